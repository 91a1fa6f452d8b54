"""Recomputes compiled submodules as a whole, with torch's checkpoint.

A recipe is a list of recorded operators that recompute a saved tensor. The operators of compiled code cannot be
recorded, so no recipe can recompute a tensor that compiled code saves. A *region* is a submodule that was compiled by
itself. If it is checkpointed, it saves only its inputs, and the step's hooks may swap these. `control/regions.py`
decides which regions are checkpointed.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from offload.recomputation.random_state import as_before, random_state
from offload.runtime.engine import Engine, bytes_taken, has_storage
from offload.torch_compat.compiled import opaque, untraced
from offload.torch_compat.modules import is_sharded, state_tensors
from offload.torch_compat.settings import in_force, restored
from offload.torch_compat.tensors import raise_changed, storage_identity, version_of

__all__ = ["Region", "RegionTrial"]

_SCALARS = (bool, int, float, str, type(None))
# Errors that the model's code may raise when it runs a second time.
_REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, AssertionError, AttributeError, ArithmeticError)
_CONSTANTS = (*_SCALARS, complex, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


class RegionTrial:
    """Runs a region twice in one step, compares the results bit for bit, and stores the verdict.

    Parameters
    ----------
    engine
        Measures the time of the second run.
    room_bytes
        Bytes that the second run may use on the device.
    saved_bytes
        Bytes that the region saves for backward. The second run allocates the same number of bytes again.

    Attributes
    ----------
    calls
        Number of calls of the region in the step.
    refusal
        Why the region is not recomputed; empty if it can be.
    input_bytes
        Bytes of the region's input tensors, summed over all calls.
    """

    def __init__(self, engine: Engine, room_bytes: int, saved_bytes: int) -> None:
        self.calls = 0
        self.refusal = ""
        self.input_bytes = 0
        self._engine = engine
        self._room_bytes = room_bytes
        self._saved_bytes = saved_bytes
        self._marks: list[tuple[Any, Any]] = []
        self._modes: list[bool] = []

    def run(self, part: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a region. Run it a second time if the first run has changed nothing and memory suffices."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before, versions = _Snapshot(part), [version_of(tensor) for tensor in inputs]
        generators = [state for state in _random_states(self._engine.device) if state is not None]
        held = _python_state(part, args, kwargs)
        result = inner(*args, **kwargs)
        self.calls += 1
        self._modes = _modes(part)
        self.input_bytes += sum(bytes_taken(inputs).values())
        if not self.refusal:
            is_held = _are_same(_python_state(part, args, kwargs), held)
            self.refusal = _why_not(part, before, [map(version_of, inputs), versions], is_held=is_held)
        if not self.refusal and not _are_plain((args, kwargs, result)):
            self.refusal = "it takes or returns an object that is neither a tensor nor a constant"
        output_bytes = sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if not self.refusal and self._saved_bytes + output_bytes > self._room_bytes:
            self.refusal = "memory_limit leaves no room to try it"
        if not self.refusal:
            self.refusal = "its trial was interrupted"
            self.refusal = self._run_again(inner, args, kwargs, result, generators)
            self._watch(result, inputs)
        return result

    def is_as_tried(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call may be recomputed.

        It may if the modules are in the modes (`training`) of the trial, none of them has hooks, and all inputs are
        tensors or constants.
        """
        return _modes(part) == self._modes and not _calls_hooks(part) and _are_plain((args, kwargs))

    def _watch(self, result: Any, inputs: list[Tensor]) -> None:
        """Register hooks that refuse the region if an input is changed in place before backward reaches the region."""
        watched = [(_version_counter(tensor), version_of(tensor)) for tensor in inputs]

        def look(_: Tensor) -> None:
            if any(version_of(counter) != version for counter, version in watched):
                self.refusal = self.refusal or "its inputs are written to after it has run"

        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(look)  # type: ignore[no-untyped-call]

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
                stack.enter_context(saved_tensors_hooks(_forget, _forgotten))
                again = inner(*args, **kwargs)
            self._marks.append((begin, self._engine.mark()))
            return "" if _have_same_bits(result, again) else "its second run gave other bits"
        except _REFUSALS as error:
            return f"it failed when run again: {error}"

    def seconds(self) -> float | None:
        """Return the seconds of the second runs of all calls; None if the device has not finished them."""
        total = 0.0
        for begin, end in self._marks:
            found = self._engine.seconds_since(begin, [end])
            if found is None:
                return None
            total += found[0]
        return total


class Region:
    """Replaces the compiled callable of one submodule. Calls it directly, in a trial, or under checkpoint.

    Parameters
    ----------
    name
        Name of the submodule, as in ``named_modules()``.
    part
        The submodule: a result of `torch.compile`, or a module that was compiled in place.
    slot
        Name of its attribute that holds the compiled callable.
    is_in_step
        Whether this thread runs a training step of the enabled model, and the step's saved-tensor hooks are the
        innermost ones.

    Attributes
    ----------
    is_checkpointed
        Whether backward runs the region again.
    is_trying
        Whether the current step is the region's trial.
    trial
        The current or finished trial; None if there was none.
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
        assert self.trial is not None
        if self.is_trying:
            return self.trial.run(part, self._inner, args, kwargs)
        if not self.trial.is_as_tried(part, args, kwargs):
            return self._inner(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))  # checkpoint saves only tensors that are arguments
        return checkpoint(_Rerun(part, self._inner, args, kwargs, structure), *leaves, use_reentrant=False)

    def close(self) -> None:
        """Restore the submodule's own callable. Backward over existing graphs still works."""
        part = self._part()
        if part is None:
            return
        found = part.__dict__.get(self._slot)
        if found is self:
            part.__dict__[self._slot] = self._inner
        while isinstance(found, Region):  # Regions of other enabled models that share the submodule
            if found._inner is self:
                found._inner = self._inner
            found = found._inner


class _Rerun:
    """The function that checkpoint calls: in forward, and again in backward with the settings of the forward.

    Raises
    ------
    RuntimeError
        A parameter or a buffer of the region has changed since its forward.
    """

    def __init__(
        self,
        part: nn.Module,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        structure: TreeSpec,
    ) -> None:
        self._part = part
        self._inner = inner
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._structure = structure
        self._before: _Snapshot | None = None
        self._settings = in_force(is_heavy=True)

    def __call__(self, *values: Any) -> Any:
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
            self._before = _Snapshot(self._part)
            return self._inner(*args, **kwargs)
        assert self._before is not None
        args, kwargs = tree_unflatten(list(values), self._structure)
        self._before.check()
        with self._before.in_force(), restored() as put_in_force:
            put_in_force(self._settings)
            return self._inner(*args, **kwargs)


class _Snapshot:
    """The parameters, buffers and settings of a region at one moment. The region's result depends on them."""

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
        """Return whether the region has the same tensors, in the same versions, and the same settings."""
        return self._changed() is None and all(own.get(name) == value for own, name, value in self._settings)

    def check(self) -> None:
        """Raise autograd's error if a parameter or a buffer has changed."""
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
        """Give modules the settings of the snapshot, such as `training`, for a `with` block."""
        changed = [(own, name, own[name]) for own, name, value in self._settings if own.get(name, value) != value]
        values = {(id(own), name): value for own, name, value in self._settings}
        try:
            for own, name, _ in changed:
                own[name] = values[id(own), name]
            yield
        finally:
            for own, name, value in changed:
                own[name] = value


def _version_counter(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of `tensor`."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # keeps the counter
    return counter


def _tensors_of(part: nn.Module) -> list[Tensor]:
    parameters, buffers = state_tensors(part)
    return [*parameters, *buffers]


def _storage_of(tensor: Tensor) -> int:
    return storage_identity(tensor.untyped_storage()) if has_storage(tensor) else 0


def _random_states(device: torch.device) -> Iterator[tuple[Any, Tensor] | None]:
    """Yield the default generators of the CPU and the device, with their states."""
    for kind in {"cpu", device.type}:
        where = device if kind == device.type else torch.device("cpu")
        yield random_state((), {"device": where})


def _why_not(part: nn.Module, before: _Snapshot, versions: list[Any], *, is_held: bool) -> str:
    if is_sharded(part):
        return "its parameters are sharded"
    if _calls_hooks(part):
        return "one of its modules has a hook, which would be called twice"
    if not is_held or not before.is_same():
        return "it changes a buffer, an attribute of a module, a container or the state of a random generator"
    now, then = versions
    return "" if list(now) == then else "it writes to its inputs"


def _calls_hooks(part: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for module in part.modules() for name in names)


def _modes(part: nn.Module) -> list[bool]:
    return [module.training for module in part.modules()]


def _python_state(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what a region may change, but for the bytes of tensors: attributes, elements, generator states."""
    leaves, structure = tree_flatten((args, kwargs))
    numbers: tuple[Any, ...] = np.random.get_state(legacy=True)  # type: ignore[assignment]
    found = [structure, str(random.getstate()), numbers[1].tobytes(), *numbers[2:]]
    for value in (*leaves, *(value for module in part.modules() for value in vars(module).values())):
        found += [value, *_contents(value)]
    return found


def _contents(value: Any) -> list[Any]:
    if isinstance(value, torch.Generator):
        return [value.get_state().numpy().tobytes()]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    is_own = not isinstance(value, Tensor | nn.Module | type | Region) and not callable(value)
    return list(getattr(value, "__dict__", {}).values()) if is_own else []


def _are_same(a: list[Any], b: list[Any]) -> bool:
    """Return whether both lists hold the same objects in the same order; for constants, equality is enough."""
    kinds = (*_CONSTANTS, TreeSpec)
    return len(a) == len(b) and all(
        x is y or (type(x) is type(y) and isinstance(x, kinds) and x == y) for x, y in zip(a, b, strict=True)
    )


def _are_plain(values: Any) -> bool:
    """Return whether all values are tensors or constants. Changes of other objects could not be detected."""
    return all(isinstance(leaf, Tensor) or type(leaf) in _CONSTANTS for leaf in tree_leaves(values))


def _forget(_: Tensor) -> None:
    """Save nothing: the second run has no backward."""


def _forgotten(_: None) -> Tensor:
    raise RuntimeError(
        "offload ran a compiled part of the model twice to test whether backward can recompute it. The part keeps a "
        "result of the second run outside of what it returns, such as in a global list: enable with recompute=False"
    )


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
