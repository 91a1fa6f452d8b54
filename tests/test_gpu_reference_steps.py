"""On an accelerator, reference steps keep every tensor if there is room, until the search for a plan has ended."""

from dataclasses import replace

import pytest
import torch
from accelerator import KIND, gpu
from gpu_rig import assert_nothing_left, cuda  # noqa: F401
from reference_rig import every_second_step
from torch import nn

import offload
from offload.control.limits import LIMITS
from offload.control.plan_search import PlanSearch
from offload.control.promise import SlowdownPromise
from offload.devices.accelerator import Accelerator
from offload.devices.memory import free_bytes

pytestmark = pytest.mark.gpu

STEPS, WIDTH, ROWS = 16, 64, 2048
# A plan is judged after three steps of each kind, however much they vary, and whatever it saves.
QUICK = replace(LIMITS, judged_steps=3, judged_steps_max=3, uneven=1e9, worth_hooks=0, worth_bytes=0, recheck_steps=2)


def train(**knobs):
    """Losses and gradients of every step; the handle."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to(KIND)
    handle = offload.enable(model, min_tensor_bytes="64KiB", recompute=False, **knobs) if knobs else None
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = model(torch.randn(ROWS, WIDTH, generator=generator).to(KIND)).square().mean()
        loss.backward()
        results += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
    if handle is not None:
        handle.disable()
        assert_nothing_left(handle)
    return results, handle


@pytest.fixture
def swapped(monkeypatch):
    """Train, with every second step a reference step; how many tensors each of them swaps."""

    def run(settled_after=None, **knobs):
        found = every_second_step(monkeypatch, settled_after)
        expected, _ = train()  # first: the libraries' workspaces, allocated in the first step, are not the step's
        results, handle = train(max_slowdown=1e9, **knobs)
        assert handle.report().reference_steps == len(found) >= 3
        assert handle.plan.swaps
        assert all(map(torch.equal, results, expected))
        return found

    return run


def test_every_tensor_is_kept_however_much_the_plan_saves(swapped):
    assert set(swapped()) == {0}


def test_a_memory_limit_has_none(swapped):
    assert min(swapped(memory_limit=gpu.get_device_properties(0).total_memory)) > 0


@pytest.mark.parametrize(("share", "is_kept"), [(1.0, True), (0.0, False)])
def test_a_margin_of_half_of_what_the_plan_saves_has_to_be_free(swapped, monkeypatch, share, is_kept):
    """`share` of it is, beside what the step itself needs."""
    may_keep_all, plans = SlowdownPromise._may_keep_all, []

    def noted(promise, planned):
        plans.append(planned.plan)
        return may_keep_all(promise, planned)

    def free_bytes(device):
        plan = plans[-1]
        margin = (LIMITS.device_kept_room - 1) * (plan.unswapped_peak_bytes - plan.peak_bytes)
        return int(plan.unswapped_peak_bytes - min(plan.trace.base_bytes) + share * margin + share)

    monkeypatch.setattr(SlowdownPromise, "_may_keep_all", noted)
    monkeypatch.setattr("offload.control.promise.free_bytes", free_bytes)
    kept = swapped()
    assert set(kept) == {0} if is_kept else min(kept) > 0


@pytest.mark.parametrize(("devices", "is_kept"), [(1, False), (1 << 30, True)])
def test_each_process_that_may_use_the_device_needs_room(swapped, monkeypatch, devices, is_kept):
    monkeypatch.setattr("offload.control.promise.local_processes", lambda: 1 << 30)
    monkeypatch.setattr("offload.control.promise.driven_devices", lambda: devices)
    found = swapped()
    assert set(found) == {0} if is_kept else min(found) > 0


def test_cached_memory_is_free_and_allocated_memory_is_not():
    """For torch's allocator; the rest of the device may be free or not."""
    device = torch.device(KIND, 0)
    gpu.empty_cache()
    before = free_bytes(device)
    tensor = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    while_allocated = free_bytes(device)
    del tensor
    assert gpu.memory_reserved() - gpu.memory_allocated() >= 64 << 20
    assert before - while_allocated == pytest.approx(64 << 20, abs=4 << 20)
    assert free_bytes(device) == pytest.approx(before, abs=4 << 20)


def test_after_the_search_a_plan_that_was_not_judged_by_them_has_none(swapped):
    first, second, *_ = swapped(settled_after=1)
    assert first == 0 < second


@pytest.fixture
def first_plan_stays(monkeypatch):
    """The search ends with its first plan; the devices whose cached memory is returned."""
    released = []
    monkeypatch.setattr("offload.handle.LIMITS", replace(QUICK, search_steps=1))
    monkeypatch.setattr(Accelerator, "release_cached", lambda device: released.append(device))
    return released


@pytest.mark.parametrize("has_room", [True, False])
def test_the_memory_of_reference_steps_is_returned_once_the_search_ends(first_plan_stays, monkeypatch, has_room):
    """Later no step keeps every tensor: the plan's steps are compared with the reference steps of the search."""
    if not has_room:
        monkeypatch.setattr("offload.control.promise.free_bytes", lambda device: 0)
    schedule_of, later, watches = SlowdownPromise.reference_schedule, [], []

    def reference_schedule(promise, planned):
        schedule = schedule_of(promise, planned)
        if planned.search.is_settled:
            later.append(len(schedule.swapped))
        watches.append(planned.search)
        return schedule

    monkeypatch.setattr(SlowdownPromise, "reference_schedule", reference_schedule)
    _, handle = train(max_slowdown=1e9)
    assert handle.report().settled_steps > 2
    assert len(first_plan_stays) == has_room
    assert later == [] if has_room else min(later) > 0
    assert len(watches[-1].watch.looks) >= 1


@pytest.mark.parametrize("ends", ["with its plan", "because no other plan is new"])
def test_a_search_ends_in_one_way(first_plan_stays, monkeypatch, ends):
    """A wait for a tensor, measured in the last plan, must not change the plan that the search ends with."""
    if ends == "because no other plan is new":
        monkeypatch.setattr("offload.handle.LIMITS", QUICK)
        monkeypatch.setattr(PlanSearch, "is_new", lambda search, plan: False)
        monkeypatch.setattr(PlanSearch, "reason_to_move", lambda *_: "to try another")
    ended = []
    end = SlowdownPromise._end_search

    def noted(promise, planned, allowed):
        planned.late = {0: 1.0}
        plan = end(promise, planned, allowed)
        ended.append((planned.late, planned.reference, planned.search.is_settled))
        return plan

    monkeypatch.setattr(SlowdownPromise, "_end_search", noted)
    train(max_slowdown=1e9)
    assert ended == [({}, None, True)]
    assert len(first_plan_stays) == 1


def test_after_one_has_failed_none_keeps_every_tensor(monkeypatch):
    """As an out-of-memory error would end it."""
    monkeypatch.setattr(SlowdownPromise, "needs_plan", lambda promise, planned: False)
    schedule_of, kept = SlowdownPromise.reference_schedule, []

    def reference_schedule(promise, planned):
        schedule = schedule_of(promise, planned)
        kept.append(not schedule.swapped)
        return schedule

    def refuse(*_):
        if kept == [True]:
            kept.append("failed")
            raise MemoryError

    monkeypatch.setattr(SlowdownPromise, "reference_schedule", reference_schedule)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).to(KIND)
    model[5].register_forward_hook(refuse)
    with offload.enable(model, min_tensor_bytes="64KiB", recompute=False, max_slowdown=1e9):
        for _ in range(STEPS):
            try:
                model(torch.randn(ROWS, WIDTH).to(KIND)).square().mean().backward()
            except MemoryError:
                model.zero_grad()
    assert kept[:2] == [True, "failed"]
    assert len(kept) > 2
    assert not any(kept[2:])
