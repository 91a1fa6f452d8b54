"""Counts the memory of optimizer steps, which no plan can lower: their state and their temporaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offload.capacity.temporaries import temporary_bytes, undivided_bytes
from offload.devices.device import device_of
from offload.optimizer_state import mover
from offload.optimizer_state.forecast import StateForecast, forecast, still_written
from offload.optimizer_state.streamed_state import would_leave
from offload.plan import Link, Plan, StateChunk, Update, simulate, simulate_cycle
from offload.plan.rescale import SizedStep
from offload.plan.trace import OPTIMIZER_NODE, Node, Trace
from offload.profiling.model_state import tensors_in
from offload.runtime.engine import storage_bytes
from offload.torch_compat.allocation_profile import MARK_PREFIX, AllocationProfile
from offload.units import format_bandwidth, format_bytes

__all__ = [
    "SMALLEST_BYTES",
    "MovedState",
    "OptimizerWatch",
    "watching_optimizers",
    "with_optimizer",
]

SMALLEST_BYTES = 1 << 20  # as `offload.enable` has it


@dataclass(frozen=True)
class MovedState:
    """What ``optimizer_state=True`` would change: the optimizers' state is in the store between steps.

    Attributes
    ----------
    nbytes
        Bytes that leave memory between steps.
    model_bytes
        The most of them that are in memory while the model runs.
    peak_bytes
        The most bytes on the device while an optimizer steps.
    chunks
        Of these bytes, those of each chunk of the optimizers that step chunk by chunk, in order.
    optimizers
        How many optimizers have such state.
    """

    nbytes: int
    model_bytes: int
    peak_bytes: int
    chunks: tuple[int, ...] = ()
    optimizers: int = 1

    def within(self, trace: Trace) -> Trace:
        """Return a step that `with_optimizer` has returned, with this state moved."""
        away = self.nbytes - self.model_bytes
        base = [
            self.peak_bytes if node.name == OPTIMIZER_NODE else max(0, nbytes - away)
            for node, nbytes in zip(trace.nodes, trace.base_bytes, strict=True)
        ]
        return replace(trace, base_bytes=tuple(base))

    def seconds(self, plan: Plan) -> float:
        """Return what moving it adds to a step with this plan of a step that `with_optimizer` has returned, in seconds.

        Copies overlap with each other, with forward, backward and the updates of other chunks, as `simulate_cycle` has
        it. Those of an optimizer that does not step in chunks overlap with nothing.
        """
        link, whole, update_seconds = plan.link, plan.recomputed_trace, plan.trace.nodes[-1].seconds
        model = replace(whole, nodes=whole.nodes[:-1], base_bytes=whole.base_bytes[:-1])
        update = Update(
            tuple(StateChunk(nbytes, update_seconds * nbytes / self.nbytes) for nbytes in self.chunks),
            ahead_bytes=mover.AHEAD_BYTES,
            behind_bytes=mover.BEHIND_BYTES,
        )
        alone = simulate(model, plan.swaps, link).step_seconds + update.seconds
        cycle = simulate_cycle(model, plan.swaps, link, update, range(len(self.chunks)))
        undivided = self.nbytes - update.bytes
        copies = undivided / link.out_bandwidth + undivided / link.in_bandwidth
        return max(0.0, cycle.seconds - alone) + copies + link.byte_seconds * self.nbytes


class OptimizerWatch:
    """Counts the most bytes on the device during the first step of each optimizer, and times its steps.

    A step with a closure runs the model's forward and backward. Its temporaries are counted afterwards, on copies
    without data, and it is not timed.

    Attributes
    ----------
    peak_bytes
        The most bytes so far; 0 if no optimizer has stepped.
    is_incomplete
        Whether some optimizer's step could not be counted.
    stays
        Why the state of an optimizer would not be moved, by name of its class.
    has_stepped
        Whether an optimizer's step is over.
    stepped
        Called after each step, if any.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.is_incomplete = False
        self.stays: dict[str, str] = {}
        self.has_stepped = False
        self.stepped: Callable[[], None] | None = None
        self._forecasts: list[StateForecast] = []
        self._moved_peak_bytes = 0
        self._seen: list[torch.optim.Optimizer] = []
        self._seconds: dict[int, float] = {}  # by identity of those in `_seen`: of the shortest step
        self._begun: Any = None
        self._profile: AllocationProfile | None = None
        self._held_bytes = 0
        self._device = torch.device("cpu")
        self._hooks: list[RemovableHandle] = []

    def listen(self) -> None:
        """Begin to watch. Call it when a model is enabled: its own hook, which comes first, ends the step's profile."""
        if not self._hooks:
            self._hooks = [
                register_optimizer_step_pre_hook(self._begin),
                register_optimizer_step_post_hook(self._end),
            ]

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._abandon()

    def _abandon(self) -> None:
        """End the profile of a step that has not ended: it raised an exception, or another step begins within it."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            self.is_incomplete = True

    @property
    def seconds(self) -> float:
        """How long one step of each optimizer takes together."""
        return sum(self._seconds.values())

    @property
    def state_bytes(self) -> int:
        """Of the state that the optimizers so far have created."""
        return sum(storage_bytes(self._state()).values())

    @property
    def moved(self) -> MovedState | None:
        """What moving all their state would change; None if none of it can be moved, or it is not known."""
        moving = [each for each in self._forecasts if each.nbytes]
        if not moving or self.is_incomplete:
            return None
        divided = [sum(chunk) for each in moving if each.is_divided for chunk in each.chunks]
        return MovedState(
            nbytes=sum(each.nbytes for each in moving),
            model_bytes=still_written(chunk for each in moving for chunk in each.chunks),
            peak_bytes=self._moved_peak_bytes,
            chunks=tuple(nbytes for nbytes in divided if nbytes),
            optimizers=len(moving),
        )

    def notes(self, link: Link) -> list[str]:
        """Return what a reader of the answer has to know about the optimizers' state, and moving it over `link`."""
        notes = []
        if self.moved is not None:
            out, into = format_bandwidth(link.out_bandwidth), format_bandwidth(link.in_bandwidth)
            slowdown = f"The slowdown is predicted for a link with {out} out and {into} in."
            if not link.is_steady:
                slowdown = (
                    f"The slowdown is not known: the speed of the link ({out} out, {into} in) changed by more than a "
                    "factor of two while it was measured. Try again when nothing else uses it."
                )
            notes.append(
                f"State moved: optimizer_state=True; {format_bytes(self.moved.nbytes)} leave memory between steps. In "
                "memory are counted: what is being written during forward, and during the optimizer's step what is "
                f"read ahead too. {slowdown}"
            )
        notes += [f"The state of {name} is not moved: {why}." for name, why in self.stays.items()]
        return notes

    def _begin(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._abandon()
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            self._begun = None
            return
        if self._has_seen(optimizer):
            self._begun = device_of(self._device).mark()
            return
        self._see(optimizer)
        self._profile = AllocationProfile(self._device)
        if not self._profile.start():
            self._profile, self.is_incomplete = None, True
            return
        self._held_bytes = self._bytes_now()
        self._profile.begin_span(f"{MARK_PREFIX}optimizer")
        self._begun = device_of(self._device).mark()

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._time(optimizer)
        if self._profile is not None:
            self._read(optimizer, self._profile)
        elif not self._has_seen(optimizer):  # it has a closure, or its closure has begun to watch
            self._count(optimizer)
        self.has_stepped = True
        if self.stepped is not None:
            self.stepped()

    def _has_seen(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(each is optimizer for each in self._seen)

    def _see(self, optimizer: torch.optim.Optimizer) -> None:
        self._seen.append(optimizer)
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        self._device = next((each.device for each in parameters), self._device)

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        self._see(optimizer)
        temporaries = undivided_bytes(optimizer)
        self.is_incomplete |= temporaries is None
        now = self._bytes_now()
        self._forecast(optimizer, now + (temporaries or 0), now)

    def _read(self, optimizer: torch.optim.Optimizer, profile: AllocationProfile) -> None:
        found = profile.stop()
        if found is None:
            return
        self._profile = None
        now = most = 0
        live: dict[int | str, int] = {}
        for kind, place, nbytes in found:
            if kind == "alloc":
                live[place] = nbytes
                now += nbytes
            elif kind == "free":
                now -= live.pop(place, 0)
            most = max(most, now)
        self._forecast(optimizer, self._held_bytes + most, self._held_bytes + now)

    def _time(self, optimizer: torch.optim.Optimizer) -> None:
        begun, self._begun = self._begun, None
        if begun is None:
            return
        device = device_of(self._device)
        end = device.mark()
        device.synchronize()
        measured = device.seconds_since(begun, [end])
        if measured is not None:
            self._seconds[id(optimizer)] = min(measured[0], self._seconds.get(id(optimizer), math.inf))

    def _forecast(self, optimizer: torch.optim.Optimizer, peak_bytes: int, end_bytes: int) -> None:
        """Note what of an optimizer's state could move.

        Parameters
        ----------
        optimizer
            It has stepped.
        peak_bytes, end_bytes
            The most bytes during this step, and those after it.
        """
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        found = forecast(optimizer, partial(self._leaves, self._device))
        if found.stays and next(tensors_in(list(optimizer.state.values())), None) is not None:
            self.stays[type(optimizer).__name__] = found.stays
        others = still_written(chunk for each in self._forecasts for chunk in each.chunks)
        self._forecasts.append(found)
        kept = end_bytes - sum(each.nbytes for each in self._forecasts)
        temporaries = max(0, peak_bytes - end_bytes)
        if found.nbytes and found.is_divided:
            temporaries = temporary_bytes(optimizer, found.params, temporaries)
        self._moved_peak_bytes = max(self._moved_peak_bytes, kept + temporaries + found.step_bytes + others)

    @staticmethod
    def _leaves(device: torch.device, state: dict[Any, Any], name: Any) -> bool:
        return would_leave(state, name, device, SMALLEST_BYTES)

    def _bytes_now(self) -> int:
        """On an accelerator, all that is allocated. Elsewhere parameters, gradients and state of optimizers."""
        device = device_of(self._device)
        if device.is_accelerator:
            return device.allocated_bytes()
        groups = [group for each in self._seen for group in each.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        return sum(storage_bytes([*parameters, *gradients, *self._state()]).values())

    def _state(self) -> Iterator[Tensor]:
        return tensors_in([list(dict.values(each.state)) for each in self._seen])  # what has moved stays so


@contextmanager
def watching_optimizers() -> Iterator[OptimizerWatch]:
    """Watch the optimizers that step within, from the first call of `listen` on."""
    watch = OptimizerWatch()
    try:
        yield watch
    finally:
        watch.close()


def with_optimizer(step: SizedStep | Trace, peak_bytes: int, seconds: float = 0.0) -> SizedStep | Trace:
    """Return the step with one more node at its end, in which the optimizer steps, for all batch sizes the same."""
    if not peak_bytes:
        return step
    trace = step if isinstance(step, Trace) else step.trace
    nodes = (*trace.nodes, Node(OPTIMIZER_NODE, seconds, True))
    longer = Trace(nodes, (*trace.base_bytes, peak_bytes), trace.tensors, trace.source, trace.link)
    if isinstance(step, Trace):
        return longer
    base, slopes = (*step.base_slopes, 0.0), (*step.second_slopes, 0.0)
    return replace(step, trace=longer, base_slopes=base, second_slopes=slopes)
