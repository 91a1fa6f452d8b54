"""Memory and step time of a fine-tune with adapters: the frozen base in memory, and in the store between uses.

    python bench/frozen_base.py [--tokens N …] [--width W] [--layers L] [--steps N] [--turns N] [--json FILE] [--quick]

trains adapters of rank 8 beside frozen linear layers in processes of their own, in turns, and prints for each number of
tokens how much the resident memory of both exceeds that before the model was made, at most during the steps, and the
ratios of their step times. `--quick` takes seconds. The malloc is that of the environment: begin with `offload run --`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from result_file import write_json

FORMAT = "offload-frozen-base/1"


def resident(name: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def train(arguments: argparse.Namespace, tokens: int, *, is_moved: bool) -> None:
    """Train in this process; print the figures as JSON."""
    import torch
    from torch import Tensor, nn

    import offload

    class Adapted(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width, bias=False).requires_grad_(False)
            self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            added: Tensor = self.layer(x) + self.up(self.down(x))
            return added

    torch.manual_seed(0)
    before = resident("VmRSS")
    model = nn.Sequential(*(nn.Sequential(Adapted(arguments.width), nn.GELU()) for _ in range(arguments.layers)))
    if is_moved:
        offload.enable(model, n_tensors=0, parameters="frozen")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: the model was made in memory
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters)
    batch = torch.randn(tokens, arguments.width)
    seconds = []
    for _ in range(arguments.steps):
        begin = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        seconds.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    peak = resident("VmHWM") - before
    wall, processor = (statistics.median(column[1:]) for column in zip(*seconds, strict=True))
    check = float(sum(adapter.double().sum() for adapter in adapters))
    base = arguments.layers * arguments.width**2 * 4
    print(json.dumps({"peak": peak, "wall": wall, "processor": processor, "check": check, "base": base}))


def main() -> None:
    """Print one row per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one turn")
    parser.add_argument("--run", choices=("plain", "moved"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.width, arguments.layers, arguments.steps, arguments.turns = [16], 512, 4, 3, 1
    if arguments.run is not None:
        train(arguments, arguments.tokens[0], is_moved=arguments.run == "moved")
        return
    import machine

    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("width", "layers", "steps")]
    print("tokens  base MiB  peak MiB  moved MiB  step  processor")
    made: list[dict[str, object]] = []
    for tokens in arguments.tokens:
        found: dict[str, list[dict[str, float]]] = {"plain": [], "moved": []}
        for _ in range(arguments.turns):
            for kind, rows in found.items():
                command = [sys.executable, __file__, f"--run={kind}", f"--tokens={tokens}", *sizes]
                rows.append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
        assert len({row["check"] for rows in found.values() for row in rows}) == 1, "other weights"
        peak = {kind: statistics.median(row["peak"] for row in rows) / 2**20 for kind, rows in found.items()}
        ratio = {
            what: [b[what] / a[what] for a, b in zip(found["plain"], found["moved"], strict=True)]
            for what in ("wall", "processor")
        }
        wall, processor = (statistics.median(ratios) for ratios in ratio.values())
        base = found["moved"][0]["base"] / 2**20
        print(f"{tokens:6} {base:9.0f} {peak['plain']:9.0f} {peak['moved']:10.0f} ", end="")
        print(f"{wall:5.2f} {processor:10.2f}", flush=True)
        made.append({"tokens": tokens, "ratios": ratio, **found})
    if arguments.json:
        write_json(arguments.json, {"format": FORMAT, "machine": machine.describe(), "rows": made})


if __name__ == "__main__":
    main()
