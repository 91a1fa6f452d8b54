"""Recomputation within one forward pass: records operators in the schedule's windows, and drops tensors.

Hooks call it for every storage that they swap, drop or keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import ref

import torch

from offload._core import SwappedStorage
from offload.options import Options
from offload.recomputation.following import FollowingRecorder
from offload.recomputation.measured import MeasuredRecipe
from offload.recomputation.recipe import Recipe
from offload.recomputation.slicing import cut_of
from offload.recomputation.template import Template, Window
from offload.runtime.engine import Engine
from offload.runtime.recomputed_storage import RecomputedStorage, StorageKey
from offload.runtime.schedule import Schedule
from offload.runtime.weak import weak_callback
from offload.torch_compat.tensors import is_read_lazily

# The record of a swapped or dropped storage, which graph nodes hold.
Slot = SwappedStorage | RecomputedStorage

__all__ = ["DroppedTensors", "Recomputation", "Surroundings"]


class Surroundings(Protocol):
    """The interface for questions about the model; `DeviceSession` implements it."""

    options: Options

    def holds_state(self, storage_id: int) -> bool:
        """Return whether a storage belongs to a parameter or a buffer of the model; always False for FSDP models."""

    def has_compiled_parts(self) -> bool:
        """Return whether a part of the model is compiled; it may have been compiled since the last step."""


class Recomputation(Protocol):
    """The interface that the hooks of a step call, so that tensors can be dropped or recipes can be found."""

    def begin(self, surroundings: Surroundings) -> None:
        """Called when the forward pass begins, in its thread."""

    def pause(self) -> None:
        """Called when a hook begins. The hook's operators are not part of the step."""

    def passed(self, index: int, tensor: torch.Tensor) -> None:
        """Called when the hook that packs `tensor` is about to return."""

    def abandon(self) -> None:
        """Drop no further tensors: the step differs from the recorded one."""

    def drop(self, tensor: torch.Tensor, index: int, key: StorageKey) -> RecomputedStorage | None:
        """Drop a storage and return its record; None if it is to be swapped instead."""

    def saved(self, tensor: torch.Tensor, index: int, key: StorageKey, slot: Slot | None) -> None:
        """Called when a storage has been swapped out, dropped or kept. `slot` is its record, or None if it is kept."""

    def end(self) -> None:
        """Called when the forward pass ends or raises an exception; may be called again."""


class Recording:
    """Records the operators of a forward pass. The recorder is on between packs and off in hooks."""

    def __init__(self) -> None:
        self._recorder: FollowingRecorder | None = None
        self._was_on = False  # when the hook began

    def begin(self, surroundings: Surroundings) -> None:
        """Create the recorder of a forward pass. If a part of the model is compiled, nothing is recorded."""
        if surroundings.has_compiled_parts():
            return
        self._recorder = FollowingRecorder(surroundings.options.min_tensor_bytes, surroundings.holds_state)

    def pause(self) -> None:
        """Suspend recording while a hook runs."""
        if self._recorder is not None:
            self._was_on = self._recorder.is_on
            self._recorder.suspend()

    def saved(self, tensor: torch.Tensor, index: int, key: StorageKey, slot: Slot | None) -> None:
        """Note where a storage's bytes are, if the tensor covers it: recipes read only whole storages."""
        if self._recorder is not None and key[2] == 0 and key[3] == tensor.untyped_storage().nbytes():
            self._recorder.saved(tensor, index, None if slot is None else ref(slot), key[3])

    def end(self) -> None:
        """Close the recorder at the end of the forward pass."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()


class DroppedTensors(Recording):
    """Drops the tensors of a schedule if this step's operators give the same recipes as the trial.

    Parameters
    ----------
    ran
        A bound method, called with the bytes and seconds of every recomputation. Its owner is not kept alive.
    """

    def __init__(self, schedule: Schedule, engine: Engine, ran: Callable[[int, float], None]) -> None:
        super().__init__()
        self._schedule = schedule
        self._engine = engine
        self._ran = weak_callback(ran)  # the owner of `ran` holds this object
        self._is_open = False
        self._is_abandoned = False
        self._windows = dict(schedule.windows)
        self._opened = -1  # index of the pack that opened the present window
        self._template: Template | None = None  # of the present window, if it has one
        self._is_followed = False

    def begin(self, surroundings: Surroundings) -> None:
        """Create the recorder of a forward pass, and open the first window if it begins with the step."""
        super().begin(surroundings)
        if -1 in self._windows and self._recorder is not None:
            self._open(self._recorder, -1)
            self._recorder.resume()

    def passed(self, index: int, tensor: torch.Tensor) -> None:
        """Close or open a window at the pack of `tensor`, and resume recording if one is open."""
        recorder = self._recorder
        if recorder is None:
            return
        if self._is_open and index == self._windows[self._opened]:
            self._close(recorder)
        if index in self._windows:
            self._open(recorder, index)
        # If an operator that was called with the mode on packs a lazily conjugated tensor, it dispatches to Python once
        # more after this hook, which fails in torch if the mode is off then.
        is_lazy = is_read_lazily(tensor)
        if (self._is_open and not self._is_abandoned) or (self._was_on and is_lazy):
            recorder.resume()

    def abandon(self) -> None:
        """Drop no further tensors: the step differs from the recorded one."""
        self._is_abandoned = True

    def saved(self, tensor: torch.Tensor, index: int, key: StorageKey, slot: Slot | None) -> None:
        """Note where a storage's bytes are, if a recipe of the schedule reads it."""
        index = self._schedule.order.duplicates.get(index, index)
        if index in self._schedule.sources:
            super().saved(tensor, index, key, slot)

    def drop(self, tensor: torch.Tensor, index: int, key: StorageKey) -> RecomputedStorage | None:
        """Drop a storage and return its record; None if the schedule swaps it or this step has no matching recipe."""
        known = self._schedule.recipes.get(index)
        if (
            known is None
            or self._recorder is None
            or self._is_abandoned
            or key[2] != 0
            or not self._schedule.matches(index, key[3])
        ):
            return None
        recipe = self._recipe(self._recorder, tensor, index, known)
        if recipe is None:
            return None
        slot = self._engine.drop(tensor, key, recipe, self._ran)
        self.saved(tensor, index, key, slot)
        return slot

    def _recipe(
        self, recorder: FollowingRecorder, tensor: torch.Tensor, index: int, known: MeasuredRecipe
    ) -> Recipe | None:
        if recorder.follows:
            recipe = recorder.recipe(index, tensor)
            if recipe is None or not _keeps_to(recipe, known):
                self._is_followed = False
                return None
            return recipe
        value = recorder.value_of(tensor)
        cut = cut_of(value) if value is not None else None
        if cut is None or isinstance(cut, str):
            return None
        recipe = cut.recipe(weighs=False)
        if recipe.operators != known.operators or not _keeps_to(recipe, known):
            return None  # the trial has not compared the result of these operators
        if recorder.window is not None:
            recorder.window.was_cut(index, cut, recipe)
        return recipe

    def _open(self, recorder: FollowingRecorder, index: int) -> None:
        self._is_open, self._opened = True, index
        templates = self._schedule.templates
        self._template = templates.of(index)
        self._is_followed = True
        if self._template is not None:
            recorder.follow(self._template)
        elif templates.is_wanted(index):
            recorder.window = Window()

    def _close(self, recorder: FollowingRecorder) -> None:
        self._is_open = False
        schedule, opened = self._schedule, self._opened
        if self._template is not None:
            schedule.templates.followed(opened, to_its_end=self._is_followed and recorder.follows)
        elif recorder.window is not None:
            closes = self._windows[opened]
            template = recorder.window.template({index for index in schedule.recipes if opened < index <= closes})
            if template is not None:
                schedule.templates.made(opened, template)
        recorder.forget()


def _keeps_to(recipe: Recipe, known: MeasuredRecipe) -> bool:
    """Return whether a recipe reads no other sources, and keeps no more bytes, than the plan assumes."""
    return known.sources.issuperset(recipe.sources.values()) and recipe.held_bytes <= known.held_bytes
