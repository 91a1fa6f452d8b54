"""What moving an optimizer's state would leave in memory, before any of it is moved. `offload fit` asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from offload.optimizer_state import mover
from offload.optimizer_state.chunks import is_known, split
from offload.optimizer_state.streamed_state import StreamedState
from offload.torch_compat.optimizers import is_own_step, step_behind_hooks

__all__ = ["StateForecast", "forecast", "still_written"]


@dataclass(frozen=True)
class StateForecast:
    """The state of one optimizer, if it were moved.

    Attributes
    ----------
    nbytes
        Bytes that leave memory between steps.
    step_bytes
        The most of them that are in memory at a time while the optimizer steps.
    stays
        Why no state leaves; empty if some does.
    """

    nbytes: int
    step_bytes: int
    stays: str = ""


def still_written(forecasts: Iterable[StateForecast]) -> int:
    """Return the most bytes of moved state that are in memory between the steps of these optimizers of one model."""
    return min(sum(each.nbytes for each in forecasts), mover.BEHIND_BYTES)


def forecast(optimizer: Optimizer, leaves: Callable[[dict[Any, Any], Any], bool]) -> StateForecast:
    """Return what `StateMover` would do with an optimizer that has stepped. Call it in a hook after its step.

    Parameters
    ----------
    leaves
        Called with the state of one parameter and a name in it: whether this value can leave memory.
    """
    is_away = isinstance(optimizer.state, StreamedState) and optimizer.state.is_moved
    stays = "it is moved already" if is_away else mover.why_it_stays(optimizer)
    leaving = {} if stays else dict(_leaving(optimizer, leaves))
    nbytes = sum(leaving.values())
    if not nbytes:
        return StateForecast(0, 0, stays or "its tensors are smaller than min_tensor_bytes, or other code holds them")
    is_whole = not (is_known(optimizer) and is_own_step(optimizer, step_behind_hooks(optimizer)))
    if is_whole:  # or it would be tried, and may turn out to be separable
        return StateForecast(nbytes, nbytes)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    chunks = split(params, lambda param: leaving.get(id(param)) or 2 * param.nbytes, mover.CHUNK_BYTES)
    return StateForecast(nbytes, _most_at_a_time([sum(leaving.get(id(param), 0) for param in each) for each in chunks]))


def _leaving(optimizer: Optimizer, leaves: Callable[[dict[Any, Any], Any], bool]) -> list[tuple[int, int]]:
    """By identity of each parameter, the bytes of its state that leave."""
    found = []
    for param in list(optimizer.state):
        state = optimizer.state[param]
        if isinstance(state, dict):
            names = [name for name in state if leaves(state, name)]
            found.append((id(param), sum(state[name].nbytes for name in names)))
    return found


def _most_at_a_time(chunks: list[int]) -> int:
    """The most bytes in memory, given those of each chunk: itself, what is read ahead, what is still being written."""
    most = begun = 0
    for number in range(len(chunks)):
        ahead = sum(chunks[number + 1 : begun])
        while begun < len(chunks) and (begun <= number + 1 or ahead < mover.AHEAD_BYTES):
            ahead += chunks[begun] if begun > number else 0
            begun += 1
        most = max(most, chunks[number] + ahead + min(mover.BEHIND_BYTES, sum(chunks[:number])))
    return most
