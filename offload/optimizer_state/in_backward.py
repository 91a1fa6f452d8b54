"""Updates each parameter in backward, as soon as its gradient is complete, and frees the gradient.

With `step_in_backward=True` the session makes one `StepInBackward` for each optimizer. `optimizer.step()` then updates
only the parameters that backward has not updated. The program's schedulers and hooks run as usual.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offload.optimizer_state.begun_step import BegunStep
from offload.optimizer_state.chunks import ChunkedStep, is_known, split, stepping_nothing
from offload.optimizer_state.complete_gradients import CompleteGradients
from offload.optimizer_state.divisible import why_its_kind_is_not_divided, why_not_divided
from offload.optimizer_state.freed_gradient import StepInBackwardError
from offload.optimizer_state.left_gradients import leave_gradients, params_to_step, settle_gradients
from offload.optimizer_state.mover import CHUNK_BYTES, StateMover
from offload.optimizer_state.separable import is_separable
from offload.optimizer_state.state_in_turn import StateInTurn
from offload.parameters.moved_parameter import kind_of
from offload.parameters.updating import updating
from offload.torch_compat.allocation_profile import apart
from offload.torch_compat.compiled import opaque_in_step, untraced
from offload.torch_compat.holders import overlapping
from offload.torch_compat.optimizers import step_behind_hooks
from offload.units import format_bytes

__all__ = ["BackwardCounts", "StepInBackward", "check_in_backward", "is_known_to_step_in_backward", "why_shared"]

log = logging.getLogger("offload")

_GRAPH = (
    "backward(create_graph=True) needs the weights after backward, and step_in_backward=True updates them in backward: "
    "enable without step_in_backward, or use torch.autograd.grad(…, create_graph=True) for the inner gradient"
)


@dataclass
class BackwardCounts:
    """How many parameters one optimizer has updated in backward.

    Attributes
    ----------
    optimizer : str
        Name of the optimizer's class.
    steps : int
        Calls of `optimizer.step()`.
    in_backward, at_step : int
        Parameters that the latest step updated in backward, and in `optimizer.step()`.
    freed_bytes : int
        Bytes of gradients that were freed in backward so far.
    """

    optimizer: str
    steps: int = 0
    in_backward: int = 0
    at_step: int = 0
    freed_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and the bytes freed per step."""
        return {**asdict(self), "freed_bytes_per_step": self.freed_bytes / max(self.steps, 1)}

    def __str__(self) -> str:
        freed = format_bytes(round(self.to_dict()["freed_bytes_per_step"]))
        later = f", {self.at_step} in step()" if self.at_step else ""
        return f"{self.optimizer}: {self.in_backward} parameters updated in backward{later}; {freed} freed per step"


def check_in_backward(optimizer: Optimizer) -> None:
    """Check that an optimizer can update its parameters one at a time, in any order.

    Raises
    ------
    ValueError
        The optimizer cannot do this, or gradients may still be reduced among processes after backward.
    """
    step = step_behind_hooks(optimizer)
    why = why_its_kind_is_not_divided(optimizer) or _why_not(optimizer, step)
    if not why and not is_known(optimizer):
        takes_closure = "closure" in inspect.signature(step).parameters
        if not (takes_closure and is_separable(optimizer, step, in_any_order=True)):
            why = "it is not known to give the same bits when it steps one parameter at a time, in any order"
    if why:
        raise ValueError(f"step_in_backward=True cannot be used with this {type(optimizer).__name__}: {why}")


def is_known_to_step_in_backward(optimizer: Optimizer) -> bool:
    """Return whether `check_in_backward` accepts an optimizer of torch; False for others, which it has to try."""
    step = step_behind_hooks(optimizer)
    return is_known(optimizer) and not (why_its_kind_is_not_divided(optimizer) or _why_not(optimizer, step))


def _why_not(optimizer: Optimizer, step: Callable[..., Any]) -> str:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "a process group is initialized, and gradients that are complete in one process may still be reduced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "with differentiable=True the update itself has a backward"
    for number, group in enumerate(optimizer.param_groups):
        kinds = {(kind_of(param), param.device.type) for param in group["params"]}
        if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
            return f"group {number} has parameters of several kinds or devices; give foreach=True or foreach=False"
    shared = why_shared(param for group in optimizer.param_groups for param in group["params"])
    return shared or why_not_divided(optimizer, step)


def why_shared(params: Iterable[Tensor]) -> str:
    """Return why these parameters cannot be updated one at a time in backward: two share memory. Empty if none do."""
    shared = next(overlapping(params), None)
    if shared is None:
        return ""
    shapes = " and ".join(str(list(each.shape)) for each in shared)
    return (
        f"two parameters, of shapes {shapes}, share memory, and backward may still need the values of one after the "
        "update of the other; to tie weights, give both modules the same Parameter"
    )


class StepInBackward:
    """Runs the step of one optimizer during backward, one parameter at a time.

    Parameters
    ----------
    name_of
        The name of a parameter, for errors.
    mover
        Moves the optimizer's state; this class, not the mover, steps the optimizer. None if the state stays in memory.
    """

    def __init__(self, optimizer: Optimizer, name_of: Callable[[Tensor], str], mover: StateMover | None = None) -> None:
        self.counts = BackwardCounts(type(optimizer).__name__)
        self.mover = mover
        self._state = StateInTurn(mover) if mover is not None and not mover.counts.stays else None
        self._optimizer = weakref.ref(optimizer)
        self._name_of = name_of
        self._begun: BegunStep | None = None
        self._gradients = CompleteGradients(self, StepInBackward.update)
        self._hooks: list[RemovableHandle] = []
        self._is_open = True
        try:
            self._hooks += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_load_state_dict_post_hook(self._after_load_state_dict),
            ]
            self._gradients.watch(optimizer)
        except BaseException:  # also after an interrupt
            self.close()
            raise

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, as long as it is alive."""
        return self._optimizer()

    def close(self) -> None:
        """Stop stepping in backward. The optimizer's next step leaves out the parameters that are already updated."""
        self._is_open = False  # first: an interrupt may leave some of the hooks, which then do nothing
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.remove()
        if self._begun is not None:
            count = len(self._begun.updated)
            log.warning("%d parameters were updated in backward, but optimizer.step() was not called afterwards", count)
        optimizer = self._optimizer()
        if optimizer is not None:
            leave_gradients(optimizer, self._begun, self._name_of)
        self._forget()

    # -- backward -----------------------------------------------------------------------------------------------------

    def update(self, param: Tensor) -> None:
        """Update a parameter whose gradient is complete, if it was in a group of the optimizer when the step began."""
        optimizer = self._optimizer()
        if optimizer is None or not self._is_open or param.grad is None:  # a hook of the program took the gradient
            return
        if torch.is_grad_enabled():
            raise StepInBackwardError(_GRAPH)
        begun = self._begun or self._begin(optimizer)
        if not begun.steps(param):
            return
        self._check_first(begun, param)
        with apart(), updating([param]):  # raises before the update if the parameter cannot be read
            if self._state is None:
                begun.update(optimizer, param)
                return
            self._state.bring(param)
            begun.update(optimizer, param)
            self._state.leave(param)

    def _check_first(self, begun: BegunStep, param: Tensor) -> None:
        if param in begun.updated:
            raise StepInBackwardError(
                f"parameter {self._name_of(param)} was already updated in backward since the latest optimizer.step() "
                "(step_in_backward=True): call optimizer.step() after each backward pass. Gradient accumulation, a "
                "loss in several backward passes, and reentrant checkpoints that share a parameter need "
                "step_in_backward=False. If the earlier backward pass failed, its updates cannot be undone: load the "
                "latest checkpoint, or call optimizer.step() and zero_grad() to go on without the parameters that it "
                "did not reach"
            )

    def _begin(self, optimizer: Optimizer) -> BegunStep:
        step = step_behind_hooks(optimizer)
        why = _why_not(optimizer, step)
        if why:
            raise StepInBackwardError(f"step_in_backward=True cannot be used any more: {why}")
        if self._state is not None and self.mover is not None:
            self.mover.begin_step(optimizer)
            self._state.begin(param for group in optimizer.param_groups for param in group["params"])
        self._begun = BegunStep(optimizer, step)
        return self._begun

    # -- step ---------------------------------------------------------------------------------------------------------

    @opaque_in_step
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return untraced(self._take_over, optimizer, args, kwargs)

    def _take_over(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = step_behind_hooks(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        why = _why_not(optimizer, step)
        if not why and (len(args) > 2 or kwargs.keys() - {"closure"}):
            why = "optimizer.step() was given other arguments than a closure"
        if not why and closure is not None and not is_known(optimizer):
            why = "this optimizer may call its closure more than once"
        if why:
            raise StepInBackwardError(f"step_in_backward=True cannot be used any more: {why}")
        grad_mode = torch.is_grad_enabled()

        def rest_of_step() -> Any:
            loss = closure() if closure is not None else None
            with torch.set_grad_enabled(grad_mode):
                untraced(self._finish, optimizer, step)
            return loss

        # `step` calls the closure after all pre-hooks have run, so options that a later pre-hook changes are used.
        return (stepping_nothing(optimizer),), {"closure": opaque_in_step(rest_of_step)}

    def _finish(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        if not self._is_open:  # the closure or a hook of the program has called `close` since the step began
            settle_gradients(optimizer)
            step(optimizer)
            return
        begun = self._begun
        updated = begun.updated if begun is not None else {}
        if begun is not None:
            begun.check(optimizer, self._name_of)
        rest = list(params_to_step(optimizer, updated, self._name_of))
        if rest or begun is None:
            self._step_rest(optimizer, ChunkedStep(optimizer, step, rest), is_first=begun is None)
        if begun is not None:
            begun.end()
            self.counts.freed_bytes += begun.freed_bytes
        self.counts.steps += 1
        self.counts.in_backward, self.counts.at_step = len(updated), len(rest)
        self._forget()

    def _step_rest(self, optimizer: Optimizer, step: ChunkedStep, *, is_first: bool) -> None:
        if self._state is not None and self.mover is not None:
            if is_first:
                self.mover.begin_step(optimizer)
            self.mover.step(step)
        else:
            for chunk in list(split(step.params, lambda param: param.nbytes, CHUNK_BYTES)) or [[]]:
                step.run(chunk)
            step.end()

    @opaque_in_step
    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        untraced(self._end_step, optimizer)

    def _end_step(self, optimizer: Optimizer) -> None:
        if self._is_open:
            if self._state is not None and self.mover is not None:
                self.mover.end_step(optimizer)
            self._gradients.watch(optimizer)

    def _after_load_state_dict(self, optimizer: Optimizer) -> None:
        """Forget the updates made in backward: a loaded checkpoint begins a new step, even after a failed backward."""
        self._forget()
        if self._is_open:
            self._gradients.watch(optimizer)

    def _forget(self) -> None:
        self._begun = None
        if self._state is not None:
            self._state.end()
