"""Training runs in processes of their own, in turn with a plain one: what the steps group and its tables are made of.

    python bench/race.py --json FILE [--family NAME …] [--contestant NAME …] [--size quick|full] [--rounds N] [--slow]

Every contestant's steps alternate with those of a plain run, A B A B …; both processes start with the same allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import contestants
import machine
import models
from contest import spread
from contestants import PLAIN, Contestant, Inapplicable
from result_file import ResultFile
from step_worker import EXIT_OVER_CAP
from training import Setting

from offload import allocator

WORKER = Path(__file__).with_name("step_worker.py")
COMPLAINT_CHARACTERS_MAX = 2000


class OverCap(Exception):
    """A run's resident set grew beyond its cap."""


class Runner:
    """One worker process; a context manager that leaves none behind.

    Raises
    ------
    Inapplicable
        The contestant cannot run here.
    OverCap
        It grew beyond `cap_bytes`.
    RuntimeError
        It ended otherwise; the message carries the end of what it wrote to stderr.
    """

    def __init__(self, setting: Setting, contestant: Contestant, cap_bytes: int | None = None) -> None:
        self.contestant = contestant
        self.steps: list[dict[str, Any]] = []
        self._complaints: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - close() does
        task = {"setting": setting.to_dict(), "contestant": contestant.name, "cap_bytes": cap_bytes}
        environment = dict(os.environ) if setting.device == "cuda" else allocator.preload_environment()
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        root = str(Path(__file__).resolve().parents[1])
        known = environment.get("PYTHONPATH")
        if (Path(root) / "offload").is_dir() and known is None and _runs_from(root):
            environment["PYTHONPATH"] = root
        self._child = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env=environment,
        )
        try:
            self.steps += self._expect("ready")["settling"]
        except BaseException:
            self.close()
            raise
        self.settling = len(self.steps)

    def step(self) -> float:
        """Train one step; its seconds."""
        self._send("step")
        self.steps.append(self._expect("step"))
        return float(self.steps[-1]["seconds"])

    def finish(self) -> dict[str, Any]:
        """End the run; its figures."""
        self._send("finish")
        return self._expect("figures")

    def close(self) -> None:
        """End the process, whatever it is at."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # it was told something that it did not live to read
                    continue
        self._complaints.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _send(self, line: str) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _expect(self, event: str) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if not line.startswith("{"):
                continue  # what a package prints by itself
            content: dict[str, Any] = json.loads(line)
            if content.pop("event") == event:
                return content
            raise Inapplicable(content["reason"])
        raise self._ended()

    def _ended(self) -> Exception:
        status = self._child.wait()
        if status == EXIT_OVER_CAP:
            return OverCap(f"{self.contestant.name} grew beyond its cap")
        self._complaints.seek(0)
        tail = self._complaints.read().strip()[-COMPLAINT_CHARACTERS_MAX:]
        return RuntimeError(f"the run of {self.contestant.name} ended with exit status {status}:\n{tail}")


def _runs_from(root: str) -> bool:
    import offload

    return Path(offload.__file__).is_relative_to(root)


class Race:
    """A contestant beside a plain run of the same setting.

    Raises
    ------
    Inapplicable
        The contestant cannot run here.
    """

    def __init__(self, setting: Setting, contestant: Contestant, plain: Runner | None = None) -> None:
        self.setting = setting
        self.contestant = contestant
        self._stack = ExitStack()
        self._own = self._stack.enter_context(Runner(setting, contestant))
        self._plain = plain or self._stack.enter_context(Runner(setting, PLAIN))
        self._plain_seconds: list[float] = []
        self._own_seconds: list[float] = []

    def plain_step(self) -> None:
        """Train a plain step."""
        self._plain_seconds.append(self._plain.step())

    def step(self) -> None:
        """Train a step of the contestant."""
        self._own_seconds.append(self._own.step())

    def row(self, plain_peak_bytes: int | None) -> dict[str, Any]:
        """End the race; every figure, beside plain's where `plain_peak_bytes` or an own plain run tells it."""
        with self._stack:
            figures = self._own.finish()
            ours, theirs = self._own.steps, self._plain.steps
            pairs = list(zip(ours, theirs, strict=False))
            if plain_peak_bytes is None:
                plain_peak_bytes = int(self._plain.finish()["peak_bytes"])
        step_seconds = statistics.median(self._own_seconds)
        lower, upper = spread(self._own_seconds)
        ratios = [own / plain for own, plain in zip(self._own_seconds, self._plain_seconds, strict=True)]
        return {
            "family": self.setting.family,
            "name": self.contestant.name,
            "ours": self.contestant.is_ours,
            "options": dict(self.contestant.options),
            "setting": self.setting.to_dict(),
            "step_seconds": self._own_seconds,
            "step_seconds_median": step_seconds,
            "step_seconds_spread": [lower, upper],
            "plain_step_seconds": self._plain_seconds,
            "step_over_plain": step_seconds / statistics.median(self._plain_seconds),
            "step_over_plain_spread": list(spread(ratios)),
            "plain_peak_bytes": plain_peak_bytes,
            "memory_over_plain": figures["peak_bytes"] / plain_peak_bytes,
            "equal_losses": all(own["loss"] == plain["loss"] for own, plain in pairs),
            "equal_gradients": all(own["gradients"] == plain["gradients"] for own, plain in pairs),
            "equal_expected": self.contestant.equal,
            **figures,
        }

    def close(self) -> None:
        """End what still runs."""
        self._stack.close()


def wrong(row: dict[str, Any]) -> bool:
    """Whether a contestant that must compute plain's bits did not."""
    return bool(row.get("equal_expected")) and not (row["equal_losses"] and row["equal_gradients"])


def setting_of(family: str, size: str) -> Setting:
    """Return a family's setting on the CPU: "tiny", "quick" or "full"."""
    least = 1024 if size == "tiny" else None
    return Setting(family, getattr(models.FAMILIES[family], size), min_tensor_bytes=least)


def race(setting: Setting, contestant: Contestant, rounds: int) -> dict[str, Any]:
    """Race one contestant; a row, or one with "inapplicable" or "error" in it."""
    about = {"family": setting.family, "name": contestant.name, "ours": contestant.is_ours}
    try:
        run = Race(setting, contestant)
    except Inapplicable as reason:
        return {**about, "inapplicable": str(reason)}
    except RuntimeError as error:
        return {**about, "error": str(error)}
    try:
        for _ in range(rounds):
            run.plain_step()
            run.step()
        return run.row(None)
    except RuntimeError as error:
        return {**about, "error": str(error)}
    finally:
        run.close()


def line(row: dict[str, Any]) -> str:
    """Say a row in one line."""
    begin = f"{row['family']:<7} {row['name']:<34} "
    for word in ("inapplicable", "error"):
        if word in row:
            return begin + f"{word}: {row[word].splitlines()[-1]}"
    bits = "bit-equal" if row["equal_gradients"] and row["equal_losses"] else "OTHER BITS"
    return begin + (
        f"memory {row['memory_over_plain']:.2f} ×, step {row['step_over_plain']:.2f} × "
        f"({row['step_seconds_median']:.2f} s), {bits}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Race them; 1 where one failed or computed other bits than it must."""
    parser = argparse.ArgumentParser(prog="race.py", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="rewritten after every row")
    parser.add_argument("--family", action="append", choices=sorted(models.FAMILIES), help="again for several (all)")
    parser.add_argument("--contestant", action="append", metavar="NAME", help="again for several (all)")
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="full")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="timed steps of each (7)")
    parser.add_argument("--slow", action="store_true", help="torch.compile too: minutes for each")
    args = parser.parse_args(argv)
    chosen = contestants.select(args.contestant, slow=args.slow)
    results = ResultFile(args.json)
    results.set("format", "offload-frontier/1")
    results.set("machine", machine.describe())
    results.set("size", args.size)
    bad = 0
    for family in args.family or models.FAMILIES:
        for contestant in chosen:
            row = race(setting_of(family, args.size), contestant, args.rounds)
            results.append("rows", row)
            bad += "error" in row or ("inapplicable" not in row and wrong(row))
            print(line(row), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
