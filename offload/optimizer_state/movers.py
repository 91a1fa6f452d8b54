"""Moves the state of a model's optimizers, or steps them in backward. The session has one `StateMovers`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from offload.optimizer_state import mover as mover_module
from offload.optimizer_state.counts import GradientCounts, StateCounts
from offload.optimizer_state.divisible import why_it_stays
from offload.optimizer_state.gradient_mover import GradientMover
from offload.optimizer_state.in_backward import BackwardCounts, StepInBackward, check_in_backward, why_shared
from offload.optimizer_state.in_passes import StateInPasses
from offload.optimizer_state.movable import MovableChunk, movable_chunks, params_of, streamed_state
from offload.optimizer_state.mover import StateMover
from offload.optimizer_state.share import Passes
from offload.optimizer_state.state_tensor import is_movable
from offload.optimizer_state.streamed_state import StreamedState
from offload.optimizer_state.update_room import STATE_MOST
from offload.optimizer_state.write_behind import WriteBehind
from offload.runtime.engine import Engine
from offload.torch_compat.compiled import untraced
from offload.torch_compat.tensors import local_of

__all__ = ["NameOf", "StateMovers"]


_KNOWN_AFTER = 4  # updates after which their times and the number of their micro-batches are known


class StateMovers:
    """Moves the state of a model's optimizers, or steps them in backward, while the optimizers are alive.

    Parameters
    ----------
    make_engine
        Makes one engine for each optimizer.
    min_nbytes
        Smaller tensors stay.
    moves_state
        Whether the optimizers' state leaves memory.
    in_backward
        Whether parameters are updated in backward. Not with `is_planned`.
    moves_gradients
        Whether gradients leave too. Only with `moves_state`, and with neither `in_backward` nor `is_planned`.
    limit_bytes
        The memory limit; with `is_planned`.
    is_planned
        Whether a plan chooses which state moves, for these optimizers and for others that step the model's parameters.
        Until there is a plan, all state of these optimizers moves.

    Attributes
    ----------
    counts
        Counts for each optimizer whose state may be moved, including optimizers that no longer exist.
    backward_counts
        Counts for each optimizer that steps in backward.
    gradient_counts
        Counts for each optimizer whose gradients may leave.
    has_room
        Returns whether a number of bytes fits within the memory limit, in addition to the peak of the profiled step
        without swapping. State that fits stays until there is a plan, if `enable` was not given the optimizer.
    passes
        Counts the forward passes of the model.

    Raises
    ------
    ValueError
        An optimizer has been given to another model, or it cannot step in backward.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        make_engine: Callable[[], Engine],
        min_nbytes: int,
        *,
        moves_state: bool = True,
        in_backward: bool = False,
        moves_gradients: bool = False,
        limit_bytes: int | None = None,
        is_planned: bool = False,
    ) -> None:
        self.counts: list[StateCounts] = []
        self.backward_counts: list[BackwardCounts] = []
        self.gradient_counts: list[GradientCounts] = []
        self.is_planned = is_planned
        self.has_room: Callable[[int], bool] = bool
        self._model = weakref.ref(model)
        self._movers: list[weakref.ref[StateMover]] = []  # the hooks of their optimizers hold them
        self._steppers: list[weakref.ref[StepInBackward]] = []
        self._gradient_movers: list[weakref.ref[GradientMover]] = []
        self._make_engine = make_engine
        self._min_nbytes = min_nbytes
        self._limit_bytes = limit_bytes
        self._is_closed = False
        self._moved: frozenset[int] | None = None
        self._pid = os.getpid()
        self._behind = WriteBehind()
        self.passes = Passes()
        self.in_passes = StateInPasses(partial(_alive, weakref.ref(self)), self._behind)
        self._check(optimizers, optimizers if in_backward else ())
        self._take_all(optimizers, moves_state, in_backward, moves_gradients)

    def add(
        self, optimizers: Sequence[Optimizer], moves_state: bool, in_backward: bool, moves_gradients: bool = False
    ) -> None:
        """Move the state of further optimizers and their gradients, or step them in backward.

        From then on no plan chooses which state moves. Other optimizers keep what they have: state that moves
        continues to move, and the rest stays in memory.

        Raises
        ------
        ValueError
            An enabled model already uses an optimizer, or it cannot step in backward. An optimizer of this model may
            be given again if a plan chose which of its state moves.
        """
        # Movers whose state a plan chooses, or that do not move all state. Their optimizers may be passed here again.
        planned = [mover for mover in self._alive() if self.is_planned or mover.share.moved is not None]
        known = [mover for mover in planned if any(mover.optimizer is each for each in optimizers)]
        new = [each for each in optimizers if all(mover.optimizer is not each for mover in known)]
        self._check(new, optimizers if in_backward else ())
        self.is_planned = False
        for mover in known:
            if not (in_backward or moves_gradients):
                mover.follow(None if moves_state else frozenset())  # frozenset(): state comes back at the next step
                continue
            optimizer = mover.optimizer
            mover.close()
            self._movers = [each for each in self._movers if each() is not mover]
            self.counts = [each for each in self.counts if each is not mover.counts]
            if optimizer is not None:
                new.append(optimizer)
        if moves_state or in_backward:
            self._take_all(new, moves_state, in_backward, moves_gradients)

    def _check(self, unused: Iterable[Optimizer], in_backward: Sequence[Optimizer]) -> None:
        """Check that no enabled model uses some optimizers, and that others can step in backward."""
        for optimizer in unused:
            if _is_used(optimizer):
                raise ValueError(
                    f"optimizer: this {type(optimizer).__name__} is already used by an enabled model; "
                    "give it to one offload.enable alone"
                )
        if in_backward:
            steppers = [each for reference in self._steppers if (each := reference()) is not None]
            stepped = [each.optimizer for each in steppers if each.optimizer is not None]
            _check_all([*stepped, *in_backward], NameOf(self._model))

    def _take_all(
        self, optimizers: Sequence[Optimizer], moves_state: bool, in_backward: bool, moves_gradients: bool
    ) -> None:
        try:
            for optimizer in optimizers:
                self._take(optimizer, moves_state=moves_state, in_backward=in_backward, moves_gradients=moves_gradients)
        except BaseException:  # also after an interrupt
            self.close()
            raise

    def _take(self, optimizer: Optimizer, *, moves_state: bool, in_backward: bool, moves_gradients: bool) -> None:
        mover = None
        if moves_state:
            mover = self._add(optimizer, self._make_engine(), None, steps=not in_backward)
        if in_backward:
            stepper = StepInBackward(optimizer, NameOf(self._model), mover)
            self._steppers.append(weakref.ref(stepper))
            self.backward_counts.append(stepper.counts)
        if moves_gradients and mover is not None:
            gradients = GradientMover(optimizer, NameOf(self._model), mover, self._min_nbytes)
            self._gradient_movers.append(weakref.ref(gradients))
            self.gradient_counts.append(gradients.counts)

    def _add(
        self, optimizer: Optimizer, engine: Engine, moved: frozenset[int] | None, *, steps: bool = True
    ) -> StateMover:
        about = (engine, self._min_nbytes, NameOf(self._model), self._behind, self.passes)
        mover = StateMover(optimizer, *about, moved=moved, limit_bytes=self._limit_bytes, steps=steps)
        self._movers.append(weakref.ref(mover))
        self.counts.append(mover.counts)
        return mover

    def found(self, optimizer: Optimizer) -> None:
        """Take over an optimizer of the model that is about to step, if a plan chooses what moves."""
        if self.is_planned and not self._is_closed and os.getpid() == self._pid:
            untraced(self._take_over, optimizer)

    def _take_over(self, optimizer: Optimizer) -> None:
        if _mover_of(optimizer) is not None or _is_used(optimizer):
            return  # it belongs to an enabled model already: another one or this one
        nbytes = sum(local_of(param).nbytes for group in optimizer.param_groups for param in group["params"])
        stays = self._moved is not None or self.has_room(STATE_MOST * nbytes)
        try:
            self._add(optimizer, self._make_engine(), frozenset() if stays else None)
        except (OSError, RuntimeError, MemoryError) as error:
            self.counts.append(StateCounts(type(optimizer).__name__, f"its state cannot be swapped out: {error}"))

    def look(self) -> None:
        """Bring the counts up to date."""
        for mover in self._alive():
            mover.look()

    # -- what a plan needs --------------------------------------------------------------------------------------------

    def away_bytes(self) -> tuple[int, int]:
        """Return the bytes of state that is away, and how many of them are still being written."""
        away = writing = 0
        for mover in self._alive():
            state = streamed_state(mover)
            away += state.away_nbytes if state is not None else 0
            mover.engine.collect()
            writing += mover.engine.in_flight_bytes
        return away, writing

    @property
    def updates(self) -> int:
        """Number of steps begun by the optimizer that has stepped most often."""
        return max((mover.share.updates for mover in self._alive()), default=0)

    @property
    def micro_batches(self) -> int:
        """Forward passes per update of the optimizer that has stepped most often."""
        most = max((mover.share for mover in self._alive()), key=lambda share: share.updates, default=None)
        return most.micro_batches if most is not None else 1

    @property
    def kinds(self) -> tuple[object, ...]:
        """Changes when other state moves, or moves in another way."""
        known = min(self.updates, _KNOWN_AFTER), self.passes.optimizers, self.steps_whole
        return *known, len(self._movers), len(self._steppers), len(self.gradient_counts), self._moved

    def arguments(self) -> dict[str, object]:
        """Return the arguments of `enable`, without the optimizers, that move what is moved now."""
        moving = {
            "optimizer_state": any(not each.stays for each in self.counts),
            "gradients": any(not each.stays for each in self.gradient_counts),
            "step_in_backward": self.steps_in_backward,
        }
        return {name: True for name, moves in moving.items() if moves}

    @property
    def steps_whole(self) -> bool:
        """Whether all state of an optimizer was in memory during its latest step."""
        return any(mover.is_whole for mover in self._alive())

    def settle(self) -> None:
        """Move out again the state that the program has brought back since the last step and that is to be away."""
        for mover in self._alive():
            mover.follow(mover.share.moved)

    def chunks(self) -> list[MovableChunk]:
        """Return the state that can move, in the order in which it is updated."""
        model = self._model()
        names = {id(each): name for name, each in model.named_parameters()} if model is not None else {}
        return [chunk for mover in self._alive() for chunk in movable_chunks(mover, self._min_nbytes, names)]

    def movable_bytes(self, optimizers: Iterable[Optimizer]) -> int:
        """Return how many bytes of state could be moved, for optimizers whose state is not moved now."""
        states = [state for each in optimizers if not why_it_stays(each) for state in dict.values(each.state)]
        return sum(
            local_of(value).nbytes
            for state in states
            if isinstance(state, dict)
            for value in state.values()
            if isinstance(value, Tensor) and is_movable(value, value.device, self._min_nbytes)
        )

    def follow(self, params: Iterable[Tensor]) -> None:
        """Let only the state of these parameters leave memory."""
        self._moved = frozenset(map(id, params))
        for mover in self._alive():
            mover.follow(self._moved & frozenset(map(id, params_of(mover))))

    # -- memory -------------------------------------------------------------------------------------------------------

    def bytes_in_memory_max(self) -> int:
        """Return the most bytes of moved state that copies may hold in memory in each node of a step.

        If an optimizer steps in backward, this includes the state read ahead and that of the parameter being updated.
        """
        nbytes_max = mover_module.BEHIND_BYTES
        if self.steps_in_backward:
            nbytes_max += sum(mover_module.AHEAD_BYTES + mover.largest_bytes for mover in self._alive())
        return nbytes_max

    @property
    def steps_in_backward(self) -> bool:
        """Whether an optimizer steps in backward."""
        return any(reference() is not None for reference in self._steppers)

    def close(self) -> None:
        """Bring all state back and stop acting on the optimizers.

        Raises
        ------
        OptimizerStateError
            Some state cannot be read.
        """
        self._is_closed = True
        if os.getpid() != self._pid:  # in a forked child the store is that of its parent
            return
        for reference in self._steppers:
            stepper = reference()
            if stepper is not None:
                stepper.close()
        self._steppers.clear()
        for gradients in [each() for each in self._gradient_movers]:
            if gradients is not None:
                gradients.close()
        for mover in self._alive():
            mover.close()

    def _alive(self) -> list[StateMover]:
        if os.getpid() != self._pid:  # in a forked child the store is that of its parent
            return []
        return [mover for reference in self._movers if (mover := reference()) is not None]


def _alive(movers: weakref.ref[StateMovers]) -> list[StateMover]:
    found = movers()
    return found._alive() if found is not None else []


def _mover_of(optimizer: Optimizer) -> StateMover | None:
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return next((owner for hook in hooks if isinstance(owner := getattr(hook, "__self__", None), StateMover)), None)


def _is_used(optimizer: Optimizer) -> bool:
    """Return whether an enabled model moves the optimizer's state or steps it in backward."""
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
    if shared := why_shared(owner):
        raise ValueError(f"step_in_backward=True cannot be used with these optimizers: {shared}")


class NameOf:
    """Returns a parameter's name in the model. Keeps neither of them alive."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model = model

    def __call__(self, parameter: Tensor) -> str:
        model = self._model()
        named = model.named_parameters() if model is not None else ()
        return next((name for name, each in named if each is parameter), f"of shape {list(parameter.shape)}")
