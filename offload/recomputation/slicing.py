"""Extracts a recipe from the recorded operators: from a storage back to the nearest ones available in backward."""

from __future__ import annotations

from typing import Any

from offload.recomputation.measured import Refusal
from offload.recomputation.recipe import Argument, Recipe, Step
from offload.recomputation.values import Call, Held, Probe, Reference, Value, references
from offload.torch_compat.settings import may_choose_otherwise

__all__ = ["NOT_MADE", "Cut", "Sources", "cut_of", "recipe_of"]

NOT_MADE = "not made by an operator of the step"

_CALLS_MAX = 400  # most operators of one recipe
_UNSEEN = "written by a kernel that recording does not see"


def recipe_of(target: Value, *, weighs: bool = False) -> Recipe | Refusal:
    """Return the recipe of a value, or why it has none. `weighs`: also compute the recipe's `peak_bytes`."""
    cut = cut_of(target)
    return cut if isinstance(cut, str) else cut.recipe(weighs)


def cut_of(target: Value) -> Cut | Refusal:
    """Return the calls and sources of a value's recipe, or why it has none."""
    cut = Cut(target)
    return cut.take_in() or cut


class Sources:
    """The swapped, dropped and kept storages that a recipe reads, by number of the value."""

    __slots__ = ("held", "indices", "slots")

    def __init__(self) -> None:
        self.slots: dict[int, tuple[Any, Probe]] = {}
        self.held: dict[int, Held] = {}
        self.indices: dict[int, int] = {}

    def add(self, number: int, value: Value, is_saved: bool) -> bool:
        """Store where a value's bytes are. Return whether they are available in backward."""
        slot = value.slot() if value.slot is not None else None
        # If a tensor was changed in place after its pack, its copy-out may contain the new bytes, or old and new bytes.
        if slot is not None and value.probe is not None and not value.probe.is_changed:
            self.slots[number] = slot, value.probe
        elif value.held is not None and value.held.is_usable(is_saved):
            self.held[number] = value.held
        else:
            return False
        if value.index >= 0:
            self.indices[number] = value.index
        return True


class Cut:
    """The operators that compute one value from values that are available in backward.

    Attributes
    ----------
    calls
        The recorded calls by number, which gives their order.
    numbers
        The recipe's numbers of the values that the calls read and write.
    leaves
        The values that the recipe reads and that are available in backward, each with whether the call that
        reads it also makes autograd save it.
    """

    def __init__(self, target: Value) -> None:
        self.target = target
        self.numbers = {target: 0}
        self.calls: dict[int, Call] = {}
        self.leaves: dict[Value, bool] = {}
        self._sources = Sources()

    def take_in(self) -> Refusal:
        """Find all calls that the recipe needs. Return why no recipe is possible; empty if one is."""
        if self.target.call is None:
            return NOT_MADE
        pending: list[Call] = [self.target.call]
        while pending:
            call = pending.pop()
            if call.number in self.calls:
                continue
            if len(self.calls) >= _CALLS_MAX:
                return f"needs more than {_CALLS_MAX} operators"
            if call.operator.refusal:
                return call.operator.refusal
            if call.operator.is_convolution and may_choose_otherwise():
                return "a convolution, for which torch.backends.cudnn.benchmark may choose another kernel in backward"
            if call.operator.is_seeded and call.random is None:
                return "draws from a generator that cannot be set back"
            self.calls[call.number] = call
            for reference, is_written, is_added in _read_by(call):
                value = reference.value
                number = self.numbers.get(value)
                is_saved = call.saves_weights and not is_added
                if self._is_there(value, is_saved) if number is None else value in self.leaves:
                    if is_written:
                        return "changes in place what it reads"
                elif value.call is None:
                    return "reads a tensor that is freed before backward"
                elif value.call.operator.is_blank and not is_written:
                    return _UNSEEN
                elif number is None:
                    pending.append(value.call)
                self.numbers.setdefault(value, len(self.numbers))
        return _UNSEEN if self.target.call.operator.is_blank else ""

    def _is_there(self, value: Value, is_saved: bool) -> bool:
        is_there = self._sources.add(len(self.numbers), value, is_saved)
        if is_there:
            self.leaves[value] = is_saved
        return is_there

    def recipe(self, weighs: bool) -> Recipe:
        """Return the recipe: the calls in the order in which they ran, and their sources."""
        calls = [self.calls[number] for number in sorted(self.calls)]
        last_use = {reference.value: i for i, call in enumerate(calls) for reference, _, _ in _read_by(call)}
        made: dict[int, list[Value]] = {}
        for value in self.numbers:
            if value.call is not None and value not in self.leaves:
                made.setdefault(value.call.number, []).append(value)
        return Recipe(
            target=0,
            steps=tuple(self._step(i, call, made.get(call.number, []), last_use) for i, call in enumerate(calls)),
            slots=self._sources.slots,
            held=self._sources.held,
            sources=self._sources.indices,
            is_heavy=any(call.operator.is_heavy for call in calls),
            opens=min(call.opens for call in calls),
            peak_bytes=self._peak_bytes(calls, made, last_use) if weighs else 0,
        )

    def _peak_bytes(self, calls: list[Call], made: dict[int, list[Value]], last_use: dict[Value, int]) -> int:
        """Return the peak memory of the calls' results, as if no two results shared memory.

        The results that the recipe does not need are allocated too, and freed at once.
        """
        now = peak = 0
        for i, call in enumerate(calls):
            needed = made.get(call.number, ())
            allocated = sum(value.nbytes for value in needed if isinstance(value.place, int))
            now += sum(value.nbytes for value in needed)
            peak = max(peak, now + call.made_bytes - allocated)
            done = {reference.value for reference, _, _ in _read_by(call) if last_use[reference.value] == i}
            freed = [value for value in done if value.call is not None and value not in self.leaves]
            now -= sum(value.nbytes for value in freed if value.call.number in self.calls)
        return peak

    def _step(self, position: int, call: Call, made: list[Value], last_use: dict[Value, int]) -> Step:
        last = {self.numbers[ref.value] for ref, _, _ in _read_by(call) if last_use[ref.value] == position}
        ignored = call.ignored
        args = tuple(None if i in ignored else self._numbered(each) for i, each in enumerate(call.args))
        kwargs = {name: self._numbered(each) for name, each in call.kwargs.items()}
        results = tuple((value.place, self.numbers[value]) for value in made)
        return Step(call.func, call.operator.name, args, kwargs, call.random, call.settings, results, tuple(last))

    def _numbered(self, given: Any) -> Any:
        if type(given) is Reference:
            return Argument(self.numbers[given.value], given.view())
        if type(given) is list:
            return [self._numbered(each) for each in given]
        return given


def _read_by(call: Call) -> list[tuple[Reference, bool, bool]]:
    """Return the tensor arguments of a call, each with two flags.

    The first: the call writes to the argument. The second: the call only adds it, so autograd does not save it.
    """
    if call.read is None:
        ignored, writes, added = call.ignored, call.operator.writes, call.operator.added
        call.read = []
        for position, given in (*enumerate(call.args), *call.kwargs.items()):
            if position not in ignored:
                call.read += [(each, position in writes, position in added) for each in references(given)]
    return call.read
