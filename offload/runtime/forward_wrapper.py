"""Stands in for a module's `forward` while it is enabled.

Each call of the model goes through it to the session, which installs the hooks.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from offload.torch_compat.compiled import opaque, untraced, with_traced_frame


class ForwardWrapper:
    """A module's `forward`, with something around it; copies and pickles of the module get the plain one."""

    def __init__(
        self, module: nn.Module, around: Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[object]]
    ) -> None:
        self._module = weakref.ref(module)
        self._around = around
        own = module.__dict__.get("forward")
        if isinstance(own, ForwardWrapper):  # what `copy.copy` of an enabled module carries
            own.put_back(module)
        elif isinstance(own, types.MethodType) and own.__self__ is module and own.__func__ is type(module).forward:
            del module.__dict__["forward"]  # what a deep copy of an enabled module carries: the plain one
        self.owner: object = None  # lives as long as the module
        self._framed: Callable[..., Any] | None = None
        self._is_wanted = True
        self._was_own = "forward" in module.__dict__
        self._inner = module.__dict__.get("forward") or type(module).forward
        functools.update_wrapper(self, module.forward)
        self.__wrapped__: Callable[..., Any] = (
            self._inner if self._was_own else functools.partial(type(module).forward, weakref.proxy(module))
        )
        module.__dict__["forward"] = self

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        twin = self._twin_calling()
        if twin is not None:
            return self._inner(*args, **kwargs) if self._was_own else self._inner(twin, *args, **kwargs)
        around = untraced(self._around, args, kwargs)
        try:  # around the entering too: an interrupt may come when it is done and not yet known to be
            untraced(around.__enter__)
            if self._was_own:
                result = self._inner(*args, **kwargs)
            else:
                module = self._module()
                result = untraced(self._traced, module)(module, *args, **kwargs)
            untraced(around.__exit__, None, None, None)
        except BaseException as error:
            try:
                untraced(around.__exit__, type(error), error, error.__traceback__)
            finally:  # what is left already stays so; an interrupt may have come first
                untraced(around.__exit__, type(error), error, error.__traceback__)
            raise
        return result

    def _traced(self, module: nn.Module | None) -> Callable[..., Any]:
        """The class's forward, such that torch.compile compiles it as it would have without this wrapper."""
        if self._framed is None:
            self._framed = with_traced_frame(self._inner)
        if self._framed is None or getattr(module, "_compiled_call_impl", None) is not None:
            return self._inner  # module.compile() adds no frame
        return self._framed

    @opaque
    def _twin_calling(self) -> nn.Module | None:
        """The shallow copy that is being called, where it is not the enabled module itself.

        `copy.copy` and DataParallel copy a module's dictionary, and this wrapper in it, without asking anybody. Only
        the frame of the call, a method of the copy, knows which module is meant.
        """
        caller = sys._getframe(2).f_locals.get("self")
        if not isinstance(caller, nn.Module) or caller.__dict__.get("forward") is not self:
            return None
        if getattr(caller, "_is_replica", False):
            raise ValueError(
                "DataParallel copies the model to several devices at every step, and offload serves one device per "
                "process: use torch.nn.parallel.DistributedDataParallel, or call offload.disable(model)"
            )
        return None if caller is self._module() else caller

    @property
    def __code__(self) -> types.CodeType:
        """The plain forward's: torch.export names the module's inputs after it."""
        inner = self._inner.func if isinstance(self._inner, functools.partial) else self._inner
        code: types.CodeType = inner.__code__
        return code

    @property
    def __globals__(self) -> dict[str, Any]:
        """TorchScript, which compiles a forward's source, asks for this first."""
        raise AttributeError(
            "torch.jit.script compiles source, and offload stands in for this module's forward: call "
            "offload.disable(model) first, or use torch.export.export or torch.jit.trace"
        )

    def undo(self) -> None:
        """Give the module its own `forward` back."""
        self._is_wanted = False
        self._take_away()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Show the module as it is without this wrapper: something around the call does the wrapper's work."""
        try:
            self._take_away()
            yield
        finally:
            module = self._module()
            if module is not None and self._is_wanted:
                module.__dict__["forward"] = self

    def _take_away(self) -> None:
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            self.put_back(module)

    def put_back(self, module: nn.Module) -> None:
        """Put what was there before into a module, the wrapped one or a shallow copy of it."""
        if self._was_own:
            module.__dict__["forward"] = self._inner
        else:
            del module.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._was_own:
            return self._inner
        module = self._module()
        assert module is not None
        copied: nn.Module = memo.get(id(module), module)
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        if self._was_own:
            return operator.itemgetter(0), ((self._inner,),)
        return getattr, (self._module(), "forward")
