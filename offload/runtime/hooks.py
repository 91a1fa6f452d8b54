"""The saved-tensor hooks of a step. The session decides which tensors may be swapped, the engine swaps them.

A `StepHooks` serves one forward pass and all backward passes over its graph. The graph stores the object that `pack`
returns. In backward, autograd passes this object to `unpack` of the same `StepHooks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from offload._core import HookCore, KeptTensor, PinningFailed, SwappedStorage, SwappedView, follow, view_of
from offload.options import Options
from offload.runtime.counters import Counts
from offload.runtime.engine import REFUSALS, Engine
from offload.runtime.executor import StepObserver, SwapOnDemand
from offload.runtime.recomputation import Recomputation
from offload.runtime.recomputed_storage import RecomputedStorage
from offload.torch_compat.autograd import innermost_hooks
from offload.torch_compat.tensors import raise_changed, version_of

# The object that a graph node holds instead of a saved tensor.
Packed = KeptTensor | SwappedView


class HeldStorages(Protocol):
    """Identities of the storages of the model's parameters and buffers.

    Attributes
    ----------
    storages
        These identities.
    not_held
        A cache of negative look-ups: identities of storages known not to be in `storages`.
    """

    storages: frozenset[int]
    not_held: set[int]


class Policy(Protocol):
    """Tells hooks which tensors may be swapped. `DeviceSession` implements it."""

    options: Options
    engine: Engine
    counts: Counts

    @property
    def state(self) -> HeldStorages:
        """The storages that the model holds."""

    def supports(self, tensor: Tensor) -> bool:
        """Return whether the engine can swap tensors of this kind."""

    def why_held(self, tensor: Tensor, storage_id: int) -> str | None:
        """Return why this storage is kept whatever the plan is; None if it may be swapped.

        There are two possible reasons: other code holds the storage, so that swapping would free nothing; or the
        operator that saves it writes into it later.
        """

    def asks_modules(self) -> bool:
        """Return whether tensors of some modules may not be swapped, so that hooks must ask which module runs."""

    def is_excluded(self) -> bool:
        """Return whether the module that runs in this thread is excluded."""

    def holds_state(self, storage_id: int) -> bool:
        """Return whether a storage belongs to a parameter or a buffer, and keeps its memory until backward.

        Recomputation asks this. Always False for an FSDP model: it frees parameters after forward and gathers them
        again for backward.
        """

    def has_compiled_parts(self) -> bool:
        """Return whether a part of the model is compiled. The answer can change between steps."""

    def warn_once(self, error: Exception) -> None:
        """Log, once per kind of error, that the store could not take a tensor."""

    def explain(self, error: BaseException) -> None:
        """Add a note to an out-of-memory `error` that explains it."""


_ON_DEMAND = SwapOnDemand()


class StepHooks(HookCore):
    """The hooks of one forward pass and of the backward passes over it.

    `pack` and `unpack` are methods of the base class, in C++. They handle most kept tensors. In a step that follows a
    schedule and runs as recorded, they also handle swapped tensors (`csrc/swap_hooks.cpp`), except in three cases, in
    which Python does: if `Policy.asks_modules` returns True; if operators are being recorded; and for a tensor from
    which a dropped tensor will be recomputed. Recomputed tensors are unpacked by Python. To leave a tensor to Python,
    the C++ methods call `pack_due`, `pack_candidate`, `unpack_watched` or `unpack_swapped`. They call `pack_failed` or
    `unpack_failed` if a swap by C++ fails, and `refuse` if a kept tensor was changed in place. Before `attach` is
    called, tensors are swapped, but nothing is prefetched.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.options.min_tensor_bytes, policy.counts, policy.engine)
        self._engine = policy.engine
        self._min_nbytes = policy.options.min_tensor_bytes
        self._counts = policy.counts
        self.policy = policy
        self._kept: set[tuple[int, ...]] = set()
        self.hooks: weakref.ref[HookContext] | None = None  # installed while the step's forward runs
        self._recomputation: Recomputation | None = None
        self._observer: StepObserver = _ON_DEMAND
        self.attached = False

    def attach(self, observer: StepObserver) -> None:
        """Set the observer. The next pack gets number 0.

        From now on, packs and unpacks that C++ does not handle are reported to `observer`.
        """
        self.attached = True
        self._observer = observer
        self.end_forward()
        self._recomputation = observer.recomputation
        if self._recomputation is not None:
            self._recomputation.begin(self.policy)
        policy = self.policy
        copies = None if policy.asks_modules() else observer.copies
        follow(self, observer, observer.cursor, observer.reason, copies, policy.state)

    def end_forward(self) -> None:
        """Stop recording operators for recomputation."""
        if self._recomputation is not None:
            self._recomputation.end()

    def pack_due(self, tensor: Tensor, index: int, nbytes: int) -> KeptTensor:
        """Keep a tensor as scheduled. First the observer does what is due at this pack (`StepObserver.pass_by`)."""
        self._observer.pass_by(index)
        return self.keep(tensor, index, self._observer.reason, nbytes)

    def pack_candidate(self, tensor: Tensor, index: int, nbytes: int) -> Packed:
        """Swap, drop or keep a tensor, depending on its storage and on the observer."""
        observer, recomputation = self._observer, self._recomputation
        observer.begin()
        if recomputation is None:
            packed = self._swap_or_keep(tensor, index, nbytes)
        else:
            recomputation.pause()
            packed = self._swap_or_keep(tensor, index, nbytes)
        observer.packed(index)
        if recomputation is not None:
            recomputation.passed(index, tensor)
        return packed

    def pack_failed(self, error: Exception, tensor: Tensor, index: int, nbytes: int) -> Packed:
        """Keep a tensor whose copy-out the store refused (`REFUSALS`). Raises any other error of the copy-out."""
        try:
            packed = self._keep_after(error, tensor, index, nbytes)
        finally:
            del error  # its traceback refers to this frame: a reference cycle would keep the graph
        self._observer.packed(index)
        return packed

    def _keep_after(self, error: Exception, tensor: Tensor, index: int, nbytes: int) -> Packed:
        if not isinstance(error, REFUSALS):
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a reference cycle would keep the graph
        self.policy.warn_once(error)
        if isinstance(error, PinningFailed):
            return self.keep(tensor, index, "pinning failed", nbytes)
        return self.keep(tensor, index, "host limit", nbytes)

    def unpack_failed(self, error: Exception) -> None:
        """Raise the error of a swap-in by C++; if memory ran out, add a note that explains it."""
        try:
            raise error
        except (MemoryError, RuntimeError):
            self.policy.explain(error)
            raise
        finally:
            del error  # its traceback refers to this frame: a reference cycle would keep the graph

    def unpack_watched(self, kept: KeptTensor) -> Tensor:
        """Report the unpack of a kept tensor to the observer, and return the tensor."""
        self._engine.collect()  # frees the sources of ended copies: a copy-in may need the memory
        self._observer.unpacking(kept.index)
        tensor = self.checked(kept)
        self._observer.unpacked(kept.index)
        return tensor

    def unpack_swapped(self, view: SwappedView) -> Tensor:
        """Return a swapped or dropped tensor as it was saved.

        Raises
        ------
        RuntimeError
            The tensor was changed in place after it was saved.
        OSError
            Its bytes could not be read back; a later call tries again.
        """
        self._engine.collect()  # frees the sources of ended copies: a copy-in may need the memory
        self._observer.unpacking(view.index)
        try:
            tensor = view.restore()
        except (MemoryError, RuntimeError) as error:
            self.policy.explain(error)
            raise
        self._observer.unpacked(view.index)
        return tensor

    @staticmethod
    def refuse(kept: KeptTensor) -> None:
        """Raise autograd's error: a kept tensor was changed in place."""
        tensor = kept.tensor
        raise_changed(tensor.type(), tensor.shape, version_of(tensor), kept.version)

    def _swap_or_keep(self, tensor: Tensor, index: int, nbytes: int) -> Packed:
        policy = self.policy
        if nbytes == 0:
            return self.keep(tensor, index, "small", 0)
        if not policy.supports(tensor):
            return self.keep(tensor, index, "unsupported kind", nbytes)
        slot: SwappedStorage | RecomputedStorage | None
        key, slot = self._engine.look(tensor, nbytes)
        if key is None:
            return self.keep(tensor, index, "view of a larger storage", nbytes)
        if slot is None and self._recomputation is not None:
            slot = self._engine.dropped_before(key)
        if slot is not None:
            return self._pack_duplicate(tensor, index, slot)
        if key[3] < self._min_nbytes:
            small = tensor.untyped_storage().nbytes() < self._min_nbytes
            return self.keep(tensor, index, "small" if small else "view of a larger storage", nbytes)
        reason = policy.why_held(tensor, key[4]) or ("excluded" if policy.is_excluded() else None)
        reason = reason or self._observer.reason_to_keep(index, key[3])
        if reason is not None:
            again = key in self._kept  # bytes of a storage count once, even if it is saved twice
            self._kept.add(key)
            if self._recomputation is not None:
                self._recomputation.saved(tensor, index, key, None)
            return self.keep(tensor, index, reason, 0 if again else nbytes)
        dropped = self._recomputation.drop(tensor, index, key) if self._recomputation is not None else None
        if dropped is not None:
            self._counts.dropped.tensors += 1
            self._counts.dropped.nbytes += key[3]
            return view_of(tensor, dropped, index)
        try:
            slot = self._engine.swap_out(tensor, key, self._observer.need(index))
        except REFUSALS as error:
            return self._keep_after(error, tensor, index, nbytes)
        self._observer.swapped(index, slot, tensor)
        if self._recomputation is not None:
            self._recomputation.saved(tensor, index, key, slot)
        if self._engine.in_flight_bytes > self._engine.in_flight_bytes_max and self._observer.caps_in_flight:
            self._engine.limit_in_flight()
        self.count(self._counts.swapped, key[3])
        return view_of(tensor, slot, index)

    def _pack_duplicate(self, tensor: Tensor, index: int, slot: SwappedStorage | RecomputedStorage) -> Packed:
        self.count(self._counts.duplicates, tensor.nbytes)
        self._observer.duplicated(index, slot)
        return view_of(tensor, slot, index)


def innermost_step_hooks() -> StepHooks | None:
    """Return this thread's innermost saved-tensor hooks if they are a `StepHooks`; None otherwise."""
    top = innermost_hooks(while_tracing=True)
    current = getattr(top[0], "__self__", None) if top is not None else None
    return current if isinstance(current, StepHooks) else None


# Returns a pack and an unpack function for a step's hooks; both take the hooks as their first argument.
FirstAsked = Callable[[StepHooks], tuple[Callable[[StepHooks, Tensor], Any], Callable[[StepHooks, Any], Tensor]]]


class HookContext(saved_tensors_hooks):
    """Installs the hooks of a step; they may be removed before the step ends, if it swaps nothing.

    Parameters
    ----------
    first
        Called with the hooks; returns a pack and an unpack function. These are called first, and call the hooks for
        tensors that they do not handle. If None, the hooks are called directly.
    """

    def __init__(self, current: StepHooks, first: FirstAsked | None = None) -> None:
        if first is None:
            super().__init__(current.pack, current.unpack)
        else:  # bound to `current`: `innermost_step_hooks` finds a step's hooks by `__self__`
            pack, unpack = first(current)
            super().__init__(MethodType(pack, current), MethodType(unpack, current))
        self._hooks = current
        self.is_removed = False

    def remove(self) -> None:
        """Remove the hooks, which must be the innermost. From now on autograd saves tensors itself."""
        self.is_removed = True
        self._hooks.end_forward()
        super().__exit__()

    def __exit__(self, *args: object) -> None:
        self._hooks.end_forward()
        if innermost_step_hooks() is self._hooks:  # not so if they were removed, or never installed (an interrupt)
            super().__exit__(*args)
        self.is_removed = False
