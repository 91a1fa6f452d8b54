"""Counts for the report: how much of one optimizer's state, and of its parameters' gradients, has been moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from offload.units import format_bytes

__all__ = ["GradientCounts", "StateCounts"]


@dataclass
class _MovedCounts:
    """The counts that both subclasses have. Each subclass documents what they mean."""

    optimizer: str
    stays: str = ""
    steps: int = 0
    tensors: int = 0
    nbytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    held: int = 0
    failed: int = 0
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and the bytes moved per step in each direction."""
        steps = max(self.steps, 1)
        per_step = {"out_bytes_per_step": self.out_bytes / steps, "in_bytes_per_step": self.in_bytes / steps}
        return {**asdict(self), **per_step}

    def _with_bytes_per_step(self, what: str) -> str:
        moved = self.to_dict()
        out, back = (format_bytes(round(moved[f"{name}_bytes_per_step"])) for name in ("out", "in"))
        return f"{self.optimizer}: {self.tensors} {what}; per step {out} written, {back} read"


@dataclass
class StateCounts(_MovedCounts):
    """How much of one optimizer's state has been moved.

    Attributes
    ----------
    optimizer : str
        Name of its class.
    stays : str
        Why nothing is moved; empty if state moves.
    steps : int
        Steps with state in the store.
    whole_steps : int
        How many of these steps needed all state in memory at once. `whole_because` says why, for the latest.
    tensors, nbytes : int
        Tensors that leave between steps, and their bytes.
    out_bytes, in_bytes : int
        Bytes moved so far, in each direction.
    held : int
        Tensors that stay because other code holds them, views of them, their memory (a NumPy array),
        or the dictionary that they are in.
    failed : int
        Tensors that stayed because writing them failed; `failure` is the latest error.
    early_bytes : int
        Bytes that were read in backward already, before the step. `without_memory` is how often no memory was free for
        this.
    divided_steps : int
        Steps with all state in memory that updated few parameters at a time, because the temporary tensors of a whole
        step might exceed `memory_limit`. If such a step could not be divided, `undivided_because` says why.
    """

    whole_steps: int = 0
    whole_because: str = ""
    early_bytes: int = 0
    without_memory: int = 0
    divided_steps: int = 0
    undivided_because: str = ""

    def note_step(self, why_whole: str, *, is_at_rest: bool) -> None:
        """Count a step. `why_whole`: why it is not divided; `is_at_rest`: all state stays in memory."""
        if is_at_rest:
            self.divided_steps += not why_whole
            self.undivided_because = why_whole
            return
        self.steps += 1
        if why_whole:
            self.whole_steps += 1
            self.whole_because = why_whole

    def __str__(self) -> str:
        if self.stays:
            return f"{self.optimizer}: stays in memory: {self.stays}"
        if self.steps and not self.tensors:
            return f"{self.optimizer}: no tensor of its state can leave memory"
        moved = self._with_bytes_per_step(f"tensors, {format_bytes(self.nbytes)}, leave memory between steps")
        early = format_bytes(round(self.early_bytes / max(self.steps, 1)))
        return f"{moved} ({early} of it in backward)" if self.early_bytes else moved

    def notes(self) -> Iterator[str]:
        """Yield notes for the user."""
        if self.failed:
            yield f"{self.failed} tensors of optimizer state stayed because writing them failed: {self.failure}"
        if self.held:
            yield (
                f"{self.held} tensors of optimizer state stay because other code holds them, views of them, their "
                "memory, or their dictionary in the optimizer's state; if it is a checkpoint that was loaded, free it"
            )
        if self.whole_steps:
            yield (
                f"all state of {self.optimizer} was in memory during {self.whole_steps} of {self.steps} steps: "
                f"{self.whole_because}"
            )
        if self.divided_steps:
            yield (
                f"{self.divided_steps} steps of {self.optimizer} were divided, because its temporary tensors might "
                "exceed memory_limit; foreach=False, or fused=True if it has this argument, needs none"
            )
        if self.undivided_because:
            yield (
                f"the temporary tensors of {self.optimizer} may exceed memory_limit, and its step cannot be divided: "
                f"{self.undivided_because}; give it foreach=False, or fused=True if it has this argument"
            )


@dataclass
class GradientCounts(_MovedCounts):
    """How many gradients of one optimizer's parameters have been moved, and how many bytes.

    Attributes
    ----------
    optimizer : str
        Name of its class.
    stays : str
        Why none leaves memory; empty if they do.
    steps : int
        Steps of the optimizer.
    tensors, nbytes : int
        Gradients that were away when the latest step began, and their bytes. A gradient counts too if it was in memory
        only because the copy-out of its former bytes had not ended.
    out_bytes, in_bytes : int
        Bytes moved so far, in each direction.
    held : int
        How often a gradient stayed because other code held it, a view of it, or its memory (a NumPy array).
    brought : int
        How often a gradient came back because the program changed it or took a view of it before the step.
        `brought_by` is the latest operator.
    failed : int
        How often a gradient stayed because its copy-out could not start; `failure` is the latest error.
    """

    brought: int = 0
    brought_by: str = ""

    def __str__(self) -> str:
        if self.stays:
            return f"{self.optimizer}: gradients stay in memory: {self.stays}"
        return self._with_bytes_per_step(f"gradients, {format_bytes(self.nbytes)}, left memory before the step")

    def notes(self) -> Iterator[str]:
        """Yield notes for the user."""
        if self.failed:
            times = f"gradients stayed in memory {self.failed} times"
            yield f"{times} because their copy-out could not start: {self.failure}"
        if self.held:
            times = f"gradients stayed in memory {self.held} times"
            yield f"{times} because other code held them, views of them, or their memory"
        if self.brought:
            yield (
                f"gradients came back into memory {self.brought} times before the optimizer's step, because the "
                f"program changed them or took views of them (the latest: {self.brought_by})"
            )
