"""The template of a window: the operators that one step has recorded.

Later steps compare their operators with the template's, and store only their own tensors (*bind* them), numbers and
settings. A template is made once for each window of a schedule. It holds no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from offload._core import OperatorScript
from offload.recomputation.recipe import Recipe, Step
from offload.recomputation.slicing import Cut
from offload.recomputation.values import Call, Reference, Value, View
from offload.torch_compat.settings import readers

__all__ = ["ANY", "Line", "Read", "Several", "Slice", "Template", "Templates", "Window"]

ANY = object()  # an argument that is not compared, because recipes do not use it: running statistics
_NUMBERS = (int, float, bool, complex)
_PATIENCE = 6  # a window with this many failures gets no template; see `Templates.followed`


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor argument.

    Attributes
    ----------
    label
        Number of its value within the template.
    is_made
        Whether an operator that a recipe needs makes this value in the window.
    view
        Type, shape, stride and offset of the tensor.
    """

    label: int
    is_made: bool
    view: View


@dataclass(frozen=True, slots=True)
class Several:
    """A list argument, such as a list of tensors. A non-empty list that contains only numbers is not a `Several`."""

    each: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One operator of a window.

    Attributes
    ----------
    call
        The recorded call without its arguments and random state. None: no recipe needs the operator, so later steps
        compare only which operator it is.
    args, kwargs
        The recorded arguments; a tensor is replaced by a `Read`, running statistics by `ANY`.
    plain, plain_names
        Positions and names of the arguments that are not tensors or lists of tensors. Later steps may have other
        values.
    results, writes
        For each result and each written argument that a recipe reads: its place (`Place` in `recipe.py`) and the label
        of its value.
    """

    func: Any
    call: Call | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    plain: frozenset[int] = frozenset()
    plain_names: frozenset[str] = frozenset()
    results: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[tuple[int | str, int], int], ...] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """The recipe of one storage, without tensors.

    Attributes
    ----------
    target
        Label of the storage's value.
    steps
        The steps of the recipe.
    lines
        Position of each step in the window.
    leaves
        For each value that the recipe reads: number in the recipe, label, and whether autograd saves the value too.
    is_heavy
        Whether the recipe contains a matrix product, a convolution or attention.
    opens
        Index of the pack after which the recipe's operators have to be recorded.
    """

    target: int
    steps: tuple[Step, ...]
    lines: tuple[int, ...]
    leaves: tuple[tuple[int, int, bool], ...]
    is_heavy: bool
    opens: int


@dataclass(frozen=True, slots=True)
class Template:
    """The operators of a window in order, and its slices by pack index. `script` contains the lines for C++."""

    lines: tuple[Line, ...]
    slices: dict[int, Slice]
    label_count: int
    script: OperatorScript


class Window:
    """A window of a step that records: its calls in order, and for each dropped storage the calls of its recipe."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._cuts: dict[int, tuple[Cut, tuple[Step, ...]]] = {}

    def was_cut(self, index: int, cut: Cut, recipe: Recipe) -> None:
        """Store the recipe of a pack whose storage was dropped."""
        self._cuts[index] = cut, recipe.steps

    def template(self, indices: set[int]) -> Template | None:
        """Return the template that later steps follow. None: the operators have to be recorded in every step.

        None if a storage of `indices` was not dropped, or if an operator may write to any of its arguments, because no
        version counter shows such a write.
        """
        if not self._cuts.keys() >= indices or any(call.operator.writes_all for call in self.calls):
            return None
        return _Maker(self.calls, self._cuts).template()


class Templates:
    """The templates of a schedule, by the pack that opens the window. Steps in other threads may use them too."""

    def __init__(self) -> None:
        self._made: dict[int, Template] = {}
        self._failures: dict[int, int] = {}

    def of(self, opens: int) -> Template | None:
        """Return the template of a window; None if there is none."""
        return self._made.get(opens)

    def is_wanted(self, opens: int) -> bool:
        """Return whether to record a template for a window: not if a third of the steps or more differ."""
        return self._failures.get(opens, 0) < _PATIENCE

    def made(self, opens: int, template: Template) -> None:
        """Store the template that a step has recorded."""
        self._made[opens] = template

    def followed(self, opens: int, *, to_its_end: bool) -> None:
        """Count a step that has followed a template. If it has differed, the next step records a new template."""
        before = self._failures.get(opens, 0)
        self._failures[opens] = max(0, before - 1) if to_its_end else before + 2
        if not to_its_end:
            self._made.pop(opens, None)


class _Maker:
    def __init__(self, calls: list[Call], cuts: dict[int, tuple[Cut, tuple[Step, ...]]]) -> None:
        self._calls, self._cuts = calls, cuts
        self._needed = {number for cut, _ in cuts.values() for number in cut.calls}
        self._positions = {call.number: position for position, call in enumerate(calls)}
        self._labels: dict[Value, int] = {}
        for cut, _ in cuts.values():
            for value in cut.numbers:
                self._labels.setdefault(value, len(self._labels))

    def template(self) -> Template:
        made: dict[int, list[Value]] = {}
        for value in self._labels:
            if self._is_made(value):
                assert value.call is not None
                made.setdefault(value.call.number, []).append(value)
        lines = tuple(
            self._line(call, made.get(call.number, [])) if call.number in self._needed else Line(call.func)
            for call in self._calls
        )
        slices = {index: self._slice(cut, steps) for index, (cut, steps) in self._cuts.items()}
        script = OperatorScript(tuple(map(_encoded, self._calls, lines)), readers())
        return Template(lines, slices, len(self._labels), script)

    def _is_made(self, value: Value) -> bool:
        return value.call is not None and value.call.number in self._needed

    def _line(self, call: Call, made: list[Value]) -> Line:
        args = tuple(ANY if i in call.ignored else self._expected(each) for i, each in enumerate(call.args))
        kwargs = {name: self._expected(each) for name, each in call.kwargs.items()}
        return Line(
            func=call.func,
            call=replace(call, args=(), kwargs={}, random=None, read=None),
            args=args,
            kwargs=kwargs,
            plain=frozenset(filter(lambda place: _is_plain(args[place]), range(len(args)))),
            plain_names=frozenset(filter(lambda name: _is_plain(kwargs[name]), kwargs)),
            results=tuple((value.place, self._labels[value]) for value in made if isinstance(value.place, int)),
            writes=tuple((value.place, self._labels[value]) for value in made if isinstance(value.place, tuple)),
        )

    def _expected(self, given: Any) -> Any:
        if type(given) is Reference:
            return Read(self._labels[given.value], self._is_made(given.value), given.view())
        if type(given) is list and not (given and all(type(each) in _NUMBERS for each in given)):
            return Several(tuple([self._expected(each) for each in given]))
        return given

    def _slice(self, cut: Cut, steps: tuple[Step, ...]) -> Slice:
        return Slice(
            target=self._labels[cut.target],
            steps=tuple(replace(step, random=None) for step in steps),
            lines=tuple(self._positions[number] for number in sorted(cut.calls)),
            leaves=tuple((cut.numbers[value], self._labels[value], is_saved) for value, is_saved in cut.leaves.items()),
            is_heavy=any(call.operator.is_heavy for call in cut.calls.values()),
            opens=min(call.opens for call in cut.calls.values()),
        )


# Kinds of arguments, the same as in csrc/operator_script.h.
_ANY, _READ, _SEVERAL, _PLAIN = range(4)


def _encoded(call: Call, line: Line) -> tuple[Any, ...]:
    """Encode a line for C++.

    One item says whether C++ may run the operator. Python runs it if it draws random numbers, writes to lists or writes
    to an argument that is given by name.
    """
    operator = call.operator
    followed = [place for (place, _), _ in line.writes]
    written = [(place, label) for (place, _), label in line.writes if type(place) is int]
    is_plain = len(written) == len(followed) and all(type(line.args[place]) is Read for place, _ in written)
    return (
        line.func,
        line if line.call is not None else None,
        is_plain and not (operator.is_seeded or operator.writes_lists or operator.writes_all),
        operator.saves_factors,
        operator.added,
        call.saves_weights,
        tuple(place for place in operator.writes if place not in followed),
        call.settings,
        tuple(map(_encoded_argument, line.args)),
        {name: _encoded_argument(each) for name, each in line.kwargs.items()},
        line.results,
        tuple(written),
    )


def _encoded_argument(expected: Any) -> tuple[int, int, bool, Any]:
    if expected is ANY:
        return _ANY, 0, False, None
    if type(expected) is Read:
        return _READ, expected.label, expected.is_made, expected.view.facts
    if type(expected) is Several:
        return _SEVERAL, 0, False, tuple(map(_encoded_argument, expected.each))
    return _PLAIN, 0, False, expected


def _is_plain(expected: Any) -> bool:
    return expected is not ANY and type(expected) not in (Read, Several)
