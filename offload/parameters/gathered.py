"""Keeps moved parameters in memory during a call: a module's own parameters, or all those within a compiled module."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload.parameters.keep import Keep, needs_keep
from offload.parameters.moved_parameter import MovedParameter
from offload.parameters.stored_parameter import StoredParameter
from offload.parameters.window import Window
from offload.torch_compat.autograd import innermost_hooks
from offload.torch_compat.compiled import opaque, untraced
from offload.torch_compat.modules import own_parameters, walk

__all__ = ["CompiledCall", "Gathered", "Pass"]


class Gathered:
    """A context that keeps a module's parameters in memory during one call. After an interrupt it may exit twice.

    Parameters
    ----------
    whole
        Whether the module is compiled. Then the parameters of its submodules are brought in too, with their ordinary
        class.
    """

    def __init__(self, module: nn.Module | None, window: Window, *, whole: bool) -> None:
        self._module = module
        self._window = window
        self._whole = whole
        self._records: list[StoredParameter] = []
        self._keep: Keep | None = None

    def __enter__(self) -> None:
        if self._module is None:
            return
        for module in walk(self._module) if self._whole else [self._module]:
            for parameter in own_parameters(module):
                record = parameter.__dict__.get("_offload_stored")
                if isinstance(record, StoredParameter):
                    self._records.append(record)
                    record.window.acquire(parameter, record, self, plain=self._whole)
        if self._records and needs_keep():
            self._keep = Keep(self._window.saved, innermost_hooks())
            saved_tensors_hooks(self._keep.pack, self._keep.unpack).__enter__()

    def __exit__(self, *_: object) -> None:
        hooks = innermost_hooks(while_tracing=True) if self._keep is not None else None
        if hooks is not None and getattr(hooks[0], "__self__", None) is self._keep:
            saved_tensors_hooks(*hooks).__exit__()
        if self._records:
            self._window.release(self._records, self)
            self._records = []
            self._window.settle()


class Pass(threading.local):
    """The outermost forward of a model that is running in this thread."""

    outermost: weakref.ref[Forward] | None = None


class Forward(Gathered):
    """One forward of the model itself. It begins a pass, unless it runs within another forward of the model."""

    def __init__(
        self, model: nn.Module | None, window: Window, passes: Pass, begin: Callable[[], None], *, whole: bool
    ) -> None:
        super().__init__(model, window, whole=whole)
        self._passes = passes
        self._begin = begin
        self._is_over = False

    def __enter__(self) -> None:
        outermost = self._passes.outermost() if self._passes.outermost is not None else None
        if outermost is None or outermost._is_over:
            self._passes.outermost = weakref.ref(self)
            self._begin()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        super().__exit__(*error)


class CompiledCall:
    """Replaces the compiled callable of a module that was compiled in place."""

    def __init__(self, module: nn.Module, around: Callable[[Any, Any], AbstractContextManager[object]]) -> None:
        self._module = weakref.ref(module)
        self._around = around
        self.inner: Callable[..., Any] = module.__dict__["_compiled_call_impl"]
        module.__dict__["_compiled_call_impl"] = self

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around = untraced(self._around, args, kwargs)
        try:
            untraced(around.__enter__)
            return self.inner(*args, **kwargs)
        finally:
            untraced(around.__exit__, None, None, None)

    def undo(self) -> None:
        """Give the module its own callable back."""
        module = self._module()
        if module is not None and module.__dict__.get("_compiled_call_impl") is self:
            module.__dict__["_compiled_call_impl"] = self.inner


def moved_in(model: nn.Module) -> Iterator[tuple[StoredParameter, MovedParameter]]:
    """Yield each parameter of a model that leaves memory, once, with its record."""
    seen = set()
    for module in walk(model):
        for parameter in own_parameters(module):
            record = parameter.__dict__.get("_offload_stored")
            if isinstance(record, StoredParameter) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield record, parameter  # type: ignore[misc]
