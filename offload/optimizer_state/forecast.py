"""Forecasts which state of an optimizer would leave memory, and how much of it would be in memory during a step.

`offload fit` uses the forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from offload.optimizer_state import mover
from offload.optimizer_state.chunks import is_known, split
from offload.optimizer_state.divisible import why_it_stays
from offload.optimizer_state.streamed_state import StreamedState
from offload.torch_compat.optimizers import is_own_step, step_behind_hooks
from offload.torch_compat.tensors import local_of

__all__ = ["StateForecast", "forecast", "still_written"]

Chunk = tuple[int, ...]


@dataclass(frozen=True)
class StateForecast:
    """The state of one optimizer as it would be moved.

    Attributes
    ----------
    chunks
        Bytes of each tensor that leaves between steps, chunk by chunk, in the order of the step.
    is_divided
        Whether the step runs chunk by chunk. If not, all state is in memory while it runs.
    params
        The parameters of each chunk, if the step is divided.
    stays
        Why no state would leave; empty if some would.
    """

    chunks: tuple[Chunk, ...] = ()
    is_divided: bool = True
    params: tuple[Sequence[Tensor], ...] = field(default=(), repr=False, compare=False)
    stays: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that leave memory between steps."""
        return sum(map(sum, self.chunks))

    @property
    def step_bytes(self) -> int:
        """The most of these bytes that are in memory at a time while the optimizer steps."""
        return _most_at_a_time(self.chunks) if self.is_divided else self.nbytes


def still_written(chunks: Iterable[Chunk]) -> int:
    """Return the most bytes whose copy-outs may be under way when the copy-out of the last of these chunks has begun.

    `WriteBehind` waits for the oldest copy-outs, and never for the newest.
    """
    total = 0
    for nbytes in reversed([nbytes for chunk in chunks for nbytes in chunk]):
        if total and total + nbytes > mover.BEHIND_BYTES:
            break
        total += nbytes
    return total


def forecast(optimizer: Optimizer, leaves: Callable[[dict[Any, Any], Any], bool]) -> StateForecast:
    """Return what `StateMover` would do with an optimizer. Call it in a hook after the optimizer's step.

    Parameters
    ----------
    leaves
        Called with the state of one parameter and a name in it; returns whether this value can leave memory.
    """
    is_away = isinstance(optimizer.state, StreamedState) and optimizer.state.is_moved
    stays = "it is moved already" if is_away else why_it_stays(optimizer)
    leaving = {} if stays else _leaving(optimizer, leaves)
    if not any(leaving.values()):
        return StateForecast(stays=stays or "its tensors are smaller than min_tensor_bytes, or other code holds them")
    if not (is_known(optimizer) and is_own_step(optimizer, step_behind_hooks(optimizer))):
        return StateForecast(tuple(leaving.values()), is_divided=False)  # a trial may show later that it is separable
    params = [param for group in optimizer.param_groups for param in group["params"]]
    chunks = tuple(
        split(params, lambda param: sum(leaving.get(id(param), ())) or 2 * local_of(param).nbytes, mover.CHUNK_BYTES)
    )
    tensors = [tuple(nbytes for param in chunk for nbytes in leaving.get(id(param), ())) for chunk in chunks]
    return StateForecast(tuple(tensors), params=chunks)


def _leaving(optimizer: Optimizer, leaves: Callable[[dict[Any, Any], Any], bool]) -> dict[int, Chunk]:
    """Return, by identity of each parameter, the bytes of each tensor of its state that leaves."""
    found = {}
    for param in list(optimizer.state):
        state = optimizer.state[param]
        if isinstance(state, dict):
            names = [name for name in state if leaves(state, name)]
            found[id(param)] = tuple(local_of(state[name]).nbytes for name in names)
    return found


def _most_at_a_time(chunks: Sequence[Chunk]) -> int:
    """Return the most bytes in memory at a time: a chunk, what is read ahead, and what is still being written."""
    sizes = list(map(sum, chunks))
    most = begun = 0
    for number, nbytes in enumerate(sizes):
        ahead = sum(sizes[number + 1 : begun])
        while begun < len(chunks) and (begun <= number + 1 or ahead < mover.AHEAD_BYTES):
            ahead += sizes[begun] if begun > number else 0
            begun += 1
        before = [*chunks[begun:], *chunks[:number]]  # the last chunks left at the end of the previous step
        most = max(most, nbytes + ahead + still_written(before))
    return most
