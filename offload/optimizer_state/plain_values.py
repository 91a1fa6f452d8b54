"""Values that can be copied and compared: numbers, strings, small tensors, and containers of these.

The trial of an optimizer (`separable`, `surroundings`) compares these values of two runs. `BegunStep` uses them to see
whether an option has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["copied", "is_equal", "is_plain"]

NUMEL_MAX = 64  # of a tensor


def is_plain(value: object, is_also_plain: Callable[[object], bool] = lambda _: False) -> bool:
    """Return whether a value, with all that it contains, can be copied and compared.

    Parameters
    ----------
    is_also_plain
        Is asked about values that are not plain, and about tensors of more than `NUMEL_MAX` elements. Returns whether
        they count as plain.
    """
    if isinstance(value, dict):
        return all(is_plain(each, is_also_plain) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(is_plain(each, is_also_plain) for each in value)
    if isinstance(value, Tensor) and value.numel() <= NUMEL_MAX:
        return True
    is_number = value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device)
    return is_number or is_also_plain(value)


def copied(value: Any) -> Any:
    """Return a copy of a plain value."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else value
    if isinstance(value, set | deque):
        return value.copy()
    return value.detach().clone() if isinstance(value, Tensor) else value


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are of the same types and have the same bits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(value, other[key]) for key, value in one.items())
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
