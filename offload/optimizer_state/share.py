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

_MARKS_MAX = 1024  # chunks whose times have not been read yet


class Passes:
    """Forward passes and updates of a model. Its optimizers share it.

    Attributes
    ----------
    count
        Returns how many forward passes have begun.
    at_update
        How many forward passes had begun at the latest update.
    optimizers
        How many optimizers have made an update so far.
    """

    def __init__(self) -> None:
        self.count: Callable[[], int] = int
        self.at_update = 0
        self.optimizers = 0


class Share:
    """The parameters whose state leaves memory after an update. Keeps none of them alive.

    Parameters
    ----------
    engine
        Measures times on its device.
    passes
        Forward passes of the model. Those since the latest update by any of its optimizers count for this optimizer's
        first update.

    Attributes
    ----------
    moved
        Identities of these parameters; None for all. An identity that is reused for another parameter does no harm,
        because any share gives the same results.
    updates
        How many updates have begun.
    """

    def __init__(self, engine: Engine, passes: Passes) -> None:
        self._passes = passes
        self._per_update = (0, 0)  # forward passes before each of the last two updates
        self._passes_before = self._passes_now = passes.at_update
        self.moved: frozenset[int] | None = None
        self.updates = 0
        self._engine = engine
        self._begun: Any = None
        self._marks: list[tuple[dict[int, int], Any, Any]] = []  # of chunks: elements by parameter, begin, end
        self._seconds: dict[int, float] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no state is to leave."""
        return self.moved is not None and not self.moved

    def __contains__(self, parameter: object) -> bool:
        return self.moved is None or id(parameter) in self.moved

    def begin(self, *, has_closure: bool = False) -> None:
        """Note that an update begins. `has_closure`: forward and backward may still run, before `count_passes`."""
        self._read()
        self.updates += 1
        self._passes.optimizers += self.updates == 1
        if not has_closure:
            self.count_passes()
        self._begun = self._engine.mark()

    def count_passes(self) -> None:
        """Note how many forward passes have begun, if some have since the latest update."""
        passes, before = self._passes.count(), self._passes_now
        if passes > before:
            self._per_update = self._per_update[1], passes - before
        self._passes_now = self._passes.at_update = passes  # the count begins anew if the model is moved

    @property
    def is_last_before_update(self) -> bool:
        """Whether the present forward pass is probably the last one before an update: it was so the last two times."""
        earlier, latest = self._per_update
        return earlier == latest == self._passes.count() - self._passes_now

    @property
    def micro_batches(self) -> int:
        """Forward passes per update; at least 1."""
        return max(1, round((self._passes_now - self._passes_before) / max(1, self.updates)))

    def end(self, optimizer: Optimizer) -> None:
        """Note that an update that was not divided has ended."""
        updated = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        self._mark(updated, self._begun)

    @contextmanager
    def timed(self, chunk: Sequence[Tensor]) -> Iterator[None]:
        """Measure the update of these parameters."""
        begin = self._engine.mark()
        yield
        self._mark(chunk, begin)

    def seconds_of(self, parameters: Sequence[Tensor]) -> float:
        """Return the sum of these parameters' shortest update times so far; 0 if none is known.

        The times do not include waiting for state and gradients.
        """
        self._read()
        return sum(self._seconds.get(id(parameter), 0.0) for parameter in parameters)

    def _mark(self, chunk: Sequence[Tensor], begin: Any) -> None:
        self._marks.append(({id(each): each.numel() for each in chunk}, begin, self._engine.mark()))

    def _read(self) -> None:
        unread = []
        for numbers, begin, end in self._marks:
            measured, total = self._engine.seconds_since(begin, [end]), max(1, sum(numbers.values()))
            if measured is None:  # the device has not finished the update
                unread.append((numbers, begin, end))
                continue
            for parameter, number in numbers.items():
                seconds = measured[0] * number / total
                self._seconds[parameter] = min(self._seconds.get(parameter, seconds), seconds)
        self._marks = unread[-_MARKS_MAX:]
