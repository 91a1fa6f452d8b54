"""Run the campaigns and write their results: docs/reliability.json and docs/reliability.md.

    python tests/reliability.py                 all parts, in the size of a CI run
    python tests/reliability.py --full          all parts, in full
    python tests/reliability.py --full seeds-2  the parts that are named; --list prints the names
    python tests/reliability.py --table         only the page, from the present JSON

With --full some parts are cut into shares, so that each command ends within minutes. Every share is recorded when it
ends, so an interruption loses only the share that runs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import model_state_failures
import runs_on_a_gpu

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
NOT_COMPARED = {
    "without gradient": "not differentiable on this device",
    "varying": "some samples vary without the engine too",
    "nothing comparable": "nothing to compare",
}
NOT_RUN = "not run"
RECORDED = ("date", "processor", "processors", "python", "torch", "device")


@dataclass(frozen=True)
class Part:
    """A selection of tests. `full`: arguments added with --full. `shares`: number of commands that it is cut into."""

    what: str
    selection: tuple[str, ...]
    full: tuple[str, ...] = ()
    shares: int = 1


PARTS = {
    "scenarios": Part("test cases of autograd", ("tests/autograd", "--ignore=tests/autograd/test_faults.py")),
    "faults": Part("failing disk and memory", ("tests/autograd/test_faults.py", "tests/core")),
    "double": Part("the CUDA code on a simulated driver", ("tests/twin", "tests/test_cuda_driver.py")),
    "processes": Part("kills, limits, forks, exits, long runs", ("tests/processes",)),
    "state": Part("optimizer state and gradients: failing disk, forks, exits, copies", ("tests/optimizer_state",)),
    "parameters": Part("frozen and trained parameters: failing disk, interrupts, forks, exits", ("tests/parameters",)),
    "databases": Part("PyTorch's test databases", ("tests/test_databases.py",), ("--all-databases",), shares=4),
    "sanitizers": Part("stress program under sanitizers", ("tests/stress",), ("--rounds=500",), shares=2),
    "seeds": Part("random programs", ("tests/campaign/test_seeds.py",), shares=4),
    "mutants": Part("removed guards", ()),
}


def names(is_full: bool) -> dict[str, tuple[str, int, int]]:
    """Return the parts or shares that can be named, each with its part, the number of the share and of all shares."""
    found = {}
    for name, part in PARTS.items():
        shares = part.shares if is_full else 1
        for share in range(1, shares + 1):
            found[name if shares == 1 else f"{name}-{share}"] = (name, share, shares)
    return found


def command_of(name: str, share: int, shares: int, is_full: bool, counted: Path) -> list[str]:
    """Return the command that runs one share of a part and writes its counts to `counted`."""
    if name == "mutants":
        return [sys.executable, "-m", "campaign.mutants", str(counted)]
    part = PARTS[name]
    command = [sys.executable, "-m", "pytest", "-q", *part.selection, f"--reliability-json={counted}"]
    if not is_full:
        return [*command, "--long"]
    command += ["--full", *part.full]
    if name == "seeds":
        each = SEEDS // shares
        return [*command, f"--seeds={each}", f"--first-seed={(share - 1) * each}"]
    return [*command, f"--share={share}/{shares}"]


def run_share(label: str, is_full: bool) -> int:
    """Run one share of a part and record its counts. Returns 0 if all tests passed."""
    name, share, shares = names(is_full)[label]
    counted = JSON.with_suffix(f".{label}")
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    command = command_of(name, share, shares, is_full, counted)
    status = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
    if not counted.exists():
        print(f"{label} left nothing to record: it ended with status {status}")
        return status or 1
    about = json.loads(counted.read_text())
    counted.unlink()
    about |= {"part": name, "shares": shares, "full": is_full, "seconds": round(time.monotonic() - began)}
    about["machine"] = {key: value for key, value in described().items() if key in RECORDED}
    parts = read().get("parts", {})
    parts = {label: held for label, held in parts.items() if held["part"] != name or held["shares"] == shares}
    write({"parts": parts | {label: about}})
    return status


def described() -> dict:
    """Return machine, versions and date, as results of benchmarks record them."""
    if str(ROOT / "bench") not in sys.path:
        sys.path.insert(0, str(ROOT / "bench"))
    import machine

    return machine.describe()


def read() -> dict:
    """Return the results so far."""
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def write(found: dict) -> None:
    """Write the results in one step, so that an interruption leaves either the old file or the new one."""
    whole = JSON.with_suffix(".part")
    whole.write_text(json.dumps(found, indent=2, ensure_ascii=False, sort_keys=True) + "\n")
    whole.replace(JSON)


def figures(parts: dict[str, dict]) -> dict[str, str]:
    """Return the figures by name, as the page shows them; "not run" for parts that have not been run."""
    counts, seeds, databases, passed = Counter(), Counter(), {}, Counter()
    for about in parts.values():
        counts.update(about.get("figures", {}).get("campaigns", {}))
        seeds.update(about.get("figures", {}).get("seeds", {}))
        passed[about["part"]] += sum(about.get("passed", {}).values())
        for database, outcomes in about.get("databases", {}).items():
            databases.setdefault(database, Counter()).update(outcomes)
    found = {what: number(counts.get(what)) for what in COUNTED}
    found |= {f"seeds: {what}": number(seeds.get(what)) for what in ("seeds", "walks", "failed", "faults")}
    found["seeds: operations"] = number(seeds.get("operations_judged"))
    found["scenarios"] = number(passed.get("scenarios"))
    for database in ("operators", "modules"):
        outcomes = databases.get(database, Counter())
        equal, compared = outcomes["bit-equal"], outcomes["bit-equal"] + outcomes["FAILED"]
        found[database] = f"{equal:,} of {compared:,}" if compared else NOT_RUN
        for words, outcome in NOT_COMPARED.items():
            found[f"{database}: {words}"] = number(outcomes[outcome]) if compared else NOT_RUN
    mutants = parts.get("mutants", {}).get("mutants")
    caught = sum(bool(mutant["caught"]) for mutant in mutants or [])
    found["mutants"] = f"{caught} of {len(mutants)}" if mutants else NOT_RUN
    found["failed"] = number(sum(about.get("failed", 0) for about in parts.values()) if parts else None)
    return found


def number(value: object) -> str:
    """Return a count as text for the page."""
    return NOT_RUN if value is None else f"{value:,}"


INTRODUCTION = """# Reliability

offload moves tensors while a model trains. A mistake in it could change results, or make training hang. This page makes
six claims. For each claim it says how it is tested, and how much was run.

All tests of the six claims run without a GPU: on the CPU, on a simulated accelerator and on a simulated CUDA driver.
[What has run on a GPU](#on-a-gpu) comes after them. In the runs that this page reports, {passed} tests passed and
{failed} failed. The runs are from {days} and took {hours} hours in total. {where}{sizes} [Each part with its
date](#run-it-again) is listed below.
"""
CLAIMS = (
    (
        "Losses and gradients do not change in a single bit",
        "Each case is trained with and without offload, and all results are compared with `torch.equal`. An operator "
        "is not compared if it has no gradient on the CPU, and not with inputs for which two runs without offload "
        "differ.",
        (
            (
                "test cases of autograd's behaviour (views, in-place changes, double backward, threads, …), each with "
                "up to six combinations of storage and timing of the copies",
                "scenarios",
            ),
            ("operators of PyTorch's own test database that are bit-equal, of those that were compared", "operators"),
            ("operators not compared, because they have no gradient on the CPU", "operators: without gradient"),
            ("operators not compared with some of their inputs, because the results vary", "operators: varying"),
            ("operators without any input that can be compared", "operators: nothing comparable"),
            ("modules of PyTorch's own test database that are bit-equal, of those that were compared", "modules"),
            (
                "random operations on saved tensors; each tensor that comes back is compared with a copy that was made "
                "when it was saved",
                "events of the stateful test",
            ),
        ),
    ),
    (
        "No copy reads or overwrites memory at the wrong time",
        "Random programs save, prefetch, use and free tensors, and a random scheduler decides which copy runs next. "
        "Each program runs three times: with pinned memory, with pinned memory and disk, and with disk only. One "
        "program in ten is run six more times: with real threads, and with threads that wait for random times. Every "
        "byte that comes back is compared. For each run on the simulated accelerator, the log of its operations is "
        "given to PyTorch's own CUDA sanitizer, which reports two accesses to the same memory if no event orders "
        "them. In addition, a stress program with many threads runs under the thread, address and undefined-behaviour "
        "sanitizers of the compiler.",
        (
            ("random programs", "seeds: seeds"),
            ("runs of these programs: nine for one in ten, three for the others", "seeds: walks"),
            ("operations that the CUDA sanitizer has judged", "seeds: operations"),
            ("runs with a wrong byte, a leak or a report of the sanitizer", "seeds: failed"),
            ("rounds of the stress program", "rounds under sanitizers"),
        ),
    ),
    (
        "A failing disk or a lack of memory never gives a wrong result",
        "Reads, writes and allocations are made to fail: once or permanently, with an error, a short transfer or a "
        "wrong block of 4 KiB. Training must then go on with correct results, or raise an error that names the cause. "
        "(In the counts below, which are older than 27 November 2026, a single flipped bit took the place of the wrong "
        "block, and checksums covered every byte, as they still do with `OFFLOAD_CHECKSUM=all`.)",
        (
            ("failures injected into autograd's test cases and into the code that stores tensors", "faults injected"),
            ("failures injected into the random programs of claim 2", "seeds: faults"),
            (
                "tests in which a process reaches a real limit of the system: a full disk, file size, address space, "
                "locked memory",
                "real limits met",
            ),
            (
                "tensors that eight threads swapped out and in, without a deadlock, while the pinned memory had room "
                "for one tensor only",
                "blocks through a memory of one",
            ),
        ),
    ),
    (
        "Nothing hangs or stays on the disk when a process ends",
        "Processes are killed, forked, or end while copies run. Afterwards no file may be left, and an ordinary exit "
        "must end with status 0.",
        (
            ("processes killed in the middle of training", "kills survived"),
            ("processes that ended while copies were running", "exits with copies in flight"),
            ("forked child processes", "forks"),
        ),
    ),
    (
        "Nothing accumulates over time",
        "After every test case, offload must hold nothing: no tensors, no unfinished copies, no memory, no space in "
        "its file on disk. In long runs, the second half must need no more memory than the first.",
        (
            ("training steps of the long runs", "steps of the long runs"),
            ("forward passes whose results were discarded without a backward", "forwards abandoned"),
        ),
    ),
    (
        "The tests notice when a safeguard is missing",
        "A *guard* is a wait, a check or a lock on which the claims above rely. Each guard is removed on purpose, one "
        "at a time. At least one test must then fail. [The list](#guards-removed-on-purpose) is below.",
        (("guards whose removal a test noticed, of those removed", "mutants"),),
    ),
)
RERUN = """## Run it again

`python tests/reliability.py` runs all parts in the short form that CI uses, or in full with `--full`, and writes this
page. The table shows the newest run of each part. *Size*: *full* is `--full`, *CI* the short form.
"""
GUARDS = """Each item names guards, by what they ensure, and the tests that failed when one of them was removed. The
tests are in `tests/`. *Bounce*: the buffer between file and device. *Slot*: the record of one swapped block of bytes.
*Extent*: a range of bytes in the spill file, the file on disk. *Slice*: a part of a block; a block is copied slice by
slice. *Spill* and *fill*: a copy to and from that file. *Ticket*: the handle of one swapped storage. *Lane*: a queue
of copies that a thread runs in order. *Follow*: to compare the operators of a step with those that an earlier step
recorded, for recomputation; if an operator differs, the following ends, and operators are recorded again. `DESIGN.md`
explains the other terms."""


def claims(found: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the six claims with their figures."""
    for place, (claim, proof, counted) in enumerate(CLAIMS, start=1):
        yield from (f"## {place}. {claim}", "", proof, "", "| what was run | how many |", "|---|---:|")
        yield from (f"| {words[0].upper()}{words[1:]} | {found[name]} |" for words, name in counted)
        yield ""


def page(parts: dict[str, dict]) -> str:
    """Return the Markdown page."""
    found = figures(parts)
    lines = [introduction(parts, found), *claims(found), runs_on_a_gpu.SECTION, *model_state_failures.section(), RERUN]
    lines += ["| part | passed | failed | time | size | date |", "|---|---:|---:|---:|---|---|"]
    for name, part in PARTS.items():
        held = [about for about in parts.values() if about["part"] == name]
        if not held:
            lines.append(f"| {part.what} | {NOT_RUN} | | | | |")
            continue
        passed = sum(sum(about.get("passed", {}).values()) for about in held)
        failed, seconds = (sum(about[key] for about in held) for key in ("failed", "seconds"))
        size = "full" if all(about["full"] for about in held) else "CI"
        minutes, passed_words = max(1, round(seconds / 60)), number(passed) if passed else "–"
        lines.append(f"| {part.what} | {passed_words} | {failed} | {minutes} min | {size} | {days(held)} |")
    lines += ["", "## Guards removed on purpose", ""]
    mutants = parts.get("mutants", {}).get("mutants")
    if not mutants:
        return "\n".join([*lines, NOT_RUN.capitalize() + ".", ""])
    lines += [GUARDS, ""]
    grouped: dict[str, list[str]] = {}
    for mutant in mutants:
        grouped.setdefault(noticed_by(mutant), []).append(mutant["name"])
    lines += [f"* {'; '.join(guards)}: {tests}" for tests, guards in grouped.items()]
    return "\n".join([*lines, ""])


def introduction(parts: dict[str, dict], found: dict[str, str]) -> str:
    """Return the first paragraphs: totals, dates and machines of the runs."""
    held = list(parts.values())
    if not held:
        return f"# Reliability\n\n{NOT_RUN.capitalize()}.\n"
    machines = dict.fromkeys(words for about in held if (words := machine_of(about)))
    short = [part.what for name, part in PARTS.items() if not all(is_full(about, name) for about in held)]
    unnamed = sum(not machine_of(about) for about in held)
    where = [f"Machine: {'; '.join(machines)}."] if machines else []
    if unnamed:
        where.append(f"For {unnamed} of {len(held)} runs the machine was not recorded (a part can take several runs).")
    return INTRODUCTION.format(
        passed=number(sum(sum(about.get("passed", {}).values()) for about in held)),
        failed=found["failed"],
        days=days(held),
        hours=f"{sum(about['seconds'] for about in held) / 3600:.1f}",
        where=" ".join(where),
        sizes=f" In the short form of CI: *{'*, *'.join(short)}*. All other parts ran in full." if short else "",
    )


def is_full(about: dict, name: str) -> bool:
    """Return whether a run is of another part, or ran in full."""
    return about["part"] != name or about["full"]


def days(held: Sequence[dict]) -> str:
    """Return the first and the last day of these runs."""
    found = sorted({about["machine"]["date"][:10] for about in held})
    return " to ".join(dict.fromkeys([*found[:1], *found[-1:]])) or NOT_RUN


def machine_of(about: dict) -> str:
    """Return the machine and the versions of a run, as text; empty if the run did not record them."""
    held = about["machine"]
    if "processor" not in held:
        return ""
    return f"{held['processor']}, {held['processors']} cores, Python {held['python']}, torch {held['torch']}"


def noticed_by(mutant: dict) -> str:
    """Return the tests that failed without a guard, as text without "tests/" and variants."""
    tests = dict.fromkeys(re.sub(r"^tests/|\[.*", "", test) for test in mutant["caught_by"])
    return ", ".join(f"`{test}`" for test in tests) if mutant["caught"] else "**no test**"


def main() -> int:
    """Run the parts that were named, or all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts or shares of them (default: all)")
    parser.add_argument("--full", action="store_true", help="run the campaigns in full")
    parser.add_argument("--list", action="store_true", help="only print the names of the parts")
    parser.add_argument("--table", action="store_true", help="only write the page, from docs/reliability.json")
    options = parser.parse_args()
    known = names(options.full)
    asked = [label for label in known if not options.parts or {label, known[label][0]} & set(options.parts)]
    unknown = set(options.parts) - set(known) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.list:
        print("\n".join(known))
        return 0
    status = 0
    for label in [] if options.table else asked:
        status |= run_share(label, options.full)
        PAGE.write_text(page(read().get("parts", {})))
    PAGE.write_text(page(read().get("parts", {})))
    return status


if __name__ == "__main__":
    sys.exit(main())
