"""Copies of moved state for `state_dict()`, in unnamed files that are mapped into memory.

The system can drop their pages from memory at any time and read them again, so a snapshot of all state fits where the
state itself does not.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor, UntypedStorage

from offload.options import is_in_memory

__all__ = ["in_file"]


def in_file(tensor: Tensor, folder: str) -> Tensor:
    """Return a tensor on the CPU with the same bytes, in a file of its own; the given one if there can be no file.

    Parameters
    ----------
    tensor
        On the CPU.
    folder
        Where the file is created. It has no name, and is freed with the tensor. There can be no file if the folder is
        on a tmpfs, is full, or does not support unnamed files.

    Returns
    -------
    Tensor
        Of the same shape, strides and type. Writes to it stay in memory.
    """
    if not folder or not hasattr(os, "O_TMPFILE") or is_in_memory(folder):
        return tensor
    source = tensor.untyped_storage()
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return tensor
    try:
        os.posix_fallocate(file, 0, source.nbytes())
        _write(file, source)
        # Not `UntypedStorage.from_file`: torch takes its storages for shared memory.
        mapped = mmap.mmap(file, source.nbytes(), flags=mmap.MAP_PRIVATE)
    except OSError:
        return tensor
    finally:
        os.close(file)
    storage = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _write(file: int, source: UntypedStorage) -> None:
    with torch.no_grad():
        data = memoryview(torch.empty(0, dtype=torch.uint8).set_(source).numpy().data)
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], done)
