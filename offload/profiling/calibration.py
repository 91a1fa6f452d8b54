"""Measures the speed of copies between a device and the tier below it, and caches it for each environment and device.

The result gives the planner its link, and `offload doctor` prints it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from offload import _core
from offload.devices.device import device_of
from offload.devices.processor_use import used_by_others
from offload.options import Options, free_disk_bytes
from offload.plan import Link
from offload.profiling.cache_files import cache_path, environment, load, save
from offload.profiling.link_measurement import BLOCK_BYTES_MIN, BLOCKS_AT_A_TIME, measure
from offload.runtime.disturbance import disturb
from offload.runtime.stores import checks_every_byte, make_store, throttle

__all__ = ["Calibration", "calibrate", "forget_disturbed", "measure_link"]

log = logging.getLogger("offload")

BLOCK_BYTES_MAX = 16 << 20
KEPT_SECONDS_MAX = 900.0  # a cached result expires after this time, because the load of the machine changes
SPREAD_MAX = 2.0  # a link is steady if its `spread` is at most this
_FAILING = 1e6  # bytes per second that plans assume of a disk that fails: so few that swapping never pays
OTHERS_FRACTION_MAX = 0.1  # share of the CPU time; if other programs use more, the result is not cached


_not_written: dict[Path, tuple[float, Calibration]] = {}  # (time, result) of measurements that were not cached


@dataclass(frozen=True)
class Calibration:
    """The measured speed of copies between one device and the tier below it.

    Parameters
    ----------
    device : str
        Name of the device.
    tier : str
        The tier below it: ``"pinned RAM"`` or ``"disk"``.
    out_bandwidth, in_bandwidth : float
        Bytes per second out of and into device memory while the other direction is idle.
    out_bandwidth_both, in_bandwidth_both : float
        The same while both directions are busy.
    out_bandwidth_low, in_bandwidth_low : float
        Lower quartiles of the measurements with both directions busy.
    latency_seconds : float
        Fixed time per copy, besides the time for its bytes.
    processor_seconds : float
        CPU time in seconds for swapping one byte out and in.
    spread : float, default 1.0
        Upper over lower quartile of the bandwidths with both directions busy, in the direction that varies more.

    Examples
    --------
    >>> found = Calibration("cpu", "disk", 2e9, 3e9, 1e9, 1.5e9, 0.8e9, 1.2e9, 20e-6, 2e-10)
    >>> found.link().out_bandwidth
    800000000.0
    """

    device: str
    tier: str
    out_bandwidth: float
    in_bandwidth: float
    out_bandwidth_both: float
    in_bandwidth_both: float
    out_bandwidth_low: float
    in_bandwidth_low: float
    latency_seconds: float
    processor_seconds: float
    spread: float = 1.0

    def link(self, *, slows: bool = False) -> Link:
        """Return the link for the planner, with the lower quartiles of the bandwidths.

        A disk that is shared has fast and slow seconds. A plan that relies on the fast ones makes steps wait.

        Parameters
        ----------
        slows
            Whether computation uses all processors, so that the CPU time of copies slows it down.
        """
        byte_seconds = self.processor_seconds if slows else 0.0
        return Link(
            self.out_bandwidth_low,
            self.in_bandwidth_low,
            self.latency_seconds,
            byte_seconds=byte_seconds,
            is_steady=self.spread <= SPREAD_MAX,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict of numbers and strings, in bytes per second and in seconds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> Calibration:
        """Build a calibration from the result of `to_dict`.

        Raises
        ------
        ValueError
            A field is missing or unknown (the message lists the known fields), or invalid (the message names it).
        """
        known = {each.name for each in fields(cls)}
        if not isinstance(about, Mapping) or set(about) != known:
            raise ValueError(f"its fields are not those of this release: {', '.join(sorted(known))}")
        for name in ("device", "tier"):
            if not isinstance(about[name], str):
                raise ValueError(f"{name}: {about[name]!r} is not a string")
        for name in known - {"device", "tier"}:
            value = about[name]
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            may_be_zero = name in ("latency_seconds", "processor_seconds")
            if not is_number or value < 0 or (value == 0 and not may_be_zero):
                raise ValueError(f"{name}: {value!r} is not a valid number")
        return cls(**about)


def calibrate(
    store: _core.SwapStore,
    device: torch.device,
    spill_dir: str,
    *,
    fresh: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    room_bytes: int | None = None,
) -> Calibration:
    """Measure how fast `store` copies out of `device` and back, or return a cached result of the last 15 minutes.

    Up to 32 copies of 4 KiB at once show the latency. Then blocks of up to 16 MiB are copied through the engine, at
    most two in flight per direction: first in each direction alone, then in both at once. Blocks are smaller than 16
    MiB if an eighth of the host limit (without a GPU: of the free disk space) is less than that, if four such blocks
    need more than `room_bytes`, or if the copy-out of one block takes longer than 50 ms. The measurement takes about a
    second. `store.stats()` counts these copies too.

    Parameters
    ----------
    store
        The store to measure; nothing else should use it during the measurement.
    device
        ``cpu`` or one CUDA device.
    spill_dir
        Folder of the spill file; empty if no file is used.
    fresh
        Measure even if a result is cached. This process uses the new result; other processes use it only if it
        is cached.
    cache_dir
        Folder of the cached results. Default: ``offload`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``. If it
        cannot be written, the next call measures again. A result is not written if other programs used more than
        10 % of the CPU time during the measurement, or if the system does not report their use.
    room_bytes
        How much memory of `device` the measurement may use. Default: what 16 MiB blocks need.

    Returns
    -------
    Calibration
        Medians and lower quartiles over six rounds, or fewer on a slow link, and the least CPU time of a round.

    Raises
    ------
    OSError
        Reading or writing the spill file failed.
    MemoryError
        There is no room even for the smallest blocks.

    Examples
    --------
    >>> import tempfile
    >>> store = _core.SwapStore.direct(_core.HostDriver(), tempfile.gettempdir())
    >>> found = calibrate(store, torch.device("cpu"), tempfile.gettempdir())
    >>> found.tier
    'disk'
    """
    block_bytes = _block_bytes(store, spill_dir, room_bytes)
    key = _machine_key(store, device, spill_dir, block_bytes)
    path = cache_path("link", key, cache_dir)
    if not fresh:
        cached = _of_this_process(path) or _load(path, key)
        if cached is not None:
            return cached
    disturb()
    with used_by_others() as others:
        rates = measure(store, device, block_bytes, room_bytes)
    found = Calibration(
        device=device_of(device).name(),
        tier="disk" if _is_direct(store) else "pinned RAM",
        out_bandwidth=rates.out,
        in_bandwidth=rates.into,
        out_bandwidth_both=rates.out_both,
        in_bandwidth_both=rates.in_both,
        out_bandwidth_low=rates.out_low,
        in_bandwidth_low=rates.in_low,
        latency_seconds=rates.latency_seconds,
        processor_seconds=rates.processor_seconds,
        spread=rates.spread,
    )
    if not others() <= OTHERS_FRACTION_MAX:
        log.info("the measured speed is not written to the cache: other programs use the CPU, or their use is unknown")
        _not_written[path] = time.monotonic(), found
    else:
        _not_written.pop(path, None)
        _save(path, key, found)
    return found


def measure_link(device: torch.device, options: Options, room_bytes: int | None = None) -> Link:
    """Measure the link for the plans of a session with these options.

    If `room_bytes` is given, the measurement uses no more of the device's memory than this, or 16 KiB if that is more.
    If the spill file cannot be written or read, the result is a link so slow that plans swap only what a memory limit
    requires: as in later steps, a disk that fails does not end the training.

    Raises
    ------
    MemoryError
        There is no room even for the smallest blocks.
    """
    # The store is a separate one: no other code uses it, and its copies do not appear in the report.
    # Copies between GPU and host take no CPU time from the computation.
    slows = device.type == "cpu" and torch.get_num_threads() >= len(os.sched_getaffinity(0))
    store = make_store(device, options)
    try:
        found = calibrate(store, device, options.spill_dir, room_bytes=room_bytes)
    except OSError as error:
        log.warning("the disk fails, so plans swap only what memory_limit requires: %s", error)
        return Link(_FAILING, _FAILING)
    return found.link(slows=slows)


def forget_disturbed() -> None:
    """Forget results that were not cached, because other programs used the processors or their use is unknown.

    The controller calls this as soon as the steps of a plan have been measured, because their copies show the speed of
    the link. Only this process has used these results: they were not written to the cache.
    """
    _not_written.clear()


def _of_this_process(path: Path) -> Calibration | None:
    measured_at, found = _not_written.get(path, (-math.inf, None))
    return found if time.monotonic() - measured_at <= KEPT_SECONDS_MAX else None


def _is_direct(store: _core.SwapStore) -> bool:
    return store.alignment_bytes > 1


def _block_bytes(store: _core.SwapStore, spill_dir: str, room_bytes: int | None) -> int:
    room = free_disk_bytes(spill_dir) if _is_direct(store) else int(store.stats()["pool_max_bytes"])
    nbytes = max(min(BLOCK_BYTES_MAX, room // 8 // BLOCK_BYTES_MIN * BLOCK_BYTES_MIN), BLOCK_BYTES_MIN)
    # Halved, so that a little more or less room gives the same size, and with it the same cached result.
    while room_bytes is not None and nbytes * BLOCKS_AT_A_TIME > room_bytes and nbytes > BLOCK_BYTES_MIN:
        nbytes = max(nbytes // 2 // BLOCK_BYTES_MIN * BLOCK_BYTES_MIN, BLOCK_BYTES_MIN)
    return nbytes


# -- cache ------------------------------------------------------------------------------------------------------------


def _machine_key(store: _core.SwapStore, device: torch.device, spill_dir: str, block_bytes: int) -> dict[str, Any]:
    """Return the properties that identify a link: a cached result is used only if all of them are the same."""
    return {
        **environment(),
        "device": device_of(device).name(),
        "uuid": device_of(device).uuid(),
        "tier": "disk" if _is_direct(store) else "pinned RAM",
        "spill_device": Path(spill_dir).stat().st_dev if spill_dir else None,
        "block_bytes": block_bytes,
        "throttle": throttle(),
        "checks_every_byte": checks_every_byte(),
    }


def _load(path: Path, key: dict[str, Any]) -> Calibration | None:
    try:
        cached = load(path, key, KEPT_SECONDS_MAX)
        return None if cached is None else Calibration.from_dict(cached.get("calibration", {}))
    except (OSError, ValueError) as error:  # malformed JSON and malformed text are ValueErrors too
        log.info("cannot use %s, so the link is measured anew: %s", path, error)
        return None


def _save(path: Path, key: dict[str, Any], found: Calibration) -> None:
    try:
        save(path, key, {"calibration": found.to_dict()})
    except OSError as error:
        log.info("the measured link is not cached, so the next process measures it again: %s", error)
