"""What moving AdamW's state is compared with: state in mapped files, and bare copies of as many bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

PIECE_BYTES = 8 << 20
BEHIND_BYTES = 64 << 20  # what offload lets leave after the update, during the next forward


class Peer:
    """Takes part in the steps of a training loop; does nothing."""

    nbytes = 0

    def before_backward(self) -> None: ...

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...

    def drain(self) -> None:
        """Wait for what the last step has begun."""


class MappedState(Peer):
    """AdamW's state in files that are mapped into memory."""

    def __init__(self, optimizer: Any, min_tensor_bytes: int) -> None:
        import torch

        from offload.options import default_spill_dir

        self._mapped: list[tuple[int, Any]] = []
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            state = optimizer.state[parameter]
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter)
                if parameter.nbytes >= min_tensor_bytes:
                    descriptor, path = tempfile.mkstemp(dir=default_spill_dir())
                    tensor = torch.from_file(path, shared=True, size=parameter.numel(), dtype=parameter.dtype)
                    Path(path).unlink()
                    state[name] = tensor.view_as(parameter)
                    self._mapped.append((descriptor, tensor))
        self.nbytes = sum(tensor.nbytes for _, tensor in self._mapped)

    def after_update(self) -> None:
        """Write all pages and drop them from memory."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for descriptor, tensor in self._mapped:
            os.fsync(descriptor)
            if madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise")
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class BareCopies(Peer):
    """Reads and writes as many bytes as the state has in each step, by direct I/O, into one buffer and from another.

    Training keeps its state in memory and does not use these bytes, and nothing is computed from them. Whatever moves
    the state copies as much.
    """

    def __init__(self, optimizer: Any, min_tensor_bytes: int) -> None:
        from offload.options import default_spill_dir

        sizes = [parameter.nbytes for group in optimizer.param_groups for parameter in group["params"]]
        nbytes = 2 * sum(size for size in sizes if size >= min_tensor_bytes)
        piece_bytes = min(PIECE_BYTES, nbytes)
        self._offsets = range(0, nbytes // piece_bytes * piece_bytes, piece_bytes)
        self._buffers = [mmap.mmap(-1, piece_bytes) for _ in range(2)]
        descriptor, path = tempfile.mkstemp(dir=default_spill_dir())
        os.close(descriptor)
        self._file = os.open(path, os.O_RDWR | os.O_DIRECT)
        Path(path).unlink()
        self._threads = ThreadPoolExecutor(2)
        self._copying: list[Future[None]] = []
        self._transfer(os.pwritev, self._buffers[1], self._offsets)

    def read(self, pieces: slice = slice(None)) -> None:
        """Begin to read these pieces of the file."""
        self._begin(os.preadv, self._buffers[0], self._offsets[pieces])

    def write(self, pieces: slice = slice(None)) -> None:
        """Begin to write these pieces of the file."""
        self._begin(os.pwritev, self._buffers[1], self._offsets[pieces])

    def drain(self) -> None:
        """Wait until all of them are copied."""
        for each in self._copying:
            each.result()
        self._copying.clear()

    def _begin(self, *transfer: Any) -> None:
        self._copying.append(self._threads.submit(self._transfer, *transfer))

    def _transfer(self, copy: Callable[[int, list[mmap.mmap], int], int], buffer: mmap.mmap, offsets: range) -> None:
        for offset in offsets:
            if copy(self._file, [buffer], offset) != len(buffer):
                raise OSError(f"a part of {len(buffer)} bytes was copied")


class CopiesInUpdate(BareCopies):
    """As `optimizer_state=True`: all is read, and all but the last 64 MiB written, before `step()` returns."""

    ahead_bytes, behind_bytes = 0, BEHIND_BYTES

    def before_backward(self) -> None:
        """Begin to read what is read ahead."""
        self.drain()
        self.read(slice(self.ahead_bytes // PIECE_BYTES))

    def before_update(self) -> None:
        """Begin to copy the rest."""
        self.read(slice(self.ahead_bytes // PIECE_BYTES, None))
        self.write(slice(-(self.behind_bytes // PIECE_BYTES)))

    def after_update(self) -> None:
        """Wait for these copies, and begin to write what is written behind."""
        self.drain()
        self.write(slice(-(self.behind_bytes // PIECE_BYTES), None))


class CopiesAroundUpdate(CopiesInUpdate):
    """As much as memory allows is read during backward and written during the next forward.

    370 MiB of state can be in memory beside the weights and gradients of the full network without a peak above that of
    1,024 tokens, which is at the end of forward.
    """

    ahead_bytes = behind_bytes = 370 << 20


class CopiesInBackward(BareCopies):
    """As many bytes from the beginning of backward to that of the next: more time than `step_in_backward=True` has."""

    def before_backward(self) -> None:
        """Wait for the last step's copies, and begin this step's."""
        self.drain()
        self.read()
        self.write()


PEERS: dict[str, type[Peer]] = {
    "mapped": MappedState,
    "copies in update": CopiesInUpdate,
    "copies around": CopiesAroundUpdate,
    "copies in backward": CopiesInBackward,
}
