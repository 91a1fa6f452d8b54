"""The optimizer state that leaves memory between updates, and what that gives: a part of a plan.

`share_search` chooses it, and the mover of optimizer state follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from offload.plan.cycle import Update
from offload.units import format_bytes, format_seconds

__all__ = ["StateShare"]


@dataclass(frozen=True)
class StateShare:
    """Which state moves, what that gives, and how far from the fastest it can be.

    Parameters
    ----------
    update : Update
        The update, with all state that can move.
    moved : frozenset of int
        The numbers of the chunks that leave memory.
    cycle_seconds, update_seconds : float
        Predicted duration of an update with the steps up to the next one, and of the update alone, in seconds.
    bound_seconds : float
        Lower bound on `cycle_seconds`, whatever share moves, by `cycle_bound`.
    between_bytes : int
        State in memory during forward and backward, in bytes.
    update_bytes : int
        The most state in memory during an update, in bytes.
    """

    update: Update = field(repr=False)
    moved: frozenset[int]
    cycle_seconds: float
    update_seconds: float
    bound_seconds: float
    between_bytes: int
    update_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes of state of the chunks that leave memory."""
        return self.update.bytes_of(self.moved)

    @property
    def freed_bytes(self) -> int:
        """Bytes by which less state is in memory during forward and backward."""
        return self.update.bytes - self.between_bytes

    @property
    def gap(self) -> float:
        """``cycle_seconds / bound_seconds - 1``."""
        return self.cycle_seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, and the numbers of the chunks that move."""
        return {
            "state_bytes": self.update.bytes,
            "moved_bytes": self.moved_bytes,
            "between_bytes": self.between_bytes,
            "update_bytes": self.update_bytes,
            "chunks": len(self.update.chunks),
            "moved": sorted(self.moved),
            "cycle_seconds": self.cycle_seconds,
            "update_seconds": self.update_seconds,
            "bound_seconds": self.bound_seconds,
            "gap": self.gap,
            "micro_batches": self.update.micro_batches,
        }

    def summary(self) -> str:
        """Return one line of text."""
        total, chunks = format_bytes(self.update.bytes), len(self.update.chunks)
        if not self.moved:
            return f"optimizer state stays in memory: {total}; none of it has to move"
        return (
            f"optimizer state: {format_bytes(self.moved_bytes)} of {total}, {len(self.moved)} of {chunks} chunks, "
            f"leave memory between updates; {format_bytes(self.freed_bytes)} less in forward and backward. With the "
            f"update ({format_seconds(self.update_seconds)}) a cycle takes {format_seconds(self.cycle_seconds)}; "
            f"no share takes less than {format_seconds(self.bound_seconds)} (gap {self.gap:.3%})"
        )

    def explain(self) -> list[str]:
        """Return one line for each chunk that moves, and one for those that stay."""
        if not self.moved:
            return []
        rows = self.update.swaps(self.moved)
        chunks, lines = self.update.chunks, []
        for i in sorted(self.moved):
            release, prefetch = rows[i]
            ahead = f"{i - prefetch} {'chunk' if i - prefetch == 1 else 'chunks'} before its update"
            back = "as its update begins" if prefetch == i else ahead
            out = "in the background" if release is None else f"until chunk {release} is due"
            lines.append(
                f"optimizer state of {chunks[i].name} (chunk {i}), {format_bytes(chunks[i].bytes)}: written {out}, "
                f"read {back}, which takes {format_seconds(chunks[i].seconds)}"
            )
        if kept := len(chunks) - len(self.moved):
            nbytes = self.update.bytes - self.moved_bytes
            lines.append(f"optimizer state of the other {kept} chunks, {format_bytes(nbytes)}: kept")
        return lines
