"""Detects what an optimizer's step changes outside of the optimizer, such as a count of steps in its class.

An optimizer whose step changes anything there cannot be stepped in chunks: each chunk would change it again.
`separable` asks.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optimizer_state.plain_values import copied, is_equal, is_plain

__all__ = ["Surroundings"]


class Surroundings:
    """Plain values of an optimizer's own classes, and of the variables that their functions use, at one moment.

    Parameters
    ----------
    step
        The optimizer's step, without hooks.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        kinds = [
            kind for kind in type(optimizer).__mro__ if not f"{kind.__module__}.".startswith(("torch.", "builtins."))
        ]
        functions = {inspect.unwrap(each) for kind in kinds for each in vars(kind).values() if inspect.isfunction(each)}
        functions.add(inspect.unwrap(step))
        self._names = [(kind, set(vars(kind))) for kind in kinds]
        self._values = [
            (get, put, value, copied(value))
            for get, put in (*_of_classes(kinds), *_of_functions(functions))
            if is_plain(value := get())
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


Place = tuple[Callable[[], Any], Callable[[Any], None]]


def _of_classes(kinds: list[type]) -> Iterator[Place]:
    for kind in kinds:
        for name in vars(kind):
            if not name.startswith("__"):
                yield partial(_attribute, kind, name), partial(setattr, kind, name)


def _attribute(kind: type, name: str) -> Any:
    return vars(kind).get(name)


def _of_functions(functions: set[Any]) -> Iterator[Place]:
    for function in functions:
        for name in {name for code in _nested(function.__code__) for name in code.co_names}:
            if name in function.__globals__:
                yield partial(function.__globals__.get, name), partial(function.__globals__.__setitem__, name)
        for cell in function.__closure__ or ():
            yield partial(_contents, cell), partial(setattr, cell, "cell_contents")


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
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
