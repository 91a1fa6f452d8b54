"""Starts copy-ins of optimizer state before an update needs them: in `optimizer.step()`, or already in backward."""

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
    """Start the copy-ins of chunk `number` and of the next one, and of later ones up to `ahead_bytes`.

    The limit is for the chunks after `number` together, and is exceeded by at most one chunk.

    Parameters
    ----------
    number
        The number of the chunk that is about to be updated.
    begun
        The number of chunks whose copy-ins have been started before.

    Returns
    -------
    int
        `begun` plus the number of chunks whose copy-ins this call has started.
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
        `early_bytes` counts the bytes that were read in backward and that an update has used.

    Attributes
    ----------
    expected
        The parameters that the next update is expected to change, in order: those of the latest update in chunks.
    nbytes
        Bytes that have been read in backward and that no update has used yet.
    """

    def __init__(self, counts: StateCounts) -> None:
        self.expected: Sequence[Tensor] = ()
        self.nbytes = 0
        self._counts = counts
        self._begun: dict[Tensor, int] = {}  # bytes by parameter, until an update has used its state
        self._stream: int | None = None  # the stream of the latest update

    def begin(self, state: StreamedState, param: Tensor) -> bool:
        """Start the copy-ins of a parameter's state. Returns False if no memory is free for them.

        Does nothing if they have been started, or if the current stream is not that of the latest update: an update on
        another stream would have to read the state again.
        """
        if param in self._begun or state.engine.current_stream() != self._stream:
            return True
        self._begun[param] = 0  # before `begin`: if it fails, some of the copy-ins have to be abandoned
        try:
            self._begun[param] = nbytes = state.begin(param)
        except (MemoryError, torch.OutOfMemoryError):
            self._counts.without_memory += 1
            return False
        self.nbytes += nbytes
        return True

    def use(self, param: Tensor) -> None:
        """Note that an update uses a parameter's state."""
        nbytes = self._begun.pop(param, 0)
        self.nbytes -= nbytes
        self._counts.early_bytes += nbytes

    def drop(self, state: StreamedState | None, needed: Iterable[Tensor] = ()) -> None:
        """Free the memory of unused copy-ins, but not of those of `needed`: the update that begins uses them."""
        kept = set(map(id, needed)) if self._begun else ()
        for param in [each for each in self._begun if id(each) not in kept]:
            if state is not None:
                state.abandon(param)
                state.engine.collect()  # on an accelerator, frees the memory
            self._begun.pop(param, None)
        self.nbytes = sum(self._begun.values())

    def end(self, state: StreamedState, updated: Sequence[Tensor]) -> None:
        """End an update of these parameters."""
        self.expected, self._stream = updated, state.engine.current_stream()
        self.drop(state)
