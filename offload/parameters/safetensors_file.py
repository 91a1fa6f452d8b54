"""Reads single tensors of safetensors files, each into its own memory.

The format: eight bytes with the length of the header, the header as JSON, the bytes of the tensors. Files are not
mapped, because pages of a mapped file would count as memory of the process.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Entry", "read_entries", "read_tensor"]

HEADER_BYTES_MAX = 100 << 20  # as the format allows
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """Where one tensor is in a file. `begin` is the offset in bytes from the beginning of the file."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def read_entries(weights: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> dict[str, Entry]:
    """Return the tensors of files by name.

    Parameters
    ----------
    weights
        A file, a list of files, or a folder: then all its files ``*.safetensors`` are read.

    Raises
    ------
    ValueError
        There is no file, a file is not of this format, or two tensors have the same name.
    OSError
        A file cannot be read.
    """
    if isinstance(weights, str | os.PathLike):
        path = Path(weights)
        paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not paths:
            raise ValueError(f"{path} has no file *.safetensors; name the file, or the folder that has it")
    else:
        paths = [Path(each) for each in weights]
    found: dict[str, Entry] = {}
    for path in paths:
        for name, entry in _read_header(path):
            if name in found:
                raise ValueError(f"{path} and {found[name].path} both have {name!r}; give one of the files")
            found[name] = entry
    return found


def _read_header(path: Path) -> Iterable[tuple[str, Entry]]:
    wrong = f"{path} is not a safetensors file, or is incomplete"
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = file.read(8)
        header_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else nbytes
        if header_bytes > min(HEADER_BYTES_MAX, nbytes - 8):
            raise ValueError(wrong)
        try:
            header = json.loads(file.read(header_bytes))
            begin = 8 + header_bytes
            for name, about in header.items():
                if name == "__metadata__":
                    continue
                first, last = about["data_offsets"]
                dtype, shape = _DTYPES[about["dtype"]], tuple(about["shape"])
                expected = torch.empty(shape, dtype=dtype, device="meta").nbytes
                if not 0 <= first <= first + expected == last <= nbytes - begin:
                    raise ValueError(wrong)
                yield name, Entry(str(path), dtype, shape, begin + first)
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"{wrong}: {error!r}") from error


def read_tensor(entry: Entry) -> Tensor:
    """Return a tensor on the CPU with its own memory.

    Raises
    ------
    OSError
        Its bytes cannot be read.
    """
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.nbytes else b""
    left = memoryview(flat)
    with Path(entry.path).open("rb", buffering=0) as file:
        file.seek(entry.begin)
        while left:
            count = file.readinto(left)
            if not count:
                raise OSError(5, "the file is shorter than its header says", entry.path)
            left = left[count:]
    return tensor
