"""How fast copies really are between a device and the tier below it: measured through the engine, kept per machine.

Beside the data path: the planner's link comes from here, and `offload doctor` shows it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from offload import __version__, _core
from offload.options import free_disk_bytes
from offload.plan import Link
from offload.runtime.engine import Engine, Lease

__all__ = ["Calibration", "calibrate"]

log = logging.getLogger("offload")

BLOCK_BYTES_MAX = 16 << 20
BLOCK_BYTES_MIN = 4096
COPIES_IN_FLIGHT = 2  # a direction
ROUNDS = 3
ROUND_SECONDS = 0.1
SECONDS_MAX = 1.5
SMALL_COPIES = 32
KEPT_SECONDS_MAX = 900.0  # how long a result is read again: what others do to the machine changes
OTHERS_FRACTION_MAX = 0.1  # of the processors' time: beside programs that take more, a result tells of them
PROCESSOR_TIMES = Path("/proc/stat")
POLL_SECONDS = 5e-5
POLL_BYTES_MIN = 4 << 20  # smaller blocks end faster than a sleep does


_not_written: dict[Path, tuple[float, Calibration]] = {}  # what this process has measured on a busy machine, and when


@dataclass(frozen=True)
class Calibration:
    """The measured way between one device and the tier below it.

    Parameters
    ----------
    device : str
        Name of the device.
    tier : str
        What is below it: ``"pinned RAM"`` or ``"disk"``.
    out_bandwidth, in_bandwidth : float
        Bytes per second out of, and into, device memory while the other direction rests.
    out_bandwidth_both, in_bandwidth_both : float
        The same while both directions are busy.
    latency_seconds : float
        What a copy takes on top of its bytes.
    processor_seconds : float
        What a byte takes of the processors, out and back, in seconds of one.

    Examples
    --------
    >>> found = Calibration("cpu", "disk", 2e9, 3e9, 1e9, 1.5e9, 20e-6, 2e-10)
    >>> found.link().out_bandwidth
    1000000000.0
    """

    device: str
    tier: str
    out_bandwidth: float
    in_bandwidth: float
    out_bandwidth_both: float
    in_bandwidth_both: float
    latency_seconds: float
    processor_seconds: float

    def link(self, *, slows: bool = False) -> Link:
        """The link to plan with: both directions busy, so that a plan does not promise too much.

        Parameters
        ----------
        slows
            Whether computation uses every processor, so that copies take theirs from it.
        """
        byte_seconds = self.processor_seconds if slows else 0.0
        return Link(self.out_bandwidth_both, self.in_bandwidth_both, self.latency_seconds, byte_seconds=byte_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and strings; bytes per second and seconds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> Calibration:
        """What `to_dict` wrote.

        Raises
        ------
        ValueError
            A field is missing, unknown or impossible; the message names it.
        """
        known = {each.name for each in fields(cls)}
        if not isinstance(about, Mapping) or set(about) != known:
            raise ValueError(
                f"a calibration has the fields {', '.join(sorted(known))}; delete the file to measure anew"
            )
        for name in ("device", "tier"):
            if not isinstance(about[name], str):
                raise ValueError(f"{name}: {about[name]!r} is no text")
        for name in known - {"device", "tier"}:
            value = about[name]
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            may_be_zero = name in ("latency_seconds", "processor_seconds")
            if not is_number or value < 0 or (value == 0 and not may_be_zero):
                raise ValueError(f"{name}: {value!r} is no positive number")
        return cls(**about)


def calibrate(
    store: _core.SwapStore,
    device: torch.device,
    spill_dir: str,
    *,
    fresh: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Measure how fast `store` copies out of `device` and back, or read what was measured here minutes ago.

    Blocks of up to 16 MiB (an eighth of the host limit where that is less) travel through the engine's own path, at
    most two a direction at a time: each direction alone, then both. Takes about a second. `store.stats()` counts these
    copies too.

    Parameters
    ----------
    store
        The data plane; nothing else should use it meanwhile.
    device
        ``cpu`` or one CUDA device.
    spill_dir
        Folder of the spill file; empty where there is no disk tier.
    fresh
        Measure even where there is a kept result; this process uses the new one, and others where it may be kept.
    cache_dir
        Folder of kept results. Default: ``offload`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``. One that cannot be
        written only means that the next process measures again; so do other programs that compute on more than a tenth
        of the processors meanwhile, as the result tells of them, and a system that does not tell of them.

    Returns
    -------
    Calibration
        Medians over three rounds.

    Raises
    ------
    OSError
        The disk below refuses the copies.
    MemoryError
        There is no room for even the smallest blocks.

    Examples
    --------
    >>> import tempfile
    >>> store = _core.SwapStore.direct(_core.HostDriver(), tempfile.gettempdir())
    >>> found = calibrate(store, torch.device("cpu"), tempfile.gettempdir())
    >>> found.tier
    'disk'
    """
    block_bytes = _block_bytes(store, spill_dir)
    key = _machine_key(store, device, spill_dir, block_bytes)
    path = _cache_path(key, cache_dir)
    if not fresh:
        kept = _of_this_process(path) or _load(path, key)
        if kept is not None:
            return kept
    with _taken_by_others() as others:
        found = _measure(store, device, block_bytes)
    if not others() <= OTHERS_FRACTION_MAX:
        log.info("the measured link is not kept: other programs use the processors, or nobody tells whether they do")
        _not_written[path] = time.monotonic(), found
    else:
        _not_written.pop(path, None)
        _save(path, key, found)
    return found


def _of_this_process(path: Path) -> Calibration | None:
    measured_at, found = _not_written.get(path, (-math.inf, None))
    return found if time.monotonic() - measured_at <= KEPT_SECONDS_MAX else None


def _is_direct(store: _core.SwapStore) -> bool:
    return store.alignment_bytes > 1


def _block_bytes(store: _core.SwapStore, spill_dir: str) -> int:
    room = free_disk_bytes(spill_dir) if _is_direct(store) else int(store.stats()["pool_max_bytes"])
    return max(min(BLOCK_BYTES_MAX, room // 8 // BLOCK_BYTES_MIN * BLOCK_BYTES_MIN), BLOCK_BYTES_MIN)


# -- measuring --------------------------------------------------------------------------------------------------------


def _measure(store: _core.SwapStore, device: torch.device, block_bytes: int) -> Calibration:
    deadline = time.perf_counter() + SECONDS_MAX
    engine = Engine(store, device)
    try:
        latency = _small_copy_seconds(engine)
        traffic = _Traffic(engine, _affordable(engine, block_bytes))
        rates: list[tuple[float, ...]] = []
        while not rates or (len(rates) < ROUNDS and time.perf_counter() < deadline - 3 * ROUND_SECONDS):
            rates.append((*traffic.rates(out=True), *traffic.rates(into=True), *traffic.rates(out=True, into=True)))
        traffic.close()
    finally:
        engine.drain()
    columns = list(zip(*rates, strict=True))
    out, _, _, _, into, _, out_both, in_both, _ = map(statistics.median, columns)
    out_processor, in_processor = min(columns[2]), min(columns[5])  # a neighbour only adds
    return Calibration(
        device=_device_name(device),
        tier="disk" if _is_direct(store) else "pinned RAM",
        out_bandwidth=out,
        in_bandwidth=into,
        out_bandwidth_both=out_both,
        in_bandwidth_both=in_both,
        latency_seconds=max(latency - BLOCK_BYTES_MIN / max(out, into), 0.0),
        processor_seconds=out_processor + in_processor,
    )


def _filled(engine: Engine, nbytes: int) -> torch.Tensor:
    """A tensor whose pages are there and whose bytes do not compress away."""
    return torch.arange(nbytes // 8, dtype=torch.int64, device=engine.device).mul_(0x9E3779B97F4A7C1)


def _out(engine: Engine, source: torch.Tensor) -> Lease:
    return engine.swap_out(source, Engine.key_of(source), 0)


def _has_left(lease: Lease) -> bool:
    """Whether its copy-out has ended; raises where it failed."""
    ticket = lease.record.ticket
    if not ticket.out_done():
        return False
    if ticket.state == "failed":
        raise OSError(f"a copy-out failed while the link was measured: {ticket.failure}")
    return True


def _has_arrived(lease: Lease) -> bool:
    return lease.record.ticket.in_done()


def _await_all(leases: list[Lease], has_ended: Callable[[Lease], bool]) -> None:
    for lease in leases:
        while not has_ended(lease):
            time.sleep(0)


def _small_copy_seconds(engine: Engine) -> float:
    """What one of many queued copies of one page takes, in the slower direction."""
    outs, ins = [], []
    for _ in range(ROUNDS):
        sources = [_filled(engine, BLOCK_BYTES_MIN) for _ in range(SMALL_COPIES)]
        begun = time.perf_counter()
        leases = [_out(engine, source) for source in sources]
        _await_all(leases, _has_left)
        outs.append(time.perf_counter() - begun)
        engine.drain()
        del sources
        begun = time.perf_counter()
        for lease in leases:
            lease.record.begin_return()
        _await_all(leases, _has_arrived)
        ins.append(time.perf_counter() - begun)
        for lease in leases:
            lease.record.bring_back()
    return max(statistics.median(outs), statistics.median(ins)) / SMALL_COPIES


def _affordable(engine: Engine, block_bytes: int) -> int:
    """The largest block, at most `block_bytes`, that there is room for and that leaves within half a round."""
    while True:
        try:
            begun = time.perf_counter()
            _await_all([_out(engine, _filled(engine, block_bytes))], _has_left)
            seconds = time.perf_counter() - begun
        except MemoryError:  # torch.OutOfMemoryError is not one
            if block_bytes <= BLOCK_BYTES_MIN:
                raise
            seconds = math.inf
        except torch.OutOfMemoryError as error:
            if block_bytes <= BLOCK_BYTES_MIN:
                raise MemoryError(str(error)) from None
            seconds = math.inf
        engine.drain()
        if seconds <= ROUND_SECONDS / 2 or block_bytes <= BLOCK_BYTES_MIN:
            return block_bytes
        block_bytes = max(block_bytes // 4 // BLOCK_BYTES_MIN * BLOCK_BYTES_MIN, BLOCK_BYTES_MIN)


def _other_threads_seconds() -> float:
    return time.process_time() - time.thread_time()


@contextmanager
def _taken_by_others() -> Iterator[Callable[[], float]]:
    """What other programs took of this thread's processors within, as a fraction of their time; NaN where none tells.

    Of what they computed, and of what a hypervisor gave to others: what the kernel does may be for this process.
    """
    fraction = math.nan
    processors = os.sched_getaffinity(0)
    begun, used_begun = time.perf_counter(), _seconds_of_others(processors)
    try:
        yield lambda: fraction
    finally:
        seconds = (time.perf_counter() - begun) * len(processors)
        fraction = (_seconds_of_others(processors) - used_begun) / seconds


def _seconds_of_others(processors: set[int]) -> float:
    try:
        lines = [line.split() for line in PROCESSOR_TIMES.read_text(encoding="ascii").splitlines() if line]
    except OSError as error:
        log.info("nobody tells what other programs take of the processors: %s", error)
        return math.nan
    names = {f"cpu{each}" for each in processors}
    ticks = [sum(map(int, line[1:3] + line[8:9])) for line in lines if line[0] in names]  # user, nice; steal
    if len(ticks) != len(names) or not any(ticks):  # one has gone, or a sandbox counts nothing
        return math.nan
    return sum(ticks) / os.sysconf("SC_CLK_TCK") - os.times().user


class _Traffic:
    """Copies of equal blocks, `COPIES_IN_FLIGHT` kept under way in each direction asked for."""

    def __init__(self, engine: Engine, block_bytes: int) -> None:
        self._engine = engine
        self._block_bytes = block_bytes
        self._sources = [_filled(engine, block_bytes) for _ in range(COPIES_IN_FLIGHT)]
        self._parked = [_out(engine, _filled(engine, block_bytes)) for _ in range(COPIES_IN_FLIGHT)]
        _await_all(self._parked, _has_left)
        engine.drain()

    def rates(self, *, out: bool = False, into: bool = False) -> tuple[float, float, float]:
        """Bytes per second out and in, over at least one copy in each direction asked for, 0 for the other.

        The third: what a byte took of the processors, beside this thread, in seconds of one.
        """
        begun, processors_begun = time.perf_counter(), _other_threads_seconds()
        leaving = [_out(self._engine, source) for source in self._sources] if out else []
        arriving = list(self._parked) if into else []
        for lease in arriving:
            lease.record.begin_return()
        copies, last = [0, 0], [begun, begun]
        while True:
            enough = time.perf_counter() - begun >= ROUND_SECONDS
            if enough and (copies[0] or not out) and (copies[1] or not into):
                break
            for at in range(len(leaving)):
                if _has_left(leaving[at]):
                    copies[0] += 1
                    last[0] = time.perf_counter()
                    leaving.pop(at)  # first: the same bytes may have one lease only
                    leaving.insert(at, _out(self._engine, self._sources[at]))
            for lease in arriving:
                if _has_arrived(lease):
                    lease.record.bring_back()
                    copies[1] += 1
                    last[1] = time.perf_counter()
                    lease.record.begin_return()
            time.sleep(POLL_SECONDS if self._block_bytes >= POLL_BYTES_MIN else 0)
        _await_all(leaving, _has_left)
        _await_all(arriving, _has_arrived)
        for lease in arriving:
            lease.record.bring_back()
        moved = [count * self._block_bytes for count in copies]
        ended = [copies[0] + len(leaving), copies[1] + len(arriving)]
        return (
            moved[0] / (last[0] - begun) if copies[0] else 0.0,
            moved[1] / (last[1] - begun) if copies[1] else 0.0,
            (_other_threads_seconds() - processors_begun) / (sum(ended) * self._block_bytes),
        )

    def close(self) -> None:
        """Free the blocks below."""
        self._parked.clear()
        self._sources.clear()


# -- keeping ----------------------------------------------------------------------------------------------------------


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _machine_key(store: _core.SwapStore, device: torch.device, spill_dir: str, block_bytes: int) -> dict[str, Any]:
    """What a kept result holds for: anything else is another link."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "") if device.type == "cuda" else ""
    return {
        "version": __version__,
        "host": platform.node(),
        "device": _device_name(device),
        "uuid": str(uuid),
        "tier": "disk" if _is_direct(store) else "pinned RAM",
        "spill_device": Path(spill_dir).stat().st_dev if spill_dir else None,
        "block_bytes": block_bytes,
    }


def _cache_path(key: dict[str, Any], cache_dir: str | os.PathLike[str] | None) -> Path:
    if cache_dir is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (never raises)
        cache_dir = Path(home) / "offload"
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return Path(cache_dir) / f"link-{digest[:16]}.json"


def _load(path: Path, key: dict[str, Any]) -> Calibration | None:
    try:
        if time.time() - path.stat().st_mtime > KEPT_SECONDS_MAX:
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(kept, dict) or kept.get("key") != key:
            raise ValueError("it was written for another machine")
        return Calibration.from_dict(kept.get("calibration", {}))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # malformed JSON and malformed text are ValueErrors too
        log.info("%s is not used, the link is measured anew: %s", path, error)
        return None


def _save(path: Path, key: dict[str, Any], found: Calibration) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as part:
                json.dump({"key": key, "calibration": found.to_dict()}, part, indent=1)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        log.info("the measured link is not kept, the next process measures it again: %s", error)
