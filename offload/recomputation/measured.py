"""What a trial has found of one storage's recipe: what it costs, and what it reads.

Plans are made of these figures.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MeasuredRecipe", "Refusal"]

# Why a storage has no recipe, as a short phrase: "its bytes came out differently".
Refusal = str


@dataclass(frozen=True)
class MeasuredRecipe:
    """A recipe that made the same bytes again.

    Attributes
    ----------
    seconds
        To run it once: time of the thread on the CPU, between events on a device.
    sources
        Pack indices of the entries (first pack of each storage) that it reads.
    operators
        Names, in order.
    is_heavy
        Whether a matrix product, a convolution or attention is among them.
    opens
        The pack after which operators have to be recorded for it; -1: from the beginning of the step.
    held_bytes
        Bytes of small tensors kept for it that are neither saved tensors of the step nor parameters.
    workspace_bytes
        On the device while it runs, beside its sources and the result.
    """

    seconds: float
    sources: frozenset[int]
    operators: tuple[str, ...]
    is_heavy: bool
    opens: int = -1
    held_bytes: int = 0
    workspace_bytes: int = 0
