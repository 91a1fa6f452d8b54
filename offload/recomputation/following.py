"""Compares the operators of a step with a template, which an earlier step has recorded, instead of recording them.

A step that drops tensors needs their recipes. A *window* is a part of forward that contains the operators of recipes.
The *template* of a window (`template.py`) lists its operators, one *line* each, and contains its recipes. It holds no
tensors: a *label*, a number, stands for each value (a version of a storage) that recipes use. To *bind* a label is to
store which value of the current step it stands for. The recipes of the step are those of the template, with the bound
values. If an operator differs from its line, the rest of the window, from this operator on, is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

import torch
from torch.nn import Parameter

from offload._core import OperatorFollower, Value
from offload.recomputation.operators import Operator, operator_of
from offload.recomputation.random_state import random_state
from offload.recomputation.recipe import Recipe, Step
from offload.recomputation.recorder import (
    NO_KEY,
    OperatorRecorder,
    is_known,
    key_of,
    run,
    version_after,
    written,
)
from offload.recomputation.slicing import Sources
from offload.recomputation.template import ANY, Line, Read, Several, Template
from offload.torch_compat.settings import Settings, in_force
from offload.torch_compat.tensors import StorageWatch, storage_identity, version_of

__all__ = ["FollowingRecorder"]


@dataclass(slots=True)
class _Own:
    """Values of one operator that may differ from the template: non-tensor arguments, random state, settings."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: tuple[Any, torch.Tensor] | None
    settings: Settings


class FollowingRecorder(OperatorFollower, OperatorRecorder):  # type: ignore[no-untyped-call]
    """A recorder that follows a template: it compares each operator with its line, and binds labels.

    Torch calls the C++ base class. It runs an operator that equals its line, numbers and settings included. For others
    it calls `_follow_or_record`, which also accepts other numbers, settings and random states.

    Attributes
    ----------
    follows
        Whether the operators of this window have matched the template so far; False without a template.
    """

    def __init__(self, small_nbytes: int, is_state: Callable[[int], bool]) -> None:
        super().__init__(small_nbytes, is_state)
        self.follows = False
        self._template: Template | None = None
        self._lines: tuple[Line, ...] = ()
        self._bound = []  # label → value of this step
        self._own: dict[int, _Own] = {}  # by position of the line

    def follow(self, template: Template) -> None:
        """Begin a window that has a template."""
        self._template, self._lines, self._position, self.script = template, template.lines, 0, template.script
        self._bound = [None] * template.label_count
        self._own = {}
        self.follows = True

    def forget(self) -> None:
        """End a window."""
        super().forget()
        self._leave()
        self._template = None
        self._bound.clear()
        self._own.clear()

    def close(self) -> None:
        """End the forward pass."""
        self._leave()
        super().close()
        self._bound.clear()
        self._own.clear()

    def _leave(self) -> None:
        self.follows, self._lines, self.script = False, (), None

    def _follow_or_record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator. If it matches its line, bind the labels that the line names; otherwise record it."""
        operator = operator_of(func)
        if operator.passes or self.is_closed or get_ident() != self.thread:
            return run(func, operator, args, kwargs)
        if self.follows:
            position = self._position
            line = self._lines[position] if position < len(self._lines) else None
            if line is not None and line.func is func and not self._writes_known(line, operator, args, kwargs):
                self._position = position + 1
                if line.call is None:
                    return run(func, operator, args, kwargs)
                if self._binds(position, line, args, kwargs):
                    result = run(func, operator, args, kwargs)
                    self._bind_results(line, args, kwargs, result)
                    return result
            self._leave()
        return self.record(func, operator, args, kwargs)

    # -- one operator -------------------------------------------------------------------------------------------------

    def _writes_known(self, line: Line, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an operator writes to a storage that a recipe may read, and its line lacks this write.

        Not every write increments the version, so it must be detected here.
        """
        if not operator.writes:
            return False
        expected = [place for place, _ in line.writes]
        return any(
            (place, number) not in expected and (key in self.values or key in self._saved)
            for place, number, tensor in written(operator.writes, args, kwargs)
            for key in (key_of(tensor),)
        )

    def _binds(self, position: int, line: Line, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an operator reads the values of its line. Bind them; store other arguments that differ."""
        call = line.call
        assert call is not None
        if len(args) != len(line.args) or kwargs.keys() != line.kwargs.keys():
            return False
        operator = call.operator
        if self.saves_factors(operator, args) is not call.saves_weights:
            return False
        same = True
        for expected, given in zip(line.args, args, strict=True):
            if type(expected) is Read:
                if not self._binds_tensor(expected, given):
                    return False
            elif expected is not given and expected is not ANY:
                if not self._takes(expected, given):
                    return False
                same = same and _is_same(expected, given)
        for name, given in kwargs.items():
            expected = line.kwargs[name]
            if expected is not given:
                if not self._takes(expected, given):
                    return False
                same = same and _is_same(expected, given)
        random = random_state(args, kwargs) if operator.is_seeded else None
        if operator.is_seeded and random is None:
            return False
        settings = in_force(is_heavy=operator.is_heavy)
        if not same or random is not None or settings != call.settings:
            own = tuple([each if place in line.plain else None for place, each in enumerate(args)])
            named = {name: each for name, each in kwargs.items() if name in line.plain_names}
            self._own[position] = _Own(own, named, random, settings)
        return True

    def _binds_tensor(self, expected: Read, given: Any) -> bool:
        kind = type(given)
        if kind is not torch.Tensor and kind is not Parameter:
            return False
        key = key_of(given)
        value = self.values.get(key) or self._leaf_of(given, key)
        if value is None:
            return False
        if value.version != version_of(given):
            return False  # changed by code that was not recorded
        bound = self._bound[expected.label]
        if bound is None and not expected.is_made:
            self._bound[expected.label] = value
        elif bound is not value:
            return False
        return expected.view.is_of(given)

    def _leaf_of(self, given: torch.Tensor, key: int) -> Value | None:
        """Return the value of a tensor that existed before the window; None if recipes cannot read it."""
        if key == NO_KEY or not is_known(given):
            return None
        value = self.values[key] = self.leaf(given, given.untyped_storage(), key)
        return value

    def _takes(self, expected: Any, given: Any) -> bool:
        """Return whether an argument that differs from its line is allowed: the same type, not bool. Bind tensors."""
        kind = type(expected)
        if kind is Read:
            return self._binds_tensor(expected, given)
        if kind is Several:
            is_list = type(given) in (list, tuple) and len(given) == len(expected.each)
            return is_list and all(map(self._takes_element, expected.each, given))
        return type(given) is kind and (kind is not bool or given is expected)

    def _takes_element(self, expected: Any, given: Any) -> bool:
        if type(expected) is Read:
            return self._binds_tensor(expected, given)
        return expected is given or (type(expected) is type(given) and _is_same(expected, given))

    def _bind_results(self, line: Line, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for place, label in line.results:
            made = result[place] if isinstance(result, (tuple, list)) else result
            key = key_of(made) if type(made) is torch.Tensor else NO_KEY
            # If the storage is known, the operator has returned a view that its schema does not declare.
            if key == NO_KEY or key in self.values or made.is_inference():
                return self._leave()
            self._bind(label, key, Value(0, version_of(made), StorageWatch(made.untyped_storage())))
        for (position, number), label in line.writes:
            given: Any = kwargs.get(position) if isinstance(position, str) else args[position]
            tensor = given[number] if type(given) in (list, tuple) else given
            if not isinstance(tensor, torch.Tensor) or not is_known(tensor):
                return self._leave()
            storage = tensor.untyped_storage()
            key = storage_identity(storage)
            before = self.values.get(key)
            watch = before.watch if before is not None else StorageWatch(storage)
            assert line.call is not None
            self._bind(label, key, Value(0, version_after(line.call.operator, tensor), watch))
        return None

    def _bind(self, label: int, key: int, value: Value) -> None:
        self.values[key] = self._bound[label] = value

    # -- one recipe ---------------------------------------------------------------------------------------------------

    def recipe(self, index: int, tensor: torch.Tensor) -> Recipe | None:
        """Return the template's recipe for a pack, with the values of this step. None if the step differs."""
        found = self._template.slices.get(index) if self._template is not None else None
        value = self.value_of(tensor)
        if found is None or value is None or value is not self._bound[found.target]:
            return None
        sources = Sources()
        for number, label, is_saved in found.leaves:
            bound = self._bound[label]
            if bound is None or not sources.add(number, bound, is_saved):
                return None
        steps = found.steps
        if not self._own.keys().isdisjoint(found.lines):
            steps = tuple(map(self._step, steps, found.lines))
        return Recipe(0, steps, sources.slots, sources.held, sources.indices, found.is_heavy, found.opens, 0)

    def _step(self, step: Step, position: int) -> Step:
        own = self._own.get(position)
        if own is None:
            return step
        plain = self._lines[position].plain
        args = tuple([own.args[place] if place in plain else each for place, each in enumerate(step.args)])
        return replace(step, args=args, kwargs={**step.kwargs, **own.kwargs}, random=own.random, settings=own.settings)


def _is_same(expected: Any, given: Any) -> bool:
    """Return whether an argument equals the template's. Compares `repr` too, because 0.0 == -0.0 and [True] == [1]."""
    if type(expected) in (Read, Several):
        return True
    return bool(expected == given) and (type(expected) not in (float, complex, list) or repr(expected) == repr(given))
