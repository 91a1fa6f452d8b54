"""Tensors of an optimizer's state that share memory: one tensor under several names, or views that overlap.

They never leave memory. `StreamedState` keeps what they share when it copies or loads the state, as plain torch does.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from offload.optimizer_state.state_tensor import cloned
from offload.runtime.engine import has_storage
from offload.torch_compat.holders import overlapping
from offload.torch_compat.tensors import local_of, sharded_like

__all__ = ["Aliases"]


class Aliases:
    """Finds which of some values share memory, and makes copies that share memory where the values do."""

    def __init__(self, values: Iterable[object]) -> None:
        tensors = [local_of(each) for each in values if isinstance(each, Tensor)]
        twice = (key for key, count in Counter(map(id, tensors)).items() if count > 1)
        pairs = overlapping(filter(has_storage, tensors))
        self._shared = frozenset((*twice, *(id(each) for pair in pairs for each in pair)))  # no tensor is held here
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # with the originals, so that no identity is reused
        self._memo: dict[int, object] = {}  # of `deepcopy`: the copies of storages

    def __contains__(self, tensor: Tensor) -> bool:
        return id(local_of(tensor)) in self._shared

    def copied(self, value: Any) -> Any:
        """Return a copy of a tensor, the same one for the same tensor; any other value as it is."""
        if not isinstance(value, Tensor):
            return value
        if value not in self:
            return cloned(value)
        if id(value) not in self._made:
            self._made[id(value)] = value, self._copied(value)
        return self._made[id(value)][1]

    def _copied(self, tensor: Tensor) -> Tensor:
        local = local_of(tensor)
        if not has_storage(local):
            return cloned(tensor)
        return sharded_like(tensor)(copy.deepcopy(local.detach(), self._memo))  # copies the whole storage, once
