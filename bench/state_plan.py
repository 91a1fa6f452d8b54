"""What a plan says of a step whose optimizer state may move, and what its steps take: one run at three limits.

    python bench/state_plan.py [--json FILE] [--quick] [--tokens N] [--width W] [--layers L] [--steps N]

trains a stack of linear layers with AdamW in processes of their own: without offload, and with three values of
`memory_limit`: one that is never near, the least that works, and one between. A row has the state that moves, the
predicted and the measured duration of a step with its update, the lower bound, and the memory that the plan predicts
beside that of the process. The sums of the weights have to be equal; exit status 1 if they are not. `--quick` takes a
tiny model and smaller chunks. The malloc is that of the environment: begin with `offload run --`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FORMAT = "offload-state-plan/1"
SETTLE = 6  # steps that may be profiled, tried and planned anew
QUICK = {"tokens": 64, "width": 192, "layers": 6, "steps": 8}


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in this process, and return the figures."""
    import torch
    from torch import nn

    import offload
    from offload.optimizer_state import mover

    if arguments.quick:
        mover.CHUNK_BYTES, mover.AHEAD_BYTES, mover.BEHIND_BYTES = 256 << 10, 256 << 10, 128 << 10
    torch.manual_seed(0)
    width = arguments.width
    layers = [each for _ in range(arguments.layers) for each in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    smallest = "16KiB" if arguments.quick else "1MiB"
    knobs = {"memory_limit": arguments.limit, "min_tensor_bytes": smallest, "optimizer_state": "auto"}
    handle = offload.enable(model, **knobs) if arguments.limit else None
    batch = torch.randn(arguments.tokens, width)
    seconds = []
    for _ in range(SETTLE + arguments.steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        try:
            model(batch).square().mean().backward()
        except offload.InfeasibleLimitError as error:
            return {"least_limit_bytes": error.least_limit_bytes}
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    figures: dict[str, Any] = {
        "seconds": statistics.median(seconds[SETTLE:]),
        "process_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before,
        "check": float(sum(parameter.double().sum() for parameter in model.parameters())),
    }
    if handle is not None:
        plan, (counts,) = handle.plan, handle.report().optimizer_state
        assert plan is not None
        assert plan.state is not None
        figures |= {
            "expected_seconds": plan.state.cycle_seconds + plan.overhead_seconds,
            "bound_seconds": plan.state.bound_seconds,
            "state": plan.state.to_dict(),
            "peak_bytes": plan.peak_bytes,
            "unswapped_peak_bytes": plan.unswapped_peak_bytes + plan.state.freed_bytes,
            "swapped_tensors": len(plan.swaps),
            "recomputed_tensors": len(plan.recomputes),
            "moved_bytes": counts.nbytes,
        }
        handle.disable()
    return figures


def child(arguments: argparse.Namespace, limit: int | None) -> dict[str, Any]:
    """Train in a process of its own."""
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("tokens", "width", "layers", "steps")]
    command = [sys.executable, __file__, "--run", *sizes, *(["--quick"] if arguments.quick else [])]
    command += [f"--limit={limit}"] if limit else []
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr)
    figures: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return figures


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows; the limits follow from what the planner says is the least, and from a run without any."""
    plain = child(arguments, None)
    ample_bytes = 64 << 30
    ample = child(arguments, ample_bytes)
    least = 1 << 20
    while (refused := child(arguments, least)).keys() == {"least_limit_bytes"}:  # again once the state is known
        least = max(refused["least_limit_bytes"], least + 1)
    limits = [ample_bytes, (ample["unswapped_peak_bytes"] + least) // 2, least]
    rows = [{"limit_bytes": limit, **child(arguments, limit)} for limit in limits[:2]]
    rows = [*rows, {"limit_bytes": least, **refused}]
    return {
        "format": FORMAT,
        "sizes": {name: getattr(arguments, name) for name in QUICK},
        "plain": plain,
        "rows": rows,
        "bits_equal": len({row["check"] for row in (plain, *rows)}) == 1,
    }


def table(result: dict[str, Any]) -> str:
    """Return the rows as text."""
    mib = 2**20
    plain = result["plain"]
    heads = ("limit", "moves", "swaps", "recomputes", "bound", "predicted", "measured", "plan's peak", "process")
    rows = [("none", "", "", "", "", "", f"{plain['seconds']:.3f} s", "", f"{plain['process_bytes'] / mib:.0f} MiB")]
    rows += [
        (
            f"{row['limit_bytes'] / mib:.0f} MiB",
            f"{row['state']['moved_bytes'] / mib:.1f} of {row['state']['state_bytes'] / mib:.1f} MiB",
            str(row["swapped_tensors"]),
            str(row["recomputed_tensors"]),
            f"{row['bound_seconds']:.3f} s",
            f"{row['expected_seconds']:.3f} s",
            f"{row['seconds']:.3f} s",
            f"{row['peak_bytes'] / mib:.0f} MiB",
            f"{row['process_bytes'] / mib:.0f} MiB",
        )
        for row in result["rows"]
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(train(arguments)))
        return 0
    if arguments.quick:
        vars(arguments).update(QUICK)
    import machine

    result = {**measure(arguments), "machine": machine.describe()}
    print(table(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0 if result["bits_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
