"""Run the campaigns and write what they found: docs/reliability.json and docs/reliability.md.

    python tests/reliability.py                 all parts, in the size of a CI run
    python tests/reliability.py --long          all parts, in full
    python tests/reliability.py --long seeds-2  some parts: whatever is named here or in --list
    python tests/reliability.py --table         only the page, from the JSON as it stands

In full some parts are cut into shares, so that each command ends within minutes. Every part is recorded as it ends: one
that is interrupted loses itself alone.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JSON = ROOT / "docs" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
SEEDS = 100_000
COUNTED = [
    "faults injected",
    "real limits met",
    "blocks through a memory of one",
    "events of the stateful test",
    "forwards abandoned",
    "kills survived",
    "exits with copies in flight",
    "forks",
    "steps of the long runs",
    "rounds under sanitizers",
]
NOT_RUN = "not run"


@dataclass(frozen=True)
class Part:
    """A selection of tests; `long`: what is added in full, `shares`: into how many commands that is cut."""

    what: str
    selection: tuple[str, ...]
    long: tuple[str, ...] = ()
    shares: int = 1


PARTS = {
    "scenarios": Part("autograd scenarios", ("tests/autograd", "--ignore=tests/autograd/test_faults.py")),
    "faults": Part("failing I/O and memory", ("tests/autograd/test_faults.py", "tests/core")),
    "double": Part("the CUDA driver over its double", ("tests/twin", "tests/test_cuda_driver.py")),
    "processes": Part("kills, limits, forks, exits, long runs", ("tests/processes",)),
    "state": Part("optimizer state: failing I/O, forks, exits, copies", ("tests/optimizer_state",)),
    "databases": Part("PyTorch's databases", ("tests/test_databases.py",), ("--all-databases",), shares=4),
    "sanitizers": Part("the stress program", ("tests/stress", "--long"), ("--rounds=500",), shares=2),
    "seeds": Part("seeded schedules", ("tests/campaign/test_seeds.py",), shares=4),
    "mutants": Part("guards left out", ()),
}


def names(is_long: bool) -> dict[str, tuple[str, int, int]]:
    """What may be asked for, parts or shares of them; each with its part, which share it is and of how many."""
    found = {}
    for name, part in PARTS.items():
        shares = part.shares if is_long else 1
        for share in range(1, shares + 1):
            found[name if shares == 1 else f"{name}-{share}"] = (name, share, shares)
    return found


def command_of(name: str, share: int, shares: int, is_long: bool, counted: Path) -> list[str]:
    """What runs one share of a part; it leaves what it counted in `counted`."""
    if name == "mutants":
        return [sys.executable, "-m", "campaign.mutants", str(counted)]
    part = PARTS[name]
    command = [sys.executable, "-m", "pytest", "-q", *part.selection, f"--reliability-json={counted}"]
    if not is_long:
        return command
    command += ["--long", *part.long]
    if name == "seeds":
        each = SEEDS // shares
        return [*command, f"--seeds={each}", f"--first-seed={(share - 1) * each}"]
    return [*command, f"--share={share}/{shares}"]


def run_share(label: str, is_long: bool) -> int:
    """Run one share of a part and record what it counted. Returns 0 where all passed."""
    name, share, shares = names(is_long)[label]
    counted = JSON.with_suffix(f".{label}")
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    command = command_of(name, share, shares, is_long, counted)
    status = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
    if not counted.exists():
        print(f"{label} left nothing to record: it ended with status {status}")
        return status or 1
    about = json.loads(counted.read_text())
    counted.unlink()
    about |= {"part": name, "shares": shares, "long": is_long, "seconds": round(time.monotonic() - began)}
    parts = read().get("parts", {})
    parts = {label: held for label, held in parts.items() if held["part"] != name or held["shares"] == shares}
    write({"parts": parts | {label: about}})
    return status


def read() -> dict:
    """What has been found so far."""
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def write(found: dict) -> None:
    """In one step: whoever is interrupted leaves the old file or the new one."""
    whole = JSON.with_suffix(".part")
    whole.write_text(json.dumps(found, indent=2, ensure_ascii=False, sort_keys=True) + "\n")
    whole.replace(JSON)


def rows(parts: dict[str, dict]) -> Iterator[tuple[str, str]]:
    """The figures' names and values; what has not been run says so."""
    counts, seeds, databases, passed = Counter(), Counter(), {}, Counter()
    for about in parts.values():
        counts.update(about.get("figures", {}).get("campaigns", {}))
        seeds.update(about.get("figures", {}).get("seeds", {}))
        passed[about["part"]] += sum(about.get("passed", {}).values())
        for database, outcomes in about.get("databases", {}).items():
            databases.setdefault(database, Counter()).update(outcomes)
    yield "seeds run, each on every tier", number(seeds.get("seeds"))
    yield "walks of these seeds", number(seeds.get("walks"))
    yield "seeds that failed", number(seeds.get("failed"))
    yield "stream operations shown to the oracle", number(seeds.get("operations_judged"))
    yield "faults injected by the seeds", number(seeds.get("faults"))
    for what in COUNTED:
        yield what, number(counts.get(what))
    yield "autograd scenarios × setups, all bit-equal", number(passed.get("scenarios"))
    for database, outcomes in sorted(databases.items()):
        equal, all_of_them = outcomes["bit-equal"], outcomes["bit-equal"] + outcomes["FAILED"]
        yield f"{database}: cases bit-equal, of those to compare", f"{equal:,} of {all_of_them:,}"
    if not databases:
        yield "databases' cases bit-equal", NOT_RUN
    mutants = parts.get("mutants", {}).get("mutants")
    caught = sum(bool(mutant["caught"]) for mutant in mutants or [])
    yield "mutants caught of mutants planted", f"{caught} of {len(mutants)}" if mutants else NOT_RUN
    failed = sum(about.get("failed", 0) for about in parts.values())
    yield "tests that failed", number(failed) if parts else NOT_RUN


def number(value: object) -> str:
    """A count for the page."""
    return NOT_RUN if value is None else f"{value:,}"


def page(parts: dict[str, dict]) -> str:
    """The Markdown page."""
    lines = [
        "# How hard it is tested",
        "",
        "Written by `python tests/reliability.py`; with `--long` the campaigns run in full. Edit nothing here.",
        "",
        "| figure | value |",
        "|---|---:|",
        *(f"| {name} | {value} |" for name, value in rows(parts)),
        "",
        "## Parts",
        "",
        "| part | what | size | tests passed | failed | seconds |",
        "|---|---|---|---:|---:|---:|",
    ]
    for name, part in PARTS.items():
        held = {label: about for label, about in parts.items() if about["part"] == name}
        for label, about in sorted(held.items()):
            size = "full" if about["long"] else "CI"
            passed = sum(about.get("passed", {}).values())
            lines.append(f"| {label} | {part.what} | {size} | {passed:,} | {about['failed']} | {about['seconds']:,} |")
        if not held:
            lines.append(f"| {name} | {part.what} | {NOT_RUN} | | | |")
    seconds = sum(about["seconds"] for about in parts.values())
    lines += [f"| all | | | | | {seconds:,} |", "", "## Mutants: guards that were broken on purpose", ""]
    mutants = parts.get("mutants", {}).get("mutants")
    if not mutants:
        return "\n".join([*lines, NOT_RUN.capitalize() + ".", ""])
    lines += ["| mutant | caught by | caught |", "|---|---|---|"]
    for mutant in mutants:
        by = ", ".join(f"`{test}`" for test in mutant["caught_by"])
        lines.append(f"| {mutant['name']} | {by} | {'yes' if mutant['caught'] else '**no**'} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Run what was asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts or shares of them (default: all)")
    parser.add_argument("--long", action="store_true", help="run the campaigns in full")
    parser.add_argument("--list", action="store_true", help="only say which parts there are")
    parser.add_argument("--table", action="store_true", help="only write the page, from docs/reliability.json")
    options = parser.parse_args()
    known = names(options.long)
    asked = [label for label in known if not options.parts or {label, known[label][0]} & set(options.parts)]
    unknown = set(options.parts) - set(known) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.list:
        print("\n".join(known))
        return 0
    status = 0
    for label in [] if options.table else asked:
        status |= run_share(label, options.long)
        PAGE.write_text(page(read().get("parts", {})))
    PAGE.write_text(page(read().get("parts", {})))
    return status


if __name__ == "__main__":
    sys.exit(main())
