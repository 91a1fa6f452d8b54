"""Counts the memory of optimizer steps, which no plan can lower: their state and their temporaries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offload.control.profile_listener import RecordedStep
from offload.devices.device import device_of
from offload.plan.trace import Node, Trace
from offload.profiling.model_state import storage_bytes, tensors_in
from offload.torch_compat.allocation_profile import MARK_PREFIX, AllocationProfile

__all__ = ["OPTIMIZER_NODE", "OptimizerWatch", "watching_optimizers", "with_optimizer"]

OPTIMIZER_NODE = "optimizer.step"


class OptimizerWatch:
    """Counts the most bytes on the device during the first step of each optimizer.

    Attributes
    ----------
    peak_bytes
        The most bytes so far; 0 if no optimizer has stepped.
    is_incomplete
        Whether some optimizer's step could not be counted: it calls the training step itself, as closures do.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.is_incomplete = False
        self._seen: list[torch.optim.Optimizer] = []
        self._profile: AllocationProfile | None = None
        self._held_bytes = 0
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

    def _begin(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(each is optimizer for each in self._seen):
            return
        self._seen.append(optimizer)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if any(each is not None for each in (*args[1:], *kwargs.values())) or not parameters:
            self.is_incomplete = True
            return
        device = device_of(parameters[0].device)
        self._profile = AllocationProfile(parameters[0].device)
        if not self._profile.start():
            self._profile, self.is_incomplete = None, True
            return
        self._held_bytes = device.allocated_bytes() if device.is_accelerator else self._bytes_of_all()
        self._profile.begin_span(f"{MARK_PREFIX}optimizer")

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = self._profile.stop() if self._profile is not None else None
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
        self.peak_bytes = max(self.peak_bytes, self._held_bytes + most)

    def _bytes_of_all(self) -> int:
        """Of parameters, gradients and state of the optimizers so far."""
        groups = [group for each in self._seen for group in each.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        state = tensors_in([list(each.state.values()) for each in self._seen])
        gradients = [parameter.grad for parameter in parameters]
        return sum(storage_bytes([*parameters, *gradients, *state]).values())


@contextmanager
def watching_optimizers() -> Iterator[OptimizerWatch]:
    """Watch the optimizers that step within, from the first call of `listen` on."""
    watch = OptimizerWatch()
    try:
        yield watch
    finally:
        watch.close()


def with_optimizer(step: RecordedStep, peak_bytes: int) -> RecordedStep:
    """Return the step with one more node at its end, in which the optimizer steps."""
    if not peak_bytes:
        return step
    trace = step.trace
    nodes = (*trace.nodes, Node(OPTIMIZER_NODE, 0.0, True))
    longer = Trace(nodes, (*trace.base_bytes, peak_bytes), trace.tensors, trace.source, trace.link)
    return replace(step, trace=longer, fixed_bytes=(*step.fixed_bytes, peak_bytes))
