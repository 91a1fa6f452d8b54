"""Explains an out-of-memory error: what uses the memory, what else could be swapped, and which arguments to use.

The session calls this when a step fails with an out-of-memory error.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from offload.control.controller import PlanController
from offload.control.device_session import DeviceSession
from offload.control.running_step import RunningStep
from offload.devices.device import device_of
from offload.devices.memory import DeviceMemory, Process, last_out_of_memory, memory_of
from offload.diagnostics.html import oom as oom_page
from offload.optimizer_state.movers import StateMovers
from offload.options import Options
from offload.parameters.mover import ParameterMover
from offload.plan import Plan
from offload.runtime.counters import Count
from offload.runtime.engine import Engine
from offload.runtime.hooks import StepHooks
from offload.units import format_bytes

__all__ = ["Explanation", "Remedy", "Subject", "explain", "is_out_of_memory", "tell", "tell_at"]

log = logging.getLogger("offload")

_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")
_MIN_TENSOR_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
# Reasons for keeping a saved tensor that no argument changes. For all other reasons, other arguments would swap it.
_FIXED = {"parameter", "leaf", "written later", "unsupported kind", "view of a larger storage", "pinning failed"}


@dataclass(frozen=True)
class Subject:
    """The session whose step failed, and the tensors that this step has saved so far.

    Parameters
    ----------
    model
        The enabled model; None after it was freed.
    engine, options
        The session's engine and options.
    swapped
        Tensors swapped out since the last forward began.
    kept
        Tensors saved since the last forward began and kept, by reason.
    dropped
        Tensors dropped since the last forward began, to be recomputed in backward.
    running
        The plan that the step follows, and the node that it has reached; None if it follows no plan.
    keeps_all
        Whether the step is a reference step that keeps every tensor.
    moving
        The arguments of `enable` by which optimizer state, gradients and parameters move.
    is_bare
        Whether the latest step runs without hooks, because its plan swaps nothing: saved tensors are not counted then.
    """

    model: nn.Module | None
    engine: Engine
    options: Options
    swapped: Count
    kept: Mapping[str, Count]
    dropped: Count = field(default_factory=Count)
    running: tuple[Plan, int] | None = None
    keeps_all: bool = False
    moving: Mapping[str, object] = field(default_factory=dict)
    is_bare: bool = False


@dataclass(frozen=True)
class Remedy:
    """A command or an action, and its effect."""

    line: str
    why: str


@dataclass(frozen=True)
class Explanation:
    """Explains why a step ran out of memory.

    `str` returns the text of the exception's note, `html` a page with the same content.
    """

    error: str
    where: str
    memory: DeviceMemory
    swapped: Count
    kept: dict[str, Count]
    resident_bytes: int
    in_flight_bytes: int
    verdict: str
    remedies: tuple[Remedy, ...] = field(default=())
    dropped: Count = field(default_factory=Count)
    running: tuple[Plan, int] | None = field(default=None, repr=False)

    @property
    def movable_bytes(self) -> int:
        """Bytes of tensors that this step has saved and kept, and that other arguments would swap."""
        return _movable_bytes(self.kept)

    def saved_rows(self) -> list[tuple[str, str, str]]:
        """Return rows for the tensors that autograd saved in this step: reason, amount, whether they can be swapped."""
        rows = [("swapped out", _words(self.swapped), "copied out")] if self.swapped.tensors else []
        rows += [("dropped", _words(self.dropped), "recomputed in backward")] if self.dropped.tensors else []
        for reason, count in sorted(self.kept.items(), key=lambda item: -item[1].nbytes):
            can = "cannot" if reason in _FIXED else "could"
            rows.append((f"kept: {reason}", _words(count), f"{can} be swapped"))
        return rows

    def __str__(self) -> str:
        rows = [(name, text) for name, text in self.memory.rows()]
        rows += [(name, f"{amount}  ({can})") for name, amount, can in self.saved_rows()]
        if self.resident_bytes:
            leaving = f", {format_bytes(self.in_flight_bytes)} of it being copied out" if self.in_flight_bytes else ""
            rows.append(("swapped, on the device now", format_bytes(self.resident_bytes) + leaving))
        width = max(len(name) for name, _ in rows)
        lines = [f"offload: out of memory in {self.where}", *(f"  {name:<{width}}  {text}" for name, text in rows)]
        lines.append(self.verdict)
        for remedy in self.remedies:
            lines += [f"  {remedy.line}", f"      {remedy.why}"]
        return "\n".join(lines)

    def html(self) -> str:
        """Return a self-contained page with the same content and a picture of the memory."""
        return oom_page.render(
            where=self.where,
            error=self.error,
            parts=self.memory.parts(self.resident_bytes, self.movable_bytes),
            memory_rows=self.memory.rows(),
            saved_rows=self.saved_rows(),
            verdict=self.verdict,
            remedies=[(remedy.line, remedy.why) for remedy in self.remedies],
            running=self.running,
            limit_bytes=self.memory.total_bytes - self.memory.foreign_bytes if self.memory.is_accelerator else None,
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is an out-of-memory error, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def tell_at(
    states: StateMovers,
    parameters: ParameterMover | None,
    error: BaseException,
    at: DeviceSession,
    path: str | os.PathLike[str] | None,
) -> None:
    """Call `tell` for the tensors of a session on one device, which moves these states and parameters."""
    running = at.controller.running if isinstance(at.controller, PlanController) else RunningStep()
    about = (*at.counts.in_step(), at.counts.dropped_in_step(), running.place(), running.keeps_all)
    moving = {**states.arguments(), **({"parameters": parameters.counts.which} if parameters is not None else {})}
    tell(error, Subject(at.model, at.engine, at.options, *about, moving, at.is_bare), path)


def tell(error: BaseException, subject: Subject, path: str | os.PathLike[str] | None = None) -> None:
    """Explain an out-of-memory error: in a note and, with `path`, on a page.

    Other exceptions are not changed. An error that is explained already gets no second explanation. If explaining
    fails, this is logged, so that the caller's exception is not lost.
    """
    if not is_out_of_memory(error):
        return
    earlier = getattr(error, "offload_explanation", None)
    try:
        explanation = earlier if isinstance(earlier, Explanation) else explain(error, subject)
        if earlier is None:
            error.offload_explanation = explanation  # type: ignore[attr-defined]
            error.add_note(str(explanation))
        if path is not None:
            Path(path).write_text(explanation.html(), encoding="utf-8")
            error.add_note(f"offload: explained with a picture in {path}")
    except (MemoryError, OSError, RuntimeError) as problem:
        log.warning("the out-of-memory error could not be explained: %s", problem)


def explain(error: BaseException, subject: Subject) -> Explanation:
    """Return the explanation of an out-of-memory error.

    Parameters
    ----------
    error
        The exception, with its traceback.
    subject
        The session whose step failed.
    """
    engine = subject.engine
    asked = asked_bytes(str(error))
    memory = last_out_of_memory(engine.device, asked) or memory_of(engine.device, asked)
    kept = {reason: count for reason, count in subject.kept.items() if count.tensors}
    movable = _movable_bytes(kept)
    engine.collect()
    leaving = engine.resident.now
    return Explanation(
        error=f"{type(error).__name__}: {error}",
        where=address_of(error.__traceback__, subject.model),
        memory=memory,
        swapped=subject.swapped,
        kept=kept,
        resident_bytes=leaving,
        in_flight_bytes=engine.in_flight_bytes,
        verdict=_verdict(memory, movable, leaving, is_saved=bool(kept) or bool(leaving), is_bare=subject.is_bare),
        remedies=tuple(_remedies(memory, kept, subject)),
        dropped=subject.dropped,
        running=subject.running,
    )


def asked_bytes(message: str) -> int | None:
    """Return the size of the failed allocation from an error's message; None if it is not there."""
    match = re.search(r"[Tt]ried to allocate ([0-9.]+) ?(bytes|B|KiB|MiB|GiB|TiB)?", message)
    if match is None:
        match = re.search(r"Unable to allocate ([0-9.]+) (bytes|B|KiB|MiB|GiB|TiB)", message)
    if match is None:
        return None
    units = ("KiB", "MiB", "GiB", "TiB")
    return int(float(match[1].rstrip(".")) * (1024 ** (units.index(match[2]) + 1) if match[2] in units else 1))


_UNPACKS = (StepHooks.unpack_swapped.__code__, StepHooks.unpack_failed.__code__)


def address_of(traceback: TracebackType | None, model: nn.Module | None) -> str:
    """Return where in a training step a traceback ends: forward (with the module), backward, optimizer or elsewhere."""
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    where = "the caller's own code, outside of the model (the loss, the batch, an evaluation)"
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_globals.get("__name__", "")
        holder = frame.f_locals.get("self")
        is_backward = module == "torch.autograd" and frame.f_code.co_name in ("backward", "grad")
        # The second condition is needed because a GPU's backward runs in a thread without the frame of torch.autograd.
        if is_backward or frame.f_code in _UNPACKS:
            where = "backward"
        elif isinstance(holder, torch.optim.Optimizer) and frame.f_code.co_name == "step":
            where = "the optimizer's step"
        elif id(holder) in names and isinstance(holder, nn.Module):
            name = names[id(holder)]
            where = f"forward of {name} ({type(holder).__name__})" if name else "forward of the model"
        traceback = traceback.tb_next
    return where


# -- words ------------------------------------------------------------------------------------------------------------


def _movable_bytes(kept: Mapping[str, Count]) -> int:
    return sum(count.nbytes for reason, count in kept.items() if reason not in _FIXED)


def _words(count: Count) -> str:
    return f"{format_bytes(count.nbytes)} in {count.tensors} tensor{'s' * (count.tensors != 1)}"


def _verdict(memory: DeviceMemory, movable: int, leaving: int, *, is_saved: bool, is_bare: bool) -> str:
    short = memory.short_bytes
    rest = max(memory.used_bytes - movable - leaving, 0)
    others = f"{format_bytes(rest)} are parameters, gradients, optimizer state, temporaries and other data"
    if memory.asked_bytes is not None and memory.asked_bytes > memory.total_bytes:
        return (
            f"Nothing can make this fit: one tensor of {format_bytes(memory.asked_bytes)} was asked for, and there are "
            f"{format_bytes(memory.total_bytes)} in all. Use a smaller batch, or a smaller layer."
        )
    if is_bare:
        return (
            "Offloading may lower this peak: the plan swaps nothing, so the latest step ran without hooks, and tensors "
            f"that autograd saved are not counted; the {format_bytes(rest)} in use are parameters, gradients, "
            "optimizer state, saved tensors, temporaries and other data."
        )
    if not is_saved:
        return f"Offloading cannot lower this peak: nothing saved for backward is on the device now; {others}."
    could = f"{format_bytes(movable)} of what autograd saved in this step could still be swapped"
    if leaving:
        could += f" and {format_bytes(leaving)} of swapped tensors are on the device (not copied out yet or swapped in)"
    if short is None:
        return f"Offloading {'can lower' if movable else 'does what it can for'} this peak: {could}; {others}."
    if movable + leaving >= short:
        return f"Offloading can lower this peak: {format_bytes(short)} are missing, and {could}; {others}."
    return f"Offloading alone is not enough: {format_bytes(short)} are missing, and only {could}; {others}."


def _remedies(memory: DeviceMemory, kept: Mapping[str, Count], subject: Subject) -> list[Remedy]:
    found = []
    if subject.keeps_all:
        why = "this step was a reference step: it kept every tensor, to show how long a step takes without swapping"
        found.append(Remedy("give memory_limit with max_slowdown: then reference steps stay within the limit", why))
    call = _enable_line(memory, kept, subject)
    if call is not None:
        found.append(call)
    unused = memory.reserved_bytes - memory.used_bytes
    if memory.is_accelerator and memory.asked_bytes is not None and unused >= memory.asked_bytes:
        why = f"{format_bytes(unused)} are reserved by torch but free, in pieces that are too small"
        found.append(Remedy("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py", why))
    ending = _processes_to_end(memory)
    if ending:
        names = " and ".join(f"{process.pid} ({process.name})" for process in ending)
        holds = format_bytes(sum(process.nbytes for process in ending))
        what, whose = (
            ("process", "it is yours and holds") if len(ending) == 1 else ("processes", "they are yours and hold")
        )
        found.append(Remedy(f"end {what} {names}", f"{whose} {holds}: at least as much as is missing"))
    why = "halves what is saved for backward; with each loss divided by 2, two halves give the gradients of the batch"
    found.append(Remedy("halve the batch, and call optimizer.step() after every second one", why))
    return found


def _processes_to_end(memory: DeviceMemory) -> list[Process]:
    """Return the fewest processes of this user that hold enough memory; none if that is unknown or impossible."""
    short = memory.short_bytes
    own = sorted((each for each in memory.processes if each.can_be_ended), key=lambda each: each.nbytes)
    if not short or sum(each.nbytes for each in own) < short:
        return []
    for process in own:
        if process.nbytes >= short:
            return [process]
    ending: list[Process] = []
    while sum(each.nbytes for each in ending) < short:
        ending.append(own.pop())
    return ending


def _enable_line(memory: DeviceMemory, kept: Mapping[str, Count], subject: Subject) -> Remedy | None:
    """Return the call of `offload.enable` that swaps more than the current one; None if there is none."""
    options, engine = subject.options, subject.engine

    def stayed(*reasons: str) -> int:
        return sum(kept[reason].nbytes for reason in reasons if reason in kept)

    small, excluded, unhoused = map(stayed, ("small", "excluded", "host limit"))
    unchosen = _movable_bytes(kept) - small - excluded - unhoused
    back_early = options.lookahead_nodes != 1 and engine.resident.now > engine.in_flight_bytes
    small = small if options.min_tensor_bytes > _SMALL_BYTES else 0
    is_uncounted = options.n_tensors == 0 or subject.is_bare
    if not (is_uncounted or unchosen or back_early or small >= _MIN_TENSOR_BYTES or excluded or unhoused):
        return None
    is_planned = options.n_tensors is None and (unchosen or subject.is_bare)
    limit = _limit_to_plan(memory, options) if is_planned else None
    arguments: dict[str, object] = {"memory_limit": limit} if limit else {"n_tensors": -1, "lb": 1}
    if limit and options.recompute != "auto":
        arguments["recompute"] = options.recompute or False
    if small >= _MIN_TENSOR_BYTES:
        arguments["min_tensor_bytes"] = "64KiB"
    elif options.min_tensor_bytes != _MIN_TENSOR_BYTES:
        arguments["min_tensor_bytes"] = options.min_tensor_bytes
    if options.exclude and not excluded:
        arguments["exclude"] = options.exclude
    if unhoused:
        arguments["host_limit"] = f"{-(-(options.host_limit + unhoused) >> 30)}GiB"
    if options.spill_dir and device_of(engine.device).is_accelerator:
        arguments["spill_dir"] = options.spill_dir
    arguments |= subject.moving
    words = ", ".join(f"{name}={value!r}" for name, value in arguments.items()).replace("'", '"')
    if subject.moving.keys() - {"parameters"}:
        words += ", optimizer=optimizer"
    moved = unchosen + small + excluded + unhoused
    why = "swaps what it can" if is_uncounted else "prefetches later, to have fewer tensors on the device"
    why = f"swaps up to {format_bytes(moved)} more" if moved else why
    why = "plans the fastest step within this limit, or raises an error if there is none" if limit else why
    return Remedy(f"offload.enable(model, {words})", why + "; the step takes longer")


def _limit_to_plan(memory: DeviceMemory, options: Options) -> str | None:
    """Return a `memory_limit` that fits the device, with a margin for fragmentation; None on the CPU."""
    if not memory.is_accelerator:
        return None  # on the CPU, a process uses more memory than its tensors
    room = 0.95 * (memory.total_bytes - memory.foreign_bytes)
    if options.memory_limit is not None:
        room = min(room, 0.9 * options.memory_limit)
    return f"{int(room * 10 / (1 << 30)) / 10}GiB" if room >= 0.1 * (1 << 30) else None
