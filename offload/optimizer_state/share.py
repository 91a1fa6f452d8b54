"""Which parameters' optimizer state leaves memory, and how long each parameter's update takes.

Each `StateMover` has one. A plan chooses the share (`control/state_plan.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from offload.runtime.engine import Engine

__all__ = ["Passes", "Share"]


class Passes:
    """Forward passes and updates of a model. Its optimizers share it.

    Attributes
    ----------
    count
        Returns how many have begun.
    at_update
        How many had begun at the latest update.
    optimizers
        How many have made an update so far.
    """

    def __init__(self) -> None:
        self.count: Callable[[], int] = int
        self.at_update = 0
        self.optimizers = 0


class Share:
    """The parameters whose state leaves memory after an update. It keeps none of them alive.

    Parameters
    ----------
    engine
        Knows the time.
    passes
        Of the model; those since the latest update belong to this optimizer's first one.

    Attributes
    ----------
    moved
        Identities of these parameters; None: all. One that is used again for another parameter does no harm: any
        share gives the same results.
    updates
        How many have begun.
    """

    def __init__(self, engine: Engine, passes: Passes) -> None:
        self._passes = passes
        self._passes_before = self._passes_now = passes.at_update
        self.moved: frozenset[int] | None = None
        self.updates = 0
        self._engine = engine
        self._begun: Any = None
        self._marks: list[tuple[dict[int, int], Any, Any]] = []  # of the latest update: numbers by parameter, and when
        self._seconds: dict[int, float] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to leave."""
        return self.moved is not None and not self.moved

    def __contains__(self, parameter: object) -> bool:
        return self.moved is None or id(parameter) in self.moved

    def begin(self) -> None:
        """An update begins."""
        self._read()
        self.updates += 1
        self._passes.optimizers += self.updates == 1
        self._passes_now = self._passes.at_update = self._passes.count()
        self._begun = self._engine.mark()

    @property
    def micro_batches(self) -> int:
        """Forward passes for each update, 1 at the least."""
        return max(1, round((self._passes_now - self._passes_before) / max(1, self.updates)))

    def end(self, optimizer: Optimizer) -> None:
        """An update that was not divided has ended."""
        updated = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        self._mark(updated, self._begun)

    @contextmanager
    def timed(self, chunk: Sequence[Tensor]) -> Iterator[None]:
        """Measure the update of these parameters."""
        begin = self._engine.mark()
        yield
        self._mark(chunk, begin)

    def seconds_of(self, parameters: Sequence[Tensor]) -> float:
        """Return how long updating these parameters takes, without waits: the least so far, 0 where it is not known."""
        self._read()
        return sum(self._seconds.get(id(parameter), 0.0) for parameter in parameters)

    def _mark(self, chunk: Sequence[Tensor], begin: Any) -> None:
        self._marks.append(({id(each): each.numel() for each in chunk}, begin, self._engine.mark()))

    def _read(self) -> None:
        for numbers, begin, end in self._marks:
            measured, total = self._engine.seconds_since(begin, [end]), max(1, sum(numbers.values()))
            if measured is None:  # the device has not come that far
                continue
            for parameter, number in numbers.items():
                seconds = measured[0] * number / total
                self._seconds[parameter] = min(self._seconds.get(parameter, seconds), seconds)
        self._marks.clear()
