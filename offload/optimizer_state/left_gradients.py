"""Handles gradients that were used and freed in backward before offload is disabled: the next step must not use them.

`StepInBackward.close` calls `leave_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from torch import Tensor
from torch.optim import Optimizer

from offload.optimizer_state.begun_step import BegunStep
from offload.optimizer_state.freed_gradient import FreedGradient, StepInBackwardError
from offload.torch_compat.compiled import opaque, untraced

__all__ = ["leave_gradients", "params_to_step", "settle_gradients"]


def params_to_step(
    optimizer: Optimizer, updated: Container[Tensor], name_of: Callable[[Tensor], str]
) -> Iterator[Tensor]:
    """Yield the parameters with a gradient that were not updated in backward.

    Raises
    ------
    StepInBackwardError
        A gradient was used by an earlier step.
    """
    for param in dict.fromkeys(param for group in optimizer.param_groups for param in group["params"]):
        if param.grad is None or param in updated:
            continue
        if isinstance(param.grad, FreedGradient):
            raise StepInBackwardError(
                f"optimizer.step() would use the gradient of parameter {name_of(param)} a second time, and it is gone "
                "(step_in_backward=True): call zero_grad() before each backward pass"
            )
        yield param


def leave_gradients(optimizer: Optimizer, begun: BegunStep | None, name_of: Callable[[Tensor], str]) -> None:
    """Make the next step of a disabled optimizer update only the parameters that were not updated in backward.

    Parameters
    ----------
    begun
        The step that has begun in backward; None if it has ended.
    """
    left = [gone for gone in map(_gone, _params(optimizer)) if gone is not None]
    if not left and begun is None:
        return
    for gone in left:
        gone.is_left = True
    hook = _hook_of(optimizer)
    if hook is None:  # never removed: when the hook is no longer needed, torch may be iterating over the hooks
        hook = _LeftGradients(name_of)
        optimizer.register_step_pre_hook(hook)
    hook.begun, hook.is_over = begun, False


def settle_gradients(optimizer: Optimizer) -> None:
    """Prepare the step of a disabled optimizer. Checks for freed gradients before the step changes any weight.

    Raises
    ------
    StepInBackwardError
        The step differs from the one that began in backward, or would use gradients a second time. Nothing has changed.
    """
    hook = _hook_of(optimizer)
    if hook is not None:
        hook.settle(optimizer)


class _LeftGradients:
    def __init__(self, name_of: Callable[[Tensor], str]) -> None:
        self.begun: BegunStep | None = None
        self.is_over = False
        self._name_of = name_of

    @opaque
    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        untraced(self.settle, optimizer)

    def settle(self, optimizer: Optimizer) -> None:
        if self.is_over:
            return
        begun = self.begun
        is_left = any(gone is not None and gone.is_left for gone in map(_gone, _params(optimizer)))
        if not is_left and (begun is None or not begun.has_interrupted_gradient):  # the gradients are gone: a new step
            if begun is not None:
                begun.end()
        elif begun is not None:
            begun.check(optimizer, self._name_of)
            list(params_to_step(optimizer, begun.updated, self._name_of))
            for param in begun.updated:
                param.grad = None
        else:
            list(params_to_step(optimizer, (), self._name_of))
        self.begun, self.is_over = None, True


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _gone(param: Tensor) -> FreedGradient | None:
    return param.grad if isinstance(param.grad, FreedGradient) else None


def _hook_of(optimizer: Optimizer) -> _LeftGradients | None:
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, _LeftGradients)), None)
