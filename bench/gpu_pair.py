"""Part of the GPU suite: two offloaded training runs share the device; both give the bits of a plain run alone.

python bench/gpu_pair.py --json FILE [--rehearse]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from contestants import BY_HAND, PLAIN
from models import FAMILIES
from race import Runner
from result_file import ResultFile
from training import Setting

STEPS = 4
SIZE = {"layers": 8, "width": 1024, "heads": 8, "batch": 4, "length": 2048}


def train(runner: Runner) -> list[dict[str, object]]:
    """Train to the end; every step."""
    for _ in range(STEPS):
        runner.step()
    return runner.steps


def main() -> int:
    """Measure; 1 where one computed other bits."""
    parser = argparse.ArgumentParser(prog="gpu_pair.py")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    results = ResultFile(args.json)
    setting = Setting("gpt", SIZE, "cuda", "bfloat16")
    if args.rehearse:
        setting = Setting("gpt", FAMILIES["gpt"].tiny, min_tensor_bytes=1024)
    results.set("setting", setting.to_dict())
    with Runner(setting, PLAIN) as alone:
        expected = train(alone)
    with ExitStack() as stack:
        pair = [stack.enter_context(Runner(setting, BY_HAND[1])) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(train, pair))
    equal = []
    for steps in (expected, *found):
        bits = [(step["loss"], step["gradients"]) for step in steps]
        equal.append(bits == [(step["loss"], step["gradients"]) for step in expected])
        seconds = [float(str(step["seconds"])) for step in steps[-STEPS:]]
        results.append("step_seconds_median", statistics.median(seconds))
    results.set("equal", equal)
    print(f"bit-equal: {equal}")
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
