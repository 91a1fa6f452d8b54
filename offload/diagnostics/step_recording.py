"""Records one training step for a timeline: when modules compute and wait, when bytes are copied, and memory in use.

A recorded step uses the hooks of this module.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offload._core import SwappedView
from offload.devices.device import device_of
from offload.diagnostics.html import timeline as timeline_page
from offload.diagnostics.recorded_tensors import RecordedTensors
from offload.diagnostics.timeline import MemorySample, Span, StepTimeline, merged, without
from offload.runtime.engine import Engine, has_storage
from offload.runtime.hooks import Packed, Policy, StepHooks
from offload.torch_compat.autograd import call_at_end_of_backward
from offload.torch_compat.backward_pass import current_node
from offload.torch_compat.call_stack import running_module
from offload.torch_compat.compiled import modules_in_graphs, wrappers_of

__all__ = ["StepRecording", "WatchedRound"]

COPIES_MAX = 100_000
MARKS_MAX = 1_000_000
WAIT_SECONDS_MIN = 50e-6  # a shorter time in a hook is not a wait, but work of the engine


class Clock:
    """Takes times of the compute stream: on the CPU with the host's clock, on a GPU with events.

    On a GPU work is asynchronous, so the times are known after `finish`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._device.synchronize()
        self._anchor = self._device.mark()
        self._device.synchronize()
        self.start = time.perf_counter() if self._device.is_accelerator else self._anchor

    def now(self) -> Any:
        """Return a mark of this moment, for `seconds`."""
        return self._device.mark()

    def finish(self) -> None:
        """Wait until the device has reached every mark."""
        self._device.synchronize()

    def seconds(self, moment: Any) -> float:
        """Return the time of a mark, in seconds from the start. Call `finish` first."""
        found = self._device.seconds_since(self._anchor, [moment])
        assert found is not None  # `finish` has waited
        return found[0]


@dataclass(frozen=True)
class _Mark:
    """One moment of the step, at which something begins or ends."""

    # start, end: of the recording. forward: the model's forward begins. enter, exit: of a module. pack, packed, unpack,
    # unpacked: begin and end of a hook. backward end. optimizer, optimizer end: begin and end of an optimizer's step.
    kind: str
    moment: Any
    name: str
    memory: tuple[int, int, int]
    recomputed: tuple[float, int] = (0.0, 0)  # seconds and bytes, in the hook that ends at this moment


class WatchedRound(StepHooks):
    """Hooks that record when they pack and unpack."""

    def __init__(self, policy: Policy, recording: StepRecording) -> None:
        super().__init__(policy)
        self._recording = recording
        self._module_of: dict[int, str] = {}

    def pack(self, tensor: Tensor) -> Packed:
        """Pack a tensor, and record it."""
        recording = self._recording
        module = recording.running_module()
        recording.mark("pack", module)
        begin = recording.last_mark
        packed: Packed = super().pack(tensor)
        recording.mark("packed")
        self._module_of[id(packed)] = module
        if isinstance(packed, SwappedView):
            recording.name_ticket(packed.ticket_id, module)
        policy = self.policy
        if has_storage(tensor) and not policy.holds_state(policy.engine.identity(tensor)):
            recording.tensors.packed(packed, tensor, module, begin)
        return packed

    def unpack(self, packed: Packed) -> Tensor:
        """Unpack a tensor, and record it."""
        recording = self._recording
        node = current_node()
        if node is None:  # code outside of backward reads grad_fn's attributes
            return super().unpack(packed)
        recording.backward_runs()
        module = self._module_of.get(id(packed), "")
        recording.mark("unpack", f"{node.name()} of {module}" if module else node.name())
        counts = self.policy.counts
        seconds, nbytes = counts.recompute_seconds, counts.recomputed.nbytes
        begin = recording.last_mark
        tensor = super().unpack(packed)
        recording.tensors.unpacked(packed, tensor, begin)
        recording.mark("unpacked", "", (counts.recompute_seconds - seconds, counts.recomputed.nbytes - nbytes))
        return tensor


class StepRecording:
    """One recorded step; `offload.Session.timeline` creates it. Used as a context manager, it is written at its end.

    Parameters
    ----------
    model
        The model, whose modules the recording names.
    engine
        The engine, whose copies the recording contains.
    device
        The device of the model.
    tier
        Text for the tier below the device.
    path
        Output file: ``.html`` for a page, ``.json`` for Perfetto.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, device: torch.device, tier: str, path: str | os.PathLike[str]
    ) -> None:
        self.path = Path(path)
        if self.path.suffix not in (".html", ".json"):
            raise ValueError(f"timeline: write a path that ends in .html or, for Perfetto, .json, not {str(path)!r}")
        self._engine = engine
        self._device = device
        self._tier = tier
        self._marks: list[_Mark] = []
        self._tickets: dict[int, str] = {}
        self.tensors = RecordedTensors(engine)
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self._names |= {id(outer): type(model).__name__ for outer in wrappers_of(model)}
        self._forwards = 0
        self._entered = False
        self._backward_noted = False
        self.is_on = True
        self._hooks: list[RemovableHandle] = []
        in_graphs = modules_in_graphs(model)
        for module in model.modules():
            if module not in in_graphs:
                self._hooks += self._watch(module, self._names[id(module)])
        self._hooks.append(register_optimizer_step_pre_hook(lambda *_: self.mark("optimizer")))
        self._hooks.append(register_optimizer_step_post_hook(lambda *_: self.mark("optimizer end")))
        engine.store.record_copies(COPIES_MAX)
        self._clock = Clock(device)
        self.mark("start")

    def __enter__(self) -> StepRecording:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    # -- what the hooks and the session report ----------------------------------------------------------------------

    def step_hooks(self, policy: Policy) -> StepHooks | None:
        """Return recording hooks for a forward pass that begins; None if the recording has ended."""
        self.forward_begins()
        return WatchedRound(policy, self) if self.is_on else None

    def forward_begins(self) -> None:
        """Record that a forward pass begins. Without a `with` block, the second one ends the recording."""
        self._forwards += 1
        if self._forwards > 1 and not self._entered:
            self.finish()
        self.mark("forward")

    def mark(self, kind: str, name: str = "", recomputed: tuple[float, int] = (0.0, 0)) -> None:
        """Record this moment. `recomputed`: seconds and bytes of recomputation in a hook that ends."""
        if self.is_on and len(self._marks) < MARKS_MAX:
            engine = self._engine
            engine.collect_dropped()
            self.tensors.look(len(self._marks), at_all=kind in ("backward end", "optimizer", "end"))
            resident = engine.resident.now + engine.dropped.now
            memory = (device_of(self._device).allocated_bytes(), resident, engine.unswapped.now)
            self._marks.append(_Mark(kind, self._clock.now(), name, memory, recomputed))

    @property
    def last_mark(self) -> int:
        """Number of the last moment that was recorded."""
        return len(self._marks) - 1

    def running_module(self) -> str:
        """Return the name of the innermost module that is running in this thread."""
        return running_module(self._names)

    def name_ticket(self, ticket_id: int, module: str) -> None:
        """Record which module saved the bytes of a ticket first."""
        self._tickets.setdefault(ticket_id, module)

    def backward_runs(self) -> None:
        """Make sure that the end of the backward pass that runs in this thread is recorded."""
        if self.is_on and not self._backward_noted:
            self._backward_noted = True
            call_at_end_of_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        self.mark("backward end")
        self._backward_noted = False

    def _watch(self, module: nn.Module, name: str) -> list[RemovableHandle]:
        def enter(module: nn.Module, args: Any) -> None:
            self.mark("enter", name)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self.mark("exit", name)

        return [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ]

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the recording and write it. A second call does nothing."""
        if not self.is_on:
            return
        self.mark("end")
        self.is_on = False
        for hook in self._hooks:
            hook.remove()
        self._clock.finish()
        self._engine.drain()
        copies = self._engine.store.take_copies()
        self._engine.store.record_copies(0)
        step = self._step(copies)
        text = json.dumps(step.to_chrome()) if self.path.suffix == ".json" else timeline_page.render(step)
        self.path.write_text(text, encoding="utf-8")
        self._marks.clear()

    def _step(self, copies: list[tuple[str, int, int, float, float]]) -> StepTimeline:
        times = [self._clock.seconds(mark.moment) for mark in self._marks]
        seconds = times[-1] if times else 0.0
        lanes = {"out": "copy out", "in": "copy in", "spill": "disk", "fill": "disk"}
        moved = []
        for kind, ticket_id, nbytes, begin, end in copies:
            start, stop = max(begin - self._clock.start, 0.0), min(end - self._clock.start, seconds)
            if stop > start:
                moved.append(Span(lanes[kind], kind, self._tickets.get(ticket_id, ""), start, stop, nbytes, ticket_id))
        memory = tuple(MemorySample(at, *mark.memory) for at, mark in zip(times, self._marks, strict=True))
        held_up = self._waits(times)
        return StepTimeline(
            device=str(self._device),
            tier=self._tier,
            memory_label="allocated by torch"
            if device_of(self._device).is_accelerator
            else "resident set of the process",
            seconds=seconds,
            spans=(*without(self._compute(times), held_up), *held_up, *sorted(moved, key=lambda span: span.start)),
            memory=memory,
            tensors=tuple(self.tensors.found(times, moved)),
        )

    def _compute(self, times: list[float]) -> list[Span]:
        """Return compute spans: the innermost module in forward, the last node to unpack in backward, the optimizer."""
        spans: list[Span] = []
        running: list[str] = []
        node, since = "", 0.0
        for at, mark in zip(times, self._marks, strict=True):
            if mark.kind in ("enter", "exit"):
                if running and at > since:
                    spans.append(Span("compute", "forward", running[-1], since, at))
                since = at
                if mark.kind == "enter":
                    running.append(mark.name)
                elif running:
                    running.pop()
            elif mark.kind == "forward":
                since = at
            elif mark.kind == "pack" and mark.name not in ("", *running[-1:]):  # a compiled graph
                spans.append(Span("compute", "forward", mark.name, since, at))
                since = at
            elif mark.kind in ("unpack", "backward end", "end"):
                if node and at > since:
                    spans.append(Span("compute", "backward", node, since, at))
                node, since = (mark.name if mark.kind == "unpack" else ""), at
            elif mark.kind == "optimizer":
                since = at
            elif mark.kind == "optimizer end":
                spans.append(Span("compute", "optimizer", "step", since, at))
        return merged(spans)

    def _waits(self, times: list[float]) -> list[Span]:
        """Return hooks that wait or recompute. A recipe runs at the end of its hook, after its inputs are loaded."""
        spans = []
        for (at, mark), (until, after) in itertools.pairwise(zip(times, self._marks, strict=True)):
            ends = {"pack": "packed", "unpack": "unpacked"}.get(mark.kind)
            if ends != after.kind:
                continue
            seconds, nbytes = after.recomputed
            waited = max(at, until - seconds)
            if waited - at >= WAIT_SECONDS_MIN:
                name = "before a copy-out" if mark.kind == "pack" else mark.name
                spans.append(Span("waiting", "wait", name, at, waited))
            if nbytes:
                spans.append(Span("recompute", "recompute", mark.name, waited, until, nbytes))
        return spans
