"""Keeps moved parameters in memory while an optimizer updates them. Then they leave with their new values.

`ChunkedStep` and `StepInBackward` use it; `UpdateRoom` uses `is_away`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from offload.parameters.stored_parameter import StoredParameter

__all__ = ["is_away", "updating"]


def is_away(parameter: Tensor) -> bool:
    """Return whether the memory of a parameter is in the store."""
    record = parameter.__dict__.get("_offload_stored")
    return isinstance(record, StoredParameter) and record.is_away_in(parameter)


@contextmanager
def updating(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep the moved ones of these parameters in memory, with their ordinary class, during a `with` block.

    Raises
    ------
    ParameterError
        A parameter cannot be read; the block is not run.
    """
    found = [(each, each.__dict__.get("_offload_stored")) for each in parameters]
    moved = [(each, record) for each, record in found if isinstance(record, StoredParameter)]
    user = object()
    try:
        for parameter, record in moved:
            record.window.acquire(parameter, record, user, plain=True)  # type: ignore[arg-type]
        yield
    finally:
        for parameter, record in moved:
            record.window.release((record,), user)
            record.window.updated(parameter, record)  # type: ignore[arg-type]
