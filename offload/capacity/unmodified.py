"""Runs a script that does not mention offload as if it enabled each of its models.

`offload fit train.py` uses it. A model is enabled when it is called for its first training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offload.capacity.optimizer_step import OptimizerWatch
from offload.control.registry import enabled_models
from offload.session import enable

__all__ = ["enable_models"]


@contextmanager
def enable_models(watch: OptimizerWatch) -> Iterator[list[str]]:
    """Within, enable every model whose outermost module is called in training mode, unless a part of it is enabled.

    Parameters
    ----------
    watch
        Is to listen as soon as a model is enabled.

    Yields
    ------
    list of str
        The classes of these models, in the order in which they were enabled.
    """
    plain = nn.Module.__call__
    names: list[str] = []

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return plain(module, *args, **kwargs)
        nn.Module.__call__ = plain  # type: ignore[method-assign]  # only the outermost module's call is of interest
        try:
            if any(parameter.requires_grad for parameter in module.parameters()):
                if not _has_enabled_part(module):
                    enable(module)
                    names.append(type(module).__name__)
                watch.listen()
            return plain(module, *args, **kwargs)
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield names
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


def _has_enabled_part(module: nn.Module) -> bool:
    enabled = {id(each.model) for each in enabled_models()}
    return bool(enabled) and any(id(part) in enabled for part in module.modules())
