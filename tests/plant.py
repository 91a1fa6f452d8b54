"""A machine made of figures, on which a controller's plans are steps: so that what it decides can be tested.

Its computation, its link and what copies cost the computation are given, and differ from what the profile says. Each
step is slowed by a random factor that neighbouring steps share in part.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from offload.control import controller as controlling
from offload.control import promise
from offload.control.controller import PlanController
from offload.control.limits import LIMITS, Limits
from offload.control.phase import Phase, SignatureState
from offload.control.planned_step import PlannedStep
from offload.options import Options
from offload.plan import Link, Plan, simulate
from offload.plan.trace import Trace
from offload.profiling.model_state import HeldBytes
from offload.profiling.profiler import Profile
from offload.runtime.counters import Counts
from offload.runtime.executor import Measured
from offload.runtime.schedule import PackEntry, StepOrder

SIGNATURE = "the step"


@dataclass
class Plant:
    """What is true of the machine and of the step.

    Attributes
    ----------
    trace
        The step as it is.
    link
        The link as it is; `byte_seconds` and `swap_seconds` are what swapping costs the computation.
    noise
        Standard deviation of the factor by which a step is slowed.
    fixed_seconds
        What a step takes more as soon as it moves anything.
    busy
        Factor by which a neighbour slows every step.
    first_factor
        Factor by which the first step of each plan that swaps is slower.
    copies_slow
        As in `Limits`: the share by which reference steps that save all memory compute too slowly.
    """

    trace: Trace
    link: Link
    noise: float = 0.0
    seed: int = 0
    fixed_seconds: float = 0.0
    busy: float = 1.0
    first_factor: float = 1.0
    copies_slow: float = 0.0
    steps: list[tuple[bool, float]] = field(default_factory=list)  # whether it was a reference step, and its seconds
    plans: dict[int, Plan] = field(default_factory=dict)  # by the number of the first step that followed it

    def __post_init__(self) -> None:
        self.reseed(self.seed)

    def reseed(self, seed: int) -> None:
        """Let the same machine have other noise."""
        self._random = random.Random(seed)
        self._drift = 0.0

    @property
    def compute_seconds(self) -> float:
        """What the step takes without swapping."""
        return sum(node.seconds for node in self.trace.nodes)

    def seconds(self, plan: Plan) -> float:
        """What a step of this plan takes, without noise."""
        timing = simulate(replace(plan.recomputed_trace, nodes=self._nodes(plan)), plan.swaps, self.link)
        return timing.step_seconds + self._slowed(plan) + len(plan.swaps) * self.link.swap_seconds

    def measure(self, plan: Plan, *, is_reference: bool) -> Measured:
        """Run a step."""
        is_first = plan not in self.plans.values()
        if is_first:
            self.plans[len(self.steps)] = plan
        self._drift = 0.7 * self._drift + self._random.gauss(0, 0.7 * self.noise)
        factor = self.busy * (1 + abs(self._drift + self._random.gauss(0, 0.5 * self.noise)))
        factor *= self.first_factor if is_first and plan.swaps else 1.0
        own = factor if is_reference else factor * (1 + self._slowed(plan) / self.compute_seconds)
        if is_reference and plan.swaps:
            own *= 1 + self.copies_slow * (1 - plan.peak_bytes / plan.unswapped_peak_bytes)
        nodes = tuple(own * node.seconds for node in self.trace.nodes)
        hooks = len(plan.swaps) * self.link.swap_seconds
        step = factor * self.seconds(plan)
        self.steps.append((is_reference, step))
        starts = tuple(0.0 for _ in nodes)
        return Measured(starts, nodes, {}, max(0.0, step - sum(nodes)), hooks, step, sum(nodes) + hooks)

    def _nodes(self, plan: Plan) -> tuple[Any, ...]:
        own = [node.seconds for node in self.trace.nodes]
        more = [a.seconds - b.seconds for a, b in zip(plan.recomputed_trace.nodes, plan.trace.nodes, strict=True)]
        rows = zip(self.trace.nodes, own, more, strict=True)
        return tuple(replace(node, seconds=seconds + again) for node, seconds, again in rows)

    def _slowed(self, plan: Plan) -> float:
        size = {tensor.id: tensor.bytes for tensor in plan.trace.tensors}
        moved = sum(size[swap.id] for swap in plan.swaps)
        return self.fixed_seconds + self.link.byte_seconds * moved if moved else 0.0


class Executor:
    """Stands in for what follows a schedule: its step is over at once."""

    on_schedule = True
    is_disturbed = False
    peak_bytes = None
    recompute_seconds = 0.0
    missed: frozenset[int] = frozenset()
    plant: Plant

    def __init__(self, schedule: Any, *_: object) -> None:
        self.schedule = schedule
        self._measured = self.plant.measure(schedule.plan, is_reference=schedule.is_serial)

    def measured(self, _: int) -> Measured:
        """What the step took."""
        return self._measured

    def late_packs(self, *_: object) -> dict[int, float]:
        """None is late."""
        return {}


class Engine:
    """Stands in for the engine: knows the link."""

    device = torch.device("cpu")

    def __init__(self, link: Link) -> None:
        self._link = link

    def store_stats(self) -> dict[str, float]:
        """What copies took, as the store tells it."""
        link = self._link
        return {"out_seconds": 1.0, "out_bytes": link.out_bandwidth, "in_seconds": 1.0, "in_bytes": link.in_bandwidth}


def order_of(trace: Trace) -> StepOrder:
    """A recorded order that has the trace's tensors, and each of them once."""
    order = StepOrder(node_count=len(trace.nodes))
    for tensor in trace.tensors:
        order.entries[tensor.id] = PackEntry(
            tensor.id, tensor.bytes, tensor.packed, tensor.first_backward, tensor.last_use
        )
        order.uses.append((tensor.first_backward, tensor.id))
    order.uses.sort()
    order.backward_nodes = [number for number, node in enumerate(trace.nodes) if node.backward]
    return order


def run(
    plant: Plant,
    recorded: Trace,
    believed: Link,
    steps: int,
    then: Callable[[int], None] | None = None,
    limits: Limits = LIMITS,
    free_bytes: int = 1 << 60,
    held: Callable[[], HeldBytes] = lambda: HeldBytes(0, 0),
    *,
    corrects: bool = True,
    **options: Any,
) -> tuple[PlannedStep, Phase]:
    """Let a controller run steps on the plant.

    Parameters
    ----------
    recorded
        The step as it was profiled.
    believed
        The link as it was calibrated.
    steps
        How many to run after the profiled one.
    then
        Called before each step, with its number.
    limits
        Of the controller, without `copies_slow`.
    corrects
        Whether the controller corrects reference steps by the plant's `copies_slow`.
    free_bytes
        Free memory; with enough of it, reference steps of a plan that saves little keep every tensor.
    held
        Returns the bytes of model, gradients and optimizers before a step, without those before the profiled step.
    options
        As `offload.enable` takes them.
    """
    defaults = dict.fromkeys(("memory_limit", "max_slowdown", "n_tensors", "lookahead_nodes"))
    fixed = {"min_tensor_bytes": 1, "exclude": (), "host_limit": 0, "spill_dir": ""}
    wanted = Options(**{**defaults, **fixed, **options})
    limits = replace(limits, copies_slow=plant.copies_slow if corrects else 0.0)
    regions = mock.Mock(**{"choose.return_value": False, "are_given_up.return_value": False})
    controller = PlanController(
        wanted, Engine(plant.link), Counts(), lambda _: None, lambda: believed, held,
        lambda *_: "there are no operators", regions, limits=limits,
    )  # fmt: skip
    members = {tensor.id: (tensor.id,) for tensor in recorded.tensors}
    none = [0] * len(recorded.nodes)
    profile = Profile(order_of(recorded), recorded, members, none, HeldBytes(0, 0), knows_temporaries=True)
    planned = PlannedStep(limits, profile, believed, HeldBytes(0, 0))
    state = controller.states[SIGNATURE] = SignatureState(Phase.PLANNING, planned=planned)
    model = torch.nn.Identity()
    executors = {"MeteredExecutor": Executor, "ScheduleExecutor": Executor}
    with (
        mock.patch.object(Executor, "plant", plant, create=True),
        mock.patch.multiple(controlling, **executors),
        mock.patch.object(promise, "Stopwatch", mock.Mock()),
        mock.patch.object(promise, "free_bytes", return_value=free_bytes),
    ):
        for number in range(steps):
            if then is not None:
                then(number)
            controller.observer(SIGNATURE, model)
            if not controller.needs_hooks(SIGNATURE):
                plant.steps[-1] = (False, plant.compute_seconds)
        planned.read_measurements(controller._counts)
    return planned, state.phase
