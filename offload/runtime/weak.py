"""Weak references: callbacks that do not keep their owner alive, and calls to make once an object is gone.

Python drops an exception that is raised in a weak reference's callback or a finalizer, and the
handler of a signal, such as Ctrl-C, may raise one in any Python code. So none runs there: the call waits in a queue,
which C code fills, until the next call into the library.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

__all__ = ["WeakReferences", "call_when_dead", "run_pending_callbacks", "weak_callback"]

Object = TypeVar("Object")


def weak_callback(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method for somebody else to call; nothing happens when its owner is gone."""
    # Not a WeakMethod, which runs Python code when its object dies.
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*args: object) -> None:
        found = owner()
        if found is not None:
            function(found, *args)
        else:
            run_pending_callbacks()

    return call


class WeakReferences(Generic[Object]):
    """A set of objects that it does not keep alive."""

    def __init__(self) -> None:
        self._references: tuple[weakref.ref[Object], ...] = ()

    def add(self, each: Object) -> None:
        """Add one; references to dead objects are dropped."""
        self._references = (*(it for it in self._references if it() is not None), weakref.ref(each))

    def __iter__(self) -> Iterator[Object]:
        for reference in self._references:
            each = reference()
            if each is not None:
                yield each


class _Death(weakref.ref[Any]):
    """A weak reference that knows what to call when its object is gone."""

    __slots__ = ("call",)
    call: Callable[[], object]


_awaited: dict[int, _Death] = {}
_dead: deque[_Death] = deque()


def call_when_dead(owner: object, call: Callable[[], object]) -> None:
    """Have something called after `owner` is gone, by the next `run_pending_callbacks`; an interrupt may repeat it."""
    death = _Death(owner, _dead.append)
    death.call = call
    _awaited[id(death)] = death


def run_pending_callbacks() -> None:
    """Call what waits for objects that are gone."""
    while _dead:
        death = _dead[0]
        death.call()
        _awaited.pop(id(death), None)
        with suppress(ValueError):  # another thread was faster
            _dead.remove(death)
