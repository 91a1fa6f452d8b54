"""The result of a trial for one storage's recipe: its duration, its memory and its sources. The planner uses them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MeasuredRecipe", "Refusal"]

# Why a storage has no recipe, as a short phrase: "its bytes came out differently".
Refusal = str


@dataclass(frozen=True)
class MeasuredRecipe:
    """A recipe that has recomputed the same bytes.

    Attributes
    ----------
    seconds
        Duration of one run: CPU time of the thread; on an accelerator, time between two events.
    sources
        Pack indices of the entries (first pack of each storage) that the recipe reads.
    operators
        Names of the operators, in order.
    is_heavy
        Whether a matrix product, a convolution or attention is among the operators.
    opens
        The pack after which operators have to be recorded for the recipe; -1: from the beginning of the step.
    held_bytes
        Bytes of small tensors that are kept only for the recipe.
    workspace_bytes
        Bytes on the device while the recipe runs, in addition to its sources and its result.
    """

    seconds: float
    sources: frozenset[int]
    operators: tuple[str, ...]
    is_heavy: bool
    opens: int = -1
    held_bytes: int = 0
    workspace_bytes: int = 0
