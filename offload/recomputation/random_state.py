"""The state of a random number generator before one operator, so that it draws the same numbers again.

Dropout needs it, for example.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.devices.device import device_of, is_known

__all__ = ["as_before", "random_state"]


class _DeviceGenerator:
    """A device's default generator. Its state is a few bytes in host memory; reading it does not synchronize."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)

    def get_state(self) -> torch.Tensor:
        return self._device.random_state()

    def set_state(self, state: torch.Tensor) -> None:
        self._device.set_random_state(state)


def random_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor] | None:
    """Return the generator from which a call draws, and its state. None if the generator cannot be determined."""
    # Some operators, such as `poisson`, take the generator by position.
    found = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator))
    given: Any = next(found, None)
    if given is None:
        device = kwargs.get("device")  # `rand_like` may draw on another device than that of its argument
        if device is None:
            device = next((each.device for each in args if isinstance(each, torch.Tensor)), "cpu")
        device = torch.device(device)
        if not is_known(device):
            return None
        given = _DeviceGenerator(device)
    return given, given.get_state()


@contextmanager
def as_before(generator: Any, state: torch.Tensor) -> Iterator[None]:
    """Set a generator to `state` within the block, and restore its present state afterwards."""
    now = generator.get_state()
    try:
        generator.set_state(state)
        yield
    finally:
        generator.set_state(now)
