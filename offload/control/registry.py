"""Which models are enabled in this process, and who listens to their profiles.

`enable` adds models to it.
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
_unwrapped: list[EnabledModel] = []  # nothing of the model refers to these, so they are kept alive here
_listener: ProfileListener | None = None
_listened_to: list[tuple[nn.Module | None, EnabledModel]] = []  # kept alive until nobody listens any more


def enabled_models(among: Iterable[EnabledModel] | None = None) -> list[EnabledModel]:
    """Those that are enabled and whose model is alive."""
    run_pending_callbacks()
    return [each for each in (_models if among is None else among) if each.is_enabled and each.model is not None]


def find(model: nn.Module) -> EnabledModel | None:
    """The entry of a model that is enabled; None where it is not."""
    return next((each for each in enabled_models() if each.model is model), None)


def register(enabled: EnabledModel) -> None:
    """Enter a model that was just enabled."""
    _models.add(enabled)
    _unwrapped[:] = enabled_models(_unwrapped)
    if not enabled.wraps:
        _unwrapped.append(enabled)
    if _listener is not None:
        _listened_to.append((enabled.model, enabled))


def is_unused(store: _core.SwapStore) -> bool:
    """Whether no enabled model uses a store any more."""
    return not any(each.on_device.engine.store is store for each in enabled_models())


@atexit.register
def _end_profiles() -> None:
    """Torch's profiler, left on by a script that ends within the profiled step, would crash the interpreter's exit."""
    for each in enabled_models():
        each.on_device.controller.end_profiles()


def profile_listener() -> ProfileListener | None:
    """Who is called with every profile before it is planned."""
    return _listener


@contextmanager
def listen_to_profiles(listener: ProfileListener) -> Iterator[None]:
    """Have `listener` called with the profile of every model that is enabled within, before it is planned.

    Every model is profiled then, also one whose tensors are chosen by hand. At the end the last steps are read too:
    a script of one step has none after it that would.
    """
    global _listener
    before, _listener = _listener, listener
    try:
        yield
        for _, enabled in _listened_to:
            enabled.on_device.latest()  # disabled or not
    finally:
        _listener = before
        _listened_to.clear()
