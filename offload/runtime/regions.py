"""Compiled parts of a model that run again in backward as a whole, under torch's own checkpoint.

Recipes are made of operators and do not reach into compiled code. A checkpointed region saves its inputs alone, through
the hooks of the step. Which regions are checkpointed is decided in `control/regions.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from offload.recomputation.random_state import as_before, random_state
from offload.runtime.engine import Engine, has_storage
from offload.torch_compat.compiled import opaque, untraced
from offload.torch_compat.modules import is_sharded, state_tensors
from offload.torch_compat.settings import in_force, restored
from offload.torch_compat.tensors import raise_changed, storage_identity, version_of

__all__ = ["Region", "RegionTrial"]

_SCALARS = (bool, int, float, str, type(None))
_REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)  # as in a trial of recipes


class RegionTrial:
    """What one step finds out about a region: it runs twice, and the results are compared bit for bit.

    Parameters
    ----------
    engine
        Its marks measure the second run.
    room_bytes
        What the second run may take on the device.
    saved_bytes
        What the region saves for backward, which the second run allocates once more.

    Attributes
    ----------
    calls
        How often the region ran.
    refusal
        Why it is not recomputed; empty if it can be.
    input_bytes
        Of the tensors that it is given, in all calls.
    """

    def __init__(self, engine: Engine, room_bytes: int, saved_bytes: int) -> None:
        self.calls = 0
        self.refusal = ""
        self.input_bytes = 0
        self._engine = engine
        self._room_bytes = room_bytes
        self._saved_bytes = saved_bytes
        self._marks: list[tuple[Any, Any]] = []

    def run(self, part: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a region, and run it again where that is safe."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before, versions = _Snapshot(part), [version_of(tensor) for tensor in inputs]
        generators = [state for state in _random_states(self._engine.device) if state is not None]
        result = inner(*args, **kwargs)
        self.calls += 1
        self.input_bytes += sum(tensor.nbytes for tensor in inputs if has_storage(tensor))
        if not self.refusal:
            self.refusal = _why_not(part, before, [map(version_of, inputs), versions])
        output_bytes = sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if not self.refusal and self._saved_bytes + output_bytes > self._room_bytes:
            self.refusal = "memory_limit leaves no room to try it"
        if not self.refusal:
            self.refusal = self._run_again(inner, args, kwargs, result, generators)
        return result

    def _run_again(
        self,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        generators: Sequence[tuple[Any, Tensor]],
    ) -> str:
        begin = self._engine.mark()
        try:
            with ExitStack() as stack:
                for generator, state in generators:
                    stack.enter_context(as_before(generator, state))
                stack.enter_context(saved_tensors_hooks(_forget, _forget))
                again = inner(*args, **kwargs)
        except _REFUSALS as error:
            return f"it failed when run again: {error}"
        self._marks.append((begin, self._engine.mark()))
        return "" if _have_same_bits(result, again) else "run again, it gave other bits"

    def seconds(self) -> float | None:
        """What running it again took, in seconds; None while the device has not come that far."""
        total = 0.0
        for begin, end in self._marks:
            found = self._engine.seconds_since(begin, [end])
            if found is None:
                return None
            total += found[0]
        return total


class Region:
    """Stands in for the compiled call of one part of a model.

    Parameters
    ----------
    name
        Of the part, as in ``named_modules()``.
    part
        What `torch.compile` returned, or a module compiled in place.
    slot
        Name of the part's attribute that holds the compiled callable.
    is_in_step
        Whether a training step of the enabled model runs in this thread with its hooks innermost.

    Attributes
    ----------
    is_checkpointed
        Whether backward runs it again.
    trial
        The trial that is under way, or its result; None before it.
    """

    def __init__(self, name: str, part: nn.Module, slot: str, is_in_step: Callable[[], bool]) -> None:
        self.name = name
        self.is_checkpointed = False
        self.is_trying = False
        self.trial: RegionTrial | None = None
        self._part = weakref.ref(part)
        self._slot = slot
        self._is_in_step = is_in_step
        self._inner: Callable[..., Any] = part.__dict__[slot]
        part.__dict__[slot] = self

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self._part()
        is_away = part is None or not (self.is_checkpointed or self.is_trying)
        if is_away or not torch.is_grad_enabled() or not untraced(self._is_in_step):
            return self._inner(*args, **kwargs)
        assert part is not None
        if self.is_trying:
            assert self.trial is not None
            return self.trial.run(part, self._inner, args, kwargs)
        again = _Rerun(part, self._inner, len(args), tuple(kwargs))
        return checkpoint(again, *args, *kwargs.values(), use_reentrant=False)

    def close(self) -> None:
        """Give the part its own call back. Graphs that exist can still be differentiated."""
        part = self._part()
        if part is not None and part.__dict__.get(self._slot) is self:
            part.__dict__[self._slot] = self._inner


class _Rerun:
    """Runs a region, and in backward again with the settings of its modules as they were.

    Raises
    ------
    RuntimeError
        A parameter or a buffer of the region was changed since it ran first.
    """

    def __init__(self, part: nn.Module, inner: Callable[..., Any], positional: int, names: tuple[str, ...]) -> None:
        self._part = part
        self._inner = inner
        self._positional = positional
        self._names = names
        self._before: _Snapshot | None = None
        self._settings = in_force(is_heavy=True)

    def __call__(self, *values: Any) -> Any:
        args, kwargs = values[: self._positional], dict(zip(self._names, values[self._positional :], strict=True))
        if self._before is None:
            self._before = _Snapshot(self._part)
            return self._inner(*args, **kwargs)
        self._before.check()
        with self._before.in_force(), restored() as put_in_force:
            put_in_force(self._settings)
            return self._inner(*args, **kwargs)


class _Snapshot:
    """What the result of a region depends on besides its inputs and random numbers."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._tensors = [(tensor, version_of(tensor), _storage_of(tensor)) for tensor in _tensors_of(part)]
        self._settings = [
            (vars(module), name, value)
            for module in part.modules()
            for name, value in vars(module).items()
            if type(value) in _SCALARS
        ]

    def is_same(self) -> bool:
        """Whether the region still has the same tensors, unchanged, and the same settings."""
        return self._changed() is None and all(own.get(name) == value for own, name, value in self._settings)

    def check(self) -> None:
        """Raise autograd's error where a parameter or a buffer was changed."""
        changed = self._changed()
        if changed is not None:
            tensor, version = changed
            raise_changed(tensor.type(), tensor.shape, version_of(tensor), version)

    def _changed(self) -> tuple[Tensor, int] | None:
        now = _tensors_of(self._part)
        for (tensor, version, storage), found in zip(self._tensors, now, strict=False):
            if found is not tensor or version_of(tensor) != version or _storage_of(tensor) != storage:
                return tensor, version
        return None if len(now) == len(self._tensors) else (self._tensors[0][0], self._tensors[0][1])

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Put the settings of the modules back for a while, such as `training`."""
        changed = [(own, name, own[name]) for own, name, value in self._settings if own.get(name, value) != value]
        values = {(id(own), name): value for own, name, value in self._settings}
        try:
            for own, name, _ in changed:
                own[name] = values[id(own), name]
            yield
        finally:
            for own, name, value in changed:
                own[name] = value


def _tensors_of(part: nn.Module) -> list[Tensor]:
    parameters, buffers = state_tensors(part)
    return [*parameters, *buffers]


def _storage_of(tensor: Tensor) -> int:
    return storage_identity(tensor.untyped_storage()) if has_storage(tensor) else 0


def _random_states(device: torch.device) -> Iterator[tuple[Any, Tensor] | None]:
    """The generators that an operator may draw from, with their states."""
    for kind in {"cpu", device.type}:
        where = device if kind == device.type else torch.device("cpu")
        yield random_state((), {"device": where})


def _why_not(part: nn.Module, before: _Snapshot, versions: list[Any]) -> str:
    if is_sharded(part):
        return "its parameters are sharded"
    if any(_has_hooks(module) for module in part.modules()):
        return "a hook is registered on a module of it, and would be called twice"
    if not before.is_same():
        return "it changes a buffer or an attribute of a module"
    now, then = versions
    return "" if list(now) == then else "it writes to its inputs"


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))


def _forget(_: Any) -> Any:
    """Save nothing: nobody differentiates the second run."""


def _have_same_bits(result: Any, again: Any) -> bool:
    own, other = tree_leaves(result), tree_leaves(again)
    return len(own) == len(other) and all(map(_is_same, own, other))


def _is_same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape or not has_storage(a):
        return False
    as_bytes = partial(torch.Tensor.view, dtype=torch.uint8)
    return torch.equal(*(as_bytes(each.detach().contiguous().reshape(-1)) for each in (a, b)))
