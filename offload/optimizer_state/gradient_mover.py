"""Moves the gradients of an optimizer's parameters to the swap store in backward.

A gradient leaves when it is complete and the next one is complete too; the last one leaves at the end of backward.

The session makes one mover for each optimizer with `gradients=True`. The optimizer's step brings the gradients in,
chunk by chunk (`gradients_in_step.py`). Any other use of a gradient sees its true bytes (`away_gradient.py`).
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offload.optimizer_state import gradients_in_step
from offload.optimizer_state.away_gradient import AwayGradient, record_of
from offload.optimizer_state.complete_gradients import CompleteGradients
from offload.optimizer_state.counts import GradientCounts
from offload.optimizer_state.mover import StateMover
from offload.optimizer_state.state_tensor import is_movable
from offload.optimizer_state.stored_gradient import GradientPlace, StoredGradient
from offload.torch_compat.autograd import call_at_end_of_backward
from offload.torch_compat.compiled import opaque, untraced
from offload.torch_compat.holders import holds_alone

__all__ = ["GradientMover", "why_all_gradients_stay"]

_SAMPLE = torch.nn.Parameter(torch.empty(1))
_SAMPLE.grad = torch.empty(1)
_HELD_ONCE = sys.getrefcount(_SAMPLE.grad)  # reference count of a gradient that only its parameter holds

_PROCESSES = "a process group is initialized, and gradients that are complete in one process may still be reduced"


class GradientMover:
    """Moves complete gradients out of memory.

    Parameters
    ----------
    name_of
        The name of a parameter, for errors.
    mover
        The `StateMover` of the optimizer, which runs `optimizer.step` in chunks.
    min_nbytes
        Smaller gradients stay.
    """

    def __init__(
        self, optimizer: Optimizer, name_of: Callable[[Tensor], str], mover: StateMover, min_nbytes: int
    ) -> None:
        self.counts = GradientCounts(type(optimizer).__name__, mover.counts.stays or why_all_gradients_stay())
        self._place = GradientPlace(mover.engine, self.counts, name_of)
        self._mover = mover
        self._optimizer = weakref.ref(optimizer)
        self._min_nbytes = min_nbytes
        self._pid = os.getpid()
        self._complete: list[weakref.ref[Tensor]] = []  # parameters with complete gradients that autograd may hold
        # Parameters whose gradients stayed because a copy-out may still use their memory, by id.
        self._delayed: dict[int, weakref.ref[Tensor]] = {}
        self._completed = 0  # how many gradients have been registered
        self._retried_at = 0  # `_completed` when delayed gradients were last tried at the end of a backward pass
        self._gradients = CompleteGradients(self, GradientMover.complete)
        self._hooks: list[RemovableHandle] = []
        self._is_open = True
        if self.counts.stays:
            return
        try:
            self._hooks += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
            self._gradients.watch(optimizer)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Bring all gradients back, and remove the hooks of the optimizer and of its parameters.

        Raises
        ------
        GradientError
            A gradient cannot be read. The next call tries again.
        """
        optimizer = self._optimizer()
        if optimizer is not None:
            gradients_in_step.bring_back(each for group in optimizer.param_groups for each in group["params"])
        # Set before the hooks are removed: a hook that an interrupt leaves in place then adds no new hooks.
        self._is_open = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.remove()
        self._complete.clear()
        self._delayed.clear()

    # -- backward -----------------------------------------------------------------------------------------------------

    def complete(self, param: Tensor) -> None:
        """Register a gradient that is complete now, and move out the ones registered before it.

        Autograd still holds a reference to this gradient. Only after autograd drops it does the reference count show
        whether other code holds one.
        """
        # Grad mode is on only with `create_graph=True`: then the gradient has a graph and stays. In a forked child all
        # gradients stay: the store belongs to the parent.
        if not self._is_open or torch.is_grad_enabled() or os.getpid() != self._pid:
            return
        self.leave()
        if not self._complete:
            call_at_end_of_backward(self._end_backward)
        self._completed += 1
        self._delayed.pop(id(param), None)
        self._complete.append(weakref.ref(param))

    def _end_backward(self) -> None:
        # `complete` may register several calls of this function in one backward pass. Only the first has work to do.
        if self._retried_at != self._completed:
            self._retried_at = self._completed
            self._leave_late()

    def leave(self) -> None:
        """Move out every registered gradient that can leave memory."""
        complete, self._complete = self._complete, []
        for reference in complete:
            self._try_to_leave(reference)

    def _leave_late(self) -> None:
        """Move out registered gradients, and those that were delayed by copy-outs which have ended since."""
        delayed, self._delayed = self._delayed, {}
        for reference in filter(_was_left_alone, delayed.values()):
            self._try_to_leave(reference)
        self.leave()

    def _try_to_leave(self, reference: weakref.ref[Tensor]) -> None:
        param = reference()
        if param is not None and not why_all_gradients_stay() and not self._leave(param):
            self._delayed[id(param)] = reference

    def _leave(self, param: Tensor) -> bool:
        """Move a gradient out if that is possible. Returns False if a copy-out may still use its memory."""
        # If a gradient was read back before its copy-out ended, the engine still holds the same memory. This drops the
        # references of ended copies, before `holds_alone` counts them.
        self._mover.engine.collect()
        record = record_of(param) or self._new_record(param)
        if record is None or record.tensor is None:
            return True
        # Either a copy-out still uses the memory, or another tensor shares it. In the second case the gradient stays:
        # changes made through the other tensor would be lost.
        if not holds_alone(record.tensor):
            record.is_delayed = record.is_delayed and self._mover.engine.in_flight_bytes > 0
            self.counts.held += not record.is_delayed
            return not record.is_delayed
        record.leave()
        self._mover.limit_writing()
        return True

    def _new_record(self, param: Tensor) -> StoredGradient | None:
        """Replace `param.grad` by an `AwayGradient` if it can leave. Its bytes stay until `record.leave()`."""
        if param.grad is None or not is_movable(param.grad, self._mover.engine.device, self._min_nbytes):
            return None
        if sys.getrefcount(param.grad) > _HELD_ONCE or not holds_alone(param.grad):
            self.counts.held += 1
            return None
        record = StoredGradient(param.grad, self._place)
        param.grad = AwayGradient(param.grad, param, record)
        return record

    # -- step ---------------------------------------------------------------------------------------------------------

    @opaque
    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        untraced(self._count, optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        self._leave_late()
        sizes = [gradients_in_step.nbytes_moved(each) for group in optimizer.param_groups for each in group["params"]]
        self.counts.steps += 1
        self.counts.tensors, self.counts.nbytes = sum(map(bool, sizes)), sum(sizes)

    @opaque
    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        untraced(self._end_step, optimizer)

    def _end_step(self, optimizer: Optimizer) -> None:
        place = self._place
        place.expected, place.asked = place.asked, set()
        if self._is_open:
            self._gradients.watch(optimizer)


def _was_left_alone(reference: weakref.ref[Tensor]) -> bool:
    """Return whether a parameter's `grad` is still an `AwayGradient`.

    False if the program has brought the gradient into memory permanently. The program may then know the gradient's
    address, so the gradient must not leave again.
    """
    param = reference()
    return param is not None and record_of(param) is not None


def why_all_gradients_stay() -> str:
    """Return why the gradients of every model stay in memory; empty if gradients can leave."""
    is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _PROCESSES if is_shared else ""
