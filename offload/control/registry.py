"""The enabled models of this process, and the listener to their profiles.

`enable` adds models to this registry.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from offload import _core
from offload.control.enabled_model import EnabledModel
from offload.control.profile_listener import ProfileListener
from offload.runtime.weak import WeakReferences, run_pending_callbacks

__all__ = ["enabled_models", "find", "is_unused", "listen_to_profiles", "profile_listener", "register"]

_models: WeakReferences[EnabledModel] = WeakReferences()
_unwrapped: list[EnabledModel] = []  # no wrapper of their models refers to these, so they are kept alive here
_listener: ProfileListener | None = None
_listened_to: list[tuple[nn.Module | None, EnabledModel]] = []  # kept alive until `listen_to_profiles` ends


def enabled_models(among: Iterable[EnabledModel] | None = None) -> list[EnabledModel]:
    """Return the entries, or those of `among`, that are enabled and whose model is alive."""
    run_pending_callbacks()
    return [each for each in (_models if among is None else among) if each.is_enabled and each.model is not None]


def find(model: nn.Module) -> EnabledModel | None:
    """Return the entry of a model; None if it is not enabled."""
    return next((each for each in enabled_models() if each.model is model), None)


def register(enabled: EnabledModel) -> None:
    """Add a model that was just enabled."""
    _models.add(enabled)
    _unwrapped[:] = enabled_models(_unwrapped)
    if not enabled.wraps:
        _unwrapped.append(enabled)
    if _listener is not None:
        _listened_to.append((enabled.model, enabled))


def is_unused(store: _core.SwapStore) -> bool:
    """Return whether no enabled model uses a store any more."""
    return not any(each.on_device.engine.store is store for each in enabled_models())


@atexit.register
def _end_profiles() -> None:
    """Stop torch's profiler, which would crash the interpreter at exit if a script ends within the profiled step."""
    for each in enabled_models():
        each.on_device.controller.end_profiles()


def profile_listener() -> ProfileListener | None:
    """Return the function that is called with every profile before it is planned; None if there is none."""
    return _listener


@contextmanager
def listen_to_profiles(listener: ProfileListener) -> Iterator[None]:
    """Call `listener` with the profiles of all models enabled in this `with` block, before they are planned.

    In the block every model is profiled, even one with `n_tensors`. A profile is usually read when the next step
    begins. At the end of the block the profiles of the last steps are read too, because a script may have only one
    step.
    """
    global _listener
    before, _listener = _listener, listener
    try:
        yield
        for _, enabled in _listened_to:
            enabled.on_device.latest()  # also if it is disabled by now
    finally:
        _listener = before
        _listened_to.clear()
