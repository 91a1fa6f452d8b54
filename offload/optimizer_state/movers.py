"""The optimizers of one model whose state is moved. The session has one of these."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from offload.optimizer_state import mover as one
from offload.optimizer_state.mover import StateCounts, StateMover
from offload.optimizer_state.streamed_state import StreamedState
from offload.optimizer_state.write_behind import WriteBehind
from offload.runtime.engine import Engine

__all__ = ["StateMovers"]


class StateMovers:
    """Moves the state of a model's optimizers, as long as these are alive.

    Parameters
    ----------
    make_engine
        Makes an engine of its own for each of them.
    min_nbytes
        Smaller tensors stay.

    Attributes
    ----------
    counts
        Of each optimizer, also of one that is gone.

    Raises
    ------
    ValueError
        An optimizer's state is moved already.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], make_engine: Callable[[], Engine], min_nbytes: int
    ) -> None:
        self.counts: list[StateCounts] = []
        self._model = weakref.ref(model)
        self._movers: list[weakref.ref[StateMover]] = []  # the hooks of their optimizers hold them
        self._pid = os.getpid()
        behind = WriteBehind()
        for optimizer in optimizers:
            if isinstance(optimizer.state, StreamedState) and optimizer.state.is_moved:
                raise ValueError(
                    f"optimizer: the state of this {type(optimizer).__name__} is moved by another enabled model; "
                    "give it to one offload.enable alone"
                )
        try:
            for optimizer in optimizers:
                mover = StateMover(optimizer, make_engine(), min_nbytes, _NameOf(self._model), behind)
                self._movers.append(weakref.ref(mover))
                self.counts.append(mover.counts)
        except BaseException:
            self.close()
            raise

    def look(self) -> None:
        """Bring the counts up to date."""
        for mover in self._alive():
            mover.look()

    def bytes_in_memory_max(self) -> int:
        """Of state that has left and whose copies may be under way while the model runs."""
        return min(sum(mover.counts.nbytes for mover in self._alive()), one.BEHIND_BYTES)

    def close(self) -> None:
        """Bring all state back.

        Raises
        ------
        OptimizerStateError
            Some of it cannot be read.
        """
        if os.getpid() == self._pid:  # in a forked child the store is that of its parent
            for mover in self._alive():
                mover.close()

    def _alive(self) -> list[StateMover]:
        return [mover for reference in self._movers if (mover := reference()) is not None]


class _NameOf:
    """A parameter's name in the model. It keeps neither alive."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model = model

    def __call__(self, parameter: Tensor) -> str:
        model = self._model()
        named = model.named_parameters() if model is not None else ()
        return next((name for name, each in named if each is parameter), f"of shape {list(parameter.shape)}")
