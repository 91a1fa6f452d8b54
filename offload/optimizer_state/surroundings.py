"""Detects what an optimizer's step changes outside of the optimizer, such as a count of steps in its class.

An optimizer whose step changes anything there cannot be stepped in chunks: each chunk would change it again.
`separable` asks.
"""

from __future__ import annotations

import inspect
import logging
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optimizer_state.plain_values import copied, is_equal, is_plain
from offload.runtime.random_numbers import is_global

__all__ = ["Surroundings"]


# Objects that cannot change, or whose changes do not affect updates.
_FIXED: tuple[type, ...] = (bytes, range, slice, types.EllipsisType, types.NotImplementedType, Enum, np.generic)
_FIXED += (PurePath, re.Pattern, torch.finfo, torch.iinfo, torch.layout, torch.memory_format)
_FIXED += (types.ModuleType, types.UnionType, TypeVar, logging.Logger)
_NUMEL_MAX = 1 << 20  # of a tensor that is compared


class Surroundings:
    """Values of an optimizer's own classes, and of the variables that their functions use, at one moment.

    Parameters
    ----------
    step
        The optimizer's step, without hooks.

    Attributes
    ----------
    unknown
        Names of the values that cannot be copied and compared, such as iterators and random generators. A step might
        change them.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        kinds = [
            kind for kind in type(optimizer).__mro__ if not f"{kind.__module__}.".startswith(("torch.", "builtins."))
        ]
        functions = [function for kind in kinds for each in vars(kind).values() for function in _functions(each)]
        places = [*_of_classes(kinds), *_of_functions([*functions, step], {kind.__module__ for kind in kinds})]
        self._names = [(kind, set(vars(kind))) for kind in kinds]
        self.unknown = sorted({name for name, get, _ in places if not is_plain(get(), _is_fixed)})
        self._values = [
            (get, put, value, copied(value)) for _, get, put in places if is_plain(value := get(), _is_fixed)
        ]

    def has_changed(self) -> bool:
        """Return whether anything has changed since."""
        return any(set(vars(kind)) != names for kind, names in self._names) or any(
            not is_equal(get(), before) for get, _, _, before in self._values
        )

    def restore(self) -> None:
        """Restore all values, in the same objects."""
        for kind, names in self._names:
            for name in set(vars(kind)) - names:
                delattr(kind, name)
        for get, put, value, before in self._values:
            if not is_equal(get(), before):
                put(_filled(value, before))


Place = tuple[str, Callable[[], Any], Callable[[Any], None]]


def _is_fixed(value: object) -> bool:
    """Return whether a step is taken to leave an object as it is. Of what can be called, only methods are looked at."""
    if isinstance(value, Tensor):
        return value.numel() <= _NUMEL_MAX
    owner = getattr(value, "__self__", None)  # of a method
    if callable(value) and owner is not None:
        return is_global(owner) or _is_fixed(owner)
    is_code = callable(value) or hasattr(type(value), "__get__") or type(value).__module__ == "_abc"
    return is_code or isinstance(value, _FIXED)


def _of_classes(kinds: list[type]) -> Iterator[Place]:
    for kind in kinds:
        for name in vars(kind):
            if not name.startswith("__"):
                yield f"{kind.__name__}.{name}", partial(_attribute, kind, name), partial(setattr, kind, name)


def _attribute(kind: type, name: str) -> Any:
    return vars(kind).get(name)


def _functions(value: Any) -> list[Any]:
    """Return the functions of an attribute of a class: those of a property, or the one of a method of any kind."""
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset, value.fdel) if inspect.isfunction(each)]
    found = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return [found] if inspect.isfunction(found) else []


def _of_functions(functions: Iterable[Any], modules: set[str]) -> Iterator[Place]:
    """Yield the variables of some functions, and of the functions of these modules that they use."""
    pending, seen = list(functions), set()
    while pending:
        function = inspect.unwrap(pending.pop())
        if function in seen:
            continue
        seen.add(function)
        for place in _of_function(function):
            yield place
            used = place[1]()
            if inspect.isfunction(used) and used.__module__ in modules:
                pending.append(used)


def _of_function(function: Any) -> Iterator[Place]:
    for name in {name for code in _nested(function.__code__) for name in code.co_names}:
        if name in function.__globals__:
            yield name, partial(function.__globals__.get, name), partial(function.__globals__.__setitem__, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, partial(_contents, cell), partial(setattr, cell, "cell_contents")


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _nested(each)


def _filled(value: Any, before: Any) -> Any:
    """Return the same object with its former content; return the former value if it is not a container or a tensor."""
    if isinstance(value, list):
        value[:] = before
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)
    elif isinstance(value, deque):
        value.clear()
        value.extend(before)
    elif isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(before)
    else:
        return before
    return value
