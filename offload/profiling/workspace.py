"""Compares recomputed workspaces: memory in a layout of a kernel's own, parts of which the kernel never writes.

The backward of a kernel gets its workspace as a tensor of type uint8. Two thirds of the workspace of oneDNN's LSTM are
padding (torch 2.13). Padding has the bytes that the memory had before, so it differs from run to run, also in training
without offload.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from offload.recomputation.recipe import Recipe
from offload.torch_compat.dispatch import undisturbed
from offload.torch_compat.settings import FILL_BYTE, filling, memory_filled

__all__ = ["as_words", "is_equal_where_written"]

_FILL_WORD = int.from_bytes(8 * bytes([FILL_BYTE]), "little", signed=True)
_SLICE_WORDS = 1 << 17  # compared at a time, so that little memory is needed


def as_words(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage as int64, or as uint8 if their number is not a multiple of 8."""
    # Words where possible: the result of a comparison takes one byte for each element.
    dtype = torch.uint8 if storage.nbytes() % 8 else torch.int64
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def is_equal_where_written(differs: torch.Tensor, recipe: Recipe, storages: dict[int, torch.UntypedStorage]) -> bool:
    """Run a recipe in memory that is filled before, and return whether it writes no word that differs.

    A single written byte may equal `FILL_BYTE` by chance; eight in a row do not.

    Parameters
    ----------
    differs
        Bool, one for each element of `as_words`: whether the result of another run differs from the saved tensor.
    recipe
        Its result is of type uint8.
    storages
        The storages that it reads, as for `Recipe.run`.

    Raises
    ------
    RuntimeError
        An operator has no deterministic kernel, which torch demands when it fills memory.
    """
    steps = tuple(replace(step, settings=filling(step.settings)) for step in recipe.steps)
    with memory_filled():
        words = as_words(replace(recipe, steps=steps).run(storages))
    if words.dtype != torch.int64:
        return False
    with undisturbed():
        slices = zip(torch.split(differs, _SLICE_WORDS), torch.split(words, _SLICE_WORDS), strict=True)
        return not any(bool((other & (word != _FILL_WORD)).any()) for other, word in slices)
