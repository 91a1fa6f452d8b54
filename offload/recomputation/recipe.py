"""A recipe: the operators that compute one dropped storage from kept or swapped ones, and the code that runs them.

When backward needs a dropped tensor, its recipe recomputes the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload.recomputation.random_state import as_before
from offload.recomputation.values import Held, Probe, View
from offload.torch_compat.dispatch import undisturbed
from offload.torch_compat.settings import Settings, restored
from offload.torch_compat.tensors import storage_identity, version_of

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
    """One operator of a recipe; numbers stand for the values.

    Attributes
    ----------
    results
        Places of the results that the recipe needs, and the numbers of their values.
    last
        Numbers of the values that the recipe does not need after this step.
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
        """Run the operator on numbered storages, add those of its results, and remove those in `last`."""
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
            if not isinstance(made, torch.Tensor):  # some kernels return fewer results if no gradient is recorded
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
    """The operators that recompute one storage, and their sources.

    Attributes
    ----------
    target
        Number of the value to recompute.
    slots
        Swapped or dropped storages that the recipe reads, by number of the value. The recipe counts as one more view
        of each.
    held
        Kept tensors that the recipe reads, by number of the value.
    sources
        Pack indices of the entries that the recipe reads, by number of the value.
    is_heavy
        Whether a matrix product, a convolution or attention is among the operators.
    opens
        The pack after which the operators have to be recorded.
    peak_bytes
        Peak bytes of the operators' results, that of the recipe included, without what kernels allocate while they run;
        0 if not computed.
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
        """Names of the operators, in order."""
        return tuple(step.name for step in self.steps)

    @property
    def held_bytes(self) -> int:
        """Bytes that stay in memory only for this recipe."""
        return sum(held.nbytes for held in self.held.values() if held.is_own)

    def reads_state(self, storages: frozenset[int]) -> bool:
        """Return whether the recipe reads one of these storages, of parameters or buffers, where it is."""
        held = (each.tensor for each in self.held.values() if each.is_state and not each.is_own)
        return any(storage_identity(tensor.untyped_storage()) in storages for tensor in held)

    @property
    def changeable(self) -> list[Held | Probe]:
        """Objects that show whether a source of the recipe was changed in place."""
        return [*self.held.values(), *(probe for _, probe in self.slots.values())]

    def load(self) -> _Storages:
        """Return the storages of the sources, on the device and ready for the current stream.

        Raises
        ------
        ChangedSource
            A source was changed in place after the recipe was built.
        OSError
            Bytes could not be read back; a later call tries again.
        """
        for source in self.changeable:
            if source.is_changed:
                raise ChangedSource(source)
        found = {number: held.tensor.untyped_storage() for number, held in self.held.items()}
        for number, (slot, _) in self.slots.items():
            found[number], begin = slot.swap_in()
            assert begin == 0  # recipes read only whole storages
        return found

    def run(self, storages: _Storages) -> torch.UntypedStorage:
        """Recompute and return the dropped storage. `storages` is the result of `load`; this method changes it."""
        alone = undisturbed()
        try:
            with alone:
                self._run_steps(storages)
        # After an interrupt, its traceback may hold the generator of `undisturbed`. Without `close`, the generator
        # would restore grad mode only when it is freed.
        finally:
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
