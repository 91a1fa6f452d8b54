"""The record of one parameter's gradient, which is in memory or in the store. An `AwayGradient` holds the record.

`GradientMover` moves the gradient out; `AwayGradient` and the optimizer's step bring it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from offload import _core
from offload.optimizer_state.counts import GradientCounts
from offload.runtime.engine import REFUSALS, Engine
from offload.runtime.unreadable import UnreadableError
from offload.torch_compat.holders import holds_alone

__all__ = ["GradientError", "GradientPlace", "StoredGradient"]

# Backward does not read complete gradients, so they go to disk before any saved tensor does.
_SPILL_FIRST = 1 << 40
_SCALES_MAX = 8


class GradientError(UnreadableError):
    """A gradient could not be read back: repeat the step from `zero_grad()`.

    `parameter` is a parameter's name; empty if the parameter is gone.
    """


@dataclass
class GradientPlace:
    """Where the gradients of one optimizer's parameters go.

    Attributes
    ----------
    name_of
        The name of a parameter, for errors.
    asked
        The orders of the norms that were asked for since the latest step.
    expected
        The orders that were asked for in the previous step. These norms are computed before a gradient leaves.
    """

    engine: Engine
    counts: GradientCounts
    name_of: Callable[[Tensor], str]
    asked: set[float] = field(default_factory=set)
    expected: set[float] = field(default_factory=set)


class StoredGradient:
    """A gradient in memory, or in the store.

    Parameters
    ----------
    tensor
        The gradient, in memory.

    Attributes
    ----------
    tensor
        The gradient in memory; None while it is away.
    is_delayed
        Whether the gradient was read back before its copy-out ended. It stays in memory until the copy-out ends,
        because the copy-out still uses that memory.
    """

    def __init__(self, tensor: Tensor, place: GradientPlace) -> None:
        self.tensor: Tensor | None = tensor
        self.place = place
        self.nbytes = tensor.nbytes
        self.is_delayed = False
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._stored: _core.SwappedStorage | None = None
        self._is_coming = False  # a copy-in has begun that nobody has waited for
        self._norms: dict[float, Tensor] = {}
        self._scales: list[tuple[Callable[..., Any], object]] = []  # applied when the gradient comes back

    @property
    def is_away(self) -> bool:
        """Whether the gradient is in the store. Its copy-out may still be under way."""
        return self._stored is not None

    def leave(self) -> None:
        """Start the copy-out, if there is room. The engine holds the memory until the copy has ended."""
        tensor, place = self.tensor, self.place
        if tensor is None:
            return
        self._norms = {order: torch.linalg.vector_norm(tensor, order) for order in place.expected}
        key, _ = place.engine.look(tensor, tensor.nbytes)
        if key is None:
            return
        try:
            stored = place.engine.swap_out(tensor, key, _SPILL_FIRST)
        except REFUSALS as error:
            place.counts.failed += 1
            place.counts.failure = str(error)
            return
        stored.add_view()
        self._stored = stored  # before the memory is freed: an interrupt between the two loses nothing
        self.tensor = None
        self.is_delayed = False
        place.counts.out_bytes += self.nbytes

    def begin(self) -> int:
        """Start the copy-in. Returns the bytes; 0 if there is nothing to copy."""
        if self._stored is None or not self._stored.prefetch():
            return 0
        self._is_coming = True
        return self.nbytes

    def abandon(self) -> None:
        """Free the memory of a copy-in that is no longer needed."""
        if self._stored is not None and self._is_coming:
            self._stored.ticket.settle()  # wait: no second copy-in may begin before this one has ended
            self._stored.remove_view()
            self._stored.add_view()
            self._is_coming = False

    def read(self, param: Tensor | None) -> Tensor:
        """Return a tensor with the gradient's bytes. If the gradient is away, changes of this tensor are lost.

        Raises
        ------
        GradientError
            The gradient could not be read; it is still away.
        """
        if self._stored is None:
            assert self.tensor is not None
            return self.tensor
        found = self._filled(self._stored, param)
        if self._scales and not holds_alone(found):  # a copy-out still reads its memory
            found = found.clone(memory_format=torch.preserve_format)
        for scale, factor in self._scales:
            scale(found, factor)
        return found

    def bring(self, param: Tensor | None) -> Tensor:
        """Bring the gradient into memory for good, and return it. Raises `GradientError` as `read` does."""
        if self._stored is not None:
            self.keep(self.read(param))
            assert self.tensor is not None
            self.is_delayed = not holds_alone(self.tensor)
        assert self.tensor is not None
        return self.tensor

    def keep(self, tensor: Tensor) -> None:
        """Make this tensor the gradient, instead of the bytes in the store."""
        self.tensor = tensor
        self.is_delayed = False
        self._stored = None
        self._scales.clear()
        self._norms.clear()

    def scale(self, multiply: Callable[..., Any], factor: object) -> bool:
        """Multiply the gradient in place, now or when it comes back. Returns False if it has to come back for this."""
        if self._stored is not None and len(self._scales) == _SCALES_MAX:
            return False
        if self._stored is None:
            multiply(self.tensor, factor)
        else:
            multiply(self._like, factor)  # it is empty: this only raises torch's error for a factor that does not fit
            self._scales.append((multiply, factor))
        return True

    def norm(self, order: float, param: Tensor | None) -> Tensor:
        """Return the gradient's norm as `torch.linalg.vector_norm` does; the norm computed before it left, if any."""
        self.place.asked.add(order)
        known = self._norms.get(order) if self._stored is not None and not self._scales else None
        return known.clone() if known is not None else torch.linalg.vector_norm(self.read(param), order)

    def _filled(self, stored: _core.SwappedStorage, param: Tensor | None) -> Tensor:
        storage: UntypedStorage
        try:
            storage, begin = stored.swap_in()
        except _core.SpillError as error:
            name = self.place.name_of(param) if param is not None else ""
            owner = f"parameter {name}" if param is not None else "a parameter that no longer exists"
            raise GradientError.of(
                error,
                name,
                f"the gradient of {owner} cannot be read back; call zero_grad() and repeat the step, or load the "
                "latest checkpoint if the optimizer was stepping",
            ) from error
        self._is_coming = False
        self.place.counts.in_bytes += self.nbytes
        with torch.inference_mode(mode=False), torch.no_grad():
            empty = torch.empty_like(self._like)
            return empty.set_(storage, begin // empty.itemsize, self._shape, self._stride)
