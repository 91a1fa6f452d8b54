"""Weak references: callbacks that do not keep their owner alive, and calls after an object is freed.

Python drops an exception that is raised in a weak reference's callback or a finalizer. A signal handler, such as that
of Ctrl-C, may raise an exception in any Python code. So no Python code runs in weak references' callbacks: C code puts
the call into a queue, and the next call into the library makes it.
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
    """Return a function that calls a bound method; it does nothing after the method's owner has been freed."""
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
        """Add an object. References to dead objects are dropped."""
        self._references = (*(it for it in self._references if it() is not None), weakref.ref(each))

    def __iter__(self) -> Iterator[Object]:
        return iter([each for reference in self._references if (each := reference()) is not None])


class _Death(weakref.ref[Any]):
    """A weak reference with a function to call after its object is freed."""

    __slots__ = ("call",)
    call: Callable[[], object]


_awaited: dict[int, _Death] = {}
_dead: deque[_Death] = deque()


def call_when_dead(owner: object, call: Callable[[], object]) -> None:
    """Let the next `run_pending_callbacks` after `owner` is freed call `call`; an interrupt may repeat the call."""
    death = _Death(owner, _dead.append)
    death.call = call
    _awaited[id(death)] = death


def run_pending_callbacks() -> None:
    """Make the pending calls of objects that have been freed."""
    while _dead:
        death = _dead[0]
        death.call()
        _awaited.pop(id(death), None)
        with suppress(ValueError):  # another thread has removed it
            _dead.remove(death)
