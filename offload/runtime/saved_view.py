"""One saved tensor whose bytes are out: its size, stride, offset and version.

On the data path: what a graph node holds in the tensor's place, from pack to unpack.
"""

from __future__ import annotations

import torch

from offload._core import Ticket
from offload.runtime.swapped_storage import SlotHandle
from offload.torch_compat.tensors import conjugated, negated, version_of


def raise_changed(kind: str, shape: torch.Size, found: int, expected: int) -> None:
    """Raise what autograd raises without hooks when a saved tensor was changed in place."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}] is at version {found}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        "with torch.autograd.set_detect_anomaly(True)."
    )


class SwappedView:
    """One saved tensor whose bytes are out: what the graph node holds in its place."""

    __slots__ = (
        "_dtype",
        "_is_conj",
        "_is_neg",
        "_offset",
        "_probe",
        "_saved_version",
        "_shape",
        "_slot",
        "_stride",
        "index",
    )

    def __init__(self, tensor: torch.Tensor, slot: SlotHandle, index: int) -> None:
        self._slot = slot
        self.index = index  # of its pack
        record = slot.record
        record.add_view()
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = int(tensor.storage_offset())
        begin = record.key[2]
        if begin:
            self._offset -= begin // tensor.itemsize
        self._dtype = tensor.dtype
        self._is_conj = tensor.is_conj()
        self._is_neg = tensor.is_neg()
        self._saved_version = version_of(tensor)
        # Shares the tensor's version counter, and holds none of its memory.
        self._probe = tensor.detach()
        self._probe.data = record.empty(tensor.dtype)

    @property
    def ticket_id(self) -> int:
        """Which copies of the store's log are those of these bytes; -1: none."""
        ticket: Ticket | None = self._slot.record.ticket
        return ticket.id if ticket is not None else -1

    def restore(self) -> torch.Tensor:
        """The tensor as it was saved: same bytes, size, stride, offset and lazy bits.

        Raises
        ------
        RuntimeError
            The tensor was changed in place after it was saved.
        OSError
            Its bytes could not be read back; calling again tries again.
        """
        found = version_of(self._probe)
        if found != self._saved_version:
            raise_changed(self._probe.type(), self._shape, found, self._saved_version)
        storage, begin = self._slot.record.swap_in()
        # Nothing here requires a gradient, so none of it is recorded where grad is on (create_graph).
        tensor = self._slot.record.empty(self._dtype).detach()
        tensor.set_(storage, self._offset + begin // tensor.itemsize, self._shape, self._stride)
        if self._is_conj:
            tensor = conjugated(tensor)
        if self._is_neg:
            tensor = negated(tensor)
        # Under the original's version counter: a backward that writes to it is noticed by whoever saved it too.
        restored = self._probe.detach()
        restored.data = tensor
        return restored
