"""The optimizer state that a plan may move, in chunks. `StateMovers` passes them to the planner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from offload.optimizer_state import mover as mover_module
from offload.optimizer_state.chunks import split
from offload.optimizer_state.mover import StateMover
from offload.optimizer_state.state_tensor import is_movable
from offload.optimizer_state.streamed_state import StreamedState
from offload.torch_compat.tensors import local_of

__all__ = ["MovableChunk", "movable_chunks", "params_of", "streamed_state"]

# A chunk has at most this share of an optimizer's movable state, or CHUNK_BYTES if that is more. A parameter with more
# state is a chunk of its own. All state is one chunk if the optimizer's update cannot be divided: it is in memory then.
_CHUNK_SHARE = 1 / 512


@dataclass(frozen=True)
class MovableChunk:
    """State of some parameters that a plan may move out.

    Attributes
    ----------
    params
        The parameters.
    nbytes
        Bytes of the state.
    seconds
        Time of the parameters' update; 0 if it is not known.
    name
        Names of the first and the last parameter.
    is_moved
        Whether the present plan moves the state out. Decided for the first of the parameters.
    """

    params: tuple[Tensor, ...]
    nbytes: int
    seconds: float
    name: str
    is_moved: bool

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(local_of(param).nbytes for param in self.params)


def movable_chunks(mover: StateMover, min_nbytes: int, names: Mapping[int, str]) -> Iterator[MovableChunk]:
    """Yield the state of one optimizer that can move, in the order of the update.

    `names`: names of parameters, by identity.
    """
    sizes = {param: nbytes for param in params_of(mover) if (nbytes := _movable_nbytes(mover, param, min_nbytes))}
    total_bytes = sum(sizes.values())
    share_bytes = max(mover_module.CHUNK_BYTES, int(_CHUNK_SHARE * total_bytes))
    nbytes_max = total_bytes if mover.counts.whole_steps else share_bytes
    for params in split(sizes, sizes.__getitem__, nbytes_max):
        ends = (params[0], params[-1]) if len(params) > 1 else (params[0],)
        name = " … ".join(names.get(id(each), f"a parameter of shape {list(each.shape)}") for each in ends)
        nbytes, is_moved = sum(map(sizes.__getitem__, params)), params[0] in mover.share
        yield MovableChunk(tuple(params), nbytes, mover.share.seconds_of(params), name, is_moved)


def params_of(mover: StateMover) -> Iterator[Tensor]:
    """Yield the parameters of the mover's optimizer."""
    optimizer = mover.optimizer
    for group in optimizer.param_groups if optimizer is not None else ():
        yield from group["params"]


def streamed_state(mover: StateMover) -> StreamedState | None:
    """Return an optimizer's state if some of it may be away; None otherwise."""
    state = mover.optimizer.state if mover.optimizer is not None else None
    return state if isinstance(state, StreamedState) and state.is_moved else None


def _movable_nbytes(mover: StateMover, param: Tensor, min_nbytes: int) -> int:
    """Return the bytes of one parameter's state that have been moved out, or that could be."""
    optimizer, streamed = mover.optimizer, streamed_state(mover)
    assert optimizer is not None  # it has this parameter
    if streamed is not None and param in mover.share:  # all that can leave has left
        return sum(each.nbytes for each in streamed.tensors.get(param, ()) if each.is_away)
    state = dict.get(optimizer.state, param)
    if not isinstance(state, dict) or mover.counts.stays not in ("", mover_module.STAYS_BY_PLAN):
        return 0
    away = {id(each.tensor): each for each in streamed.tensors.get(param, ())} if streamed is not None else {}
    nbytes = 0
    for value in state.values():
        if id(value) in away:
            nbytes += away[id(value)].nbytes
        elif is_movable(value, mover.engine.device, min_nbytes):
            nbytes += local_of(value).nbytes
    return nbytes
