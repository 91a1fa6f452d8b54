"""Runs all tests and benchmarks that need a GPU, in at most nine minutes and without a network.

    python bench/gpu_suite.py --out DIR [--only PART,…] [--no-build] [--require-cuda]

Needs torch, pybind11, ninja, cmake, setuptools, pytest and pytest-benchmark. Each part runs in a separate process with
its own time limit and writes DIR/PART.json, except the build. A part that exceeds its limit keeps the results that it
has written until then. DIR/summary.json names the parts that failed. The exit status is 0 if no part failed, else 1.
Without a CUDA device, the parts that need one are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import machine
import torch
from result_file import EXIT_SKIPPED, read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
SECONDS_MAX = 530.0  # of all parts together: nine minutes, less what starting and stopping takes
SECONDS_TO_STOP = 5.0
OUTPUT_CHARACTERS_MAX = 20_000
COMPLAINT_CHARACTERS_MAX = 2_000
REHEARSAL_PATIENCE = 3  # factor on the time limits with --rehearse: a machine without a GPU may have few cores
NO_DEVICE = "no device: torch finds no CUDA device here"


@dataclass(frozen=True)
class Part:
    """One part: its command, its time limit, and whether it needs a GPU."""

    name: str
    seconds_max: float
    needs_cuda: bool
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a part ended: "passed", "failed" or "skipped", and why."""

    part: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    seconds_max: float = 0.0
    stdout: str = ""
    stderr: str = ""


def parts(out: Path, site: Path, rehearse: bool) -> list[Part]:
    """Return all parts in the order in which they run; the build installs the package into `site`."""
    python, here = sys.executable, Path(__file__).parent
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    pip = (python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index")
    on_device = not rehearse

    def script(name: str, *options: str, part: str = "") -> tuple[str, ...]:
        size = ("--rehearse",) if rehearse else ()
        return (python, str(here / f"gpu_{name}.py"), "--json", str(out / f"{part or name}.json"), *options, *size)

    def frontier(width: int) -> Part:
        name = f"frontier-{width}"
        command = script("frontier", "--width", str(width), part=name)
        return Part(name, 105, on_device, command, deterministic)

    every = [
        Part("build", 60, False, (*pip, "--target", str(site), str(ROOT))),
        Part("driver", 20, False, script("driver")),
        Part("tests", 150, True, test_command(python), {"OFFLOAD_REQUIRE_CUDA": "1", **deterministic}),
        Part("copies", 30, on_device, script("copies")),
        frontier(2048),
        frontier(4096),
        Part("largest", 90, on_device, script("largest"), deterministic),
        Part("pair", 40, on_device, script("pair"), deterministic),
    ]
    patience = REHEARSAL_PATIENCE if rehearse else 1
    return [replace(part, seconds_max=patience * part.seconds_max) for part in every]


def test_command(python: str) -> tuple[str, ...]:
    """Return a pytest command for the files with GPU tests; other files may import packages that are not installed."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(path) for path in found if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    options = ("-m", "gpu", "-v", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
    return (python, "-m", "pytest", *options, "--rootdir", str(ROOT), *marked)


def run_part(part: Part, *, work: Path, seconds_left: float, paths: list[str]) -> Outcome:
    """Run one part in a new process group and kill the whole group at the time limit.

    The environment variable OFFLOAD_PART_SECONDS gives the part its time limit. The part runs in `work`, an empty
    folder, so that it imports the installed package.
    """
    limit = min(part.seconds_max, seconds_left)
    outcome = Outcome(part.name, "failed", seconds_max=round(limit, 1))
    if limit < SECONDS_TO_STOP:
        outcome.reason = "no time left"
        return outcome
    environment = {**os.environ, **part.environment, "PYTHONUNBUFFERED": "1"}
    environment["OFFLOAD_PART_SECONDS"] = str(limit - SECONDS_TO_STOP)
    if paths:
        before = [path for path in [os.environ.get("PYTHONPATH")] if path]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *before])
    begin = time.monotonic()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(
            part.command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            status = child.wait(limit)
            outcome.status = {0: "passed", EXIT_SKIPPED: "skipped"}.get(status, "failed")
            outcome.reason = {0: "", EXIT_SKIPPED: NO_DEVICE}.get(status, f"exit status {status}")
        except subprocess.TimeoutExpired:
            outcome.reason = f"timed out after {limit:.0f} s; the results until then are kept"
        finally:
            end_group(child)
        outcome.seconds = round(time.monotonic() - begin, 2)
        outcome.stdout, outcome.stderr = (text_of(file) for file in (stdout, stderr))
    return outcome


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the process of a part and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def text_of(file: IO[bytes]) -> str:
    """Return the content of a file as text."""
    file.seek(0)
    return file.read().decode(errors="replace")


def results_of(outcome: Outcome, out: Path) -> dict[str, Any]:
    """Return the results of a part: for the tests, the counts in pytest's output; else the JSON that it wrote."""
    if outcome.part == "tests":
        counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", outcome.stdout[-600:])
        return {word: int(count) for count, word in counts}
    return read_json(out / f"{outcome.part}.json")


def keep(outcome: Outcome, out: Path, about: dict[str, Any]) -> None:
    """Write a part's JSON: status, machine, results, and the end of its output.

    The build has no results, so it gets no file; summary.json contains its status.
    """
    if outcome.part == "build":
        return
    results = results_of(outcome, out)
    if outcome.part == "tests" and outcome.status == "passed" and not results.get("passed"):
        outcome.status, outcome.reason = "failed", "no test ran"
    content = {
        "part": outcome.part,
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds": outcome.seconds,
        "seconds_max": outcome.seconds_max,
        "machine": about,
        "results": results,
        "stdout": outcome.stdout[-OUTPUT_CHARACTERS_MAX:],
        "stderr": outcome.stderr[-OUTPUT_CHARACTERS_MAX:],
    }
    write_json(out / f"{outcome.part}.json", content)


def summarize(outcomes: list[Outcome], out: Path, about: dict[str, Any], strict: bool) -> list[str]:
    """Write summary.json and return the names of the failed parts. With `strict`, skipped parts count as failed."""
    bad = ("failed", "skipped") if strict else ("failed",)
    failed = [outcome.part for outcome in outcomes if outcome.status in bad]
    summary = {
        "format": "offload-gpu-suite/1",
        "machine": about,
        "parts": {
            outcome.part: {
                "status": outcome.status,
                "reason": outcome.reason,
                "seconds": outcome.seconds,
                "stderr": outcome.stderr[-COMPLAINT_CHARACTERS_MAX:] if outcome.status == "failed" else "",
            }
            for outcome in outcomes
        },
        "failed": failed,
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
    }
    write_json(out / "summary.json", summary)
    return failed


def run_all(args: argparse.Namespace, chosen: list[Part], site: Path, work: Path) -> list[str]:
    """Run the chosen parts one after another and return the names of the failed parts."""
    deadline = time.monotonic() + args.seconds
    has_cuda = torch.cuda.is_available()
    about = {"rehearsal": args.rehearse, **machine.describe()}
    outcomes: list[Outcome] = []
    failed: list[str] = []
    for part in chosen:
        print(f"{part.name:<13} …", end="", flush=True)
        paths = [str(site)] if part.name != "build" and not args.no_build else []
        if part.needs_cuda and not has_cuda:
            outcome = Outcome(part.name, "skipped", NO_DEVICE)
        else:
            outcome = run_part(
                part,
                work=work,
                seconds_left=deadline - time.monotonic(),
                paths=paths,
            )
        keep(outcome, args.out, about)
        outcomes.append(outcome)
        failed = summarize(outcomes, args.out, about, args.require_cuda)
        print(f" {outcome.status} after {outcome.seconds:.1f} s {outcome.reason}", flush=True)
    return failed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="gpu_suite.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument("--only", metavar="PART,…", help="run these parts only")
    parser.add_argument("--no-build", action="store_true", help="use the installed offload package")
    parser.add_argument(
        "--require-cuda",
        action="store_true",
        default=os.environ.get("OFFLOAD_REQUIRE_CUDA") == "1",
        help="count a skipped part as failed; so does OFFLOAD_REQUIRE_CUDA=1",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS_MAX, help="time limit of all parts together")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="tiny sizes on the CPU: checks that the parts run, without a GPU; the figures mean nothing",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite."""
    args = parse(argv)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site, work = Path(folder, "site"), Path(folder, "work")
        work.mkdir()
        every = parts(args.out, site, args.rehearse)
        names = args.only.split(",") if args.only else [part.name for part in every]
        unknown = sorted(set(names) - {part.name for part in every})
        if unknown:
            known = ", ".join(part.name for part in every)
            print(f"gpu_suite.py: unknown part {', '.join(unknown)}; known parts: {known}", file=sys.stderr)
            return 2
        chosen = [part for part in every if part.name in names]
        if args.no_build:
            chosen = [part for part in chosen if part.name != "build"]
        failed = run_all(args, chosen, site, work)
    for draft in args.out.glob("*.part"):
        draft.unlink()
    print(f"failed: {', '.join(failed)}" if failed else "no part failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
