"""One storage that autograd saved in a recorded step, and the tensor of the trace that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.plan.trace import SavedTensor
from offload.runtime.schedule import StepOrder
from offload.torch_compat.tensors import StorageWatch

__all__ = ["SavedStorage", "tensor_of"]


@dataclass
class SavedStorage:
    """All packs of one storage in the recorded step: they are swapped together."""

    alive: StorageWatch
    place: int
    nbytes: int
    entries: list[int] = field(default_factory=list)  # pack indices
    input_bytes: int = 0  # how many of its bytes count as an input, in use before the step
    is_held_state: bool = False  # whether it is a gradient or optimizer state, in use before the step
    may_be_reloaded: bool = False  # whether it may be memory to which the engine has loaded another saved tensor
    last_forward: int | None = None  # last node in which code other than offload held the storage; None: it still does


def tensor_of(storage: SavedStorage, order: StepOrder) -> SavedTensor | None:
    """Return the tensor of the trace; None if other code holds the storage in backward.

    Its `produced` is `packed` for now; `Profiler.profile` replaces it with the node of the allocation, if it is known.
    """
    entries = [order.entries[pack_index] for pack_index in storage.entries]
    last = order.node_count - 1
    first_backward = min((e.first_backward for e in entries if e.first_backward is not None), default=last)
    packed = max(entry.packed for entry in entries)
    last_forward = storage.last_forward
    if last_forward is None or not packed <= max(last_forward, packed) < first_backward:
        return None
    copied = sum(entry.nbytes for entry in entries)
    return SavedTensor(
        id=storage.entries[0],
        bytes=max(copied, storage.nbytes),  # a view that is kept keeps all of its storage; its entry may be smaller
        produced=packed,
        packed=packed,
        last_forward=max(last_forward, packed),
        first_backward=first_backward,
        last_use=max((e.last_use for e in entries if e.last_use is not None), default=last),
        copy_bytes=copied if 0 < copied < storage.nbytes else None,
    )
