"""Copies of state for `state_dict()`, in an unnamed file that is mapped into memory.

The system can drop the file's pages from memory at any time and read them again, so a snapshot of all state fits where
the state itself does not.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.options import FREE_DISK_BYTES_MIN, free_disk_bytes, is_in_memory
from offload.torch_compat.borrowed_memory import storage_over
from offload.torch_compat.tensors import is_read_lazily, local_of, sharded_like

__all__ = ["Snapshot"]

_ALIGNMENT = 64  # of a tensor's first byte; memory from torch's own allocator has the same alignment


class Snapshot:
    """A file for copies of tensors on the CPU, and the places where these copies belong.

    One file and one mapping serve all tensors: both are limited in number. They are freed with the last tensor.

    Parameters
    ----------
    folder
        Where the file is created; it has no name.
    nbytes
        Space for the copies, from `space_for`.

    Raises
    ------
    OSError
        There can be no file, or the disk has no room for it.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        if is_in_memory(folder) or free_disk_bytes(folder) < nbytes + FREE_DISK_BYTES_MIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
        self._nbytes = nbytes
        self._used = 0
        self._places: list[tuple[dict[Any, Any], Any, Tensor, int, Callable[[Tensor], Tensor]]] = []
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        try:
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except BaseException:
            self._file.close()
            raise

    @staticmethod
    def space_for(nbytes: int) -> int:
        """Return the space that a tensor of this size takes in the file, in bytes."""
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def put(self, state: dict[Any, Any], name: Any, tensor: Tensor) -> None:
        """Copy a tensor into the file; `end` sets `state[name]`.

        `state[name]` is set to the tensor itself if its memory has gaps, if it cannot be written, or if the file has no
        room for it, because another thread has added state since the space was counted.
        """
        state[name], finished, tensor = tensor, sharded_like(tensor), local_of(tensor)
        if not _is_dense(tensor) or self._used + self.space_for(tensor.nbytes) > self._nbytes:
            return
        try:
            self._write(tensor)
        except OSError:
            return
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._places.append((state, name, like, self._used, finished))
        self._used += self.space_for(tensor.nbytes)
        state[name] = None  # keeps the order of names until `end`; the tensor may be freed

    def _write(self, tensor: Tensor) -> None:
        with torch.no_grad(), torch.device("cpu"):
            begin = tensor.storage_offset() * tensor.itemsize
            elements = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), begin, (tensor.nbytes,), (1,))
        data, done = memoryview(elements.numpy().data), 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], self._used + done)

    def end(self) -> None:
        """Put the copies in their places. A write to one of them stays in memory and changes neither file nor state."""
        with self._file, torch.no_grad(), torch.device("cpu"):
            mapped = mmap.mmap(self._file.fileno(), self._nbytes, flags=mmap.MAP_PRIVATE)
            for state, name, like, begin, finished in self._places:
                # A storage of its own, so that `torch.save` of this copy does not write the others. And torch cannot
                # copy a DTensor whose local tensor begins within a storage.
                own = storage_over(mapped, begin, like.nbytes)
                empty = torch.empty(0, dtype=like.dtype)
                state[name] = finished(empty.set_(own, 0, like.shape, like.stride()))

    def close(self) -> None:
        """Close the file. The copies that `end` has put in their places stay."""
        self._file.close()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether memory holds the values as they are, without gaps or overlaps, in any order of the dimensions.

    False for a lazily conjugated or negated view: its memory holds other values.
    """
    if is_read_lazily(tensor):
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
