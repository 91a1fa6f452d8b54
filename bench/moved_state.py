"""Memory and step time with optimizer state in memory, and in the store between steps.

    python bench/moved_state.py [--tokens N …] [--width W] [--layers L] [--steps N] [--turns N]

trains a stack of linear layers with AdamW in processes of their own, in turns, and prints for each number of tokens the
largest resident memory of both and the ratios of their step times. The malloc is that of the environment: begin with
`offload run --`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time


def train(arguments: argparse.Namespace, tokens: int, *, is_moved: bool) -> None:
    """Train in this process; print the figures as JSON."""
    import torch
    from torch import nn

    import offload

    torch.manual_seed(0)
    width = arguments.width
    layers = [each for _ in range(arguments.layers) for each in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    handle = offload.enable(model, n_tensors=0, optimizer=optimizer, optimizer_state=is_moved)
    batch = torch.randn(tokens, width)
    seconds = []
    for _ in range(arguments.steps):
        begin = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        seconds.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    wall, processor = (statistics.median(column[1:]) for column in zip(*seconds, strict=True))
    moved = handle.report().optimizer_state
    check = float(sum(parameter.double().sum() for parameter in model.parameters()))
    figures = {"peak": peak, "wall": wall, "processor": processor, "check": check}
    print(json.dumps({**figures, "state": moved[0].nbytes if moved else 0}))


def main() -> None:
    """Print one row per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--run", choices=("plain", "moved"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        train(arguments, arguments.tokens[0], is_moved=arguments.run == "moved")
        return
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("width", "layers", "steps")]
    print("tokens  state MiB  peak MiB  moved MiB  wall  processor")
    for tokens in arguments.tokens:
        found: dict[str, list[dict[str, float]]] = {"plain": [], "moved": []}
        for _ in range(arguments.turns):
            for kind, rows in found.items():
                command = [sys.executable, __file__, f"--run={kind}", f"--tokens={tokens}", *sizes]
                rows.append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
        assert len({row["check"] for rows in found.values() for row in rows}) == 1, "other weights"
        peak = {kind: statistics.median(row["peak"] for row in rows) / 2**20 for kind, rows in found.items()}
        ratio = {
            what: statistics.median(b[what] / a[what] for a, b in zip(found["plain"], found["moved"], strict=True))
            for what in ("wall", "processor")
        }
        state = found["moved"][0]["state"] / 2**20
        print(f"{tokens:6} {state:10.0f} {peak['plain']:9.0f} {peak['moved']:10.0f} ", end="")
        print(f"{ratio['wall']:5.2f} {ratio['processor']:10.2f}", flush=True)


if __name__ == "__main__":
    main()
