"""Measures contestants in separate processes, in turn with a plain run: the data of the benchmark tables of steps.

    python bench/race.py --json FILE [--family NAME …] [--contestant NAME …] [--size quick|full] [--rounds N] [--slow]

Every contestant's steps alternate with those of a plain run, A B A B …; all processes start with the same allocator,
and each contestant has one. The file is rewritten after every row; with --keep, rows of other networks stay in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import contestants
import machine
import models
from contest import spread
from contestants import PLAIN, Contestant, Inapplicable
from result_file import ResultFile, read_json
from step_worker import EXIT_OVER_CAP
from training import Setting

from offload.devices import allocator

WORKER = Path(__file__).with_name("step_worker.py")
COMPLAINT_CHARACTERS_MAX = 2000
RUN_SECONDS_MAX = 240.0  # limit for one process
FAMILY_SECONDS_MAX = 480.0


def environment_with(malloc: str) -> dict[str, str]:
    """The environment of a process on the CPU; `malloc` as in `Runner`.

    Raises
    ------
    ValueError
        It is not installed; or "glibc" is asked for, and another one is preloaded.
    """
    if malloc == "glibc":
        if "LD_PRELOAD" in os.environ:
            raise ValueError("LD_PRELOAD is set; start this program without `offload run`")
        return dict(os.environ)
    environment = allocator.preload_environment(name=malloc)
    if malloc not in environment.get("LD_PRELOAD", ""):
        raise ValueError(f"{malloc} is not installed; {allocator.INSTALL_OF[malloc]}")
    return environment


class OverCap(Exception):
    """A run's resident set grew beyond its cap."""


class Runner:
    """One worker process; as a context manager, it always ends the process.

    `malloc`: which one to preload; "glibc": none; by default the first that is installed.

    Raises
    ------
    Inapplicable
        The contestant cannot run here.
    OverCap
        It grew beyond `cap_bytes`.
    RuntimeError
        It failed, or ran longer than `seconds_max`; the message contains the end of its stderr.
    """

    def __init__(
        self,
        setting: Setting,
        contestant: Contestant,
        cap_bytes: int | None = None,
        *,
        settle: int | None = None,
        seconds_max: float = RUN_SECONDS_MAX,
        watch: bool = False,
        malloc: str = "",
    ) -> None:
        contestants.check_device(contestant, setting.device)
        self.contestant = contestant
        self.seconds_max = seconds_max
        self.steps: list[dict[str, Any]] = []
        self._complaints: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - close() does
        task = {"setting": setting.to_dict(), "contestant": contestant.name, "cap_bytes": cap_bytes}
        task["watch"] = watch
        task["settle"] = settle
        environment = dict(os.environ) if setting.device == "cuda" else environment_with(malloc)
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
        self._overdue = threading.Event()
        self._timer = threading.Timer(seconds_max, self._end_overdue)
        self._timer.daemon = True
        self._timer.start()
        try:
            self.steps += self._expect("ready")["settling"]
        except BaseException:
            self.close()
            raise
        self.settling = len(self.steps)

    def step(self) -> float:
        """Train one step and return its seconds."""
        self._send("step")
        self.steps.append(self._expect("step"))
        return float(self.steps[-1]["seconds"])

    def finish(self) -> dict[str, Any]:
        """End the run and return its figures."""
        self._send("finish")
        return self._expect("figures")

    def close(self) -> None:
        """End the process, whatever its state."""
        self._timer.cancel()
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # the process ended before it read the command
                    continue
        self._complaints.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end_overdue(self) -> None:
        self._overdue.set()
        self._child.kill()

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
                continue  # output of a package
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
        if self._overdue.is_set():
            return RuntimeError(f"{tail}\nthe run of {self.contestant.name} took more than {self.seconds_max:.0f} s")
        return RuntimeError(f"the run of {self.contestant.name} ended with exit status {status}:\n{tail}")


def _runs_from(root: str) -> bool:
    import offload

    return Path(offload.__file__).is_relative_to(root)


class Race:
    """A contestant and a plain run of the same setting; the plain run continues after the race.

    Raises
    ------
    Inapplicable
        The contestant cannot run here.
    """

    def __init__(self, setting: Setting, contestant: Contestant, plain: Runner) -> None:
        self.setting = setting
        self.contestant = contestant
        self._own = Runner(setting, contestant)
        self._plain = plain
        self._plain_seconds: list[float] = []
        self._own_seconds: list[float] = []

    def plain_step(self) -> None:
        """Train a plain step."""
        self._plain_seconds.append(self._plain.step())

    def step(self) -> None:
        """Train a step of the contestant."""
        self._own_seconds.append(self._own.step())

    def row(self, plain_peak_bytes: int | None) -> dict[str, Any]:
        """End the race and return all figures. `plain_peak_bytes` None: the contestant is plain itself."""
        with self._own:
            figures = self._own.finish()
        while len(self._plain.steps) < len(self._own.steps):  # a search for a plan takes more steps than plain has run
            self._plain.step()
        pairs = list(zip(self._own.steps, self._plain.steps[: len(self._own.steps)], strict=True))  # the same batches
        if "settled_peak_bytes" in figures:  # on a GPU, `peak_bytes` is that of the timed steps already
            figures["all_steps_peak_bytes"] = figures["peak_bytes"]
            figures["peak_bytes"] = figures.pop("settled_peak_bytes")
        plain_peak_bytes = plain_peak_bytes or int(figures["peak_bytes"])
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
        """End the contestant's run; the plain run continues."""
        self._own.close()


def wrong(row: dict[str, Any]) -> bool:
    """Whether a contestant that must have the same bits as plain has other ones."""
    return bool(row.get("equal_expected")) and not (row["equal_losses"] and row["equal_gradients"])


def setting_of(family: str, size: str) -> Setting:
    """Return a family's setting on the CPU: "tiny", "quick" or "full"."""
    least = 1024 if size == "tiny" else None
    return Setting(family, getattr(models.FAMILIES[family], size), min_tensor_bytes=least)


class Meeting:
    """The races of one network: all contestants run in turn with one plain run. The first race gives plain's memory.

    A context manager. `race` returns a row, or one with "inapplicable" or "error" in it.
    """

    def __init__(self, setting: Setting, rounds: int, seconds_max: float = FAMILY_SECONDS_MAX) -> None:
        self.setting = setting
        self.rounds = rounds
        self.plain_peak_bytes: int | None = None
        self._deadline = time.monotonic() + seconds_max
        self._longest = 0.0  # longest race so far; a race that would not end in time is not started
        self._plain = Runner(setting, PLAIN, seconds_max=seconds_max + RUN_SECONDS_MAX)

    def race(self, contestant: Contestant) -> dict[str, Any]:
        """Race one contestant. The first one must be plain."""
        about = {"family": self.setting.family, "name": contestant.name, "ours": contestant.is_ours}
        begin = time.monotonic()
        if begin + self._longest > self._deadline:
            return {**about, "inapplicable": "left out: the time for this network was up"}
        if self.plain_peak_bytes is None and contestant is not PLAIN:
            base = self.race(PLAIN)
            if "peak_bytes" not in base:
                return {**base, **about}
        try:
            run = Race(self.setting, contestant, self._plain)
        except Inapplicable as reason:
            return {**about, "inapplicable": str(reason)}
        except RuntimeError as error:
            return {**about, "error": str(error)}
        try:
            for _ in range(self.rounds):
                run.plain_step()
                run.step()
            row = run.row(self.plain_peak_bytes)
        except RuntimeError as error:
            return {**about, "error": str(error)}
        finally:
            run.close()
            self._longest = max(self._longest, time.monotonic() - begin)
        if contestant is PLAIN:
            self.plain_peak_bytes = int(row["peak_bytes"])
        return row

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._plain.close()


def rows_of(
    setting: Setting, chosen: Sequence[Contestant], rounds: int, seconds_max: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each contestant; a row with "error" if plain itself fails."""
    try:
        meeting = Meeting(setting, rounds, seconds_max)
    except RuntimeError as error:
        yield {"family": setting.family, "name": PLAIN.name, "ours": False, "error": str(error)}
        return
    with meeting:
        for contestant in chosen:
            yield meeting.race(contestant)


def line(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
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
    """Race the contestants. Return 1 if one failed or computed wrong bits."""
    parser = argparse.ArgumentParser(prog="race.py", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="rewritten after every row")
    parser.add_argument("--family", action="append", choices=sorted(models.FAMILIES), help="again for several (all)")
    parser.add_argument("--contestant", action="append", metavar="NAME", help="again for several (all)")
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="full")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="timed steps of each (3)")
    parser.add_argument("--slow", action="store_true", help="torch.compile too: minutes for each")
    parser.add_argument("--keep", action="store_true", help="add to what FILE holds of other networks")
    parser.add_argument(
        "--seconds", type=float, default=FAMILY_SECONDS_MAX, metavar="S", help="for each network; the rest is left out"
    )
    args = parser.parse_args(argv)
    families = args.family or list(models.FAMILIES)
    results = ResultFile(args.json)
    kept = read_json(args.json).get("rows", []) if args.keep else []
    results.set("format", "offload-frontier/1")
    results.set("machine", machine.describe())
    results.set("size", args.size)
    results.set("rows", [row for row in kept if row["family"] not in families])
    bad = 0
    for family in families:
        about = machine.describe()
        when = {"date": about["date"], "commit": about["commit"]}  # with --keep, networks differ in both
        chosen = [contestants.by_name(name) for name in args.contestant or ()] or contestants.field_of(family)
        chosen = [contestant for contestant in chosen if args.slow or not contestant.slow]
        for row in rows_of(setting_of(family, args.size), chosen, args.rounds, args.seconds):
            results.append("rows", {**row, **when})
            bad += "error" in row or ("inapplicable" not in row and wrong(row))
            print(line(row), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
