"""Memory that torch uses and something else owns: a NumPy array, a buffer of Python, a tensor of another library.

The owner can read and write such memory at any time, so it may not leave. Torch does not tell whose memory a storage
has. But the storage's C++ object has the address of the function that gives the memory back, and this address is
another one for borrowed memory, for a slice of a storage (what `torch.load(mmap=True)` and safetensors return), and for
memory that torch has allocated.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import UntypedStorage

__all__ = ["is_borrowed", "storage_over"]

_WORDS = 8  # the C++ object is at least this long


def _words(storage: UntypedStorage) -> list[int]:
    return list((ctypes.c_size_t * _WORDS).from_address(storage._cdata))


def _own(nbytes: int) -> UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()


def _borrowed(nbytes: int) -> UntypedStorage:
    return torch.frombuffer(bytearray(nbytes), dtype=torch.uint8).untyped_storage()


def _sliced(whole: Any) -> UntypedStorage:
    found: UntypedStorage = whole[:]
    return found


def _find() -> tuple[int, int] | None:
    """Return which word of a storage has the address of the function, and this address for borrowed memory.

    It is the word that two storages of each kind share and storages of different kinds do not. None if there is none.
    """
    samples = [_borrowed(8), _borrowed(16), _sliced(_own(8)), _sliced(_own(16)), _own(8), _own(16)]
    for word, values in enumerate(zip(*map(_words, samples), strict=True)):
        if values[::2] == values[1::2] and len(set(values)) == 3:
            return word, values[0]
    return None


_found = _find()


def is_borrowed(storage: UntypedStorage) -> bool:
    """Return whether a storage's memory is that of a NumPy array, of a buffer or of a tensor of another library."""
    if _found is None or storage.resizable():  # torch's own memory is resizable, that of a loaded checkpoint is not
        return False
    word, address = _found
    return _words(storage)[word] == address


def storage_over(buffer: Any, offset: int = 0, nbytes: int = -1) -> UntypedStorage:
    """Return a storage with the memory of a buffer that nothing else uses: not `is_borrowed`. It keeps the buffer."""
    # A slice, because `is_borrowed` tells a slice from the memory of a buffer.
    return _sliced(torch.frombuffer(buffer, dtype=torch.uint8, offset=offset, count=nbytes).untyped_storage())
