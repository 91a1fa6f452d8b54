"""Which tensors share memory, and whether anything besides one tensor can reach its memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from offload.torch_compat.borrowed_memory import is_borrowed
from offload.torch_compat.tensors import no_torch_function, storage_identity

__all__ = ["holds_alone", "is_in_shared_memory", "overlapping"]

_holders: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_NBYTES = Tensor.nbytes.__get__  # type: ignore[attr-defined]
_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


def holds_alone(tensor: Tensor) -> bool:
    """Return whether a tensor of any class covers its whole storage and nothing else can reach this memory.

    What else could: another tensor, another process, and the owner of memory that is borrowed.
    """
    storage: UntypedStorage = _plain(Tensor.untyped_storage, tensor)
    if _holders is None or storage.nbytes() != _plain(_NBYTES, tensor) or _plain(Tensor.storage_offset, tensor) != 0:
        return False
    if is_borrowed(storage) or _is_shared(storage):
        return False
    del storage
    return _count_holders(tensor) == _ALONE


def is_in_shared_memory(tensor: Tensor) -> bool:
    """Return whether other processes may use a tensor's memory."""
    return _is_shared(tensor.untyped_storage())


def overlapping(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of different tensors of any class whose ranges of memory overlap, also if no element is in both.

    Each tensor that overlaps with another one is in a pair.
    """
    in_storage: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
    for each in tensors:
        if each.layout is torch.strided and not each.is_nested and each.numel():
            in_storage[storage_identity(_plain(Tensor.untyped_storage, each))][id(each)] = each
    for found in in_storage.values():
        ranges = sorted((_range(each) for each in found.values()), key=lambda each: each[0]) if len(found) > 1 else []
        for (_, end, first), (begin, _, second) in zip(accumulate(ranges, _ending_later), ranges[1:], strict=False):
            if begin < end:
                yield first, second


def _ending_later(one: tuple[int, int, Tensor], other: tuple[int, int, Tensor]) -> tuple[int, int, Tensor]:
    """Return the range that ends later."""
    return other if other[1] > one[1] else one


def _range(tensor: Tensor) -> tuple[int, int, Tensor]:
    """Return where in its storage a tensor begins and ends, in bytes."""
    strides = zip(_plain(_SHAPE, tensor), _plain(Tensor.stride, tensor), strict=True)
    elements = 1 + sum((count - 1) * stride for count, stride in strides)
    begin = _plain(Tensor.storage_offset, tensor) * tensor.itemsize
    return begin, begin + elements * tensor.itemsize, tensor


def _is_shared(storage: UntypedStorage) -> bool:
    return storage.device.type == "cpu" and storage.is_shared()


def _plain(function: Callable[..., Any], tensor: Tensor) -> Any:
    return no_torch_function(function, (), (tensor,))


def _count_holders(tensor: Tensor) -> int:
    assert _holders is not None
    return _holders(storage_identity(_plain(Tensor.untyped_storage, tensor)))


_ALONE = _count_holders(torch.empty(1)) if _holders is not None else 0
