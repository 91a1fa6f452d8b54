"""Reference steps keep every tensor only where the plan saves little, and where the memory for it is free."""

from dataclasses import replace

import pytest
from planned_rig import assert_equal, enabled, known_link, make, plain_run, told_blocks, train  # noqa: F401
from reference_rig import every_second_step

from offload.control.limits import LIMITS
from offload.devices.memory import free_host_bytes
from offload.runtime.executor import Stopwatch

ROWS = [512] * 10
ANY = 1.0  # of the peak: every plan saves at most this


@pytest.fixture
def swapped(tmp_path, monkeypatch):
    """Trains, each second step a reference step; how many tensors the schedule of each reference step swaps."""

    def run(free_bytes=1 << 40, kept_share=ANY, settled_after=None, **options):
        monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, kept_share=kept_share))
        monkeypatch.setattr("offload.control.promise.free_bytes", lambda device: free_bytes)
        found = every_second_step(monkeypatch, settled_after)
        model, optimizer = make()
        with enabled(model, max_slowdown=1e9, spill_dir=tmp_path, recompute=False, **options) as handle:
            results, _ = train(model, optimizer, ROWS)
            assert handle.report().reference_steps == len(found) >= 3
            assert handle.plan.swaps
        assert_equal(results, plain_run(ROWS)[0])
        return found

    return run


def test_every_tensor_is_kept(swapped, monkeypatch):
    monkeypatch.setattr(Stopwatch, "defer_copy_outs", lambda stopwatch: pytest.fail("others' copy-outs would wait too"))
    assert set(swapped()) == {0}


def test_a_plan_that_saves_much_has_none(swapped):
    assert min(swapped(kept_share=LIMITS.kept_share)) > 0


def test_a_memory_limit_has_none(swapped):
    assert min(swapped(memory_limit="8GiB")) > 0


def test_without_room_there_is_none(swapped):
    assert min(swapped(free_bytes=0)) > 0


def test_each_process_of_the_job_needs_room(swapped, monkeypatch):
    monkeypatch.setattr("offload.control.promise.local_processes", lambda: 1 << 30)
    assert min(swapped()) > 0


def test_after_the_search_there_is_none(swapped):
    first, second, *_ = swapped(settled_after=1)
    assert first == 0 < second


def test_free_memory_is_that_of_the_tightest_limit(monkeypatch):
    assert free_host_bytes() > 0
    monkeypatch.setattr("offload.devices.memory.tightest_control_group", lambda: (100, 7))
    assert free_host_bytes() == 7
