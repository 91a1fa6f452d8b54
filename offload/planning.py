"""Who decides what a round follows: a schedule by hand, or a plan that is held to what it promised.

Beside the data path: a session asks at the beginning of every round. Plans are kept per signature.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import median
from typing import Protocol

from torch import nn

from offload.activations import LATE_SECONDS, MEASUREMENTS_MAX, HandRounds, WeighedCourse, Weights
from offload.course import Course, Follower, Idle, Measured, Stopwatch
from offload.engine import Engine
from offload.held import HeldBytes
from offload.options import Options, device_bytes
from offload.plan import (
    InfeasibleLimitError,
    Link,
    Plan,
    Swap,
    fastest_plan,
    least_memory_plan,
    make_plan,
    manual_plan,
    resident_bytes,
)
from offload.profiler import Profile, Profiler, Recorder
from offload.report import Counts, StepRecord
from offload.schedule import Schedule, StepOrder, by_hand, of_plan
from offload.trace import Trace
from offload.units import format_seconds
from offload.weak import weakly

log = logging.getLogger("offload")

SIGNATURES_MAX = 64
PROFILES_MIN = 4
ROUNDS_WATCHED_MAX = 2
DEVIATIONS_MAX = 4
BLIND_PROFILES_MAX = 3  # of a signature: another profiler was running each time
REPLANS_MAX = 5
LOOK_AGAIN_STEPS = 64  # of a plan without swaps: one of so many is watched still
MEASUREMENTS_MIN = 3  # of a plan's steps, before it is judged: a neighbour may have slowed one
_OFF = 0.05  # a prediction that is off by more is worth a new plan
_FASTER = 0.25
_DEVICE_MEASURED_STEPS = 8
_KEPT = "kept by plan"

# Told of every profiled step before it is planned (trace, link, most bytes that host memory takes), where somebody
# wants to see the options instead of a run. While it is set nothing is done by hand.
on_profile: Callable[[Trace, Link, int], None] | None = None


@dataclass(frozen=True)
class Signature:
    """What tells one kind of step from another: the shapes and kinds of the model's inputs, and the mode."""

    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[object, ...]

    input_bytes: int = 0

    def is_within(self, other: Signature) -> bool:
        """Whether the other is of the same kinds and nowhere smaller."""
        return self.kinds == other.kinds and all(
            len(own) == len(theirs) and all(map(operator.le, own, theirs))
            for own, theirs in zip(self.shapes, other.shapes, strict=True)
        )


class Planning(Protocol):
    """What a session asks."""

    def follower(self, signature: object, model: nn.Module) -> Follower:
        """Who listens to the round that begins now."""

    def needs_hooks(self, signature: object) -> bool:
        """Whether the round that begins now has anything to be told, after `follower` was asked."""

    def forget(self, signature: object) -> None:
        """This signature behaves otherwise than recorded: record it anew at its next round."""

    def pause(self) -> None:
        """Something else than a step begins: stop watching the steps that are over."""

    def stop(self) -> None:
        """Stop watching whatever is only watched in a step."""


class ByHand:
    """Swaps `n_tensors`, brings each back `lookahead_nodes` ahead."""

    def __init__(self, options: Options, engine: Engine, counts: Counts, recorded: Callable[[StepOrder], None]) -> None:
        self._options = options
        self._engine = engine
        self._counts = counts
        self._recorded = recorded
        self._recorders: OrderedDict[object, Recorder] = OrderedDict()
        self.schedules: OrderedDict[object, HandRounds] = OrderedDict()

    def follower(self, signature: object, model: nn.Module) -> Follower:
        """A recorder at a signature's first round, the course of its schedule from then on."""
        recorder = self._recorders.get(signature)
        if recorder is not None and recorder.finished:
            del self._recorders[signature]
            self._recorded(recorder.order)
            count, lookahead_nodes = self._options.n_tensors, self._options.lookahead_nodes
            assert count is not None
            assert lookahead_nodes is not None
            schedule = by_hand(recorder.order, count, lookahead_nodes)
            self.schedules[signature] = HandRounds(schedule, Weights.by_hand(schedule))
        rounds = self.schedules.get(signature)
        for table in (self.schedules, self._recorders):
            while len(table) > SIGNATURES_MAX:
                table.popitem(last=False)
        if rounds is None:
            recorder = self._recorders[signature] = Recorder()
            return recorder
        self.schedules.move_to_end(signature)
        rounds.learn(self._counts)
        rounds.rounds += 1
        # Weakly: its last rounds are held here, and must not hold the store when the session is gone.
        about = (rounds.schedule, self._engine, self._counts, "n_tensors", partial(weakly(self.forget), signature))
        if rounds.rounds > MEASUREMENTS_MAX and rounds.rounds % LOOK_AGAIN_STEPS:
            self._counts.unmeasured_steps += 1
            return Course(*about)
        course = WeighedCourse(*about, Stopwatch(self._engine), rounds.weights, finds_held=True)
        rounds.courses.append(course)
        return course

    def needs_hooks(self, signature: object) -> bool:
        """What is kept by hand is counted."""
        return True

    def settle(self) -> None:
        """Read every measurement that is complete."""
        for rounds in self.schedules.values():
            rounds.learn(self._counts)

    @property
    def main(self) -> HandRounds | None:
        """What is known of the signature with most steps, the latest where several have as many."""
        return max(reversed(self.schedules.values()), key=lambda each: each.rounds, default=None)

    def forget(self, signature: object) -> None:
        """Record it anew at its next round."""
        self.schedules.pop(signature, None)

    def pause(self) -> None:
        """Nothing is watched but the hooks themselves."""

    def stop(self) -> None:
        """Nothing is watched but the hooks themselves."""


@dataclass
class Pursuit:
    """One signature: its profile, its plan, and what its steps have really taken."""

    profile: Profile
    link: Link
    held: HeldBytes  # the most that there ever was before a step
    plan: Plan | None = None
    schedule: Schedule | None = None
    replans: int = 0
    rounds: int = 0
    courses: deque[WeighedCourse] = field(default_factory=lambda: deque(maxlen=4))  # with measurements to be read
    node_seconds: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=MEASUREMENTS_MAX))
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEASUREMENTS_MAX))
    swap_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEASUREMENTS_MAX))  # in hooks, of a swap
    starts: tuple[float, ...] = ()  # measured in the last step
    late: dict[int, float] = field(default_factory=dict)  # tensor id → seconds that the last step waited for it
    late_tensors: int = 0  # that the last measured step waited for, or asked for before they had begun to come back
    weights: Weights | None = None  # of the plan
    activation_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=MEASUREMENTS_MAX))  # at peaks
    refusal: InfeasibleLimitError | None = None  # without its traceback: no plan keeps the limit
    blind_profiles: int = 0  # so far, the temporaries unknown each time


class ByPlan:
    """Profiles a signature's first round, plans, and plans again where the promise is not kept.

    With `n_tensors` the plan is what is swapped by hand, and only the leads are the planner's.

    Parameters
    ----------
    recorded
        Told of every step that has been recorded.
    link
        Measures the link; called at the first plan.
    held
        What is on the device before a step begins.
    """

    def __init__(
        self,
        options: Options,
        engine: Engine,
        counts: Counts,
        recorded: Callable[[StepOrder], None],
        link: Callable[[], Link],
        held: Callable[[], HeldBytes],
    ) -> None:
        self._options = options
        self._engine = engine
        self._counts = counts
        self._recorded = recorded
        self._measure_link = link
        self._held = held
        self._profilers: OrderedDict[object, Profiler] = OrderedDict()
        self.pursuits: OrderedDict[object, Pursuit] = OrderedDict()
        self.latest: Pursuit | None = None
        self._peculiar: Counter[object] = Counter()  # how often a signature has left its course
        self._lock = threading.RLock()

    def follower(self, signature: object, model: nn.Module) -> Follower:
        """A profiler at a signature's first round, the course of its plan from then on.

        Raises
        ------
        InfeasibleLimitError
            No plan keeps the memory limit; nothing has been run yet.
        """
        with self._lock:
            self.pause()
            held = cache(partial(self._held_before, signature))  # hundreds of tensors to look at, seldom for anything
            for recorded in list(self._profilers):
                self._begin_pursuit(recorded)
            pursuit = self.pursuits.get(signature)
            while len(self.pursuits) > SIGNATURES_MAX:
                self.pursuits.popitem(last=False)
            while len(self._profilers) > SIGNATURES_MAX:
                self._profilers.popitem(last=False)[1].stop()
            if pursuit is None:
                larger = self._larger(signature)
                if larger is not None:
                    if larger.plan is None or self._outgrown(larger, held):
                        self._make_plan(larger, held())
                    return self._course(signature, larger, borrowed=True)
                return self._profiler(signature, model, held())
            self.pursuits.move_to_end(signature)
            if 0 < pursuit.blind_profiles < BLIND_PROFILES_MAX:  # a plan that knows them may be had now
                return self._profiler(signature, model, held())
            self._learn(pursuit)
            if pursuit.plan is None or self._outgrown(pursuit, held) or self._is_off(pursuit):
                self._make_plan(pursuit, held())
            return self._course(signature, pursuit)

    def _held_before(self, signature: object) -> HeldBytes:
        held = self._held()
        if self._engine.device.type == "cpu" and isinstance(signature, Signature):
            return replace(held, state=held.state + signature.input_bytes)
        return held

    def needs_hooks(self, signature: object) -> bool:
        """False where the plan swaps nothing, its steps were measured and want no other, and no limit is to be kept.

        A limit is hard: another branch than the planned one has to be noticed as it begins.
        """
        with self._lock:
            pursuit = self.pursuits.get(signature)
            if pursuit is None or pursuit.plan is None or pursuit.plan.swaps or self._options.memory_limit is not None:
                return True
            judged = len(pursuit.step_seconds) >= MEASUREMENTS_MIN or not self._measures(pursuit)
            return not judged or pursuit.rounds % LOOK_AGAIN_STEPS == 0

    def _measures(self, pursuit: Pursuit) -> bool:
        return self._engine.device.type == "cpu" or pursuit.rounds <= _DEVICE_MEASURED_STEPS

    def _profiler(self, signature: object, model: nn.Module, held: HeldBytes) -> Follower:
        """Profile this round, unless an earlier one of the same signature waits for its backward."""
        for profiler in self._profilers.values():
            profiler.rounds_since += 1
            if profiler.rounds_since > ROUNDS_WATCHED_MAX:
                profiler.stop()  # nobody differentiates it
        if self._peculiar[signature] >= DEVIATIONS_MAX:
            return Idle()
        pending = self._profilers.get(signature)
        if pending is not None and pending.rounds_since <= ROUNDS_WATCHED_MAX:
            return Idle()
        self._counts.profiled_steps += 1
        profiler = self._profilers[signature] = Profiler(self._engine, model, held)
        return profiler

    def forget(self, signature: object) -> None:
        """Record it anew at its next round, even where a plan could be borrowed."""
        with self._lock:
            self.pursuits.pop(signature, None)
            self._peculiar[signature] += 1
            if self._peculiar[signature] == DEVIATIONS_MAX:
                log.info("a step of one kind never runs twice in the same way: it goes on by demand")

    def pause(self) -> None:
        """Stop watching the steps that are over."""
        for profiler in self._profilers.values():
            if profiler.finished:
                profiler.stop()

    def stop(self) -> None:
        """Stop watching, over or not: an optimizer steps, or the session ends."""
        for profiler in self._profilers.values():
            profiler.stop()

    def settle(self) -> Pursuit | None:
        """Read every measurement that is complete; the pursuit of the latest signature that was profiled."""
        with self._lock:
            self.pause()
            for signature in list(self._profilers):
                self._begin_pursuit(signature)
            for pursuit in self.pursuits.values():
                self._learn(pursuit)
            return self.latest

    @property
    def main(self) -> Pursuit | None:
        """What is known of the signature with most planned steps, the latest where several have as many."""
        return max(reversed(self.pursuits.values()), key=lambda each: each.rounds, default=None)

    @property
    def gives_up(self) -> bool:
        """Whether a step of one kind never runs twice in the same way, so that it goes on by demand."""
        return any(count >= DEVIATIONS_MAX for count in self._peculiar.values())

    @property
    def knows_temporaries(self) -> bool:
        """Whether every profile tells the bytes of temporaries."""
        return all(pursuit.profile.knows_temporaries for pursuit in self.pursuits.values())

    # -- from profile to plan -----------------------------------------------------------------------------------------

    def _begin_pursuit(self, signature: object) -> Pursuit | None:
        profiler = self._profilers.get(signature)
        profile = profiler.profile() if profiler is not None else None
        if profiler is None or profile is None:
            return None
        del self._profilers[signature]
        self._recorded(profile.order)
        measured = profiler.stopwatch.measured(profile.order.node_count)
        if measured is not None:
            self._counts.steps_measured.append(StepRecord(True, None, measured.step_seconds, measured.stall_seconds))
        link = self._measure_link()
        if measured is not None and profile.trace.tensors:
            link = replace(link, swap_seconds=measured.hook_seconds / len(profile.trace.tensors))
        pursuit = Pursuit(profile, link, profile.held)
        if not profile.knows_temporaries:
            before = self.pursuits.get(signature)
            pursuit.blind_profiles = 1 + (before.blind_profiles if before is not None else 0)
        self.latest = self.pursuits[signature] = pursuit
        if on_profile is not None:
            on_cpu = self._engine.device.type == "cpu"
            on_profile(profile.trace, pursuit.link, 0 if on_cpu else self._options.host_limit)
        return pursuit

    def _make_plan(self, pursuit: Pursuit, held: HeldBytes) -> None:
        pursuit.held = _most(pursuit.held, held)
        trace = self.trace(pursuit)
        limit_bytes = self._options.memory_limit
        try:
            plan = self._wanted_plan(trace, pursuit.link)
        except InfeasibleLimitError as error:
            pursuit.refusal = InfeasibleLimitError(error.limit_bytes, error.least_limit_bytes, error.reasons)
            raise
        if pursuit.late:
            room = limit_bytes if limit_bytes is not None else plan.peak_bytes
            plan = _with_longer_leads(plan, pursuit.late, room)
        if pursuit.plan is not None:
            log.info("planned anew: %s", plan.summary())
        pursuit.plan, pursuit.refusal = plan, None
        pursuit.weights = Weights.of_plan(trace, plan.swaps)
        pursuit.schedule = of_plan(pursuit.profile.order, plan, pursuit.profile.members)
        pursuit.step_seconds.clear()
        pursuit.activation_bytes.clear()
        pursuit.late_tensors = 0
        self.latest = pursuit

    def _wanted_plan(self, trace: Trace, link: Link) -> Plan:
        limit_bytes, slowdown = self._options.memory_limit, self._options.max_slowdown
        if self._options.n_tensors is not None:
            room = device_bytes(self._engine.device)
            return manual_plan(trace, link, self._options.n_tensors, "auto", limit_bytes=room)
        if limit_bytes is not None and slowdown is None:
            return fastest_plan(trace, link, limit_bytes)
        assert slowdown is not None
        return least_memory_plan(trace, link, slowdown, limit_bytes)

    def _outgrown(self, pursuit: Pursuit, held: Callable[[], HeldBytes]) -> bool:
        """Whether what is on the device before the step has grown so that the plan would exceed the limit."""
        limit_bytes, plan = self._options.memory_limit, pursuit.plan
        if limit_bytes is None or plan is None:
            return False
        more = _most(pursuit.held, held()).total - pursuit.held.total
        return plan.peak_bytes + more > limit_bytes

    def trace(self, pursuit: Pursuit) -> Trace:
        """The profile's trace with the bytes that are held now and the durations measured since."""
        trace = pursuit.profile.trace
        profile, held = pursuit.profile, pursuit.held
        # Where gradients are there already, those that the profiled step made are not made a second time.
        own = profile.gradient_bytes if held.gradients > profile.held.gradients else [0] * len(trace.nodes)
        more = [max(held.total - profile.held.total - made, held.state - profile.held.state) for made in own]
        nodes = trace.nodes
        if pursuit.node_seconds:
            seconds = [median(column) for column in zip(*pursuit.node_seconds, strict=True)]
            nodes = tuple(replace(node, seconds=s) for node, s in zip(nodes, seconds, strict=True))
        return replace(trace, nodes=nodes, base_bytes=tuple(map(sum, zip(trace.base_bytes, more, strict=True))))

    def _larger(self, signature: object) -> Pursuit | None:
        """Where many shapes come: the latest plan of a signature that is nowhere smaller, so that its limit holds.

        A loader that yields a new length every time would have every step profiled otherwise.
        """
        if len(self.pursuits) < PROFILES_MIN or signature in self._peculiar or not isinstance(signature, Signature):
            return None
        for other, pursuit in reversed(self.pursuits.items()):
            if isinstance(other, Signature) and signature.is_within(other):
                return pursuit
        return None

    def _course(self, signature: object, pursuit: Pursuit, borrowed: bool = False) -> Course:
        assert pursuit.schedule is not None
        if borrowed:
            self._counts.borrowed_steps += 1
        else:
            pursuit.rounds += 1
            self.latest = pursuit
        schedule = replace(pursuit.schedule, borrowed=True) if borrowed else pursuit.schedule
        about = (schedule, self._engine, self._counts, _KEPT, partial(weakly(self.forget), signature))
        if borrowed or not self._measures(pursuit):
            self._counts.unmeasured_steps += 1
            return Course(*about)
        assert pursuit.weights is not None
        course = WeighedCourse(*about, Stopwatch(self._engine), pursuit.weights)
        pursuit.courses.append(course)
        return course

    # -- from measurements to a better plan ---------------------------------------------------------------------------

    def _learn(self, pursuit: Pursuit) -> None:
        """Read what the last rounds took."""
        unread = []
        for course in pursuit.courses:
            if not course.on_course:
                continue
            measured = course.measured(len(pursuit.profile.trace.nodes))
            if measured is None:
                unread.append(course)
            elif course.schedule is pursuit.schedule:
                self._take_in(pursuit, course, measured)
        pursuit.courses.clear()
        pursuit.courses.extend(unread)

    def _take_in(self, pursuit: Pursuit, course: WeighedCourse, measured: Measured) -> None:
        plan = pursuit.plan
        assert plan is not None
        record = StepRecord(False, plan.expected_seconds, measured.step_seconds, measured.stall_seconds)
        self._counts.steps_measured.append(record)
        if plan.swaps:
            pursuit.swap_seconds.append(measured.hook_seconds / len(plan.swaps))
        # What copies take of the processors while a hook runs is in the hook's time, not in a node's.
        waiting = plan.step_seconds - plan.compute_seconds
        in_hooks = max(0.0, measured.stall_seconds - measured.hook_seconds - waiting)
        slowed = plan.overhead_seconds - len(plan.swaps) * plan.link.swap_seconds
        pursuit.node_seconds.append(_quickened(measured.node_seconds, max(0.0, slowed - in_hooks)))
        pursuit.step_seconds.append(measured.step_seconds)
        pursuit.starts = measured.starts
        if log.isEnabledFor(logging.DEBUG):
            rows = zip(plan.trace.nodes, plan.timing.start, measured.starts, strict=True)
            for number, (node, predicted, found) in enumerate(rows):
                log.debug("node %d (%s): start predicted %.6f s, measured %.6f s", number, node.name, predicted, found)
        owner = {index: tensor for tensor, indices in pursuit.profile.members.items() for index in indices}
        pursuit.late = {}
        for index, seconds in measured.waits.items():
            tensor = owner.get(pursuit.profile.order.duplicates.get(index, index))
            if tensor is not None and seconds > LATE_SECONDS:
                pursuit.late[tensor] = pursuit.late.get(tensor, 0.0) + seconds
        late = course.late_packs(measured).keys()
        pursuit.late_tensors = len({owner[index] for index in late if index in owner})
        self._counts.prefetched_late += len(late - course.missed)
        if course.peak_bytes is not None:
            pursuit.activation_bytes.append(course.peak_bytes)

    def _is_off(self, pursuit: Pursuit) -> bool:
        """Whether the last steps kept the promise badly enough for a new plan. Bounded, logged."""
        plan = pursuit.plan
        if plan is None or len(pursuit.step_seconds) < MEASUREMENTS_MIN or pursuit.replans >= REPLANS_MAX:
            return False
        measured = median(pursuit.step_seconds)
        link = self._measured_link(pursuit.link)
        if pursuit.swap_seconds:
            link = replace(link, swap_seconds=median(pursuit.swap_seconds))
        compute = median(sum(row) for row in pursuit.node_seconds)
        reasons = []
        if abs(measured - plan.expected_seconds) > _OFF * plan.expected_seconds:
            reasons.append(f"a step took {format_seconds(measured)}, not {format_seconds(plan.expected_seconds)}")
        if abs(compute - plan.compute_seconds) > _OFF * plan.compute_seconds:
            reasons.append(f"its computation {format_seconds(compute)}, not {format_seconds(plan.compute_seconds)}")
        for name, found, known in (
            ("copy-out", link.out_bandwidth, pursuit.link.out_bandwidth),
            ("copy-in", link.in_bandwidth, pursuit.link.in_bandwidth),
        ):
            if found < (1 - _OFF) * known:
                reasons.append(f"{name} is slower than planned with")
            elif found > (1 + _FASTER) * known:
                reasons.append(f"{name} is faster than planned with: there is memory or time to give back")
        if not reasons:
            return False
        pursuit.replans += 1
        pursuit.link = link
        log.info("planning anew (%d of at most %d): %s", pursuit.replans, REPLANS_MAX, "; ".join(reasons))
        return True

    def _measured_link(self, link: Link) -> Link:
        """The link as the engine's own copies have found it; as it was where too little has been copied."""
        stats = self._engine.store_stats()
        rates = {}
        for name, known in (("out", link.out_bandwidth), ("in", link.in_bandwidth)):
            seconds, nbytes = stats[f"{name}_seconds"], stats[f"{name}_bytes"]
            rates[name] = nbytes / seconds if seconds > 0.05 else known
        return replace(link, out_bandwidth=rates["out"], in_bandwidth=rates["in"])


def _quickened(seconds: Sequence[float], slowed: float) -> tuple[float, ...]:
    """Durations without what copies have slowed them by, taken off in proportion: at most half of it all."""
    total = sum(seconds)
    share = 1 - min(slowed / total, 0.5) if total > 0 else 1.0
    return tuple(each * share for each in seconds)


def _most(a: HeldBytes, b: HeldBytes) -> HeldBytes:
    return HeldBytes(max(a.state, b.state), max(a.gradients, b.gradients))


def _with_longer_leads(plan: Plan, late: Mapping[int, float], limit_bytes: int) -> Plan:
    """Bring each late tensor back earlier by what it was late, as far as the limit leaves room."""
    trace, starts = plan.trace, plan.timing.start
    swaps = {swap.id: swap for swap in plan.swaps}
    for tensor_id, seconds in sorted(late.items(), key=lambda item: -item[1]):
        swap = swaps.get(tensor_id)
        if swap is None:
            continue
        prefetch = swap.prefetch
        while prefetch > swap.release and starts[swap.prefetch] - starts[prefetch] < seconds:
            earlier = Swap(swap.id, swap.release, prefetch - 1)
            if _peak(trace, [*(s for s in swaps.values() if s.id != swap.id), earlier]) > limit_bytes:
                break
            prefetch -= 1
        swaps[tensor_id] = Swap(swap.id, swap.release, prefetch)
    return make_plan(trace, plan.link, tuple(swaps.values()), plan.limit_bytes)


def _peak(trace: Trace, swaps: Sequence[Swap]) -> int:
    return max(resident_bytes(trace, swaps), default=0)
