"""Runs a script that does not mention offload as if it enabled each of its models.

`offload fit train.py` uses it. A model is enabled when it is called for its first training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offload.capacity.optimizer_step import OptimizerWatch
from offload.capacity.replay import Call
from offload.control.registry import enabled_models
from offload.session import enable
from offload.torch_compat.backward_pass import OUTSIDE, current_backward

__all__ = ["CALLS_MAX", "Enabled", "enable_models", "end_the_script"]


CALLS_MAX = 64  # of models in training mode, while the first step of an optimizer is awaited


@dataclass
class Enabled:
    """What was enabled: the classes of the models, in order, and the call of the first one.

    Attributes
    ----------
    watch
        The script's optimizers.
    calls_left
        How often a model may still be called before the script is ended; None if no optimizer's step is awaited.
    """

    watch: OptimizerWatch
    names: list[str] = field(default_factory=list)
    call: Call | None = None
    calls_left: int | None = None

    def await_optimizer(self) -> bool:
        """End the script by `SystemExit` after the first step of an optimizer, or after `CALLS_MAX` calls of a model.

        A script that accumulates gradients calls its model several times before its optimizer steps.

        Returns
        -------
        bool
            Whether the script goes on; False if an optimizer has stepped already.
        """
        if not self.watch.has_stepped:
            self.calls_left, self.watch.stepped = CALLS_MAX, end_the_script
        return not self.watch.has_stepped

    def count_call(self) -> None:
        """A model is called in training mode."""
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                end_the_script()


def end_the_script() -> None:
    """End the script, which runs in this thread."""
    raise SystemExit(0)


@contextmanager
def enable_models(watch: OptimizerWatch) -> Iterator[Enabled]:
    """Within, enable every model whose outermost module is called in training mode.

    It is not enabled if a part of it is, or if it is a part of an enabled model.

    Parameters
    ----------
    watch
        Is to listen as soon as a model is enabled.

    Yields
    ------
    Enabled
        Is filled as models are enabled.
    """
    plain = nn.Module.__call__
    found = Enabled(watch)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_again = current_backward() != OUTSIDE and any(enabled_models())  # checkpoint runs a part of forward again
        if not (module.training and torch.is_grad_enabled()) or is_again:
            return plain(module, *args, **kwargs)
        nn.Module.__call__ = plain  # type: ignore[method-assign]  # only the outermost module's call is of interest
        try:
            if any(parameter.requires_grad for parameter in module.parameters()):
                enabled = [each.model for each in enabled_models() if each.model is not None]
                if not any(_has_part(module, model) or _has_part(model, module) for model in enabled):
                    enable(module)
                    found.names.append(type(module).__name__)
                    found.call = found.call or Call.of(module, args, kwargs, _copied)
                watch.listen()
                if not any(model is not module and _has_part(model, module) for model in enabled):
                    found.count_call()
            return plain(module, *args, **kwargs)
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield found
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


def _copied(tensor: Tensor) -> Tensor:
    """In host memory: what is measured is that of the script alone."""
    return tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)


def _has_part(model: nn.Module, module: nn.Module) -> bool:
    """Return whether a module is this model or a part of it."""
    return any(part is module for part in model.modules())
