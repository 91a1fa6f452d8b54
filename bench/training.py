"""Runs one contestant's training in this process and measures each step: time, memory, the bits of the gradients.

The worker processes of the CPU benchmarks and the parts of the GPU suite use it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import contestants
import models
import torch
from contestants import Contestant, Prepared
from step_watch import StepWatch
from torch import Tensor, nn

from offload.demo.memory import MemoryMeter
from offload.devices import allocator

STEPS_TO_WARM_UP = 2  # the first is recorded, the second follows the schedule
STEPS_TO_SETTLE = 3  # the first is recorded, and in it memory is pinned or the file grows
STEPS_TO_STEADY_MAX = 60  # a search measures 36 steps or some more, and may repeat some that were disturbed
STEPS_PER_HASH = 8
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value
CHECKSUM_VALUES = 1 << 24  # values in one sum of a checksum; their products take 8 bytes each


@dataclass(frozen=True)
class Setting:
    """The model, its sizes and the device; the same for every contestant."""

    family: str
    size: models.Size
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    min_tensor_bytes: int | None = None  # None: the engine's own default

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Step:
    """Time and results of one step."""

    seconds: float
    loss: str  # as float.hex
    gradients: str  # hash over all gradients
    watched: dict[str, Any] | None = None  # what `StepWatch` has found, where the trainer watches


def gradient_hash(model: nn.Module) -> str:
    """SHA-256 over all gradients, in the order of the parameters; hexadecimal.

    On the CPU it is over the hashes of their bytes. On an accelerator it is over their checksums, which are computed
    there: gradients of several GB would take seconds to copy and hash.
    """

    def digest(gradient: Tensor) -> bytes:
        whole = gradient.detach().contiguous().view(-1).view(torch.uint8)
        return hashlib.sha256(whole.numpy()).digest()

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if gradients and gradients[0].device.type != "cpu":
        sums = torch.stack([checksum(gradient) for gradient in gradients])
        return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()
    with ThreadPoolExecutor(8) as pool:
        return hashlib.sha256(b"".join(pool.map(digest, gradients))).hexdigest()


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of (2 i + 1) × v[i] modulo 2^64 as an int64 scalar; v[i]: the bits of value i as an integer.

    Every factor is odd, so two tensors that differ in one value have different checksums.
    """
    bits = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHECKSUM_VALUES):
        part = bits[start : start + CHECKSUM_VALUES]
        factors = torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=tensor.device)
        total += (factors * part).sum()
    return total


@contextlib.contextmanager
def same_bits(device: str) -> Iterator[None]:
    """Compute deterministically on a GPU; CUBLAS_WORKSPACE_CONFIG must be set as well."""
    if device == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    # Deterministic mode would also fill every new tensor, which normal training does not do.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def resident_file_bytes() -> int:
    """The resident pages of programs, libraries and other files, in bytes; 0 without /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text(encoding="ascii").split()[2]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


class Trainer:
    """A model, its optimizer and the contestant that trains it.

    `watch`: whether memory, kind and the controller's decisions are found for each step (on the CPU).

    Raises
    ------
    Inapplicable
        The contestant cannot run here.
    """

    def __init__(self, setting: Setting, contestant: Contestant, *, watch: bool = False) -> None:
        self.setting = setting
        self.contestant = contestant
        self._number = 0
        self._dtype = getattr(torch, setting.dtype)
        self._owner = models.build(
            setting.family, setting.size, seed=setting.seed, device=setting.device, dtype=self._dtype
        )
        self._optimizer = torch.optim.AdamW(self._owner.parameters(), lr=1e-4, fused=True)
        for parameter in self._owner.parameters():  # memory held between steps is not growth of a step
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device=setting.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        defaults = {} if setting.min_tensor_bytes is None else {"min_tensor_bytes": setting.min_tensor_bytes}
        self._stall_before = 0.0
        self._settled = 0
        self._meter: MemoryMeter | None = None
        self._allocated_before: int | None = None  # by malloc's count
        self._file_bytes_before = 0
        # Before a contestant runs a step: memory that malloc keeps after it would count as the initial memory.
        self.baseline_bytes = self._begin()
        try:
            self._prepared: Prepared = contestants.prepare(
                contestant, self._owner, device=setting.device, probe=self._probe, defaults=defaults
            )
        except BaseException:
            self._end_meter()
            raise
        self._watch = StepWatch(self._meter, self._prepared.handle) if watch and self._meter is not None else None

    def _begin(self) -> int:
        """Start measuring memory; return the bytes in use now, from which growth is counted."""
        gc.collect()
        if self.setting.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return int(torch.cuda.memory_allocated())
        self._allocated_before, self._file_bytes_before = allocator.bytes_in_use(), resident_file_bytes()
        self._meter = MemoryMeter("cpu")
        self._meter.start()
        return self._meter.baseline_bytes

    def settle(self, count: int | None = None) -> list[Step]:
        """Run the first steps, which may differ from the later ones, and reset the peaks.

        `count`: how many. By default, as many as it takes until a plan of offload is steady, and at least
        `STEPS_TO_SETTLE`.
        """
        steps = [self.step() for _ in range(count or STEPS_TO_SETTLE)]
        if count is None:
            steps += self.settle_plan(STEPS_TO_STEADY_MAX, hash_every=1)
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        elif self._meter is not None:
            self._meter.lap()
        self._stall_before = self._report().get("stall_seconds", 0.0)
        self._settled = self._number
        return steps

    def settle_plan(self, steps_max: int, hash_every: int = STEPS_PER_HASH) -> list[Step]:
        """Train until offload's plan is steady, if the contestant has one. One step in `hash_every` is hashed."""
        steps: list[Step] = []
        while self.contestant.is_planned and not self._report().get("settled_steps") and len(steps) < steps_max:
            steps.append(self.step(hashes=self._number % hash_every == 0))
        return steps

    def step(self, hashes: bool = True) -> Step:
        """Train one step; only forward, loss, backward and optimizer are timed."""
        setting = self.setting
        self._optimizer.zero_grad(set_to_none=True)
        x, y = models.batch_of(
            setting.family,
            setting.size,
            seed=setting.seed,
            step=self._number,
            device=setting.device,
            dtype=self._dtype,
        )
        self._number += 1
        self._synchronize()
        if self._watch is not None:
            self._watch.begin()
        begin = time.perf_counter()
        with self._prepared.around():
            loss = models.loss_of(self._prepared.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._synchronize()
        seconds = time.perf_counter() - begin
        watched = self._watch.end() if self._watch is not None else None
        return Step(seconds, float(loss.item()).hex(), gradient_hash(self._owner) if hashes else "", watched)

    def figures(self) -> dict[str, Any]:
        """End the measurement and return memory, disk use and stalls."""
        report = self._report()
        disk = self._prepared.disk
        stalled = report.get("stall_seconds")
        steps = max(self._number - self._settled, 1)
        return {
            "report": report or None,
            "disk_bytes": disk.peak_bytes if disk else report.get("spill_file_bytes", 0),
            "stall_seconds_per_step": None if stalled is None else (stalled - self._stall_before) / steps,
            **(self._device_memory(report) if self.setting.device == "cuda" else self._resident_memory()),
        }

    def close(self) -> None:
        """Undo what was done to the model."""
        self._end_meter()
        if self._prepared.handle is not None:
            self._prepared.handle.disable()

    def _resident_memory(self) -> dict[str, Any]:
        meter = self._meter
        assert meter is not None
        settled_peak_bytes = meter.lap()  # since `settle`, or the latest step that was watched
        self._end_meter()
        allocated_bytes = allocator.bytes_in_use()
        return {
            "allocator": allocator.current(),
            "allocated_bytes": (
                None
                if allocated_bytes is None or self._allocated_before is None
                else allocated_bytes - self._allocated_before
            ),
            "file_bytes": resident_file_bytes() - self._file_bytes_before,
            "baseline_bytes": meter.baseline_bytes,
            "peak_bytes": meter.peak_bytes - meter.baseline_bytes,
            **({} if self._watch is not None else {"settled_peak_bytes": settled_peak_bytes - meter.baseline_bytes}),
            "pinned_bytes": 0,
        }

    def _end_meter(self) -> None:
        if self._meter is not None:
            self._meter.stop()
            self._meter = None

    def _device_memory(self, report: dict[str, Any]) -> dict[str, Any]:
        pinned = int(report.get("host_bytes_held", 0))
        statistics = getattr(torch.cuda, "host_memory_stats", None)
        if statistics is not None and not pinned:
            pinned = int(statistics().get("allocated_bytes.peak", 0))
        return {
            "baseline_bytes": self.baseline_bytes,
            "peak_bytes": torch.cuda.max_memory_allocated() - self.baseline_bytes,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "pinned_bytes": pinned,
        }

    def _report(self) -> dict[str, Any]:
        handle = self._prepared.handle
        return {} if handle is None else dict(handle.report().to_dict())

    def _probe(self) -> None:
        """Run a step that changes nothing: the optimizer steps without gradients."""
        setting = self.setting
        x, y = models.batch_of(
            setting.family, setting.size, seed=setting.seed, step=0, device=setting.device, dtype=self._dtype
        )
        models.loss_of(self._owner(x), y).backward()  # type: ignore[no-untyped-call]
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.step()

    def _synchronize(self) -> None:
        if self.setting.device == "cuda":
            torch.cuda.synchronize()


def warm_up(setting: Setting, contestant: Contestant) -> None:
    """Train a tiny model in the same way, so that the memory of loaded code is not counted.

    Raises
    ------
    Inapplicable
        The contestant cannot run here.
    """
    size = models.family_of(setting.family).tiny
    tiny = Setting(setting.family, size, setting.device, setting.dtype, min_tensor_bytes=1024)
    trainer = Trainer(tiny, contestant)
    for _ in range(STEPS_TO_WARM_UP):
        trainer.step()
    trainer.close()
