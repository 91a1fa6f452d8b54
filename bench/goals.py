"""The speed and memory that the engine and the planner should reach on a machine without a GPU, in one table.

    python bench/goals.py [ROW …] [--json FILE] [--keep] [--rounds N] [--demo-runs N] [--spill-dir DIR] [--results DIR]

Figures that take a few minutes at most are measured here; those of longer runs are read from the newest result files in
--results. Recorded traces are read from OFFLOAD_TRACES, or from shared/traces in the parent folder of the repository.
Contestants run in turn, A B A B, and medians are used. The exit status is 1 if a row could not be measured; a missed
goal does not change it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import collected
import machine
import planner_goals
from collected import Finding, Kept
from contest import alternate, medians
from copy_rig import MIB, HostCopyRig, SpillRig
from demo_run import run_demo
from hook_rig import HookRig, mean_of_steady_steps, microseconds_under_preload
from hooked_step import measure_steps
from joint_rows import PROOF_SECONDS_MAX
from result_file import read_json, write_json

from offload.options import default_spill_dir
from offload.units import format_bytes

KEPT_US_MAX = 2.0
HOOKED_STEP_RATIO_MAX = 1.01
HOOKED_STEP_ROUNDS = 5  # times the others, because steps differ by more than 1 %
SWAPPED_US_MAX = 25.0
HOST_COPY_SHARE_MIN = 0.80
SPILL_SHARE_MIN = 0.85
GROWTH_RATIO_MAX = 0.36
STEP_RATIO_MAX = 1.08
SPILL_BLOCKS_MIB = (1, 4, 16, 64)
DEMO_STEPS = 7
RESULTS = machine.ROOT / "bench" / "results"
TINY_DEMO = "--layers 2 --width 64 --heads 2 --batch 4 --length 256 --steps 3"


class Bench:
    """How much to measure, and the runs of the demo, which several rows use."""

    def __init__(
        self, *, rounds: int, demo_runs: int, spill_dir: str, quick: bool, results: Path, proof_seconds: float
    ) -> None:
        self.rounds = rounds
        self.demo_runs = demo_runs
        self.spill_dir = spill_dir
        self.quick = quick
        self.kept = Kept(results)
        self.proof_seconds = proof_seconds

    @cached_property
    def demo(self) -> dict[str, Any]:
        """Ratios to plain with a recycling allocator."""
        return self._demo("")

    @cached_property
    def demo_glibc(self) -> dict[str, Any]:
        """Ratios to plain with this system's malloc."""
        return self._demo("--no-preload")

    def _demo(self, option: str) -> dict[str, Any]:
        """Run the demo, which measures its contestants in turn, and return medians over the runs."""
        runs = [
            run_demo(option, *(TINY_DEMO if self.quick else f"--steps {DEMO_STEPS}").split())
            for _ in range(self.demo_runs)
        ]
        samples: dict[str, list[float]] = {}
        for run in runs:
            results = {result["name"]: result for result in run["contestants"]}
            plain = results["plain"]
            for name, result in results.items():
                for key in ("peak_bytes", "step_seconds_median"):
                    samples.setdefault(f"{name}.{key}", []).append(result[key])
                    samples.setdefault(f"{name}.{key}.ratio", []).append(result[key] / plain[key])
        return {
            "equal": all(run["equal"] for run in runs),
            "allocator": runs[0]["contestants"][0]["allocator"],
            "medians": medians(samples),
            "samples": samples,
        }


def hook_costs(bench: Bench, kind: str, count: int, **how: bool) -> dict[str, float]:
    """Return the microseconds per tensor of a kind."""
    return microseconds_under_preload(kind, count=count, rounds=bench.rounds, spill_dir=bench.spill_dir, **how)


def kept(bench: Bench) -> Finding:
    """The cost of a kept tensor more than empty hooks: small, a parameter, large (manual, and with a timed plan)."""
    figures = {kind: hook_costs(bench, f"kept {kind}", 200) for kind in ("small", "parameter")}
    figures["by hand"] = hook_costs(bench, "kept", 200)
    figures["by plan"] = hook_costs(bench, "kept", 200, planned=True)
    over = {kind: costs["offload_us"] - costs["plain_us"] for kind, costs in figures.items()}
    measured = ", ".join(f"{kind} {cost:.1f} µs" for kind, cost in over.items())
    return Finding(measured, max(over.values()) <= KEPT_US_MAX, {"over_plain_us": over, **figures})


def swapped(bench: Bench) -> Finding:
    """Swap a tensor of 1 MiB out and in, without its copies: beside steps without hooks that copy the same bytes."""
    figures = {how: hook_costs(bench, "swapped", 64, measured=how == "timed") for how in ("by hand", "timed")}
    over = {how: costs["offload_us"] - costs["copies_us"] for how, costs in figures.items()}
    words = [f"{how} {over[how]:.1f} µs ({figures[how]['offload_us']:.1f} with the copies' effect)" for how in figures]
    most = max(over["by hand"], mean_of_steady_steps(over["by hand"], over["timed"]))
    words.append(f"{most:.1f} µs in the mean of steady steps")
    return Finding("; ".join(words), most <= SWAPPED_US_MAX, {"over_copies_us": over, "by": figures})


def hooked_step(bench: Bench) -> Finding:
    """A small ResNet's step with hooks and a plan that keeps every tensor, relative to its plain step."""
    rounds = HOOKED_STEP_ROUNDS * bench.rounds
    steps = measure_steps(rounds=rounds, spill_dir=bench.spill_dir, quick=bench.quick)
    ratios, seconds = steps.ratios, steps.seconds
    words = (
        f"by plan {ratios['offload']:.3f} × plain, every step timed {ratios['timed']:.3f} ×, by hand "
        f"{ratios['by hand']:.3f} × (hooks that do nothing: {ratios['empty hooks']:.3f} ×, the least that is correct, "
        f"in Python: {ratios['detaching hooks']:.3f} ×, plain again: "
        f"{ratios['plain again']:.3f} ×), {1e3 * seconds['plain']:.0f} ms and {steps.tensors} saved tensors"
    )
    figures = {"seconds": seconds, "ratios": ratios, "quartiles": steps.quartiles, "tensors": steps.tensors}
    most = max(ratios["offload"], ratios["by hand"])  # "offload" times one step in 16
    return Finding(words, most <= HOOKED_STEP_RATIO_MAX, figures)


def host_copy(bench: Bench) -> Finding:
    """Copies of 64 MiB blocks to and from a slab, compared with memcpy."""
    rig = HostCopyRig(MIB if bench.quick else 64 * MIB)
    taken = medians(alternate(rig.contestants(), rounds=bench.rounds))
    share = {name: taken["memcpy"] / taken[name] for name in ("out", "into")}
    rate = format_bytes(round(rig.block_bytes / taken["memcpy"]))
    measured = f"out {share['out']:.0%}, in {share['into']:.0%} of {rate}/s"
    met = min(share.values()) >= HOST_COPY_SHARE_MIN
    return Finding(measured, met, {"share": share, "seconds": taken, "bytes": rig.block_bytes})


def spill(bench: Bench, direction: str) -> Finding:
    """The spill file compared with plain direct I/O, for the worst block size."""
    share: dict[int, float] = {}
    rate: dict[int, float] = {}
    for block_mib in SPILL_BLOCKS_MIB[: 1 if bench.quick else None]:
        total_bytes = (4 if bench.quick else 256) * MIB
        rig = SpillRig(bench.spill_dir, block_bytes=block_mib * MIB, total_bytes=total_bytes)
        with closing(rig):
            taken = medians(alternate(rig.contestants(direction), rounds=max(bench.rounds // 2, 1)))
        share[block_mib] = taken["plain"] / taken["spill"]
        rate[block_mib] = rig.total_bytes / taken["spill"]
    cells = [f"{share[size]:.0%} at {size} MiB" for size in share]
    figures = {"share_by_block_mib": share, "bytes_per_second_by_block_mib": rate}
    return Finding(", ".join(cells), min(share.values()) >= SPILL_SHARE_MIN, figures)


def second_tensor(bench: Bench) -> Finding:
    """How often the bytes of a storage with many saved views are copied."""
    count = 16
    with closing(HookRig("view", count=count, spill_dir=bench.spill_dir)) as rig:
        for _ in range(3):
            rig.step("offload")
        before = rig.handle.report().to_dict()["copy_out"]["copies"]
        rig.step("offload")
        copies = rig.handle.report().to_dict()["copy_out"]["copies"] - before
    words = "copy" if copies == 1 else "copies"
    return Finding(f"{copies} {words} for {count} tensors", copies == 1, {"copies": copies})


def demo_ratio(bench: Bench, key: str, limit: float) -> Finding:
    """Memory or step time of the offloaded run, relative to the plain one."""
    ratio = bench.demo["medians"][f"offloaded.{key}.ratio"]
    met = bench.demo["equal"] and ratio <= limit
    return Finding(f"{ratio:.2f} × plain ({bench.demo['allocator']})", met, bench.demo)


def demo_checkpoint(bench: Bench) -> Finding:
    """The offloaded run compared with the checkpointed one, in memory and time."""
    taken = bench.demo["medians"]
    words, below = [], []
    for name, key in (("growth", "peak_bytes"), ("step", "step_seconds_median")):
        ours, theirs = (taken[f"{who}.{key}.ratio"] for who in ("offloaded", "checkpointed"))
        words.append(f"{name} {ours:.2f} against {theirs:.2f}")
        below.append(ours < theirs)
    return Finding(", ".join(words), bench.demo["equal"] and all(below), bench.demo)


def glibc(bench: Bench) -> Finding:
    """Both figures with this system's malloc."""
    taken = bench.demo_glibc["medians"]
    words = [
        f"{who} {taken[f'{who}.peak_bytes.ratio']:.2f} × growth, {taken[f'{who}.step_seconds_median.ratio']:.2f} × step"
        for who in ("offloaded", "checkpointed")
    ]
    return Finding("; ".join(words), None, bench.demo_glibc)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    goal: str
    measure: Callable[[Bench], Finding]


ROWS = {
    "kept": Row("hooks of a tensor that is kept", f"≤ {KEPT_US_MAX:g} µs more than empty hooks", kept),
    "swapped": Row(
        "hooks of a swapped 1 MiB tensor, without the copies",
        f"≤ {SWAPPED_US_MAX:g} µs",
        swapped,
    ),
    "hooked-step": Row(
        "a small ResNet's step, every tensor kept by hooks",
        f"≤ {HOOKED_STEP_RATIO_MAX} × plain",
        hooked_step,
    ),
    "host-copy": Row("host driver copies, 64 MiB blocks", f"≥ {HOST_COPY_SHARE_MIN:.0%} of memcpy", host_copy),
    "spill-write": Row(
        "spill file, write",
        f"≥ {SPILL_SHARE_MIN:.0%} of plain O_DIRECT",
        lambda bench: spill(bench, "write"),
    ),
    "spill-read": Row(
        "spill file, read",
        f"≥ {SPILL_SHARE_MIN:.0%} of plain O_DIRECT",
        lambda bench: spill(bench, "read"),
    ),
    "demo-growth": Row(
        "demo, growth of the resident set",
        f"≤ {GROWTH_RATIO_MAX} × plain",
        lambda bench: demo_ratio(bench, "peak_bytes", GROWTH_RATIO_MAX),
    ),
    "demo-step": Row(
        "demo, step time",
        f"≤ {STEP_RATIO_MAX} × plain",
        lambda bench: demo_ratio(bench, "step_seconds_median", STEP_RATIO_MAX),
    ),
    "demo-checkpoint": Row("demo, compared with checkpointing", "less memory and less time", demo_checkpoint),
    "demo-glibc": Row("demo with the system's malloc", "none; for information", glibc),
    "second-tensor": Row("a second tensor of the same storage", "no second copy", second_tensor),
    "planner-shared": Row(
        "recorded steps: median and largest gap",
        "≤ 0.05 % and ≤ 0.8 %",
        lambda bench: planner_goals.shared(),
    ),
    "planner-small": Row(
        "small generated steps: time above the optimum, mean and largest",
        "≤ 0.5 % and ≤ 5 %",
        lambda bench: planner_goals.small(bench.quick),
    ),
    "planner-unseen": Row(
        "generated steps: median and largest gap",
        "≤ 0.5 % and ≤ 3.5 %",
        lambda bench: planner_goals.unseen(bench.quick),
    ),
    "planning-time": Row(
        "planning time, 1,000 and 10,000 tensors",
        "≤ 1 s and ≤ 10 s",
        lambda bench: planner_goals.planning_time(bench.quick),
    ),
    "planner-joint": Row(
        "recorded traces with recipes, slowdown at a tenth of the room; median and largest gap",
        "≤ +6 %, ≤ 1 % and ≤ 5 %",
        lambda bench: planner_goals.joint_shared(),
    ),
    "planner-joint-unseen": Row(
        "unseen traces with recipes, median and largest gap",
        "≤ 2 % and ≤ 10 %, or proven to 2 %",
        lambda bench: planner_goals.joint_unseen(bench.quick, bench.proof_seconds),
    ),
    "predicted-step": Row(
        "step time, measured over predicted",
        f"within {collected.STEP_OFF_MAX:.0%}",
        lambda bench: collected.prediction_error(bench.kept, "seconds", collected.STEP_OFF_MAX),
    ),
    "predicted-peak": Row(
        "peak of tensors, measured over predicted",
        f"within {collected.PEAK_OFF_MAX:.0%}",
        lambda bench: collected.prediction_error(bench.kept, "peak_bytes", collected.PEAK_OFF_MAX),
    ),
    "default-slowdown": Row(
        "slowdown of the default on the demo's model",
        f"≤ {collected.DEFAULT_SLOWDOWN_MAX:.0%}",
        lambda bench: collected.default_slowdown(bench.kept),
    ),
    "steps-growth": Row(
        "five networks, least memory: memory",
        f"≤ {collected.STEPS_GROWTH_MAX} × plain",
        lambda bench: collected.least_ratio(bench.kept, "memory_over_plain", collected.STEPS_GROWTH_MAX),
    ),
    "steps-time": Row(
        "five networks, least memory: step time",
        f"≤ {collected.STEPS_TIME_MAX} × plain",
        lambda bench: collected.least_ratio(bench.kept, "step_over_plain", collected.STEPS_TIME_MAX),
    ),
    "steps-checkpoint": Row(
        "five networks: some setting compared with checkpointing",
        "less memory and less time",
        lambda bench: collected.below_checkpoint(bench.kept),
    ),
    "steps-tutorial": Row(
        "five networks: some setting compared with the tutorial's disk hooks",
        f"≥ {collected.TUTORIAL_SPEEDUP_MIN} × faster at no more memory",
        lambda bench: collected.faster_than_tutorial(bench.kept),
    ),
    "largest": Row(
        "largest batch of a ResNet within a limit",
        f"≥ {collected.LARGEST_MIN:g} × plain at ≤ {collected.LARGEST_SLOWDOWN_MAX - 1:.0%} more time per sample",
        lambda bench: collected.largest(bench.kept),
    ),
    "gpu": Row(
        "copies, pinned memory, frontier and largest batch on a GPU",
        "≥ 97 % of the link, less of both than every peer",
        lambda bench: collected.on_a_gpu(bench.kept),
    ),
}
VERDICTS = {True: "yes", False: "NOT REACHED", None: "–"}


def table(findings: dict[str, Finding]) -> list[str]:
    """Return the rows as a Markdown table."""
    cells = [("what", "goal", "measured", "met")]
    cells += [
        (ROWS[name].what, ROWS[name].goal, found.measured, VERDICTS[found.met]) for name, found in findings.items()
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def measure(bench: Bench, name: str) -> tuple[Finding, bool]:
    """Measure one row and print its name to stderr. The second value: whether it could be measured."""
    print(f"{name} …", file=sys.stderr, flush=True)
    try:
        return ROWS[name].measure(bench), True
    except (OSError, RuntimeError) as error:
        return Finding(f"not measured: {error}", None), False


def described(name: str) -> dict[str, str]:
    """Return the description of a row and its goal."""
    return {"what": ROWS[name].what, "goal": ROWS[name].goal}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the requested rows and print the table."""
    parser = argparse.ArgumentParser(prog="goals.py", description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS) + " (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every figure there")
    parser.add_argument("--rounds", type=int, default=31, metavar="N", help="of each row (31)")
    parser.add_argument("--demo-runs", type=int, default=1, metavar="N", help="of the demo (1)")
    parser.add_argument("--spill-dir", default=default_spill_dir(), metavar="DIR")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="of the longer runs")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only checks that the script runs")
    text = f"of each proof of planner-joint-unseen ({PROOF_SECONDS_MAX:g})"
    parser.add_argument("--proof-seconds", type=float, default=PROOF_SECONDS_MAX, metavar="S", help=text)
    parser.add_argument("--keep", action="store_true", help="keep what FILE holds of other rows")
    args = parser.parse_args(argv)
    for name in args.rows:
        if name not in ROWS:
            parser.error(f"no row {name!r}; there are {', '.join(ROWS)}")
    bench = Bench(
        rounds=1 if args.quick else args.rounds,
        demo_runs=1 if args.quick else args.demo_runs,
        spill_dir=args.spill_dir,
        quick=args.quick,
        results=args.results,
        proof_seconds=args.proof_seconds,
    )
    about = machine.describe()
    kept = read_json(args.json).get("rows", {}) if args.keep and args.json else {}
    findings: dict[str, Finding] = {}
    unmeasured = False
    for name in args.rows or ROWS:
        findings[name], measured = measure(bench, name)
        unmeasured |= not measured
        if args.json is not None:
            made = {key: about[key] for key in ("date", "commit")}
            rows = {each: {**asdict(found), **described(each), **made} for each, found in findings.items()}
            rows = {each: (kept | rows)[each] for each in ROWS if each in kept or each in rows}
            write_json(args.json, {"format": "offload-goals/1", "machine": about, "quick": args.quick, "rows": rows})
    print("\n".join(table(findings)))
    return 1 if unmeasured else 0


if __name__ == "__main__":
    sys.exit(main())
