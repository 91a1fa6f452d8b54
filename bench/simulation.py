"""Training steps on the simulated accelerator, in virtual time: cards, scaled-down networks, one contestant's run.

No GPU is used: durations are computed from the queued work, see tests/twin/clock.h.

Scaling. A network that is k times as wide, with k times as many positions (samples, or tokens of a sequence), needs k³
times the FLOPs in matrix products and convolutions, and k² times the bytes of activations and weights. An element has
four bytes here and represents one of two bytes. So the simulated card has 1/k³ of the FLOP/s and 2/k² of every byte
rate: each kernel and each copy takes as long as that of the large network on the real card. Launch times and latencies
are not scaled. The engine's thresholds in bytes are not scaled either: blocks below 1 MiB are joined, which is k²/2 MiB
in the large network.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import models
import torch
from contestants import Inapplicable, checkpointed, installed, selectively
from torch import nn
from torch.autograd.graph import save_on_cpu
from training import gradient_hash

import offload
from offload.devices import accelerator
from offload.plan import InfeasibleLimitError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from twin import sim, virtual_time
from twin.virtual_time import Figures, seconds_of, united

accelerator.LIBRARIES["sim"] = sim.LIBRARY

STEPS_TO_SETTLE, STEPS_TO_SETTLE_OURS, STEPS_MEASURED = 2, 10, 3  # ours are profiled, then measured for eight steps
STEPS_TO_SETTLE_MAX = 60  # of a search for a plan
MIN_TENSOR_BYTES, MIN_TRL_BYTES, IN_FLIGHT_BYTES = (
    1 << 20,
    1024,
    512 << 20,
)  # defaults, of the large network
KERNEL_SECONDS, COPY_SECONDS, LAUNCH_SECONDS = 2e-6, 8e-6, 5e-6
LEAST_MARGIN = 1.005


@dataclass(frozen=True)
class Card:
    """An accelerator and its link, as large networks meet them: what kernels reach, not what data sheets say."""

    name: str
    flops_per_second: float  # bfloat16
    bytes_per_second: float
    link_bytes_per_second: float  # each way

    def figures(self, network: Network, host_factor: float) -> Figures:
        """Scaled to the small network."""
        bytes_scale = network.bytes_scale
        return Figures(
            self.flops_per_second / network.factor**3,
            self.bytes_per_second / bytes_scale,
            self.link_bytes_per_second / bytes_scale,
            self.link_bytes_per_second / bytes_scale,
            KERNEL_SECONDS,
            COPY_SECONDS,
            LAUNCH_SECONDS,
            host_factor,
        )


CARDS = {
    "h200": Card("H200, 55 GB/s each way", 600e12, 3.8e12, 55e9),
    "a100": Card("A100 PCIe, 25 GB/s each way", 190e12, 1.2e12, 25e9),
    "laptop": Card("12 GB laptop card, 12 GB/s each way", 60e12, 0.35e12, 12e9),
}


@dataclass(frozen=True)
class Network:
    """A family's network as it is computed here, and `factor`, k above."""

    family: str
    size: models.Size
    factor: int
    stands_for: str

    def make(self) -> nn.Module:
        """With its first weights, in RAM."""
        return models.build(self.family, self.size, seed=0, device="cpu", dtype=torch.float32)

    @property
    def bytes_scale(self) -> float:
        """Bytes of the large network to a byte here."""
        return self.factor**2 / 2


NETWORKS = (
    Network(
        "gpt",
        {"layers": 4, "width": 256, "heads": 4, "batch": 16, "length": 64},
        16,
        "4 layers, width 4096, 16 sequences of 1024 tokens, attention by its formula",
    ),
    Network(
        "resnet",
        {"width": 8, "blocks0": 2, "blocks1": 2, "blocks2": 3, "blocks3": 1, "resolution": 128, "batch": 16},
        8,
        "8 bottlenecks, width 64, 128 images of 128 × 128",
    ),
    Network(
        "unet",
        {"width": 8, "levels": 4, "resolution": 128, "batch": 4},
        8,
        "4 levels, width 64, 32 images of 128 × 128",
    ),
    Network(
        "lstm",
        {"layers": 3, "width": 128, "batch": 16, "length": 24},
        8,
        "3 layers, width 1024, 128 sequences of 24 bytes, cells as single kernels",
    ),
    Network(
        "vit",
        {"layers": 4, "width": 128, "heads": 4, "resolution": 64, "patch": 8, "batch": 16},
        8,
        "4 layers, width 1024, 16 images of 512 patches, attention by its formula",
    ),
)
QUICK = Network(
    "gpt",
    {"layers": 3, "width": 64, "heads": 2, "batch": 8, "length": 32},
    16,
    "3 layers, width 1024, 8 sequences of 512 tokens, attention by its formula",
)


@dataclass(frozen=True)
class Way:
    """One way to train. `share` is a limit: so much of what plain's step grows by."""

    name: str
    kind: str = "offload"
    share: float | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the engine runs in it."""
        return self.kind == "offload"


PLAIN, SAVE_ON_CPU, TRL = Way("plain", "plain"), Way("save_on_cpu, pinned", "save_on_cpu"), Way("TRL", "trl")
TORCHTUNE = Way("torchtune", "torchtune")
CHECKPOINT, SELECTIVE = Way("checkpoint per block", "checkpoint"), Way("selective checkpointing", "selective")
CHECKPOINTING = {"checkpoint": checkpointed, "selective": selectively}
ALL, BY_DEFAULT, LEAST = Way("offload, n_tensors −1, lb 4"), Way("offload, default"), Way("offload, least memory")
LIMITED = tuple(Way(f"offload, {share:.0%} of plain", share=share) for share in (0.8, 0.6, 0.4))
WAYS = (PLAIN, CHECKPOINT, SELECTIVE, SAVE_ON_CPU, TRL, TORCHTUNE, ALL, BY_DEFAULT, *LIMITED, LEAST)
WAYS_QUICK = (PLAIN, SAVE_ON_CPU, TRL, ALL, LIMITED[1])


@dataclass(frozen=True)
class Step:
    """One step, in seconds of the large network on its card.

    `seconds` until nothing is under way any more, the optimizer included; `until_backward_seconds` from the first
    kernel to backward's last. `kernel_seconds`, `copy_seconds`: at least one is under way; `exposed_seconds`: a
    copy is, and no kernel.
    """

    seconds: float
    until_backward_seconds: float
    kernel_seconds: float
    out_seconds: float
    in_seconds: float
    copy_seconds: float
    exposed_seconds: float
    loss: str  # as float.hex


Around = Callable[[], AbstractContextManager[Any]]


class Run:
    """A model, its optimizer and one way to train it, on the simulated device."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.model: nn.Module = network.make().to("sim")
        self.around: Around = contextlib.nullcontext
        self.handle: Any = None
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        for parameter in self.model.parameters():  # what a run holds between steps is none of a step's growth
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device="sim"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._number = 0
        # As asked for: what the allocator rounds up does not scale.
        self.baseline_bytes = int(torch.sim.memory_stats()["requested_bytes.all.current"])

    def enable(self, **options: Any) -> None:
        """Have the engine swap; sizes are the large network's."""
        scale = self.network.bytes_scale
        self.handle = offload.enable(self.model, min_tensor_bytes=int(MIN_TENSOR_BYTES / scale), **options)
        self.handle._engine.in_flight_bytes_max = int(IN_FLIGHT_BYTES / scale)
        self.around = self.handle.step

    def take(self, way: Way, plain_bytes: int) -> None:
        """Prepare the model; `plain_bytes` is what plain's step grows by."""
        scale = self.network.bytes_scale
        if way.kind == "save_on_cpu":
            self.around = lambda: save_on_cpu(pin_memory=True, device_type="sim")
        elif way.kind == "trl":
            installed("trl")
            from trl.models.activation_offloading import get_act_offloading_ctx_manager

            least = max(int(MIN_TRL_BYTES / scale), 1)
            manager = get_act_offloading_ctx_manager(self.model, min_offload_size=least, warn_if_no_head=False)
            self.around = lambda: manager
        elif way.kind == "torchtune":
            raise Inapplicable("it moves tensors by torch.cuda only; TRL's is made from it")
        elif way.kind in CHECKPOINTING:
            CHECKPOINTING[way.kind](self.model, "sim", self.step)
        elif way is ALL:
            self.enable(n_tensors=-1, lb=4)
        elif way is LEAST:
            self._enable_least()
        elif way.share is not None:
            self.enable(memory_limit=self.baseline_bytes + int(way.share * plain_bytes))
        elif way.is_ours:
            self.enable()

    def _enable_least(self) -> None:
        """Enable with the least limit, which is told with the refusal of a smaller one."""
        limit_bytes = self.baseline_bytes
        for _ in range(4):
            self.enable(memory_limit=limit_bytes)
            try:
                for _ in range(3):  # profiled, then planned
                    self.step()
            except InfeasibleLimitError as error:
                self.handle.disable()
                limit_bytes = int(error.least_limit_bytes * LEAST_MARGIN)
            else:
                return
        raise RuntimeError("the least limit rose from try to try")

    def step(self) -> Step:
        """Train one step."""
        network = self.network
        self._optimizer.zero_grad(set_to_none=True)
        x, y = models.batch_of(
            network.family, network.size, seed=0, step=self._number, device="sim", dtype=torch.float32
        )
        self._number += 1
        begun, ended = torch.sim.Event(enable_timing=True), torch.sim.Event(enable_timing=True)
        torch.sim.synchronize()
        virtual_time.take_work()
        begin = virtual_time.now()
        begun.record()
        with self.around():
            loss = models.loss_of(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        ended.record()
        self._optimizer.step()
        torch.sim.synchronize()
        seconds = virtual_time.now() - begin
        kernels, outs, ins = virtual_time.take_work()
        copies = united(outs, ins)
        return Step(
            seconds=seconds,
            until_backward_seconds=1e-3 * begun.elapsed_time(ended),
            kernel_seconds=seconds_of(united(kernels)),
            out_seconds=seconds_of(outs),
            in_seconds=seconds_of(ins),
            copy_seconds=seconds_of(copies),
            exposed_seconds=seconds_of(united(kernels, copies)) - seconds_of(united(kernels)),
            loss=float(loss.item()).hex(),
        )

    def start_anew(self) -> None:
        """Weights, optimizer and batches as at the beginning: some ways have taken more steps to settle than others."""
        fresh = self.network.make()
        with torch.no_grad():
            for own, other in zip(self.model.state_dict().values(), fresh.state_dict().values(), strict=True):
                own.copy_(other)
            for state in self._optimizer.state.values():
                for value in state.values():
                    value.zero_()
        self._number = 0

    def end_search(self) -> None:
        """Train until the search for a plan has ended: reference steps need more memory than its plans."""
        handle = self.handle
        if handle is None or handle.plan is None:
            return
        while not handle.report().settled_steps and self._number < STEPS_TO_SETTLE_MAX:
            self.step()

    def close(self) -> None:
        """Undo what was done to the model."""
        if self.handle is not None:
            self.handle.disable()


def figures_of(way: Way, network: Network, plain: dict[str, Any] | None) -> dict[str, Any]:
    """Train in this way until it has settled; the median step. `plain` is what this gave for plain, None for itself."""
    run = Run(network)
    try:
        run.take(way, plain["growth_bytes"] if plain else 0)
        for _ in range(STEPS_TO_SETTLE_OURS if way.is_ours else STEPS_TO_SETTLE):
            run.step()
        run.end_search()
        run.start_anew()
        torch.sim.reset_peak_memory_stats()
        steps, bits = [], []
        for _ in range(STEPS_MEASURED):
            steps.append(run.step())
            bits.append((steps[-1].loss, gradient_hash(run.model)))
        growth_bytes = int(torch.sim.memory_stats()["requested_bytes.all.peak"]) - run.baseline_bytes
        middle = asdict(sorted(steps, key=lambda step: step.seconds)[STEPS_MEASURED // 2])
        middle.pop("loss")
        return {**middle, "bits": bits, "growth_bytes": growth_bytes, **_ours(run)}
    finally:
        run.close()
        del run
        gc.collect()
        torch.sim.synchronize()
        torch.sim.empty_cache()


def _ours(run: Run) -> dict[str, Any]:
    if run.handle is None:
        return {}
    plan, report = run.handle.plan, run.handle.report()
    found: dict[str, Any] = {"swapped_tensors": report.swapped.tensors}
    if plan is not None:
        found |= {
            "predicted_seconds": plan.expected_seconds,
            "bound_seconds": plan.bound_seconds,
            "predicted_waits_seconds": plan.step_seconds - plan.compute_seconds,
            "swaps": len(plan.swaps),
            "recomputes": len(plan.recomputes),
            "recompute_seconds": plan.recompute_seconds,
        }
    return found


def rows_of(network: Network, card: Card, ways: tuple[Way, ...], host_factor: float) -> Iterator[dict[str, Any]]:
    """A row for each way; plain first. "error" in one whose losses or gradients are not plain's."""
    # A measured link is kept under the device's name, and each network scales it in its own way.
    sim.module.get_device_name = lambda device=None: f"simulated {card.name}, for {network.stands_for}"
    figures, scale = card.figures(network, host_factor), network.bytes_scale
    plain: dict[str, Any] | None = None
    for way in ways:
        about = {"card": card.name, "family": network.family, "host_factor": host_factor, "name": way.name}
        about["ours"] = way.is_ours
        try:
            with virtual_time.on(figures):
                found = figures_of(way, network, plain)
        except (InfeasibleLimitError, Inapplicable, RuntimeError) as error:
            if isinstance(error, RuntimeError) and way.kind not in CHECKPOINTING:  # torch refuses some cells
                raise
            yield {**about, "inapplicable": str(error).splitlines()[0]}
            continue
        plain = plain or found
        row = {**about, **{name: value for name, value in found.items() if name != "bits"}}
        row["memory_bytes"] = int(row.pop("growth_bytes") * scale)
        row["memory_over_plain"] = found["growth_bytes"] / plain["growth_bytes"]
        row["step_over_plain"] = found["seconds"] / plain["seconds"]
        row["overlap"] = 1 - found["exposed_seconds"] / found["copy_seconds"] if found["copy_seconds"] else None
        row["equal"] = found["bits"] == plain["bits"]
        yield row
