"""The optimizers of one model whose state is moved, or that step in backward. The session has one of these."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from offload.optimizer_state import mover as one
from offload.optimizer_state.in_backward import BackwardCounts, StepInBackward, check_in_backward
from offload.optimizer_state.mover import StateCounts, StateMover
from offload.optimizer_state.streamed_state import StreamedState
from offload.optimizer_state.write_behind import WriteBehind
from offload.runtime.engine import Engine

__all__ = ["NameOf", "StateMovers"]


class StateMovers:
    """Moves the state of a model's optimizers, and steps them in backward, as long as these are alive.

    Parameters
    ----------
    make_engine
        Makes an engine of its own for each of them. None: their state stays in memory.
    min_nbytes
        Smaller tensors stay.
    in_backward
        Whether parameters are updated in backward.

    Attributes
    ----------
    counts
        Of each optimizer whose state is moved, also of one that is gone.
    backward_counts
        Of each optimizer that steps in backward.

    Raises
    ------
    ValueError
        An optimizer has been given to another model, or it cannot step in backward.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        make_engine: Callable[[], Engine] | None,
        min_nbytes: int,
        *,
        in_backward: bool = False,
    ) -> None:
        self.counts: list[StateCounts] = []
        self.backward_counts: list[BackwardCounts] = []
        self._model = weakref.ref(model)
        self._movers: list[weakref.ref[StateMover]] = []  # the hooks of their optimizers hold them
        self._steppers: list[weakref.ref[StepInBackward]] = []
        self._pid = os.getpid()
        behind = WriteBehind()
        for optimizer in optimizers:
            if _is_used(optimizer):
                raise ValueError(
                    f"optimizer: this {type(optimizer).__name__} belongs to another enabled model; "
                    "give it to one offload.enable alone"
                )
        if in_backward:
            _check_all(optimizers, NameOf(self._model))
        try:
            for optimizer in optimizers:
                self._take(optimizer, make_engine, min_nbytes, behind, in_backward=in_backward)
        except BaseException:
            self.close()
            raise

    def _take(
        self,
        optimizer: Optimizer,
        make_engine: Callable[[], Engine] | None,
        min_nbytes: int,
        behind: WriteBehind,
        *,
        in_backward: bool,
    ) -> None:
        name_of = NameOf(self._model)
        mover = None
        if make_engine is not None:
            mover = StateMover(optimizer, make_engine(), min_nbytes, name_of, behind, steps=not in_backward)
            self._movers.append(weakref.ref(mover))
            self.counts.append(mover.counts)
        if in_backward:
            stepper = StepInBackward(optimizer, name_of, mover)
            self._steppers.append(weakref.ref(stepper))
            self.backward_counts.append(stepper.counts)

    def look(self) -> None:
        """Bring the counts up to date."""
        for mover in self._alive():
            mover.look()

    def bytes_in_memory_max(self) -> int:
        """Of state that has left and whose copies may be under way while the model runs.

        In backward that is also what is read ahead, and a parameter's own.
        """
        movers = self._alive()
        nbytes_max = one.BEHIND_BYTES
        if self.steps_in_backward:
            nbytes_max += sum(one.AHEAD_BYTES + mover.largest_bytes for mover in movers)
        return min(sum(mover.counts.nbytes for mover in movers), nbytes_max)

    @property
    def steps_in_backward(self) -> bool:
        """Whether an optimizer steps in backward."""
        return any(reference() is not None for reference in self._steppers)

    def close(self) -> None:
        """Bring all state back, and leave the optimizers alone.

        Raises
        ------
        OptimizerStateError
            Some of it cannot be read.
        """
        if os.getpid() == self._pid:  # in a forked child the store is that of its parent
            for reference in self._steppers:
                stepper = reference()
                if stepper is not None:
                    stepper.close()
            self._steppers.clear()
            for mover in self._alive():
                mover.close()

    def _alive(self) -> list[StateMover]:
        return [mover for reference in self._movers if (mover := reference()) is not None]


def _is_used(optimizer: Optimizer) -> bool:
    """Whether another enabled model moves its state or steps it in backward."""
    moved = isinstance(optimizer.state, StreamedState) and optimizer.state.is_moved
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return moved or any(isinstance(getattr(each, "__self__", None), StepInBackward) for each in hooks)


def _check_all(optimizers: Sequence[Optimizer], name_of: Callable[[Tensor], str]) -> None:
    owner: dict[Tensor, Optimizer] = {}
    for optimizer in optimizers:
        check_in_backward(optimizer)
        for param in (each for group in optimizer.param_groups for each in group["params"]):
            if owner.setdefault(param, optimizer) is not optimizer:
                raise ValueError(
                    f"step_in_backward=True: parameter {name_of(param)} is in two optimizers, and its gradient is gone "
                    "after the first update; give each parameter to one optimizer"
                )


class NameOf:
    """A parameter's name in the model. It keeps neither alive."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model = model

    def __call__(self, parameter: Tensor) -> str:
        model = self._model()
        named = model.named_parameters() if model is not None else ()
        return next((name for name, each in named if each is parameter), f"of shape {list(parameter.shape)}")
