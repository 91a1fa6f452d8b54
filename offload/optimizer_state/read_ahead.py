"""Starts the copy-ins of optimizer state before the update that needs it: during the step, or in backward already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offload.optimizer_state import gradients_in_step
from offload.optimizer_state.counts import StateCounts
from offload.optimizer_state.streamed_state import StreamedState

__all__ = ["EarlyReads", "read_ahead"]


def read_ahead(
    state: StreamedState, chunks: Sequence[Sequence[Tensor]], number: int, begun: int, ahead_bytes: int
) -> int:
    """Start the copy-ins of a chunk and the next, and of later ones until `ahead_bytes` are being read ahead.

    Parameters
    ----------
    number
        The number of the chunk that is about to be updated.
    begun
        The number of chunks whose copy-ins have been started before.

    Returns
    -------
    int
        The number of chunks whose copy-ins have been started now.
    """

    def nbytes_of(param: Tensor) -> int:
        return state.nbytes_of(param) + gradients_in_step.nbytes_of(param)

    ahead = sum(nbytes_of(param) for chunk in chunks[number + 1 : begun] for param in chunk)
    while begun < len(chunks) and (begun <= number + 1 or ahead < ahead_bytes):
        for param in chunks[begun]:
            state.begin(param)
            gradients_in_step.begin(param)
        ahead += sum(map(nbytes_of, chunks[begun])) if begun > number else 0
        begun += 1
    return begun


class EarlyReads:
    """State of one optimizer that is read in backward.

    Parameters
    ----------
    counts
        Counts the bytes that a step has used.

    Attributes
    ----------
    expected
        The parameters that the next step is expected to update, in order: those of the latest step in chunks.
    nbytes
        Bytes that have been read in backward and that no step has used yet.
    """

    def __init__(self, counts: StateCounts) -> None:
        self.expected: Sequence[Tensor] = ()
        self.nbytes = 0
        self._counts = counts
        self._begun: dict[Tensor, int] = {}  # bytes by parameter, until a step has used its state
        self._stream: int | None = None  # the stream of the latest step

    def begin(self, state: StreamedState, param: Tensor) -> bool:
        """Start the copy-ins of a parameter's state. Returns False if no memory is free for them."""
        if param in self._begun or state.engine.current_stream() != self._stream:
            return True  # on another stream, the step would have to read it again
        self._begun[param] = nbytes = state.nbytes_of(param)
        self.nbytes += nbytes
        try:
            state.begin(param)
        except (MemoryError, torch.OutOfMemoryError):
            self._counts.without_memory += 1
            return False
        return True

    def use(self, param: Tensor) -> None:
        """Note that a step uses a parameter's state."""
        nbytes = self._begun.pop(param, 0)
        self.nbytes -= nbytes
        self._counts.early_bytes += nbytes

    def drop(self, state: StreamedState | None, used: Iterable[Tensor] = ()) -> None:
        """Free the memory of copy-ins that no step has used, except those of the parameters in `used`."""
        kept = set(map(id, used)) if self._begun else ()
        for param in [each for each in self._begun if id(each) not in kept]:
            if state is not None:
                state.abandon(param)
                state.engine.collect()  # on an accelerator, frees the memory
            self._begun.pop(param, None)
        self.nbytes = sum(self._begun.values())

    def end(self, state: StreamedState, updated: Sequence[Tensor]) -> None:
        """End a step that has updated these parameters."""
        self.expected, self._stream = updated, state.engine.current_stream()
        self.drop(state)
