"""Cuts a recipe out of what was recorded: from a storage back to the nearest ones that will be there in backward."""

from __future__ import annotations

from typing import Any

from offload.recomputation.measured import Refusal
from offload.recomputation.recipe import Argument, Recipe, Step
from offload.recomputation.values import Call, Held, Probe, Reference, Value, references

__all__ = ["NOT_MADE", "recipe_of"]

NOT_MADE = "not made by an operator of the step"

_CALLS_MAX = 400  # of one recipe
_UNSEEN = "written by a kernel that recording does not see"


def recipe_of(target: Value, *, weighs: bool = False) -> Recipe | Refusal:
    """The recipe of a value, or why it has none. `weighs`: with its `peak_bytes`."""
    cut = _Cut(target)
    refusal = cut.take_in()
    return refusal or cut.recipe(weighs)


class _Cut:
    def __init__(self, target: Value) -> None:
        self._target = target
        self._numbers = {target: 0}
        self._calls: dict[int, Call] = {}
        self._slots: dict[int, tuple[Any, Probe]] = {}
        self._held: dict[int, Held] = {}
        self._sources: dict[int, int] = {}

    def take_in(self) -> Refusal:
        """Find every call that is needed. Returns why that cannot be; empty where it can."""
        if self._target.call is None:
            return NOT_MADE
        pending = [self._target.call]
        while pending:
            call = pending.pop()
            if call.number in self._calls:
                continue
            if len(self._calls) >= _CALLS_MAX:
                return f"needs more than {_CALLS_MAX} operators"
            if call.operator.refusal:
                return call.operator.refusal
            if call.operator.is_seeded and call.random is None:
                return "draws from a generator that cannot be set back"
            self._calls[call.number] = call
            for reference, is_written, is_added in _read_by(call):
                value = reference.value
                number = self._numbers.get(value)
                is_saved = call.saves_weights and not is_added
                if self._is_there(value, is_saved) if number is None else number in self._slots or number in self._held:
                    if is_written:
                        return "changes in place what it reads"
                elif value.call is None:
                    return "reads a tensor that is freed before backward"
                elif value.call.operator.is_blank and not is_written:
                    return _UNSEEN
                elif number is None:
                    pending.append(value.call)
                self._numbers.setdefault(value, len(self._numbers))
        return _UNSEEN if self._target.call.operator.is_blank else ""

    def _is_there(self, value: Value, is_saved: bool) -> bool:
        """Whether the value's bytes are available in backward; notes where."""
        slot = value.slot() if value.slot is not None else None
        number = len(self._numbers)
        # Bytes that were changed in place may have left after that, or while it happened.
        if slot is not None and value.probe is not None and not value.probe.is_changed:
            self._slots[number] = slot, value.probe
        elif value.held is not None and value.held.is_usable(is_saved):
            self._held[number] = value.held
        else:
            return False
        if value.index >= 0:
            self._sources[number] = value.index
        return True

    def recipe(self, weighs: bool) -> Recipe:
        """What was found, in the order in which it ran."""
        calls = [self._calls[number] for number in sorted(self._calls)]
        last_use = {reference.value: i for i, call in enumerate(calls) for reference, _, _ in _read_by(call)}
        made: dict[int, list[Value]] = {}
        for value, number in self._numbers.items():
            if value.call is not None and number not in self._slots and number not in self._held:
                made.setdefault(value.call.number, []).append(value)
        return Recipe(
            target=0,
            steps=tuple(self._step(i, call, made.get(call.number, []), last_use) for i, call in enumerate(calls)),
            slots=self._slots,
            held=self._held,
            sources=self._sources,
            is_heavy=any(call.operator.is_heavy for call in calls),
            opens=min(call.opens for call in calls),
            peak_bytes=self._peak_bytes(calls, made, last_use) if weighs else 0,
        )

    def _peak_bytes(self, calls: list[Call], made: dict[int, list[Value]], last_use: dict[Value, int]) -> int:
        """What the calls have on the device at a time, as if each wrote to memory of its own."""
        now = peak = 0
        for i, call in enumerate(calls):
            now += sum(value.nbytes for value in made.get(call.number, ()))
            peak = max(peak, now)
            done = {reference.value for reference, _, _ in _read_by(call) if last_use[reference.value] == i}
            now -= sum(value.nbytes for value in done if value.call is not None and value.call.number in self._calls)
        return peak

    def _step(self, position: int, call: Call, made: list[Value], last_use: dict[Value, int]) -> Step:
        last = {self._numbers[ref.value] for ref, _, _ in _read_by(call) if last_use[ref.value] == position}
        ignored = _ignored(call)
        args = tuple(None if i in ignored else self._numbered(each) for i, each in enumerate(call.args))
        kwargs = {name: self._numbered(each) for name, each in call.kwargs.items()}
        results = tuple((value.place, self._numbers[value]) for value in made)
        return Step(call.func, call.operator.name, args, kwargs, call.random, call.settings, results, tuple(last))

    def _numbered(self, given: Any) -> Any:
        if type(given) is Reference:
            return Argument(self._numbers[given.value], given.view())
        if type(given) is list:
            return [self._numbered(each) for each in given]
        return given


def _ignored(call: Call) -> tuple[int, ...]:
    """Positions of running statistics that a normalization updates beside its result: they are updated once."""
    operator = call.operator
    return operator.statistics if operator.statistics and call.args[operator.training] else ()


def _read_by(call: Call) -> list[tuple[Reference, bool, bool]]:
    """The tensor arguments of a call, each with whether the call writes to it, and whether it only adds it."""
    if call.read is None:
        ignored, writes, added = _ignored(call), call.operator.writes, call.operator.added
        call.read = []
        for position, given in (*enumerate(call.args), *call.kwargs.items()):
            if position not in ignored:
                call.read += [(each, position in writes, position in added) for each in references(given)]
    return call.read
