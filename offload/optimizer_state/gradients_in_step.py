"""During an optimizer's step, brings gradients back into memory, each with its chunk of parameters.

`StateMover` uses these functions in its steps. They do nothing for gradients that are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from offload.optimizer_state.away_gradient import AwayGradient, record_of
from offload.optimizer_state.chunks import ChunkedStep
from offload.torch_compat.holders import holds_alone
from offload.torch_compat.tensors import version_of

__all__ = ["abandon", "begin", "bring_back", "lent", "nbytes_moved", "nbytes_of"]


class Lent(NamedTuple):
    """A gradient that is in memory for an update while the store keeps its copy."""

    param: Tensor
    gradient: AwayGradient
    tensor: Tensor
    version: int


def nbytes_of(param: Tensor) -> int:
    """Return the bytes of a gradient that is away; 0 for a gradient in memory."""
    record = record_of(param)
    return record.nbytes if record is not None and record.is_away else 0


def nbytes_moved(param: Tensor) -> int:
    """Return the bytes of a gradient that is away or `is_delayed`; 0 for another gradient in memory."""
    record = record_of(param)
    return record.nbytes if record is not None and (record.is_away or record.is_delayed) else 0


def begin(param: Tensor) -> None:
    """Start the copy-in of a gradient."""
    record = record_of(param)
    if record is not None:
        record.begin()


def abandon(param: Tensor) -> None:
    """Free the memory of a copy-in that is no longer needed."""
    record = record_of(param)
    if record is not None:
        record.abandon()


def bring_back(params: Iterable[Tensor]) -> None:
    """Bring gradients into memory for good.

    Raises
    ------
    GradientError
        A gradient could not be read. It and the ones after it are still away.
    """
    for param in params:
        gradient = param.grad
        if isinstance(gradient, AwayGradient):
            param.grad = gradient.record.bring(param)


@contextmanager
def lent(chunk: Sequence[Tensor], step: ChunkedStep) -> Iterator[None]:
    """Keep a chunk's gradients in memory while `step` updates its parameters. Changed gradients are stored again.

    Raises
    ------
    GradientError
        A gradient could not be read; no gradient has changed.
    """
    if step.keeps_gradients:
        bring_back(chunk)
        yield
        return
    given: list[Lent] = []
    try:
        for param in chunk:
            gradient = param.grad
            if isinstance(gradient, AwayGradient):
                tensor = gradient.record.read(param)
                given.append(Lent(param, gradient, tensor, version_of(tensor)))
                param.grad = tensor
        yield
    finally:
        while given:
            _take_back(given.pop(), is_unscaled=step.unscales_gradients)


def _take_back(each: Lent, *, is_unscaled: bool) -> None:
    record = each.gradient.record
    is_changed = record.is_away and (is_unscaled or version_of(each.tensor) != each.version)
    if is_changed:
        record.keep(each.tensor)
    if each.param.grad is each.tensor:
        each.param.grad = each.gradient
    if is_changed and holds_alone(each.tensor):  # not if an earlier copy-out still reads the memory
        record.leave()
