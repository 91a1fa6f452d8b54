"""The class of a frozen parameter that leaves memory: each access to its bytes brings them back first.

A parameter gets this class when it leaves, and its own back when it stays again. Torch tells the class of every
function that is called with such a parameter, also of reads of its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from offload.torch_compat.compiled import opaque
from offload.torch_compat.overrides import (
    GIVES_ADDRESS,
    GIVES_MEMORY,
    OF_THE_LAYOUT,
    OF_THE_OBJECT,
    SETS_DATA,
    alias_of,
    call_without_overrides,
)

if TYPE_CHECKING:
    from offload.parameters.stored_parameter import StoredParameter

__all__ = ["MovedParameter"]


class MovedParameter(nn.Parameter):
    """A frozen parameter whose bytes are in the store, or in memory while they are used."""

    _offload_stored: StoredParameter

    @classmethod
    @opaque
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in OF_THE_OBJECT:
            return call_without_overrides(func, types, args, kwargs or {})
        return _accessed(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self._offload_stored.copy(self), requires_grad=False)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self._offload_stored.copy(self), requires_grad=False)
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_offload_stored"})
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _accessed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that may use the bytes of moved parameters, which are in memory meanwhile.

    It gets other tensors with the same memory, and sees no override. What changes the parameter itself gets that one.
    """
    first = args[0] if args else None
    if type(first) is MovedParameter and first._offload_stored.is_away_in(first):
        if func in OF_THE_LAYOUT:
            return func(first._offload_stored.content.layout, *args[1:], **kwargs)
        if func is Tensor.to and call_without_overrides(func, (), args, kwargs) is first:
            return first  # as `Module.to` asks where nothing is to be done
    if func == SETS_DATA and args[1] is first:
        return None
    found = {id(each): each for each in _moved_in((args, kwargs))}.values()
    moved = [(each, each._offload_stored) for each in found]
    user = object()
    try:
        aliases: dict[int, tuple[Tensor, Tensor]] = {}
        for parameter, record in moved:
            record.window.acquire(parameter, record, user)
            record.is_suspect |= func in GIVES_MEMORY
            record.is_pinned |= func in GIVES_ADDRESS
            aliases[id(parameter)] = parameter, alias_of(parameter)
        if _changes_object(func):
            return call_without_overrides(func, (), args, kwargs)
        result = func(*_with_aliases(args, aliases), **_with_aliases(kwargs, aliases))
        same = [parameter for parameter, alias in aliases.values() if alias is result]
        return same[0] if same else result
    finally:
        aliases = {}
        for parameter, record in moved:
            record.window.release((record,), user)
            record.window.accessed(parameter, record)


def _changes_object(func: Callable[..., Any]) -> bool:
    """Whether a function, which is not written in Python, may change the parameter as an object, or return it."""
    name = getattr(func, "__name__", "")
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return is_in_place and not isinstance(func, FunctionType)


def _moved_in(value: object) -> Iterator[MovedParameter]:
    if type(value) is MovedParameter:
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _moved_in(each)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for each in value:
            yield from _moved_in(each)


def _with_aliases(value: Any, aliases: dict[int, tuple[Tensor, Tensor]]) -> Any:
    if id(value) in aliases:
        return aliases[id(value)][1]
    if isinstance(value, dict):
        return {name: _with_aliases(each, aliases) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_aliases(each, aliases) for each in value)
    return value


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_IN_PLACE = {"__set__", "__delete__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
