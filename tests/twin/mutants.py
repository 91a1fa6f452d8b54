"""What finds each ordering edge that is left out: the order checker without delays, wrong bytes under seeded delays.

    python tests/twin/mutants.py [--seeds 20] [--json PATH]

prints a table. Bytes are given so many seeds at most; the checker needs none.
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
    """What it names first, without any delay."""
    sim.reset()
    sim.watch_order()
    with contextlib.suppress(AssertionError, OSError):
        run()
    sim.module.synchronize()
    return next((text for text in sim.violations() if text.endswith("in no order")), "")


def found_by_bytes(sim: Any, run: Any, seeds: int) -> int | None:
    """How many seeds it took until somebody got wrong bytes, an error of a copy's checksum among them."""
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
    """All edges, in a process whose `offload` can leave them out."""
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
    """As it says above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sys.path[:0] = [str(HERE.parent), str(HERE / "inside")]
    if "OFFLOAD_MUTANTS_FOLDER" not in os.environ:  # once more, with the extension in which edges can be left out
        from campaign.build import mutants_package

        with mutants_package() as folder:
            environment = {**os.environ, "OFFLOAD_MUTANTS_FOLDER": str(folder), "PYTHONPATH": str(folder)}
            environment.setdefault("OMP_NUM_THREADS", "1")
            return subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=environment, check=False).returncode
    rows = look(args.seeds)
    print("| edge left out | order checker, without delays | wrong bytes under delays |\n|---|---|---|")
    for row in rows:
        by_bytes = f"seed {row['seeds']}" if row["seeds"] else f"not in {args.seeds} seeds"
        print(f"| {row['name']} | {row['checker'] or 'not found'} | {by_bytes} |")
    found = [sum(bool(row[by]) for row in rows) for by in ("checker", "seeds")]
    missed = [row["name"] for row in rows if not row["checker"] and not row["seeds"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} found: {found[0]} by the checker, {found[1]} by bytes")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
