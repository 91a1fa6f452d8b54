"""One optimizer step that begins in backward, at the first complete gradient, and ends in `optimizer.step()`.

`StepInBackward` makes one for each step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optimizer_state.chunks import ChunkedStep, is_known
from offload.optimizer_state.freed_gradient import FreedGradient, StepInBackwardError
from offload.optimizer_state.plain_values import copied, is_equal, is_plain
from offload.torch_compat.tensors import version_of

__all__ = ["BegunStep"]

_IDENTITY = "identity"


class Updated(NamedTuple):
    """A parameter after its update: the object in place of its gradient; its version; its state in the optimizer."""

    freed: FreedGradient
    version: int
    state: Any


class BegunStep:
    """The updates made in backward, and what they depend on. It does not keep the optimizer alive.

    Parameters
    ----------
    step
        The optimizer's own function, without hooks.

    Attributes
    ----------
    updated
        Maps each updated parameter to its `Updated`; to None if the update was interrupted.
    freed_bytes
        Bytes of the gradients that were freed.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        self._step = ChunkedStep(optimizer, step)
        self._options = [_remembered(group) for group in optimizer.param_groups]
        self._own = _own(optimizer)
        self._in_autocast = _in_autocast(optimizer)
        self.updated: dict[Tensor, Updated | None] = {}
        self.freed_bytes = 0
        self._interrupted: tuple[weakref.ref[Tensor], weakref.ref[Tensor], int] | None = None

    def steps(self, param: Tensor) -> bool:
        """Return whether the parameter was in a group of the optimizer when the step began."""
        return self._step.group_of(param) is not None

    def update(self, optimizer: Optimizer, param: Tensor) -> None:
        """Update a parameter whose gradient is complete, and free the gradient."""
        gradient = param.grad
        assert gradient is not None
        nbytes = gradient.nbytes if gradient.layout is torch.strided else 0
        self.updated[param] = None  # before the update: an interrupted update is not repeated
        try:
            self._step.run([param])
            freed = FreedGradient(param, gradient.dtype, gradient.device)
            param.grad = freed
        except BaseException:
            self._interrupted = weakref.ref(param), weakref.ref(gradient), version_of(gradient)
            raise
        self.updated[param] = Updated(freed, version_of(param), _state_of(optimizer, param))
        self.freed_bytes += nbytes

    @property
    def has_interrupted_gradient(self) -> bool:
        """Return whether the gradient whose update was interrupted is still there, as it was then."""
        if self._interrupted is None:
            return False
        param, gradient = self._interrupted[0](), self._interrupted[1]()
        if param is None or gradient is None or param.grad is not gradient:
            return False
        return version_of(gradient) == self._interrupted[2]  # zero_grad(set_to_none=False) keeps the object

    def check(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> None:
        """Check that `optimizer.step()` would still make the same updates.

        Raises
        ------
        StepInBackwardError
            Options, weights, state or gradients were changed since the updates.
        """
        for number, before in enumerate(self._options):
            groups = optimizer.param_groups
            changed = _differing(before, _remembered(groups[number]) if number < len(groups) else {})
            if changed:
                raise StepInBackwardError(
                    f"{', '.join(changed)} of parameter group {number} changed between backward and optimizer.step(), "
                    "and parameters were updated in backward with the former value (step_in_backward=True): change "
                    "options before backward, and step schedulers after optimizer.step()"
                )
        changed = _differing(self._own, _own(optimizer))
        if changed:
            raise StepInBackwardError(
                f"{', '.join(changed)} of the optimizer changed between backward and optimizer.step(), and parameters "
                "were updated in backward with the former value (step_in_backward=True): change it before backward"
            )
        if _in_autocast(optimizer) != self._in_autocast:
            raise StepInBackwardError(
                "one of backward and optimizer.step() ran inside torch.autocast and the other outside of it; "
                "parameters are updated in backward (step_in_backward=True): call both outside of it"
            )
        group_of = {param: n for n, group in enumerate(optimizer.param_groups) for param in group["params"]}
        for param, made in self.updated.items():
            if made is not None:
                self._check_param(optimizer, param, made, group_of.get(param), name_of)

    def _check_param(
        self,
        optimizer: Optimizer,
        param: Tensor,
        made: Updated,
        group: int | None,
        name_of: Callable[[Tensor], str],
    ) -> None:
        if param.grad is not made.freed:
            raise StepInBackwardError(
                f"the gradient of parameter {name_of(param)} was removed or replaced between backward and "
                "optimizer.step(), and the parameter was updated in backward (step_in_backward=True): to leave a "
                "parameter as it is, call its requires_grad_(False) before forward"
            )
        if version_of(param) != made.version:
            raise StepInBackwardError(
                f"parameter {name_of(param)} was changed between backward and optimizer.step(), and it was updated in "
                "backward (step_in_backward=True): change it after optimizer.step()"
            )
        if group != self._step.group_of(param) or _state_of(optimizer, param) is not made.state:
            raise StepInBackwardError(
                f"the group or the state of parameter {name_of(param)} in its optimizer was replaced between backward "
                "and optimizer.step(), and it was updated in backward (step_in_backward=True): replace it "
                "after optimizer.step()"
            )

    def end(self) -> None:
        """Write the counters that the step has changed back to the optimizer."""
        self._step.end()


def _state_of(optimizer: Optimizer, param: Tensor) -> Any:
    """Return the state as it is, without bringing any of it back."""
    return dict.get(optimizer.state, param) if isinstance(optimizer.state, dict) else None


def _remembered(options: dict[str, Any]) -> dict[str, Any]:
    """Return what later shows whether a value has changed: the version of a tensor, a copy of a plain value."""
    return {name: _mark(value) for name, value in options.items() if name not in ("params", "param_names")}


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _IDENTITY, id(value), version_of(value)
    return copied(value) if is_plain(value) else (_IDENTITY, id(value))


def _own(optimizer: Optimizer) -> dict[str, Any]:
    """Return what later shows whether an attribute of the optimizer has changed.

    Empty for torch's optimizers: their steps use no attributes, except those that a `GradScaler` sets.
    """
    own = {} if is_known(optimizer) else vars(optimizer)
    shared = {"defaults", "param_groups", "state", "step"}
    return _remembered({name: value for name, value in own.items() if name not in shared and name[0] != "_"})


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(
        str(name)
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not is_equal(before[name], after[name])
    )


def _in_autocast(optimizer: Optimizer) -> bool:
    kinds = {param.device.type for group in optimizer.param_groups for param in group["params"]}
    return any(map(torch.is_autocast_enabled, kinds))
