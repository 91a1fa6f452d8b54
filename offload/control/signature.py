"""The signature of a training step: the shapes and kinds of its inputs.

Plans are kept per signature.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from offload.runtime.engine import bytes_taken
from offload.torch_compat.dispatch import modes_of_others
from offload.torch_compat.tensors import shapes_in_nested

__all__ = ["Signature", "signature_of"]

_PLAIN = (Tensor, bool, NoneType)  # `tree_leaves`, which is slow, returns these values unchanged


class Signature(NamedTuple):
    """The shapes and kinds of the model's inputs, and the modes of torch that are on.

    Attributes
    ----------
    shapes
        Shapes of the tensors among the inputs, in elements; those in it for a nested tensor.
    kinds
        Dtypes of these tensors, and whether they require gradients; of a nested tensor, its layout and the number of
        shapes in it too; the bools and Nones among the inputs; whether autocast is on; the dispatch modes that are on.
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


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> tuple[Signature, dict[int, int]]:
    """Return the signature of a step that begins, and the bytes of its inputs by the identity of their storages.

    Parameters
    ----------
    args, kwargs
        Arguments of the model's forward.
    device_type
        Type of the model's device, of which autocast is looked up.
    """
    shapes: list[tuple[int, ...]] = []
    kinds: list[object] = []
    inputs: list[Tensor] = []
    leaves: Sequence[Any] = (*args, *kwargs.values()) if kwargs else args
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN):
            leaves = tree_leaves(leaves)
            break
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_nested:
                inside = shapes_in_nested(leaf)
                shapes += inside
                kinds.append((leaf.dtype, leaf.requires_grad, leaf.layout, len(inside)))
            else:
                shapes.append(tuple(leaf.shape))
                kinds.append((leaf.dtype, leaf.requires_grad))
            inputs.append(leaf)
        elif leaf is None or isinstance(leaf, bool):  # selects a branch; few values, so few signatures
            kinds.append(leaf)
    kinds.append(torch.is_autocast_enabled(device_type))
    kinds += modes_of_others()  # the program's dispatch modes may change what operators return
    input_bytes = bytes_taken(inputs)
    return Signature(tuple(shapes), tuple(kinds), sum(input_bytes.values())), input_bytes
