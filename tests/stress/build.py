"""Builds the stress program with a sanitizer, and runs it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from campaign.build import cmake_build
from campaign.seeds import spill_directory

# Of the two sanitizers that look the one that checks types may be the first to see what has taken the memory's place.
USE_AFTER_FREE = "AddressSanitizer: heap-use-after-free|which does not point to an object of type"


def missing_sanitizer(sanitizer: str) -> str:
    """Why this compiler cannot build with it; empty where it can."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.cpp")
        source.write_text("int main() { return 0; }\n")
        program = source.with_suffix("")
        command = [*compiler, f"-fsanitize={sanitizer}", str(source), "-o", str(program)]
        for step in (command, [str(program)]):
            run = subprocess.run(step, capture_output=True, text=True, check=False)
            if run.returncode != 0:
                return f"-fsanitize={sanitizer} does not work here: {run.stderr.strip()[-200:]}"
    return ""


def build_stress(sanitizer: str) -> Path:
    """The program, under a sanitizer."""
    return cmake_build("stress", "-DOFFLOAD_STRESS=ON", f"-DOFFLOAD_SANITIZE={sanitizer}")


def run_stress(program: Path, rounds: int, seed: int, edge: str = "") -> subprocess.CompletedProcess[str]:
    """Run it; whatever a sanitizer finds makes the status nonzero. It has a minute, and ten seconds a round."""
    with tempfile.TemporaryDirectory(dir=spill_directory()) as directory:
        command = [str(program), str(rounds), str(seed), directory, *([edge] if edge else [])]
        # The first finding ends it: what a race has left behind may wait for ever.
        halts = {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}
        environment = {**os.environ, **halts}
        return run_within(command, 60 + 10 * rounds, environment)


def run_within(command: list[str], seconds_max: float, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program, and say where its threads are if it does not end in time."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as program:
        try:
            stdout, stderr = program.communicate(timeout=seconds_max)
        except subprocess.TimeoutExpired:
            stacks = stacks_of(program.pid)
            program.kill()
            _, stderr = program.communicate()
            raise AssertionError(f"not done after {seconds_max} s:\n{stacks}\n{stderr}") from None
    return subprocess.CompletedProcess(command, program.returncode, stdout, stderr)


def stacks_of(pid: int) -> str:
    """The threads of a process by name, what each waits in and, where there is gdb, their stacks."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    lines = [" ".join((task / name).read_text().strip() for name in ("comm", "wchan")) for task in tasks]
    if shutil.which("gdb"):
        command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all backtrace"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        lines += [run.stdout, run.stderr]
    return "\n".join(lines)


def run_planted(edge: str, sanitizer: str, finding: str) -> str:
    """What a sanitizer says where the guard `edge` is left out: the first of five runs that has the pattern `finding`.

    While a sanitizer looks up the source lines of what one thread did, the damage may end the process in another one.
    """
    program = build_stress(sanitizer)
    rounds = 40  # the first finding ends it; on a busy machine ten rounds may have none
    said = ""
    for seed in range(1, 6):
        said = run_stress(program, rounds, seed, edge).stderr
        if re.search(finding, said):
            break
    return said
