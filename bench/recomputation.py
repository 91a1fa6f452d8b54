"""Compares steps with recomputation, swap-only steps and plain steps on the CPU, with a throttled link.

    python bench/recomputation.py --json bench/results/recomputation-cpu-DATE.json

Each row runs in a separate process, in which three copies of one network train the same batches in turn, A B C A B C:
a plain one, one that only swaps, and one that may recompute. The limit is the smallest one possible with swapping, plus
a tenth of the difference to the plain peak. `OFFLOAD_THROTTLE` slows the link. Times are those of forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import machine
import torch
from models import CLASSES, FAMILIES, OTHERS, Family, images, loss_of
from recomputation_tables import keeps_goal
from result_file import write_json
from torch import Tensor, nn

import offload
from offload.devices import allocator
from offload.plan import least_feasible_limit, unswapped_bytes
from offload.units import format_bytes, format_seconds

ROOM = 0.1  # of the way from the least feasible limit to the unswapped peak
SETTLE_STEPS = 18  # profiling, the trial, and five plans anew after three measured steps each
MEASURED_STEPS = 9
LINKS = ("0.5GB/s", "0.15GB/s")


class Residual(nn.Module):
    """Residual blocks of group normalisation, SiLU and 3 × 3 convolutions, twice each."""

    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        width = size["width"]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(
                    layer
                    for _ in range(2)
                    for layer in (nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
                )
            )
            for _ in range(size["blocks"])
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Images → logits."""
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


_SIZES = {
    "tiny": {"width": 8, "blocks": 2, "resolution": 16, "batch": 2},
    "quick": {"width": 32, "blocks": 10, "resolution": 64, "batch": 20},
}
NETWORKS = {**FAMILIES, "residual": Family(Residual, images, _SIZES["tiny"], _SIZES["quick"], _SIZES["quick"])}
ROWS = [(name, link) for link in LINKS for name in FAMILIES] + [("residual", link) for link in (*LINKS, "")]


class Contestant:
    """One copy of a network, its optimizer and the seconds of its steps."""

    def __init__(self, network: Family, size: dict[str, int]) -> None:
        torch.manual_seed(0)
        self.network, self.size = network, size
        self.model = self.network.make(size).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []  # of the training thread: what others on the machine do not change

    def step(self, number: int) -> list[Tensor]:
        """Train one step; the loss, the gradients and the buffers."""
        x, y = self.network.draw(self.size, torch.Generator().manual_seed(number))
        torch.manual_seed(number)  # dropout drops the same for every contestant
        begin, used = time.perf_counter(), time.thread_time()
        loss = loss_of(self.model(x), y)
        loss.backward()
        self.seconds.append(time.perf_counter() - begin)
        self.processor_seconds.append(time.thread_time() - used)
        results = [loss.detach().clone(), *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]
        results += [buffer.clone() for buffer in self.model.buffers()]
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        return results


def least_and_peak(network: Family, size: dict[str, int]) -> tuple[int, int]:
    """The lowest feasible memory limit and the peak without swaps, in bytes, from a profiled step."""
    contestant = Contestant(network, size)
    with offload.enable(contestant.model, max_slowdown=0, recompute=False, min_tensor_bytes=min_bytes(size)) as handle:
        contestant.step(0)
        contestant.step(1)
        trace = handle.plan.trace  # type: ignore[union-attr]  # the optimizer's state is in it
    return least_feasible_limit(trace), max(unswapped_bytes(trace))


def limit_and_peak(network: Family, size: dict[str, int]) -> tuple[int, int]:
    """The memory limit of a row and the peak without swaps, in bytes."""
    least, peak = least_and_peak(network, size)
    return int(least + ROOM * (peak - least)), peak


def min_bytes(size: dict[str, int]) -> str:
    """The smallest tensors that move."""
    tiny = [network.tiny for network in (*NETWORKS.values(), *OTHERS.values())]
    return "1KiB" if size in tiny else "1MiB"


def measure(name: str, link: str, size_name: str, settle: int, measured: int) -> dict[str, Any]:
    """One row."""
    network = NETWORKS[name]
    size = getattr(network, size_name)
    limit, peak = limit_and_peak(network, size)
    plain, alone, joint = (Contestant(network, size) for _ in range(3))
    asked = {"memory_limit": limit, "min_tensor_bytes": min_bytes(size)}
    handles = offload.enable(alone.model, **asked, recompute=False), offload.enable(joint.model, **asked)
    equal = True
    for number in range(settle + measured):
        expected = plain.step(number)
        for other in (alone, joint):
            equal = all(map(torch.equal, other.step(number), expected)) and equal
    swap_plan, plan = (handle.plan for handle in handles)
    assert swap_plan is not None
    assert plan is not None
    sizes = {tensor.id: tensor.bytes for tensor in plan.trace.tensors}
    about = {
        each: _spread(contestant.seconds[-measured:])
        for each, contestant in zip(KINDS, (plain, alone, joint), strict=True)
    }
    used = {
        each: median(contestant.processor_seconds[-measured:])
        for each, contestant in zip(KINDS, (plain, alone, joint), strict=True)
    }
    return {
        "network": name,
        "link": link,
        "bits_equal": equal,
        "limit_bytes": limit,
        "unswapped_peak_bytes": peak,
        "predicted_peak_bytes": plan.peak_bytes,
        "seconds": about,
        "slowdown_swap": about["swap"]["median"] / about["plain"]["median"] - 1,
        "slowdown_joint": about["joint"]["median"] / about["plain"]["median"] - 1,
        "slowdown_swap_least": about["swap"]["least"] / about["plain"]["least"] - 1,
        "slowdown_joint_least": about["joint"]["least"] / about["plain"]["least"] - 1,
        "processor_seconds": used,
        "planned_swap": swap_plan.expected_seconds / swap_plan.compute_seconds - 1,
        "planned_joint": plan.expected_seconds / plan.compute_seconds - 1,
        "predicted_seconds": plan.expected_seconds,
        "activation_bytes": handles[1].report().verdict.activation_bytes,
        "activation_bytes_planned": handles[1].report().verdict.activation_bytes_planned,
        "swapped_bytes": sum(sizes[swap.id] for swap in plan.swaps),
        "recomputed_bytes": sum(sizes[row.id] for row in plan.recomputes),
        "recompute_seconds": plan.recompute_seconds,
        "tensors": [len(plan.trace.tensors), len(plan.swaps), len(plan.recomputes)],
        "out_bandwidth": plan.link.out_bandwidth,
        "in_bandwidth": plan.link.in_bandwidth,
        "threads": torch.get_num_threads(),
    }


KINDS = ("plain", "swap", "joint")


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    low, middle, high = quantiles(seconds, n=4)
    return {"median": middle, "low": low, "high": high, "least": min(seconds)}


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    count, swaps, recomputes = row["tensors"]
    took = row["seconds"]
    return (
        f"{row['network']:<9}{row['link'] or 'as it is':<10}bits {'equal' if row['bits_equal'] else 'DIFFER'}  plain "
        f"{format_seconds(took['plain']['median'])}  swap alone {row['slowdown_swap']:+.0%} (fastest steps "
        f"{row['slowdown_swap_least']:+.0%}, planned {row['planned_swap']:+.0%})  joint {row['slowdown_joint']:+.0%} "
        f"(fastest steps {row['slowdown_joint_least']:+.0%}, planned {row['planned_joint']:+.0%}, processor time "
        f"{row['processor_seconds']['joint'] / row['processor_seconds']['plain'] - 1:+.0%})  of "
        f"{count} tensors {swaps} swap, {format_bytes(row['swapped_bytes'])}, {recomputes} are recomputed, "
        f"{format_bytes(row['recomputed_bytes'])} in {format_seconds(row['recompute_seconds'])}  peak "
        f"{format_bytes(row['predicted_peak_bytes'])} of {format_bytes(row['unswapped_peak_bytes'])}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 1 where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--network", choices=NETWORKS, action="append", help="only this one (repeatable)")
    parser.add_argument("--link", action="append", help='only over this link, such as "0.15GB/s" (repeatable)')
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="quick")
    parser.add_argument("--threads", type=int, help="of torch; default: as torch chooses")
    parser.add_argument("--settle", type=int, default=SETTLE_STEPS, help="steps before those that are measured")
    parser.add_argument("--measured", type=int, default=MEASURED_STEPS, help="steps that are measured")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.worker is not None:
        print(json.dumps(measure(**json.loads(args.worker))))
        return 0
    rows = []
    chosen = [(name, link) for name, link in ROWS if args.link is None or link in args.link]
    for link in args.link or ():
        chosen += [(name, link) for name in NETWORKS if (name, link) not in chosen]
    for name, link in chosen:
        if args.network is not None and name not in args.network:
            continue
        about = {"name": name, "link": link, "size_name": args.size}
        task = json.dumps({**about, "settle": args.settle, "measured": args.measured})
        threads = [] if args.threads is None else ["--threads", str(args.threads)]
        command = [sys.executable, __file__, *threads, "--worker", task]
        environment = {**os.environ, **allocator.preload_environment(), "OFFLOAD_THROTTLE": link}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(line(rows[-1]), flush=True)
        if args.json is not None:
            write_json(args.json, {"format": "offload-recomputation/1", "machine": machine.describe(), "rows": rows})
    print(f"{sum(map(keeps_goal, rows))} of {len(rows)} rows: at most a third of the slowdown by swapping alone")
    print(f"median slowdown: {median(row['slowdown_joint'] for row in rows):+.0%}")
    return 0 if all(row["bits_equal"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
