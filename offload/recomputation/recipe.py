"""A recipe: the operators from what is kept or swapped to one dropped storage, and how to run them again.

When backward asks for a dropped tensor, its recipe makes the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload.recomputation.random_state import as_before
from offload.recomputation.values import Held, Probe, View
from offload.torch_compat.dispatch import undisturbed
from offload.torch_compat.settings import Settings, restored
from offload.torch_compat.tensors import version_of

__all__ = ["Argument", "ChangedSource", "Place", "Recipe", "Step"]

# Number of a result, or (position or name, number) of an argument that the call wrote.
Place = int | tuple[int | str, int]
_Storages = dict[int, torch.UntypedStorage]


class ChangedSource(Exception):
    """A tensor that a recipe reads was changed in place."""

    def __init__(self, source: Held | Probe) -> None:
        super().__init__()
        self.kind, self.shape = source.kind, source.shape
        self.found, self.expected = version_of(source.tensor), source.version


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor argument of a step: a view of a numbered value."""

    number: int
    view: View


@dataclass(frozen=True, slots=True)
class Step:
    """One operator, with values as numbers.

    Attributes
    ----------
    results
        What is needed of what it makes, and the numbers of those values.
    last
        Values that nobody needs afterwards.
    """

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: tuple[Any, torch.Tensor] | None
    settings: Settings
    results: tuple[tuple[Place, int], ...]
    last: tuple[int, ...]

    def run(self, storages: _Storages) -> None:
        """Run it on numbered storages, and add what it makes."""
        args = [_rebuilt(each, storages) for each in self.args]
        kwargs = {name: _rebuilt(each, storages) for name, each in self.kwargs.items()}
        if self.random is not None:
            with as_before(*self.random):
                result = self.func(*args, **kwargs)
        else:
            result = self.func(*args, **kwargs)
        for place, number in self.results:
            if isinstance(place, tuple):
                given = kwargs[place[0]] if isinstance(place[0], str) else args[place[0]]
                made = given[place[1]] if isinstance(given, list) else given
            else:
                made = result[place] if isinstance(result, (tuple, list)) else result
            if not isinstance(made, torch.Tensor):  # a kernel that makes less where no gradient is recorded
                raise RuntimeError(f"{self.func} did not return what it had returned in forward")
            storages[number] = made.untyped_storage()
        for number in self.last:
            del storages[number]


def _rebuilt(given: Any, storages: _Storages) -> Any:
    if type(given) is Argument:
        return given.view.of(storages[given.number])
    if type(given) is list:
        return [_rebuilt(each, storages) for each in given]
    return given


@dataclass(eq=False, slots=True)
class Recipe:
    """How to make one storage again.

    Attributes
    ----------
    target
        Number of the value that is asked for.
    slots
        Where the bytes of saved storages are, by number of the value. Each holds one view more for it.
    held
        What stays on the device, by number of the value.
    sources
        Pack indices of the entries that it reads, by number of the value.
    is_heavy
        Whether a matrix product, a convolution or attention is among them.
    opens
        The pack after which its operators have to be recorded.
    peak_bytes
        Peak bytes of the values that it makes, the result included; 0 if not computed.
    """

    target: int
    steps: tuple[Step, ...]
    slots: dict[int, tuple[Any, Probe]]
    held: dict[int, Held]
    sources: dict[int, int]
    is_heavy: bool
    opens: int
    peak_bytes: int

    @property
    def operators(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(step.name for step in self.steps)

    @property
    def held_bytes(self) -> int:
        """Bytes that stay in memory for this recipe alone."""
        return sum(held.nbytes for held in self.held.values() if held.is_own)

    @property
    def changeable(self) -> list[Held | Probe]:
        """What tells whether somebody wrote to what it reads."""
        return [*self.held.values(), *(probe for _, probe in self.slots.values())]

    def load(self) -> _Storages:
        """The bytes that it reads, on the device and ready for the current stream.

        Raises
        ------
        ChangedSource
            A tensor that stays was changed in place since.
        OSError
            Bytes could not be read back; a later call tries again.
        """
        for source in self.changeable:
            if source.is_changed:
                raise ChangedSource(source)
        found = {number: held.tensor.untyped_storage() for number, held in self.held.items()}
        for number, (slot, _) in self.slots.items():
            found[number], begin = slot.record.swap_in()
            assert begin == 0  # recipes read whole storages alone
        return found

    def run(self, storages: _Storages) -> torch.UntypedStorage:
        """The dropped storage, made of what `load` returned; takes that over."""
        alone = undisturbed()
        try:
            with alone:
                self._run_steps(storages)
        finally:  # after an interrupt its traceback may hold it, and free it when backward, without gradients, is over
            alone.gen.close()
        return storages[self.target]

    def _run_steps(self, storages: _Storages) -> None:
        settings = restored()
        try:
            with settings as put_in_force:
                for step in self.steps:
                    put_in_force(step.settings)
                    step.run(storages)
        finally:  # as in `run`
            settings.gen.close()
