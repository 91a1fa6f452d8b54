"""With `max_slowdown` and `memory_limit`: more memory is held before the step while a search goes on."""

import plant as machines
import pytest
from test_plan_search import machine

from offload.control.planned_step import PlannedStep
from offload.profiling.model_state import HeldBytes

SEED = 369  # the search makes a second and a third plan, which are too slow, and goes back to its first
SECOND, THIRD, ENDED = 17, 24, 60  # the steps from which it follows the second and third plan; when it has ended
MORE = 100 << 20


def search(limit_bytes, held_from):
    """Search, and return for each step its plan, and the bytes that it needs with what is held when it begins.

    `held_from`: from which step on how many bytes are held.
    """
    plant, profiled, calibrated = machine(SEED % 12, noise=0.03)
    plant.reseed(2000 + SEED)
    needed, measure = [], plant.measure

    def held():
        step = len(plant.steps)
        return HeldBytes(sum(more for first, more in held_from.items() if step >= first), 0)

    def measure_need(plan, *, is_reference):
        assumed_bytes = plan.trace.base_bytes[0] - profiled.base_bytes[0]
        needed.append((plan, plan.peak_bytes + held().total - assumed_bytes))
        return measure(plan, is_reference=is_reference)

    plant.measure = measure_need
    steps = ENDED + 40
    machines.run(plant, profiled, calibrated, steps, held=held, max_slowdown=0.05, memory_limit=limit_bytes)
    return needed


@pytest.fixture(scope="module")
def peak_bytes():
    """The peak of the first plan, to which the search goes back."""
    needed = search(1 << 60, {})
    first, second, third, last = (needed[step][0] for step in (0, SECOND, THIRD, ENDED))
    assert first is last
    assert first.peak_bytes > max(second.peak_bytes, third.peak_bytes) + MORE
    return first.peak_bytes


@pytest.mark.parametrize("is_guarded", [True, False])
def test_what_an_earlier_plan_was_made_for_is_known_when_it_is_followed_again(peak_bytes, is_guarded, monkeypatch):
    """The second plan is made when more is held. Still more is held after the search: too much for the first plan."""
    limit_bytes = peak_bytes + MORE * 3 // 2
    if not is_guarded:
        follow = PlannedStep.follow

        def forget(planned, plan, limit_bytes):
            follow(planned, plan, limit_bytes)
            planned.plan_held = planned.held

        monkeypatch.setattr(PlannedStep, "follow", forget)
    needed = search(limit_bytes, {SECOND - 5: MORE, ENDED: MORE})
    assert needed[SECOND - 5][1] == peak_bytes + MORE
    assert needed[ENDED - 1][1] == peak_bytes + MORE
    assert all(each <= limit_bytes for _, each in needed) == is_guarded


@pytest.mark.parametrize("is_guarded", [True, False])
def test_an_earlier_plan_that_exceeds_the_limit_now_is_not_followed_again(peak_bytes, is_guarded, monkeypatch):
    """Less is left for it than when it was made: another plan is made before the next step."""
    limit_bytes = peak_bytes + MORE // 2
    if not is_guarded:
        exceeds, asked = PlannedStep.exceeds, set()

        def exceeds_once(planned, *about):
            is_first = planned.steps not in asked
            asked.add(planned.steps)
            return is_first and exceeds(planned, *about)

        monkeypatch.setattr(PlannedStep, "exceeds", exceeds_once)
    needed = search(limit_bytes, {SECOND + 2: MORE})
    assert needed[SECOND + 2][1] <= limit_bytes
    assert all(each <= limit_bytes for _, each in needed) == is_guarded
