"""The measured link: on both tiers, kept per machine, and what happens to a cache that cannot be trusted."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerator import KIND, LIBRARY, gpu
from faults.inject import inject_fault

import offload
from offload import _core
from offload.devices import processor_use
from offload.plan.trace import Node, SavedTensor, Trace
from offload.profiling import cache_files, calibration, link_measurement
from offload.profiling.calibration import Calibration, calibrate, measure_link
from offload.profiling.model_state import HeldBytes
from offload.profiling.profiler import Profile
from offload.runtime.schedule import StepOrder

CPU = torch.device("cpu")
used_by_others = processor_use.used_by_others
FOUND = Calibration("cpu", "disk", 4e9, 5e9, 2e9, 3e9, 1e9, 2e9, 2e-5, 1e-10)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BLOCK_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(link_measurement, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(calibration, "used_by_others", lambda: nullcontext(lambda: 0.0))  # whatever else runs here


@contextmanager
def a_neighbour() -> Iterator[None]:
    """Another program that computes where this thread, and what it starts meanwhile, does: on one processor."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    program = "import time\nprint(flush=True)\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert neighbour.stdout is not None
    try:
        assert neighbour.stdout.read(1) == b"\n", "it has begun"
        yield
    finally:
        os.sched_setaffinity(0, processors)
        neighbour.kill()
        neighbour.communicate()


def make_store(tier: str, directory: Path, host_bytes_max: int = 32 << 20) -> tuple[_core.SwapStore, str]:
    lanes = _core.HostDriver()
    if tier == "direct":
        return _core.SwapStore.direct(lanes, str(directory)), str(directory)
    spill_dir = str(directory) if tier == "slab+disk" else ""
    return _core.SwapStore.slab(lanes, lanes, host_bytes_max, spill_dir, slab_bytes=host_bytes_max), spill_dir


@pytest.mark.parametrize("tier", ["direct", "slab", "slab+disk"])
def test_every_figure_is_measured_and_nothing_is_left(tier: str, tmp_path: Path) -> None:
    store, spill_dir = make_store(tier, tmp_path)
    found = calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache")
    assert found.tier == ("disk" if tier == "direct" else "pinned RAM")
    rates = (found.out_bandwidth, found.in_bandwidth, found.out_bandwidth_both, found.in_bandwidth_both)
    assert all(rate > 0 for rate in rates)
    assert found.latency_seconds >= 0
    low = (found.out_bandwidth_low, found.in_bandwidth_low)
    assert all(0 < slow <= median for slow, median in zip(low, rates[2:], strict=True))
    assert (found.link().out_bandwidth, found.link().in_bandwidth) == low
    assert found.link().latency == found.latency_seconds
    assert found.processor_seconds > 0, "lanes copy, or add up checksums"
    assert (found.link().byte_seconds, found.link(slows=True).byte_seconds) == (0.0, found.processor_seconds)
    stats = store.stats()
    assert stats["out_copies"] > 0
    assert stats["in_copies"] > 0
    store.quiesce()
    stats = store.stats()
    assert (stats["live_tickets"], stats["pool_used_bytes"] if tier == "slab" else 0) == (0, 0)
    assert stats["spill_used_bytes"] == 0


@pytest.mark.parametrize(("slowest", "is_steady"), [(1.0, True), (0.6, True), (0.3, False)])
def test_rounds_that_disagree_are_told(
    slowest: float, is_steady: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = iter([slowest, 1.0, slowest, 1.0, 1.0, 1.0])

    def rates(self: object, *, out: bool = False, into: bool = False) -> tuple[float, float, float]:
        return 4e9 * out * (next(rounds) if out and into else 1.0), 5e9 * into, 1e-10

    monkeypatch.setattr(link_measurement._Traffic, "rates", rates)
    store, spill_dir = make_store("direct", tmp_path)
    found = calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache")
    assert found.spread == pytest.approx(1 / slowest)
    assert found.link().is_steady == is_steady
    assert calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache") == found, "it is cached either way"


def test_one_slow_round_is_no_disagreement() -> None:
    rates = [1.0, 1.0, 0.1, 1.0, 1.0, 1.0]
    assert link_measurement.upper_quartile(rates) == link_measurement.lower_quartile(rates) == 1.0
    assert (link_measurement.upper_quartile([2.0, 1.0]), link_measurement.lower_quartile([2.0, 1.0])) == (2.0, 1.0)


def test_a_slow_link_is_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[bool] = []
    rates = link_measurement._Traffic.rates

    def counting(self: link_measurement._Traffic, *, out: bool = False, into: bool = False) -> tuple[float, ...]:
        rounds.append(out and into)
        return rates(self, out=out, into=into)

    monkeypatch.setattr(link_measurement, "SECONDS_MAX", 0.0)
    monkeypatch.setattr(link_measurement._Traffic, "rates", counting)
    store, spill_dir = make_store("direct", tmp_path)
    assert calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache").spread >= 1
    assert sum(rounds) == 2


def test_blocks_shrink_with_the_host_limit(tmp_path: Path) -> None:
    store, _ = make_store("slab", tmp_path, host_bytes_max=1 << 20)
    assert calibrate(store, CPU, "", cache_dir=tmp_path).in_bandwidth > 0
    assert store.stats()["pool_high_water_bytes"] <= 1 << 20


def test_a_host_limit_without_room_for_pages_is_a_memory_error(tmp_path: Path) -> None:
    store, _ = make_store("slab", tmp_path, host_bytes_max=4096)
    with pytest.raises(_core.PoolExhausted, match="asked 4096 bytes, 0 free of 4096"):
        calibrate(store, CPU, "", cache_dir=tmp_path)


def test_a_failing_disk_is_said(tmp_path: Path) -> None:
    store, spill_dir = make_store("direct", tmp_path)
    inject_fault(store, "write", "error", persistent=True)
    with pytest.raises(OSError, match="a copy-out failed while the link was measured"):
        calibrate(store, CPU, spill_dir, cache_dir=tmp_path)
    assert store.stats()["live_tickets"] == 0


def test_the_second_time_is_read_and_moves_nothing(tmp_path: Path) -> None:
    store, spill_dir = make_store("direct", tmp_path)
    first = calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache")
    copies = store.stats()["out_copies"]
    assert calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache") == first
    assert store.stats()["out_copies"] == copies
    calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache", fresh=True)
    assert store.stats()["out_copies"] > copies
    assert len(list((tmp_path / "cache").iterdir())) == 1  # no half-written file beside it


def test_what_was_measured_long_ago_is_measured_anew(tmp_path: Path) -> None:
    store, spill_dir = make_store("direct", tmp_path)
    cache = tmp_path / "cache"
    calibrate(store, CPU, spill_dir, cache_dir=cache)
    (path,) = cache.iterdir()
    copies = store.stats()["out_copies"]
    os.utime(path, (time.time() - 800, time.time() - 800))
    calibrate(store, CPU, spill_dir, cache_dir=cache)
    assert store.stats()["out_copies"] == copies
    os.utime(path, (time.time() - 1000, time.time() - 1000))
    calibrate(store, CPU, spill_dir, cache_dir=cache)
    assert store.stats()["out_copies"] > copies


def test_what_is_measured_beside_a_neighbour_stays_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = calibration.used_by_others
    monkeypatch.setattr(calibration, "used_by_others", used_by_others)
    store, spill_dir = make_store("direct", tmp_path)
    cache = tmp_path / "cache"
    with a_neighbour():
        calibrate(store, CPU, spill_dir, cache_dir=cache)
        found = calibrate(store, CPU, spill_dir, cache_dir=cache, fresh=True)
    assert not cache.exists()
    copies = store.stats()["out_copies"]
    assert calibrate(store, CPU, spill_dir, cache_dir=cache) == found
    assert store.stats()["out_copies"] == copies
    monkeypatch.setattr(calibration, "used_by_others", alone)
    anew = calibrate(store, CPU, spill_dir, cache_dir=cache, fresh=True)
    assert len(list(cache.iterdir())) == 1
    assert calibrate(store, CPU, spill_dir, cache_dir=cache) == anew


@pytest.mark.parametrize(
    ("lines", "own_seconds", "fraction"),
    [
        (["cpu0 {} 0 0 0 0 0 0 0 0 0"], 0.0, 1.0),
        (["cpu0 0 {} 0 0 0 0 0 0 0 0"], 0.0, 1.0),  # nice
        (["cpu0 7 0 0 0 0 0 0 {} 0 0"], 0.0, 1.0),  # stolen
        (["cpu0 7 0 {0} {0} {0} {0} {0} 0 {0} {0}"], 0.0, 0.0),  # the kernel's; idle; guests, whom user counts already
        (["cpu0 {} 0 0 0"], 0.0, 1.0),  # where nothing is told of thefts
        (["cpu0 {} 0 0 0 0 0 0 0 0 0"], 0.75, 0.25),
        (["cpu {} 0 0 0 0 0 0 0 0 0", "cpu0 7 0 0 0 0 0 0 0 0 0", "cpu1 {} 0 0 0 0 0 0 0 0 0", "intr 7"], 0.0, 0.0),
        (["cpu0 0 0 0 {} 0 0 0 0 0 0"], 0.0, math.nan),  # where nobody counts
        (["cpu1 {} 0 0 0 0 0 0 0 0 0"], 0.0, math.nan),  # unplugged
    ],
)
def test_who_computed_is_told_apart(
    lines: list[str], own_seconds: float, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second on one processor."""
    times = tmp_path / "stat"
    now = [0]
    monkeypatch.setattr(processor_use, "PROCESSOR_TIMES", times)
    monkeypatch.setattr(processor_use, "time", SimpleNamespace(perf_counter=lambda: float(now[0])))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(os, "times", lambda: SimpleNamespace(user=100 + own_seconds * now[0]))

    def come_to(second: int) -> None:
        now[0] = second
        ticks = os.sysconf("SC_CLK_TCK") * (100 + second)
        times.write_text("".join(f"{line.format(ticks)}\n" for line in lines))

    come_to(0)
    with used_by_others() as others:
        come_to(1)
    assert others() == pytest.approx(fraction, nan_ok=True)


def test_where_nobody_counts_the_processors_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "used_by_others", used_by_others)
    monkeypatch.setattr(processor_use, "PROCESSOR_TIMES", tmp_path / "missing")
    store, spill_dir = make_store("direct", tmp_path)
    calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_another_tier_is_another_entry(tmp_path: Path) -> None:
    for tier in ("direct", "slab"):
        store, spill_dir = make_store(tier, tmp_path)
        calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("of", ["prefix", "boot", "root"])
def test_another_environment_is_another_entry(of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, spill_dir = make_store("direct", tmp_path)
    calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache")
    here = cache_files.environment()
    monkeypatch.setattr(calibration, "environment", lambda: {**here, of: "another"})
    copies = store.stats()["out_copies"]
    calibrate(store, CPU, spill_dir, cache_dir=tmp_path / "cache")
    assert store.stats()["out_copies"] > copies
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "no json {",
        lambda kept: "[]",
        lambda kept: b"\xff\xfe\x00",
        lambda kept: json.dumps({**kept, "key": {"host": "elsewhere"}}),
        lambda kept: json.dumps({"key": kept["key"]}),
        lambda kept: json.dumps({**kept, "calibration": {**kept["calibration"], "in_bandwidth": -1.0}}),
        lambda kept: json.dumps({**kept, "calibration": {**kept["calibration"], "in_bandwidth": None}}),
        lambda kept: json.dumps({**kept, "calibration": 7}),
    ],
)
def test_a_malformed_cache_is_measured_anew(damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, spill_dir = make_store("direct", tmp_path)
    cache = tmp_path / "cache"
    calibrate(store, CPU, spill_dir, cache_dir=cache)
    (path,) = cache.iterdir()
    damaged = damage(json.loads(path.read_text()))
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    copies = store.stats()["out_copies"]
    with caplog.at_level(logging.INFO, "offload"):
        again = calibrate(store, CPU, spill_dir, cache_dir=cache)
    assert store.stats()["out_copies"] > copies
    assert any("measured anew" in record.getMessage() for record in caplog.records)
    assert calibrate(store, CPU, spill_dir, cache_dir=cache) == again  # and kept whole again


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store, spill_dir = make_store("direct", tmp_path)
    with caplog.at_level(logging.INFO, "offload"):
        assert calibrate(store, CPU, spill_dir, cache_dir=blocked / "cache").tier == "disk"
    assert any("not cached, so the next process" in record.getMessage() for record in caplog.records)


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store, spill_dir = make_store("direct", tmp_path)
    calibrate(store, CPU, spill_dir)
    assert len(list((tmp_path / "xdg" / "offload").glob("link-*.json"))) == 1


def test_a_calibration_survives_its_dictionary() -> None:
    assert Calibration.from_dict(json.loads(json.dumps(FOUND.to_dict()))) == FOUND


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Calibration)])
def test_a_wrong_field_is_named(field: str) -> None:
    about = FOUND.to_dict()
    with pytest.raises(ValueError, match=field):
        Calibration.from_dict({**about, field: float("nan")})
    del about[field]
    with pytest.raises(ValueError, match=field):
        Calibration.from_dict(about)


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    lanes = _core.HostDriver()
    torch.zeros(1, device=KIND)
    store = _core.SwapStore.slab(_core.cuda_driver(0, LIBRARY), lanes, 256 << 20)
    found = calibrate(store, torch.device(KIND, 0), "", cache_dir=tmp_path)
    assert found.device == gpu.get_device_name(0)
    assert found.out_bandwidth_both > 0
    assert calibrate(store, torch.device(KIND, 0), "", cache_dir=tmp_path) == found


@pytest.mark.parametrize("tier", ["direct", "slab"])
def test_a_throttled_link_is_measured_as_slow_as_it_is(tier: str, tmp_path: Path) -> None:
    lanes = _core.HostDriver(bandwidth=50e6)
    if tier == "direct":
        store = _core.SwapStore.direct(lanes, str(tmp_path))
    else:
        store = _core.SwapStore.slab(lanes, lanes, 8 << 20, slab_bytes=8 << 20)
    found = calibrate(store, CPU, str(tmp_path) if tier == "direct" else "", cache_dir=tmp_path / "cache")
    assert max(found.out_bandwidth, found.in_bandwidth, found.out_bandwidth_both, found.in_bandwidth_both) <= 52e6


def test_the_environment_throttles_and_is_part_of_what_identifies_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bandwidths = []
    for text in ("50MB/s", "20MB/s"):
        monkeypatch.setenv("OFFLOAD_THROTTLE", text)
        with offload.enable(torch.nn.Linear(4, 1), spill_dir=tmp_path) as handle:
            bandwidths.append(measure_link(CPU, handle._options).out_bandwidth)
    assert bandwidths[0] <= 52e6
    assert bandwidths[1] <= 21e6
    monkeypatch.setenv("OFFLOAD_THROTTLE", "slow")
    with pytest.raises(ValueError, match=r'OFFLOAD_THROTTLE: .* such as "12GB/s"'):
        offload.enable(torch.nn.Linear(4, 1))


def test_checksums_are_part_of_what_identifies_a_link_and_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, stores = [], []
    for text in ("", "all"):
        monkeypatch.setenv("OFFLOAD_CHECKSUM", text)
        handle = offload.enable(torch.nn.Linear(4, 1), n_tensors=0, spill_dir=tmp_path)
        stores.append(handle._engine.store)
        keys.append(calibration._machine_key(stores[-1], CPU, str(tmp_path), 1 << 20))
    assert stores[0] is not stores[1]
    assert [key["checks_every_byte"] for key in keys] == [False, True]
    monkeypatch.setenv("OFFLOAD_CHECKSUM", "none")
    with pytest.raises(ValueError, match=r"OFFLOAD_CHECKSUM is \"blocks\" or \"all\", not 'none'"):
        offload.enable(torch.nn.Linear(4, 1), spill_dir=tmp_path)


def test_room_for_the_measurement(tmp_path: Path) -> None:
    store = _core.SwapStore.slab(_core.HostDriver(), _core.HostDriver(), 8 << 20, slab_bytes=8 << 20)

    def block_bytes(room_bytes: int | None) -> int:
        return calibration._block_bytes(store, "", room_bytes)

    assert block_bytes(None) == block_bytes(1 << 30) == 1 << 20
    assert block_bytes(4 << 20) == 1 << 20
    assert block_bytes((4 << 20) - 1) == 512 << 10
    assert block_bytes(0) == 4096


def test_how_much_of_a_limit_is_free() -> None:
    nodes = (Node("a", 1.0, False), Node("b", 1.0, False), Node("c", 1.0, True))
    trace = Trace(nodes, (1000, 1100, 1050), (SavedTensor(1, 500, 0, 0, 0, 2, 2),))
    profile = Profile(StepOrder(), trace, {}, [0, 7, 20], HeldBytes(0, 0), True, 20)
    assert profile.room_bytes(None, HeldBytes(900, 0)) == 1100 + 500 - 20, "what a step without swaps needs"
    assert profile.room_bytes(6400, HeldBytes(1000, 0, away=300)) == 6400 - 700 - 20
    assert profile.room_bytes(6400, HeldBytes(1000, 50)) == 6400 - 1000 - 50
    assert profile.room_bytes(6400, HeldBytes(6400, 0)) == 100  # state that is to leave takes all of it
