"""Recomputation within one forward pass: records operators where the schedule needs it, and drops what it says.

Hooks tell it of every storage that they swap or keep.
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
from offload.runtime.recomputed_storage import DroppedHandle, StorageKey
from offload.runtime.schedule import Schedule
from offload.runtime.weak import weak_callback

# What graph nodes hold of a storage whose bytes are out.
Handle = SwappedStorage | DroppedHandle

__all__ = ["DroppedTensors", "Recomputation", "Surroundings"]


class Surroundings(Protocol):
    """What is asked about the model."""

    options: Options

    def holds_state(self, storage_id: int) -> bool:
        """Whether a storage is of a parameter or a buffer that keeps its memory until backward."""

    def has_compiled_parts(self) -> bool:
        """Whether a part of the model is compiled; it may have become so since the last step."""


class Recomputation(Protocol):
    """What the hooks of a step tell, so that tensors can be dropped."""

    def begin(self, surroundings: Surroundings) -> None:
        """The forward pass begins in this thread."""

    def pause(self) -> None:
        """A hook begins; what it does is none of the step's own operators."""

    def passed(self, index: int, tensor: torch.Tensor) -> None:
        """The hook that packs `tensor` is about to return."""

    def abandon(self) -> None:
        """The step is not the recorded one: drop nothing more."""

    def drop(self, tensor: torch.Tensor, index: int, key: StorageKey) -> DroppedHandle | None:
        """Drop a storage rather than copy it. None: it is swapped."""

    def saved(self, tensor: torch.Tensor, index: int, key: StorageKey, slot: Handle | None) -> None:
        """A storage was swapped out; without a slot it stays."""

    def end(self) -> None:
        """The forward pass is over, also by an exception; may be called again."""


class Recording:
    """A recorder in its step: on between packs, off in hooks, gone at the end."""

    def __init__(self) -> None:
        self._recorder: FollowingRecorder | None = None
        self._was_on = False  # when the hook began

    def begin(self, surroundings: Surroundings) -> None:
        """The forward pass begins in this thread. Nothing is recorded where code of torch.compile runs in between."""
        if surroundings.has_compiled_parts():
            return
        self._recorder = FollowingRecorder(surroundings.options.min_tensor_bytes, surroundings.holds_state)

    def pause(self) -> None:
        """A hook begins."""
        if self._recorder is not None:
            self._was_on = self._recorder.is_on
            self._recorder.suspend()

    def saved(self, tensor: torch.Tensor, index: int, key: StorageKey, slot: Handle | None) -> None:
        """A storage was swapped out, dropped, or stays. Recipes read whole storages alone."""
        if self._recorder is not None and key[2] == 0 and key[3] == tensor.untyped_storage().nbytes():
            self._recorder.saved(tensor, index, None if slot is None else ref(slot), key[3])

    def end(self) -> None:
        """The forward pass is over."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()


class DroppedTensors(Recording):
    """Drops what a schedule says, where this step's own operators make it again from what the trial has found.

    Parameters
    ----------
    ran
        Told the bytes and seconds of every recomputation: a bound method, whose owner is not kept alive.
    """

    def __init__(self, schedule: Schedule, engine: Engine, ran: Callable[[int, float], None]) -> None:
        super().__init__()
        self._schedule = schedule
        self._engine = engine
        self._ran = weak_callback(ran)  # its owner holds this
        self._is_open = False
        self._is_abandoned = False
        self._windows = dict(schedule.windows)
        self._opened = -1  # by which pack the present window was
        self._template: Template | None = None  # which it follows, perhaps not to its end
        self._is_followed = False

    def begin(self, surroundings: Surroundings) -> None:
        """The forward pass begins in this thread, and with it the first window, if it is that early."""
        super().begin(surroundings)
        if -1 in self._windows and self._recorder is not None:
            self._open(self._recorder, -1)
            self._recorder.resume()

    def passed(self, index: int, tensor: torch.Tensor) -> None:
        """The hook that packs `tensor` is about to return: a window may begin or end."""
        recorder = self._recorder
        if recorder is None:
            return
        if self._is_open and index == self._windows[self._opened]:
            self._close(recorder)
        if index in self._windows:
            self._open(recorder, index)
        # An operator that packs a lazily conjugated tensor was called with the mode on, and goes on with another,
        # which Python does not know: torch fails where the mode is off then.
        is_lazy = tensor.is_conj() or tensor.is_neg()
        if (self._is_open and not self._is_abandoned) or (self._was_on and is_lazy):
            recorder.resume()

    def abandon(self) -> None:
        """The step is not the recorded one: drop nothing more."""
        self._is_abandoned = True

    def saved(self, tensor: torch.Tensor, index: int, key: StorageKey, slot: Handle | None) -> None:
        """A storage was swapped out, dropped, or stays, perhaps not for the first time. Recipes may read only some."""
        index = self._schedule.order.duplicates.get(index, index)
        if index in self._schedule.sources:
            super().saved(tensor, index, key, slot)

    def drop(self, tensor: torch.Tensor, index: int, key: StorageKey) -> DroppedHandle | None:
        """Drop a storage. None where the schedule does not say so, or this step's own recipe does not keep to it."""
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
            return None  # nobody has compared what these make
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
    """Whether it keeps no more than the plan counts with."""
    return known.sources.issuperset(recipe.sources.values()) and recipe.held_bytes <= known.held_bytes
