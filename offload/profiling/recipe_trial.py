"""The trial step: recomputes every saved storage once, compares the result bit for bit, and measures the time.

In this step every tensor is swapped, and loaded on demand.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from offload._core import SwappedStorage
from offload.profiling.allocations import AllocatedPeak
from offload.profiling.workspace import as_words, is_equal_where_written
from offload.recomputation.measured import MeasuredRecipe, Refusal
from offload.recomputation.recipe import Recipe
from offload.recomputation.slicing import NOT_MADE, recipe_of
from offload.recomputation.values import Held, Probe
from offload.runtime.engine import Engine
from offload.runtime.executor import SwapOnDemand
from offload.runtime.recomputation import Recording, Surroundings
from offload.runtime.recomputed_storage import StorageKey
from offload.runtime.schedule import StepOrder
from offload.torch_compat.backward_pass import current_node
from offload.torch_compat.dispatch import undisturbed

__all__ = ["RecipeTrial"]


# The exceptions that torch raises for an error in an operator. Subclasses come from other code, for example for a
# source that cannot be read.
_REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)


class RecipeTrial(SwapOnDemand):
    """A step whose operators are all recorded, and in which every recipe is tried.

    Parameters
    ----------
    order
        The recorded step.
    base_bytes
        `base_bytes` of the trace, by node; None if unknown.
    limit_bytes
        The memory limit: a recipe that does not fit into the remaining memory is not tried. None: there is no limit.
    unpacked_bytes
        By node: the bytes of the trace's tensors that exist when the node ends and are packed later, such as the second
        result of an operator.
    """

    def __init__(
        self,
        engine: Engine,
        order: StepOrder,
        base_bytes: Sequence[int] | None = None,
        limit_bytes: int | None = None,
        unpacked_bytes: Sequence[int] | None = None,
    ) -> None:
        self._trial = _Trial(engine, order, base_bytes, limit_bytes, unpacked_bytes)
        self.recomputation = self._trial

    def swapped(self, pack_index: int, slot: SwappedStorage, tensor: torch.Tensor) -> None:
        """Wait until the copy-out of a storage has ended, so that the step needs the least memory."""
        slot.wait_copied_out()

    def unpacking(self, pack_index: int) -> None:
        """Refuse the recipe of this pack if what it reads has been changed in place since the pack."""
        if current_node() is not None:  # otherwise code outside of backward reads grad_fn's attributes
            self._trial.used(pack_index)

    @property
    def finished(self) -> bool:
        """Return whether the forward pass is over and every recipe has been timed."""
        return self._trial.is_over and not self._trial.read_times()

    @property
    def is_as_recorded(self) -> bool:
        """Whether the step has saved the same storages as the recorded step."""
        return self._trial.is_as_recorded

    def recipes(self) -> Mapping[int, MeasuredRecipe]:
        """Return the recipes that gave the same bytes, by the entry's pack index; complete if the trial is finished."""
        self._trial.read_times()
        return dict(self._trial.recipes)

    def refusals(self) -> Mapping[int, Refusal]:
        """Return the reasons why the other entries have no recipe, by pack index."""
        return dict(self._trial.refusals)


class _Trial(Recording):
    """Tries the recipe of every storage at its pack, where the storage itself is still available for comparison."""

    def __init__(
        self,
        engine: Engine,
        order: StepOrder,
        base_bytes: Sequence[int] | None,
        limit_bytes: int | None,
        unpacked_bytes: Sequence[int] | None,
    ) -> None:
        super().__init__()
        self.recipes: dict[int, MeasuredRecipe] = {}
        self.refusals: dict[int, Refusal] = {}
        self.is_over = False
        self.is_as_recorded = True
        self._engine = engine
        self._order = order
        self._base_bytes = base_bytes
        self._limit_bytes = limit_bytes
        self._unpacked_bytes = unpacked_bytes
        self._met: set[int] = set()
        self._read: dict[int, list[Held | Probe]] = {}
        self._timed: list[tuple[int, MeasuredRecipe, Any, Any]] = []

    def begin(self, surroundings: Surroundings) -> None:
        """Start recording: the forward pass begins in this thread."""
        if not self._order.compiled_nodes:
            super().begin(surroundings)
            if self._recorder is not None:
                self._recorder.resume()

    def passed(self, index: int, tensor: torch.Tensor) -> None:
        """Resume recording before the hook that packs `tensor` returns."""
        if self._recorder is not None:
            self._recorder.latest_pack = index
            self._recorder.resume()

    def abandon(self) -> None:
        """Note that the step differs from the recorded one."""
        self.is_as_recorded = False

    def end(self) -> None:
        """End the trial: the forward pass is over."""
        super().end()
        self.is_over = True
        self.is_as_recorded &= self._met == self._order.entries.keys()
        for index in self._read:
            self._refuse_changed(index)
        # Copies are left out: they take memory, and the program cannot change them.
        self._read = {index: [each for each in read if not _is_copy(each)] for index, read in self._read.items()}

    def used(self, index: int) -> None:
        """Note that backward needs the storage of this pack: here a step would recompute it."""
        index = self._order.duplicates.get(index, index)
        self._refuse_changed(index)
        self._read.pop(index, None)

    def _refuse_changed(self, index: int) -> None:
        if any(source.is_changed for source in self._read.get(index, ())):
            self.recipes.pop(index, None)
            self._timed = [row for row in self._timed if row[0] != index]
            self.refusals[index] = "what it reads is changed in place later"

    def drop(self, tensor: torch.Tensor, index: int, key: StorageKey) -> None:
        """Try the recipe of a storage. The storage itself is swapped."""
        entry = self._order.entries.get(index)
        self._met.add(index)
        if entry is None or entry.nbytes != key[3]:
            self.is_as_recorded = False
        elif self._recorder is None:
            self.refusals[index] = "torch.compile made a part of the step"
        elif key[2] != 0 or key[3] != tensor.untyped_storage().nbytes():
            self.refusals[index] = "a part of a larger storage"
        else:
            value = self._recorder.value_of(tensor)
            found = recipe_of(value, weighs=True) if value is not None else NOT_MADE
            refusal = found if isinstance(found, str) else self._try(tensor, index, found)
            if refusal:
                self.refusals[index] = refusal

    def _try(self, tensor: torch.Tensor, index: int, recipe: Recipe) -> Refusal:
        """Run a recipe once, compare its result and measure the time. Return why it cannot be used; empty if it can."""
        assert self._recorder is not None
        storage, is_workspace = tensor.untyped_storage(), tensor.dtype == torch.uint8
        alive_bytes = self._recorder.forget_freed()
        there = {number: self._recorder.source(source) for number, source in recipe.sources.items()}
        missing = {number: slot for number, (slot, _) in recipe.slots.items() if there.get(number) is None}
        compared = storage.nbytes() // (1 if storage.nbytes() % 8 else 8)
        needed = recipe.peak_bytes + compared + sum(slot.nbytes for slot in missing.values())
        if needed > self._room(index, recipe.opens, alive_bytes):
            return "too large to be tried within the memory limit"
        if recipe.held_bytes > storage.nbytes() // 8:
            return "keeps too much of what it reads"
        try:
            for slot in missing.values():
                slot.add_view()
            storages = {number: held.tensor.untyped_storage() for number, held in recipe.held.items()}
            storages |= {number: slot.swap_in()[0] for number, slot in missing.items()}
            storages |= {number: found for number, found in there.items() if found is not None}
            return self._compare(storage, index, recipe, storages, is_workspace)
        except torch.OutOfMemoryError:
            return "too large to be tried on this device"
        finally:
            for slot in missing.values():
                slot.remove_view()

    def _compare(
        self,
        storage: torch.UntypedStorage,
        index: int,
        recipe: Recipe,
        storages: dict[int, Any],
        is_workspace: bool,
    ) -> Refusal:
        try:
            same = self._is_same(storage, index, recipe, storages, is_workspace)
        except Exception as error:
            if type(error) not in _REFUSALS:
                raise  # for example an exception of a signal handler, which can be raised anywhere
            return f"its operators cannot be run again: {type(error).__name__}"
        return "" if same else "its bytes came out differently"

    def _is_same(
        self,
        storage: torch.UntypedStorage,
        index: int,
        recipe: Recipe,
        storages: dict[int, Any],
        is_workspace: bool,
    ) -> bool:
        read = dict(storages) if is_workspace else {}  # a run takes its storages over
        peak = AllocatedPeak(self._engine.device)
        try:
            with peak:
                begin, cpu_begin = self._engine.mark(), time.thread_time()
                made = recipe.run(storages)
                end, seconds = self._engine.mark(), time.thread_time() - cpu_begin
        finally:
            peak.end()  # an interrupt may have stopped `__exit__`
        # The result is allocated inside: a smaller peak means that this allocator does not report to the profiler.
        peak_bytes = peak.nbytes or 0
        if peak_bytes < storage.nbytes():
            peak_bytes = recipe.peak_bytes
        workspace_bytes = max(0, peak_bytes - storage.nbytes())
        with undisturbed():
            same = made.nbytes() == storage.nbytes() and torch.equal(as_words(made), as_words(storage))
            differs = as_words(made) != as_words(storage) if is_workspace and not same else None
        del made
        if differs is not None:
            same = is_equal_where_written(differs, recipe, read)
        read.clear()
        if same:
            self._read[index] = recipe.changeable
        if same and self._engine.is_accelerator:
            # Without the recipe itself, which would keep its slots alive.
            self._timed.append((index, _measured(recipe, 0.0, workspace_bytes), begin, end))
        elif same:
            self.recipes[index] = _measured(recipe, seconds, workspace_bytes)
        return same

    def read_times(self) -> int:
        """Read the times that the device has measured by now. Return how many are still missing."""
        left = []
        for index, recipe, begin, end in self._timed:
            seconds = self._engine.seconds_since(begin, [end])
            if seconds is None:
                left.append((index, recipe, begin, end))
            else:
                self.recipes[index] = replace(recipe, seconds=seconds[0])
        self._timed = left
        return len(left)

    def _room(self, index: int, opens: int, alive_bytes: int) -> int:
        """Return the bytes that a recipe may allocate at this pack.

        `opens` is that of the recipe. `alive_bytes` are those of the packed storages that have not been freed.

        What kernels allocate while they run belongs to the nodes in which the operators ran in forward. After an
        operator that packs several tensors, the node of the last of them has none of it.
        """
        if self._limit_bytes is None or self._base_bytes is None:
            return 2**62
        entry = self._order.entries[index]
        first = min(self._order.node_after_pack.get(opens, 0), entry.packed)
        base_bytes = max(self._base_bytes[first : entry.packed + 1])
        there = entry.nbytes + alive_bytes + self._engine.resident.now
        there += self._unpacked_bytes[entry.packed] if self._unpacked_bytes is not None else 0
        return self._limit_bytes - base_bytes - there


def _is_copy(source: Held | Probe) -> bool:
    return isinstance(source, Held) and source.is_own


def _measured(recipe: Recipe, seconds: float, workspace_bytes: int) -> MeasuredRecipe:
    return MeasuredRecipe(
        seconds=seconds,
        sources=frozenset(recipe.sources.values()),
        operators=recipe.operators,
        is_heavy=recipe.is_heavy,
        opens=recipe.opens,
        held_bytes=recipe.held_bytes,
        workspace_bytes=workspace_bytes,
    )
