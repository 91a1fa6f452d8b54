"""The signature of a training step: the shapes and kinds of its inputs.

Plans are kept per signature.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

__all__ = ["Signature"]


class Signature(NamedTuple):
    """The shapes and kinds of the model's inputs, and the modes of torch that are on.

    Attributes
    ----------
    shapes
        Shapes of the tensors among the inputs, in elements.
    kinds
        Dtypes of these tensors, and whether they require gradients; the bools and Nones among the inputs; whether
        autocast is on; the dispatch modes that are on.
    input_bytes
        Bytes of the input tensors; memory that several of them share counts once.
    """

    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[object, ...]
    input_bytes: int = 0

    def is_within(self, other: Signature) -> bool:
        """Return whether `other` has inputs of the same kinds and at least the same size in every dimension."""
        return self.kinds == other.kinds and all(
            len(own) == len(theirs) and all(map(operator.le, own, theirs))
            for own, theirs in zip(self.shapes, other.shapes, strict=True)
        )
