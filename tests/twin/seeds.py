"""Training under many delays: no bit may change, and the order checker may find nothing.

    python tests/twin/seeds.py [--seeds 1000] [--first-seed 0]

Each seed gives the delays of all streams, one of the steps of inside/test_training.py and one of its settings. Prints
the findings, the number of seeds and the time.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ["OFFLOAD_TEST_DEVICE"] = "sim"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(HERE.parent), str(HERE / "inside"), str(HERE.parents[1])]

import accelerator  # noqa: E402
import torch  # noqa: E402
from faults.inject import watch  # noqa: E402
from test_training import BY_HAND, STEPS, plain_step, train  # noqa: E402
from twin import sim  # noqa: E402

from offload import _core  # noqa: E402

DELAY_US_MAX = 300
STEPS_EACH = 2
make_slab = _core.SwapStore.slab


def watched_slab(*args, **options):
    """Return a store whose file is also watched by the order checker."""
    store = make_slab(*args, **options)
    watch(store, accelerator.LIBRARY)
    return store


def run_one(seed: int, step_of, options) -> tuple[list[torch.Tensor], list[str]]:
    """Return the gradients and the findings of the order checker."""
    sim.reset()
    sim.schedule(seed, DELAY_US_MAX)
    sim.watch_order()
    found = train(options, step_of=step_of, steps=STEPS_EACH, rows=8, width=32, in_flight=seed % 2 or None)
    gc.collect()
    torch.sim.synchronize()
    return found, sim.violations()


def main() -> int:
    """Run the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    _core.SwapStore.slab = watched_slab
    steps = [plain_step, *STEPS]
    gc.freeze()  # objects created by imports are never freed: the collector need not visit them after every seed
    expected = {step: run_one(0, step, None)[0] for step in steps}
    began, bad = time.monotonic(), 0
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        if seed % 100 == 0:
            print(f"{seed - args.first_seed} so far, after {time.monotonic() - began:.0f} s: {bad} bad", flush=True)
        step_of, options = steps[seed % len(steps)], BY_HAND[seed % len(BY_HAND)]
        found, violations = run_one(seed, step_of, options)
        same = len(found) == len(expected[step_of]) and all(map(torch.equal, found, expected[step_of]))
        if violations or not same:
            bad += 1
            bits = "same bits" if same else "OTHER BITS"
            print(f"seed {seed}, {step_of.__name__}, {options}: {bits}; {violations[:2]}", flush=True)
    print(f"{args.seeds} seeds in {time.monotonic() - began:.0f} s: {bad} with a finding or another bit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
