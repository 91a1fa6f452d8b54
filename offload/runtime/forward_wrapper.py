"""Replaces a module's `forward` while offload is enabled on the model.

Each call of the model goes through the wrapper to the session, which installs the hooks.
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

Around = Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[object]]


class _Both:
    """Two contexts, one within the other. Both may exit twice, and so may this one."""

    def __init__(self, outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> None:
        self._outer = outer
        self._inner = inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *args: Any) -> None:
        try:
            self._inner.__exit__(*args)
        finally:
            self._outer.__exit__(*args)


class ForwardWrapper:
    """A module's `forward`, run within the context that `around` returns. Copies and pickles get the plain forward."""

    def __init__(self, module: nn.Module, around: Around) -> None:
        self._module = weakref.ref(module)
        self._around = around
        self._also: Around | None = None
        own = module.__dict__.get("forward")
        if isinstance(own, ForwardWrapper):  # the module is a `copy.copy` of an enabled one
            own.put_back(module)
        elif isinstance(own, types.MethodType) and own.__self__ is module and own.__func__ is type(module).forward:
            del module.__dict__["forward"]  # the module is a deep copy of an enabled one
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
        around = untraced(self._surroundings, args, kwargs)
        try:  # around `__enter__` too: an interrupt may arrive after it has finished
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
            finally:  # an interrupt may have stopped the first call; after a complete one, this does nothing
                untraced(around.__exit__, type(error), error, error.__traceback__)
            raise
        return result

    def _surroundings(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[object]:
        outer = self._around(args, kwargs)
        return outer if self._also is None else _Both(outer, self._also(args, kwargs))

    @property
    def enters_also(self) -> bool:
        """Whether each call runs within a second context; see `enter_also`."""
        return self._also is not None

    def enter_also(self, around: Around | None) -> None:
        """Run each call within a second context, inside the first one. None removes the second context."""
        self._also = around

    def is_of(self, module: nn.Module) -> bool:
        """Return whether this object wraps `module` itself, and not a module that `module` is a shallow copy of."""
        return self._module() is module

    def _traced(self, module: nn.Module | None) -> Callable[..., Any]:
        """Return the class's forward in a form that torch.compile compiles as it would without this wrapper."""
        if self._framed is None:
            self._framed = with_traced_frame(self._inner)
        if self._framed is None or getattr(module, "_compiled_call_impl", None) is not None:
            return self._inner  # module.compile() adds no frame
        return self._framed

    @opaque
    def _twin_calling(self) -> nn.Module | None:
        """Return the shallow copy that is being called; None if it is the enabled module itself.

        `copy.copy` and DataParallel copy a module's dictionary and with it this wrapper. Only the frame of the call, a
        method of the copy, shows which module is called.
        """
        caller = sys._getframe(2).f_locals.get("self")
        if caller is self._module():
            return None
        if not isinstance(caller, nn.Module) or caller.__dict__.get("forward") is not self:
            return None
        if getattr(caller, "_is_replica", False):
            raise ValueError(
                "DataParallel copies the model to several devices at every step, and offload serves one device per "
                "process: use torch.nn.parallel.DistributedDataParallel, or call offload.disable(model)"
            )
        return caller

    @property
    def __code__(self) -> types.CodeType:
        """The code of the plain forward: torch.export names the module's inputs after it."""
        inner = self._inner.func if isinstance(self._inner, functools.partial) else self._inner
        code: types.CodeType = inner.__code__
        return code

    @property
    def __globals__(self) -> dict[str, Any]:
        """Raise an error with a remedy: TorchScript, which compiles source, reads this attribute first."""
        raise AttributeError(
            "torch.jit.script compiles source, and offload replaces this module's forward: call "
            "offload.disable(model) first, or use torch.export.export or torch.jit.trace"
        )

    def undo(self) -> None:
        """Restore the module's own `forward`."""
        self._is_wanted = False
        self._take_away()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Remove this wrapper from the module for a `with` block, in which other code does the wrapper's work."""
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
        """Restore the plain `forward` of a module: the wrapped one or a shallow copy of it."""
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
