"""The class of a parameter that leaves memory: each access to its bytes brings them back first.

A parameter gets this class when it first leaves. It has its ordinary class again when it stays in memory for good, and,
if it is trained, during each call that uses it. Torch calls `__torch_function__` of this class for every function that
gets such a parameter, and for reads of its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from offload import _core
from offload.torch_compat.autograd import hooks_forbidden_reason
from offload.torch_compat.compiled import opaque
from offload.torch_compat.held_objects import may_be_reduced
from offload.torch_compat.holders import holds_alone, is_in_shared_memory
from offload.torch_compat.overrides import (
    GIVES_ADDRESS,
    GIVES_MEMORY,
    OF_THE_LAYOUT,
    OF_THE_OBJECT,
    SETS_DATA,
    USES_THE_GRAPH,
    WITHOUT_GRAPH,
    alias_of,
    call_without_overrides,
    requires_grad_of,
    unseen,
    writes_without_version,
)
from offload.torch_compat.tensors import has_default_strides, has_own_bytes, is_read_lazily

if TYPE_CHECKING:
    from offload.parameters.stored_parameter import StoredParameter

__all__ = ["MovedParameter", "gradient_allows_leaving", "is_movable", "kind_of", "stands_for_object"]


class MovedParameter(nn.Parameter):
    """A parameter whose bytes are in the store, or in memory while they are used."""

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
        copied = memo[id(self)] = self._copied()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._copied()
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_offload_stored"})
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _copied(self) -> nn.Parameter:
        return nn.Parameter(self._offload_stored.copy(self), requires_grad=requires_grad_of(self))


def _sent(parameter: MovedParameter) -> Any:
    """Pickle a parameter for another process. It becomes an ordinary one, which torch places in shared memory.

    The other process opens this memory later, so it cannot be that of a copy that is freed now.
    """
    record = parameter._offload_stored
    with record.window.lock:
        record.forget(parameter)
        held = alias_of(parameter)  # as long as this exists, a forward in another thread does not move it out again
    reduced = reduce_tensor(parameter)  # type: ignore[no-untyped-call]
    del held
    return reduced


ForkingPickler.register(MovedParameter, _sent)


def is_movable(parameter: Tensor, device: torch.device, min_nbytes: int, *, also_trained: bool) -> bool:
    """Return whether a parameter is of a kind that can leave memory: large and strided. It may have either class.

    While a parameter is away, code that torch cannot intercept reads NaN. So only floating-point and complex parameters
    can leave. Those that are conjugated or negated lazily stay, and those that are empty.
    """
    if parameter.layout is not torch.strided or parameter.is_nested:
        return False
    plain = alias_of(parameter)
    return (
        gradient_allows_leaving(parameter, plain, also_trained=also_trained)
        and plain.device == device
        and plain.nbytes >= max(min_nbytes, 1)
        and (plain.is_floating_point() or plain.is_complex())
        and not (plain.is_inference() or is_in_shared_memory(plain) or is_read_lazily(plain))
        and has_own_bytes(plain)
    )


def gradient_allows_leaving(parameter: Tensor, layout: Tensor, *, also_trained: bool) -> bool:
    """Return whether a parameter that has the shape and strides of `layout` may leave, as far as gradients matter.

    DDP gives its buckets the strides of the parameters, at times that no hook shows. The placeholder has them only if
    they are those of a new tensor.
    """
    if not requires_grad_of(parameter):
        return True
    return also_trained and (not may_be_reduced(parameter) or has_default_strides(layout))


def kind_of(parameter: Tensor) -> type[Tensor]:
    """Return the class that a parameter has if it does not leave memory."""
    return nn.Parameter if type(parameter) is MovedParameter else type(parameter)


def stands_for_object(tensor: Tensor) -> bool:
    """Return whether a function got this tensor instead of a parameter: what saves it would save the parameter."""
    return "_offload_stands_in" in tensor.__dict__


def _stand_in(parameter: Tensor) -> Tensor:
    """Return a tensor that a function gets instead of a parameter. Views of it require gradients as those of it do."""
    alias = alias_of(parameter)
    if requires_grad_of(parameter) and not torch.is_grad_enabled():
        alias = unseen(_view_of_trained, alias)
    alias.__dict__["_offload_stands_in"] = True
    return alias


def _view_of_trained(alias: Tensor) -> Tensor:
    # A view, because autocast keeps what it converts of a leaf that is none, as long as the program is in autocast.
    return alias.requires_grad_().view_as(alias)


def _accessed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that may use the bytes of moved parameters. They are in memory during the call.

    Instead of a frozen parameter, or of any if neither the function nor its result has to do with a graph, the function
    gets a plain tensor with the same memory. A function that changes the parameter as an object gets the parameter
    itself. A function gets a trained parameter itself too, because the autograd graph must refer to it; the parameter
    has its ordinary class during the call. If saved-tensor hooks are forbidden, the function gets a view of the trained
    parameter.
    """
    first = args[0] if args else None
    if type(first) is MovedParameter and first._offload_stored.is_away_in(first):
        if func in OF_THE_LAYOUT:
            return func(first._offload_stored.content.layout, *args[1:], **kwargs)
        if func is Tensor.to and call_without_overrides(func, (), args, kwargs) is first:
            return first  # there is nothing to convert: no bytes are needed
    if func == SETS_DATA and args[1] is first:
        return None
    if func == SETS_DATA and type(first) is MovedParameter and type(args[1]) is Tensor:  # needs no old bytes
        record = first._offload_stored
        call_without_overrides(func, (), args, kwargs)
        record.window.accessed(first, record)
        return None
    found = {id(each): each for each in _moved_in((args, kwargs))}.values()
    moved = [(each, each._offload_stored) for each in found]
    user = object()
    try:
        aliases: dict[int, tuple[Tensor, Tensor]] = {}
        trained = [(parameter, record) for parameter, record in moved if requires_grad_of(parameter)]
        is_in_graph = func in USES_THE_GRAPH or (torch.is_grad_enabled() and func not in WITHOUT_GRAPH)
        needs_itself = _changes_object(func) or is_in_graph
        for parameter, record in moved:
            is_trained = needs_itself and requires_grad_of(parameter)
            try:
                record.window.acquire(parameter, record, user, plain=is_trained)
            except _core.SpillError:
                if func is not Tensor.copy_ or parameter is not first or not record.begin_anew(parameter, args[1:2]):
                    raise
                record.window.acquire(parameter, record, user, plain=is_trained)
            record.is_suspect |= func in GIVES_MEMORY or writes_without_version(func)
            record.is_address_given |= func in GIVES_ADDRESS
            if not is_trained:
                aliases[id(parameter)] = parameter, _stand_in(parameter)
        with trained[0][1].window.saving() if trained and needs_itself else nullcontext():
            if _changes_object(func):
                return call_without_overrides(func, (), args, kwargs)
            if trained and needs_itself and torch.is_grad_enabled() and hooks_forbidden_reason() is not None:
                # Without hooks the graph would save the parameter, whose memory may leave before backward. So the
                # function gets a view: as long as the view exists, the memory stays.
                aliases.update({id(each): (each, each.view_as(each)) for each, _ in trained})
            result = func(*_with_aliases(args, aliases), **_with_aliases(kwargs, aliases))
        same = [parameter for parameter, alias in aliases.values() if alias is result]
        aliases = {}
        for parameter, record in trained:
            record.is_lent |= not holds_alone(parameter)
        return same[0] if same else result
    finally:
        aliases = {}
        for parameter, record in moved:
            record.window.release((record,), user)
            record.window.accessed(parameter, record)


def _changes_object(func: Callable[..., Any]) -> bool:
    """Return whether a function needs the parameter itself, because it changes the object or returns it.

    These are the in-place functions that are not written in Python.
    """
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
