"""Disables each ordering edge in turn and prints a table of what detects that it is missing.

    python tests/twin/mutants.py [--seeds 20] [--json PATH]

Two methods are tried for each edge. The order checker runs once, without delays. The comparison of bytes runs with
seeded delays, once per seed, until a run returns wrong bytes; `--seeds` is the maximum number of runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DELAY_US_MAX = 2000


def found_by_checker(sim: Any, run: Any) -> str:
    """Return the first violation that the order checker reports without delays; empty if there is none."""
    sim.reset()
    sim.watch_order()
    with contextlib.suppress(AssertionError, OSError):
        run()
    sim.module.synchronize()
    return next((text for text in sim.violations() if text.endswith("in no order")), "")


def found_by_bytes(sim: Any, run: Any, seeds: int) -> int | None:
    """Return after how many seeds a run got wrong bytes or a checksum error; None if no run did."""
    for seed in range(seeds):
        sim.reset()
        sim.schedule(seed, DELAY_US_MAX)
        try:
            run()
        except (AssertionError, OSError):
            return seed + 1
        finally:
            sim.hold_streams(False)
            sim.module.synchronize()
    return None


def look(seeds: int) -> list[dict[str, Any]]:
    """Return one row per edge. Needs the extension that is built with mutants."""
    os.environ["OFFLOAD_TEST_DEVICE"] = "sim"
    from accelerator import simulated
    from edges import EDGES
    from twin.gate import watched_slab

    from offload import _core

    sim, rows = simulated(), []
    _core.SwapStore.slab = watched_slab  # type: ignore[method-assign]
    for edge, (run,) in EDGES.items():
        _core.set_mutant(edge)  # type: ignore[attr-defined]
        row = {"name": edge, "checker": found_by_checker(sim, run), "seeds": found_by_bytes(sim, run, seeds)}
        _core.set_mutant("")  # type: ignore[attr-defined]
        rows.append(row)
        print(edge, row["checker"] or "-", row["seeds"], sep=" | ", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Run the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sys.path[:0] = [str(HERE.parent), str(HERE / "inside")]
    if "OFFLOAD_MUTANTS_FOLDER" not in os.environ:  # run this file again with the extension that is built with mutants
        from campaign.build import mutants_package

        with mutants_package() as folder:
            environment = {**os.environ, "OFFLOAD_MUTANTS_FOLDER": str(folder), "PYTHONPATH": str(folder)}
            environment.setdefault("OMP_NUM_THREADS", "1")
            return subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=environment, check=False).returncode
    rows = look(args.seeds)
    print("| missing edge | order checker, without delays | wrong bytes, with delays |\n|---|---|---|")
    for row in rows:
        by_bytes = f"seed {row['seeds']}" if row["seeds"] else f"not found in {args.seeds} seeds"
        print(f"| {row['name']} | {row['checker'] or 'not found'} | {by_bytes} |")
    found = [sum(bool(row[by]) for row in rows) for by in ("checker", "seeds")]
    missed = [row["name"] for row in rows if not row["checker"] and not row["seeds"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} found: {found[0]} by the order checker, {found[1]} by wrong bytes")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
