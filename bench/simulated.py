"""Training steps in virtual time, ours beside the peers': what the simulated accelerator says of cards nobody has here.

    python bench/simulated.py --json FILE [--card NAME …] [--network NAME …] [--host-factor F] [--keep] [--quick]

SIMULATED: no GPU runs. Each network is computed here, small, on the machine of tests/twin, by the engine and by each
peer. Durations come from scaled figures of a card (see bench/simulation.py), and the step's time from the order in
which work was really queued. Every way has to give plain's losses and gradients to the bit, else the run fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: what computes are the streams' threads

import machine
import simulation
from result_file import ResultFile, read_json
from simulation import CARDS, NETWORKS, QUICK, WAYS, WAYS_QUICK

from offload.profiling import link_measurement
from offload.units import format_bytes, format_seconds

ROUND_SECONDS_QUICK = 0.01  # in virtual time nothing disturbs the measured link
SWAPS_SOMETHING = ("save_on_cpu, pinned", "TRL", simulation.ALL.name)


def faults_of(row: dict[str, Any]) -> list[str]:
    """What cannot be, and fails the run."""
    if "inapplicable" in row:
        return []
    found = [] if row["equal"] else ["other bits than plain's"]
    if max(row["out_seconds"], row["in_seconds"]) > row["seconds"] * (1 + 1e-9):
        found.append("the link is busy for longer than the step takes")
    if row["name"] in SWAPS_SOMETHING and not (row["out_seconds"] and row["in_seconds"]):
        found.append("nothing was swapped")
    return found


def line(row: dict[str, Any]) -> str:
    """Say a row in one line."""
    begin = f"{row['family']:<7} {row['name']:<28} "
    if "inapplicable" in row:
        return begin + row["inapplicable"]
    words = [
        f"memory {row['memory_over_plain']:.2f} × ({format_bytes(row['memory_bytes'])})",
        f"step {row['step_over_plain']:.2f} × ({format_seconds(row['seconds'])})",
    ]
    if row["overlap"] is not None:
        words.append(f"{row['overlap']:.0%} of copy time hidden, {format_seconds(row['exposed_seconds'])} exposed")
    if "predicted_seconds" in row:
        error = row["predicted_seconds"] / row["until_backward_seconds"] - 1
        words.append(f"predicted {error:+.1%}")
    return begin + ", ".join([*words, *faults_of(row)])


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate; 1 where a row cannot be right."""
    parser = argparse.ArgumentParser(prog="simulated.py", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="rewritten after every row")
    parser.add_argument("--card", action="append", choices=sorted(CARDS), help="again for several (all)")
    parser.add_argument(
        "--network", action="append", choices=[each.family for each in NETWORKS], help="again for several (all)"
    )
    parser.add_argument(
        "--host-factor",
        type=float,
        default=0.0,
        metavar="F",
        help="how much of this host's own time, in Python and autograd, counts (0: runs give the same figures)",
    )
    parser.add_argument("--keep", action="store_true", help="add to what FILE holds of other cards and networks")
    parser.add_argument("--quick", action="store_true", help="one small network, a card and few ways: seconds")
    args = parser.parse_args(argv)
    cards = [CARDS[name] for name in args.card or (["a100"] if args.quick else CARDS)]
    networks = [each for each in NETWORKS if each.family in (args.network or [each.family])]
    networks, ways = ([QUICK], WAYS_QUICK) if args.quick else (networks, WAYS)
    if args.quick:
        link_measurement.ROUND_SECONDS = ROUND_SECONDS_QUICK
    results = ResultFile(args.json)
    kept = read_json(args.json).get("rows", []) if args.keep else []
    fresh = {(card.name, network.family, args.host_factor) for card in cards for network in networks}
    results.set("format", "offload-simulated/1")
    results.set("machine", machine.describe())
    results.set("cards", [asdict(card) for card in CARDS.values()])
    results.set("networks", [asdict(network) for network in (networks if args.quick else NETWORKS)])
    each = {"kernel": simulation.KERNEL_SECONDS, "copy": simulation.COPY_SECONDS, "launch": simulation.LAUNCH_SECONDS}
    results.set("seconds_each", each)
    results.set("rows", [row for row in kept if (row["card"], row["family"], row["host_factor"]) not in fresh])
    bad = 0
    for card in cards:
        print(f"SIMULATED: {card.name}, host factor {args.host_factor:g}", flush=True)
        for network in networks:
            print(f"  the {network.family} here stands for: {network.stands_for}", flush=True)
            for row in simulation.rows_of(network, card, ways, args.host_factor):
                results.append("rows", row)
                bad += bool(faults_of(row))
                print("  " + line(row), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
