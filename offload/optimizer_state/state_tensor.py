"""One tensor of an optimizer's state. The optimizer keeps the tensor object; its memory is freed and filled again.

`StreamedState` has one for each tensor that leaves memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

from offload import _core
from offload.runtime.engine import Engine, has_storage
from offload.torch_compat.holders import is_in_shared_memory
from offload.torch_compat.optimizers import nan_like
from offload.torch_compat.tensors import has_own_bytes, is_read_lazily, local_of, sharded_like

__all__ = ["StateTensor", "cloned", "is_movable", "is_replaceable", "largest_state_bytes", "replacement_of"]


def is_movable(value: object, device: torch.device, min_nbytes: int) -> bool:
    """Return whether a value of an optimizer's state is of a kind that can leave memory: a large plain tensor.

    Of a DTensor (sharded state), the local tensor can. While a tensor is away it reads as NaN. So only tensors of
    floating-point or complex numbers can leave.
    """
    return (
        is_replaceable(value)
        and (local := local_of(value)).device == device
        and local.nbytes >= min_nbytes
        and (local.is_floating_point() or local.is_complex())
        and not is_read_lazily(local)
    )


def is_replaceable(value: object) -> bool:
    """Return whether a copy can replace a value of an optimizer's state, unless another tensor shares its memory."""
    local = local_of(value)
    return (
        isinstance(local, Tensor)
        and has_storage(local)
        and not (local.requires_grad or local.is_inference() or is_in_shared_memory(local))
        and has_own_bytes(local)
    )


def cloned(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor of any layout, with its strides."""
    is_strided = tensor.layout is torch.strided
    return tensor.clone(memory_format=torch.preserve_format) if is_strided else tensor.clone()


def replacement_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, with the attributes that the program has given it; no inference tensor."""
    with torch.inference_mode(False):
        made = cloned(tensor)
    if local_of(tensor) is tensor:
        made.__dict__.update(tensor.__dict__)
    return made


def largest_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state of the parameter that has most of it, in memory or not."""
    states = [state for state in list(dict.values(optimizer.state)) if isinstance(state, dict)]
    return max(
        (sum(local_of(each).nbytes for each in state.values() if isinstance(each, Tensor)) for state in states),
        default=0,
    )


class StateTensor:
    """A tensor in memory, or in the store.

    A tensor that has left is away until `bring` succeeds. The store's ticket, which orders the copies of these bytes,
    does not show whether the tensor is away: after a failed read, the ticket has the same state as before the read.
    """

    __slots__ = ("_is_coming", "_shape", "_stored", "_stride", "name", "nbytes", "tensor")

    def __init__(self, name: object, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.nbytes = self._local.nbytes
        self._stored: _core.SwappedStorage | None = None
        self._is_coming = False  # a copy-in has begun that nobody has waited for

    @property
    def _local(self) -> Tensor:
        """The tensor whose memory is freed: not an attribute, which would be a second reference to `tensor`."""
        found: Tensor = local_of(self.tensor)
        return found

    @property
    def is_away(self) -> bool:
        """Whether the tensor reads as NaN. Its bytes may still be in memory, on their way out."""
        return self._stored is not None

    def leave(self, engine: Engine, need: int) -> None:
        """Start the copy-out. The engine holds the memory until the copy-out has ended, and keeps it if it fails."""
        tensor = self._local
        self.nbytes, self._shape, self._stride = tensor.nbytes, tensor.shape, tensor.stride()
        key, _ = engine.look(tensor, self.nbytes)
        if key is None:
            return
        stored = engine.swap_out(tensor, key, need)
        stored.add_view()
        self._stored = stored  # before the memory is freed: an interrupt between the two loses nothing
        tensor.data = nan_like(tensor)

    def begin(self) -> bool:
        """Start the copy-in. Returns False if the tensor is in memory or a copy-in has begun already."""
        if self._stored is None:
            return False
        was_coming, self._is_coming = self._is_coming, True  # before it begins: after an interrupt, `abandon` frees it
        try:
            has_begun = self._stored.prefetch()
        except Exception:
            self._is_coming = was_coming
            raise
        self._is_coming = was_coming or has_begun
        return has_begun

    def abandon(self) -> None:
        """Free the memory of a copy-in that is no longer needed."""
        stored = self._stored
        if stored is not None and self._is_coming:
            stored.ticket.settle()  # wait: no second copy-in may begin before this one has ended
            if self._stored is stored:  # else another thread has brought the tensor back meanwhile
                stored.remove_view()
                stored.add_view()
                self._is_coming = False

    def bring(self) -> None:
        """Bring the bytes into memory. Raises OSError if they cannot be read; the tensor is then still away."""
        if self._stored is not None:
            if self._local.device.type != "cpu":  # a copy-out may still read the memory that the update will write
                self._stored.wait_copied_out()
            self._local.data = self._filled(self._stored)
            self._stored = None

    def copy(self) -> Tensor:
        """Return a copy as an independent tensor, a DTensor as one. A tensor that is away stays away."""
        return sharded_like(self.tensor)(self._copy())

    def _copy(self) -> Tensor:
        if self._stored is None:
            return self._local.clone(memory_format=torch.preserve_format)
        self._stored.wait_copied_out()
        is_in_memory = not self._stored.is_swapped_out  # the copy-out failed, or a copy-in is under way
        copied = self._filled(self._stored)
        return copied.clone(memory_format=torch.preserve_format) if is_in_memory else copied

    def _filled(self, stored: _core.SwappedStorage) -> Tensor:
        storage: UntypedStorage
        storage, begin = stored.swap_in()
        self._is_coming = False
        empty = torch.empty(0, dtype=self._local.dtype, device=self._local.device)
        with torch.no_grad():
            return empty.set_(storage, begin // self._local.itemsize, self._shape, self._stride)
