"""Memory and step time of a GPT under AdamW: plain, and with its state moved in several ways.

    python bench/moved_state.py [--json FILE [--keep]] [--kinds KIND …] [--tokens N …] [--rounds N] [--quick]

They train side by side in live processes, which take turns, in another order each round; a turn is a few steps and
ends when nothing is being written any more. Each has the malloc of `offload run`. Memory is the largest resident set
beyond that after the imports. Times and ratios are medians over rounds; a ratio is that to the plain turn of its round.
Weights and states are compared bit by bit: exit status 1 where they differ.

| kind | what moves |
|---|---|
| plain | nothing |
| state | optimizer state; activations stay in memory |
| in backward | optimizer state, and parameters are updated in backward; activations stay in memory |
| limited | as "in backward", and of the activations as much as `memory_limit` (`--limit`) requires |
| mapped | optimizer state is in tensors of `torch.from_file`, as one would without offload |
| copies in update | nothing. As many bytes as "state" moves are read and written meanwhile, without checksums |
| copies around | as the former, but 370 MiB are read in backward already, and as many are written in the next forward |
| copies in backward | nothing. As many bytes are read and written between the beginnings of two backward passes |

While memory is free, the system keeps all pages of mapped files; when it is short, it writes and drops them. So that
"mapped" does not depend on what else is in memory, pages are written and dropped after each step. They count in its
memory. The three last kinds show what the copies alone cost, whoever makes them: their memory means nothing.

`update_seconds` are those in `optimizer.step()`, and for the last four kinds in waiting for files after it;
`out_seconds` and `in_seconds` those in which the store wrote and read, beside each other and beside computation;
`copy_processor_seconds` what copying threads took of the processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from state_peers import PEERS, Peer

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "state": {"optimizer_state": True},
    "in backward": {"optimizer_state": True, "step_in_backward": True},
    "limited": {"optimizer_state": True, "step_in_backward": True},
    **{kind: {} for kind in PEERS},
}
LIMITS = {"full": "1280MiB", "quick": "8MiB"}
DETAILS = ("update_seconds", "out_seconds", "in_seconds", "copy_processor_seconds")  # of a step, medians over rounds
FORMAT = "offload-state/2"
SIZES = {
    "full": {"layers": 13, "width": 1024, "heads": 16, "length": 256},
    "quick": {"layers": 2, "width": 64, "heads": 4, "length": 16},
}
TOKENS = {"full": [256, 1024, 4096], "quick": [32]}
SETTLE_ROUNDS = 1


def status_bytes(name: str) -> int:
    """One of this process's figures of memory: VmRSS, or VmHWM for the largest so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def copy_processor_seconds() -> float:
    """Of the threads that copy to the store and back."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text(encoding="ascii").startswith("offload-lane"):
            found += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return found / 1e9


def copy_figures(optimizer: Any) -> dict[str, float]:
    """What copying the state has taken so far."""
    stats = optimizer.state.engine.store.stats()
    return {
        **{name: stats[name] for name in ("out_seconds", "in_seconds")},
        "copy_processor_seconds": copy_processor_seconds(),
    }


def warm_up() -> None:
    """Update a parameter that is thrown away.

    On a busy machine, the first update in a process rounds differently now and then, also without offload.
    """
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1 << 18))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], foreach=False).step()


def train(task: dict[str, Any]) -> None:
    """Train in this process: a turn for each line of standard input, with a line of JSON as the answer."""
    import torch
    from torch.nn import functional

    import offload
    import offload.session
    from offload import units
    from offload.demo.model import VOCABULARY, ByteGPT, Shape
    from offload.devices import allocator

    imported = status_bytes("VmRSS")
    torch.manual_seed(0)
    shape = Shape(**task["shape"])
    model = ByteGPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    warm_up()
    asked = KINDS[task["kind"]]
    goal = {"memory_limit": task["limits"][task["kind"]]} if task["kind"] in task["limits"] else {"n_tensors": 0}
    knobs = {"min_tensor_bytes": task["min_tensor_bytes"], **goal, **asked}
    handle = offload.enable(model, optimizer=optimizer, **knobs) if asked else None
    least = units.parse_bytes(task["min_tensor_bytes"])
    peer = PEERS[task["kind"]](optimizer, least) if task["kind"] in PEERS else Peer()
    generator = torch.Generator().manual_seed(1)
    for _ in sys.stdin:
        begin = time.perf_counter(), time.process_time()
        copied = copy_figures(optimizer) if handle is not None else {}
        update_seconds = 0.0
        for _ in range(task["steps"]):
            drawn = torch.randint(VOCABULARY, (shape.batch, shape.length + 1), generator=generator)
            logits = model(drawn[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), drawn[:, 1:].flatten())
            peer.before_backward()
            loss.backward()
            update_seconds -= time.perf_counter()
            peer.before_update()
            optimizer.step()
            peer.after_update()
            update_seconds += time.perf_counter()
            optimizer.zero_grad()
            del logits, loss
        peer.drain()
        if handle is not None:
            optimizer.state.engine.drain()
        figures = {
            "seconds": time.perf_counter() - begin[0],
            "processor_seconds": time.process_time() - begin[1],
            "update_seconds": update_seconds,
            **{name: value - copied[name] for name, value in (copy_figures(optimizer) if copied else {}).items()},
        }
        per_step = {name: value / task["steps"] for name, value in figures.items()}
        print(json.dumps({**per_step, "peak_bytes": status_bytes("VmHWM") - imported}), flush=True)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
        for value in optimizer.state[parameter].values():
            digest.update(value.numpy().tobytes())
    counts = handle.report().optimizer_state[0] if handle is not None else None
    state = counts.nbytes if counts is not None else peer.nbytes
    count = sum(parameter.numel() for parameter in model.parameters())
    about = {"digest": digest.hexdigest(), "state_bytes": state, "parameters": count, "malloc": allocator.current()}
    print(json.dumps(about))


class Contestant:
    """One live process."""

    def __init__(self, task: dict[str, Any], environment: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--task", json.dumps(task)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.turns: list[dict[str, float]] = []

    def turn(self) -> None:
        """Have it train for a turn."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        self.turns.append(self._answer())

    def end(self) -> dict[str, Any]:
        """End it. Returns what it says of itself."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        found = self._answer()
        self._child.wait()
        return found

    def kill(self) -> None:
        """End it at once, wherever it is."""
        self._child.kill()
        self._child.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"a contestant ended with exit status {self._child.wait()}; see above")
        found: dict[str, Any] = json.loads(line)
        return found


def measure(tokens: int, size: str, kinds: list[str], limit: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """One row for each kind, of which the first is plain."""
    from offload.devices import allocator

    shape = {**SIZES[size], "batch": max(1, tokens // SIZES[size]["length"])}
    least = "1MiB" if size == "full" else "1KiB"
    common = {
        "shape": shape,
        "steps": steps,
        "min_tensor_bytes": least,
        "limits": {"limited": limit},
    }
    environment = allocator.preload_environment()
    contestants = {kind: Contestant({**common, "kind": kind}, environment) for kind in kinds}
    try:
        order = list(kinds)
        for _ in range(SETTLE_ROUNDS + rounds):
            for kind in order:
                contestants[kind].turn()
            order = [*order[1:], order[0]]
        ends = {kind: each.end() for kind, each in contestants.items()}
    finally:
        for each in contestants.values():
            each.kill()
    return [_row(kind, tokens, contestants, ends) for kind in kinds]


def _row(kind: str, tokens: int, contestants: dict[str, Contestant], ends: dict[str, dict[str, Any]]) -> dict[str, Any]:
    turns, plain = contestants[kind].turns, contestants["plain"].turns
    measured = list(zip(turns, plain, strict=True))[SETTLE_ROUNDS:]
    ratios = {name: [own[name] / other[name] for own, other in measured] for name in ("seconds", "processor_seconds")}
    return {
        "kind": kind,
        "tokens": tokens,
        **{name: ends[kind][name] for name in ("parameters", "state_bytes", "malloc")},
        "peak_bytes": turns[-1]["peak_bytes"],
        "saved_bytes": plain[-1]["peak_bytes"] - turns[-1]["peak_bytes"],
        "seconds": statistics.median(own["seconds"] for own, _ in measured),
        "ratio": statistics.median(ratios["seconds"]),
        "ratios": ratios["seconds"],
        **{name: statistics.median(own[name] for own, _ in measured) for name in DETAILS if name in turns[0]},
        "processor_ratio": statistics.median(ratios["processor_seconds"]),
        "bits_equal": ends[kind]["digest"] == ends["plain"]["digest"],
    }


def disk_rates(size: str) -> dict[str, float]:
    """Bytes per second that the store writes and reads, alone and at the same time, while nothing is computed."""
    import torch

    from offload import _core
    from offload.options import default_spill_dir
    from offload.profiling.link_measurement import measure as measure_link

    store = _core.SwapStore.direct(_core.HostDriver(), default_spill_dir())
    return asdict(measure_link(store, torch.device("cpu"), (16 if size == "full" else 1) << 20))


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    return (
        f"{row['tokens']:6}  {row['kind']:<18}  {row['peak_bytes'] / 2**20:8.0f}  {row['saved_bytes'] / 2**20:8.0f}  "
        f"{row['seconds']:8.2f}  {row['ratio']:5.2f} ({min(row['ratios']):.2f}–{max(row['ratios']):.2f})  "
        f"{row['processor_ratio']:9.2f}  bits {'equal' if row['bits_equal'] else 'DIFFER'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where weights or states differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=[each for each in KINDS if each != "plain"], help="besides plain")
    parser.add_argument("--limit", help="memory_limit of the kind limited (default: 1280MiB)")
    parser.add_argument("--tokens", type=int, nargs="+", help="per step (default: 256 1024 4096)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--keep", action="store_true", help="add to the runs that the file has")
    parser.add_argument("--quick", action="store_true", help="a tiny network: whether it works, not how fast")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.task is not None:
        train(args.task)
        return 0
    import machine
    from result_file import read_json, write_json

    size = "quick" if args.quick else "full"
    kinds, limit = ["plain", *(args.kinds or list(KINDS)[1:])], args.limit or LIMITS[size]
    kept = read_json(args.json).get("runs", []) if args.json and args.keep else []
    rates = disk_rates(size)
    run = {"machine": machine.describe(), "size": size, "disk": rates, "limit": limit, "steps": args.steps}
    rows: list[dict[str, Any]] = []
    gigabytes = {name: rates[name] / 1e9 for name in ("out", "into", "out_both", "in_both")}
    print(
        "disk: {out:.2f} GB/s written, {into:.2f} read; {out_both:.2f} and {in_both:.2f} together".format(**gigabytes)
    )
    print("tokens  kind                peak MiB  less MiB  step (s)  ratio               processor")
    for tokens in args.tokens or TOKENS[size]:
        for row in measure(tokens, size, kinds, limit, args.rounds, args.steps):
            print(line(row), flush=True)
            rows.append(row)
        if args.json:
            write_json(args.json, {"format": FORMAT, "runs": [*kept, {**run, "rows": rows}]})
    return 0 if all(row["bits_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
