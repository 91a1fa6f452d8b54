"""The link as a distribution: low quartiles, an engine's own copies, and what a slower link would cost."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_rig import make, plain_run, train

import offload
from offload import _core
from offload.control.own_copies import _SAMPLE_SECONDS, _SAMPLES_MAX, OwnCopies
from offload.plan import Link, make_plan, simulate
from offload.profiling import calibration, link_measurement
from offload.profiling.calibration import calibrate
from offload.profiling.link_measurement import lower_quartile

KNOWN = Link(2e9, 3e9, 1e-5, swap_seconds=1e-4, byte_seconds=1e-10)
ROUND = 2 * _SAMPLE_SECONDS


class Engine:
    """Copies for as long, and as fast, as it is told."""

    def __init__(self) -> None:
        self.stats = dict.fromkeys(("out_seconds", "out_bytes", "in_seconds", "in_bytes"), 0.0)

    def copy(self, name: str, rate: float, seconds: float = ROUND) -> None:
        self.stats[f"{name}_seconds"] += seconds
        self.stats[f"{name}_bytes"] += rate * seconds

    def store_stats(self) -> dict[str, float]:
        return dict(self.stats)


def copies_at(*rates: float) -> OwnCopies:
    """Own copies with a sample of each rate, in both directions."""
    engine = Engine()
    copies = OwnCopies(engine)  # type: ignore[arg-type]
    for rate in rates:
        engine.copy("out", rate)
        engine.copy("in", 2 * rate)
        copies.read()
    return copies


def test_without_copies_the_link_stays() -> None:
    copies = copies_at()
    copies.read()
    assert not copies.are_known
    assert copies.link(KNOWN) == KNOWN


def test_the_link_has_the_lower_quartile_of_each_direction() -> None:
    copies = copies_at(5e8, 1e8, 4e8, 2e8, 3e8)
    assert copies.are_known
    link = copies.link(KNOWN)
    assert (link.out_bandwidth, link.in_bandwidth) == pytest.approx((2e8, 4e8))
    assert replace(link, out_bandwidth=KNOWN.out_bandwidth, in_bandwidth=KNOWN.in_bandwidth) == KNOWN


def test_one_direction_alone_changes_its_own_bandwidth() -> None:
    engine = Engine()
    copies = OwnCopies(engine)  # type: ignore[arg-type]
    engine.copy("in", 1e8)
    copies.read()
    assert not copies.are_known
    link = copies.link(KNOWN)
    assert link.in_bandwidth == pytest.approx(1e8)
    assert replace(link, in_bandwidth=KNOWN.in_bandwidth) == KNOWN


def test_short_copies_are_added_up_to_a_sample() -> None:
    engine = Engine()
    copies = OwnCopies(engine)  # type: ignore[arg-type]
    for rate in (1e8, 3e8, 2e8):
        engine.copy("out", rate, 0.45 * _SAMPLE_SECONDS)
        copies.read()
    assert copies.link(KNOWN).out_bandwidth == pytest.approx(2e8)


def test_a_neighbour_that_has_gone_is_forgotten() -> None:
    slow, fast = [1e8] * 8, [1e9] * (_SAMPLES_MAX - 3)
    assert copies_at(*slow).link(KNOWN).out_bandwidth == pytest.approx(1e8)
    assert copies_at(*slow, *fast).link(KNOWN).out_bandwidth == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("values", "quartile"), [([3], 3), ([3, 1, 2, 4], 1), ([5, 3, 1, 2, 4], 2), (list(range(9)), 2)]
)
def test_lower_quartile(values: list[float], quartile: float) -> None:
    assert lower_quartile(values) == quartile


def test_a_calibration_plans_with_its_slow_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six rounds, two are slow."""
    both = iter([6e8, 1e8, 5e8, 4e8, 2e8, 3e8])
    monkeypatch.setattr(calibration, "used_by_others", lambda: nullcontext(lambda: 0.0))
    monkeypatch.setattr(calibration, "BLOCK_BYTES_MAX", 1 << 20)

    def rates(traffic: Any, *, out: bool = False, into: bool = False) -> tuple[float, float, float]:
        rate = next(both) if out and into else 9e8
        return rate, 2 * rate, 1e-10

    monkeypatch.setattr(link_measurement._Traffic, "rates", rates)
    monkeypatch.setattr(link_measurement, "SECONDS_MAX", 1e6)
    store = _core.SwapStore.direct(_core.HostDriver(), str(tmp_path))
    found = calibrate(store, torch.device("cpu"), str(tmp_path), cache_dir=tmp_path / "cache")
    assert found.out_bandwidth_both == pytest.approx(3.5e8)
    link = found.link()
    assert (link.out_bandwidth, link.in_bandwidth) == (2e8, 4e8)


@pytest.fixture
def throttled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A link of 20 MB/s, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OFFLOAD_THROTTLE", "20MB/s")
    monkeypatch.setattr(link_measurement, "ROUND_SECONDS", 0.01)
    folder = tmp_path / "spill"
    folder.mkdir()
    return folder


@pytest.mark.long
def test_steps_correct_a_calibration_that_was_too_fast(throttled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.handle.measure_link", lambda *_: Link(1e12, 1e12))
    _, plain_peak = plain_run([512] * 4)
    model, optimizer = make()
    options = {"memory_limit": int(0.7 * plain_peak), "min_tensor_bytes": 1, "recompute": False}
    with offload.enable(model, spill_dir=throttled, **options) as handle:
        train(model, optimizer, [512] * 8)
        link = handle._controller.main.link
        assert max(link.out_bandwidth, link.in_bandwidth) <= 21e6
        assert handle.plan.swaps
        said = dict(handle.report().rows())["planned with"]
        assert "(a quarter of the measurements was slower); step " in said
        assert "if copies take twice as long" in said
        train(model, optimizer, [256] * 2)  # another shape: planned with the copies of this session
        link = handle.plan.link
        assert max(link.out_bandwidth, link.in_bandwidth) <= 21e6


@pytest.mark.long
def test_what_was_measured_beside_a_neighbour_is_forgotten_once_steps_are_measured(
    throttled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "used_by_others", lambda: nullcontext(lambda: 0.5))
    monkeypatch.setattr(calibration, "_not_written", {})
    _, plain_peak = plain_run([512] * 4)
    model, optimizer = make()
    options = {"memory_limit": int(0.7 * plain_peak), "min_tensor_bytes": 1, "recompute": False}
    with offload.enable(model, spill_dir=throttled, **options) as handle:
        train(model, optimizer, [512] * 2)
        assert len(calibration._not_written) == 1
        train(model, optimizer, [512] * 6)
        assert handle.report().swapped.tensors
        assert not calibration._not_written
    assert not (tmp_path / "cache").exists()


@pytest.mark.long
def test_later_shapes_use_own_copies_instead_of_another_calibration(
    throttled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(device: torch.device, *_: Any) -> Link:
        measured.append(device)
        return Link(2e7, 2e7)

    monkeypatch.setattr("offload.handle.measure_link", measure)
    _, plain_peak = plain_run([512] * 4)
    model, optimizer = make()
    options = {"memory_limit": int(0.7 * plain_peak), "min_tensor_bytes": 1, "recompute": False}
    with offload.enable(model, spill_dir=throttled, **options):
        train(model, optimizer, [512] * 5)
        train(model, optimizer, [256] * 2)
    assert measured == [torch.device("cpu")]


def test_a_plan_says_what_a_slower_link_would_cost(tmp_path: Path) -> None:
    _, plain_peak = plain_run([512] * 4)
    model, optimizer = make()
    with offload.enable(
        model, memory_limit=int(0.7 * plain_peak), min_tensor_bytes=1, recompute=False, spill_dir=tmp_path
    ) as handle:
        train(model, optimizer, [512] * 3)
        plan = handle.plan
    slower = replace(
        plan.link,
        out_bandwidth=plan.link.out_bandwidth / 2,
        in_bandwidth=plan.link.in_bandwidth / 2,
        latency=2 * plan.link.latency,
    )
    seconds = simulate(plan.recomputed_trace, plan.swaps, slower).step_seconds + plan.overhead_seconds
    assert plan.seconds_if_copies_take(2) == seconds
    assert plan.seconds_if_copies_take(1) == pytest.approx(plan.expected_seconds)
    assert plan.seconds_if_copies_take(1000) > seconds
    change = 100 * (seconds / plan.expected_seconds - 1)
    assert f"if copies take twice as long ({change:+.0f} %)" in plan.explain()
    assert "twice as long" not in make_plan(plan.trace, plan.link, ()).explain()
