"""Finds the largest network or batch that trains within a cap on memory, by trying sizes.

    python bench/largest.py --json FILE [--what FAMILY:DIMENSION …] [--cap SIZE] [--size tiny|quick|full]

Every size is tried in a separate process, which watches its resident set and ends when that has grown by more than the
cap; this needs no privileges and no control group. The peak that the kernel counts must be within the cap too. The next
size is estimated from the growth at earlier ones; bisection limits the number of tries. At the largest size that fits,
further steps are timed in another process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import contestants
import machine
import models
from contestants import BY_HAND, CHECKPOINT, PLAIN, TUTORIAL, Contestant, Inapplicable
from race import OverCap, Runner, setting_of
from result_file import ResultFile
from training import Setting

from offload.units import parse_bytes

MIB = 1 << 20
TOLERANCE = {"tiny": 0.15, "quick": 0.12, "full": 0.05}
TRIES_MAX = 9
STEPS_TO_SETTLE = 2
STEPS_TIMED = 3
SEARCH_SECONDS_MAX = 100.0  # limit per contestant; the result so far is used
SECONDS_MAX = 720.0  # limit for all contestants; those that are left are not measured
SHRUNK = {  # sizes at which a search starts: small enough for plain
    "tiny": {"gpt:layers": 1, "resnet:batch": 2, "unet:resolution": 16},
    "quick": {"gpt:layers": 1, "resnet:batch": 4, "unet:resolution": 32},
    "full": {"gpt:layers": 1, "resnet:batch": 4, "unet:resolution": 64},
}
CAPS = {
    "tiny": {"gpt:layers": 64 * MIB, "resnet:batch": 64 * MIB, "unet:resolution": 64 * MIB},
    "quick": {"gpt:layers": 64 * MIB, "resnet:batch": 64 * MIB, "unet:resolution": 64 * MIB},
    "full": {"gpt:layers": 128 * MIB, "resnet:batch": 256 * MIB, "unet:resolution": 128 * MIB},
}
MULTIPLES = {"unet:resolution": 16}  # a size must be a multiple of this
DEFAULT = ("resnet:batch", "gpt:layers", "unet:resolution")
CHOSEN = (PLAIN, BY_HAND[1], CHECKPOINT, TUTORIAL)


@dataclass(frozen=True)
class Try:
    """One size that was tried: its memory growth (None: over the cap) and its settled step time."""

    value: int
    growth_bytes: int | None
    step_seconds: float | None = None


def search(
    probe: Callable[[int], Try],
    cap_bytes: int,
    first: int,
    *,
    multiple: int = 1,
    tolerance: float = 0.05,
    is_over: Callable[[], bool] = lambda: False,
) -> list[Try]:
    """Try sizes until the largest that fits is known to the tolerance, or `TRIES_MAX` have been tried.

    Parameters
    ----------
    probe
        Tries one size, a multiple of `multiple`.
    cap_bytes
        The cap, from which the next size is estimated.
    first
        The first size.
    multiple
        Every size is a multiple of this.
    tolerance
        Relative tolerance: the largest size that fits may be larger than the largest tried one by this share.
    is_over
        Called before every try but the first; returns whether the time is over.

    Returns
    -------
    list of Try
        All tries in order. Only sizes that were tried and fitted count as fitting.
    """
    tries: list[Try] = []
    low, high = 0, None
    guess, stride = first, 1
    while len(tries) < TRIES_MAX and not (tries and is_over()):
        tries.append(probe(guess))
        if tries[-1].growth_bytes is None:
            high = guess
        else:
            low = guess
        step = max(multiple, int(tolerance * low) // multiple * multiple)
        if high is None:
            # At least one step further. If the estimate is no larger and the size still fits, steps are doubled.
            guess = max(min(likely(tries, cap_bytes), 4 * low), low + step * stride)
            stride = 2 * stride if guess == low + step * stride else 1
        elif high - low <= step:
            break
        else:
            guess = min(max(likely(tries, cap_bytes), low + (high - low) // 4), high - (high - low) // 4)
        guess = max(guess // multiple * multiple, low + multiple)
        if high is not None and guess >= high:
            break
    return tries


def likely(tries: Sequence[Try], cap_bytes: int) -> int:
    """Estimate the size whose growth equals the cap, on the line through the smallest and the largest that fit."""
    fitted = sorted((each.value, each.growth_bytes) for each in tries if each.growth_bytes is not None)
    if not fitted:
        return 0
    value, growth = fitted[-1]
    before, growth_before = fitted[0] if len(fitted) > 1 else (0, 0)  # close sizes differ only by noise
    slope = max(growth - growth_before, 1) / (value - before)
    return value + int((cap_bytes - growth) / slope)


def largest_of(tries: Sequence[Try]) -> Try | None:
    """Return the largest size that fitted."""
    return max((each for each in tries if each.growth_bytes is not None), key=lambda each: each.value, default=None)


def try_apart(setting: Setting, contestant: Contestant, cap_bytes: int, value: int) -> Try:
    """Train the settling steps and one more in a separate process with a cap."""
    try:
        with Runner(setting, contestant, cap_bytes, settle=STEPS_TO_SETTLE) as run:
            seconds = run.step()
            growth_bytes = int(run.finish()["peak_bytes"])
    except OverCap:
        return Try(value, None)
    return Try(value, growth_bytes, seconds) if growth_bytes <= cap_bytes else Try(value, None)


def time_apart(setting: Setting, contestant: Contestant, cap_bytes: int) -> list[float]:
    """Train again within the cap; return the seconds of the timed steps, none if it does not fit this time."""
    try:
        with Runner(setting, contestant, cap_bytes, settle=STEPS_TO_SETTLE) as run:
            return [run.step() for _ in range(STEPS_TIMED)]
    except OverCap:
        return []


def setting_at(what: str, size: str, value: int) -> Setting:
    """Return a family's setting with its dimension at this value; for other dimensions the batch is small."""
    family, dimension = what.split(":")
    base = setting_of(family, size)
    return replace(base, size={**base.size, **_batch(family, dimension), dimension: value})


def _batch(family: str, dimension: str) -> dict[str, int]:
    return {} if dimension == "batch" else {"batch": max(models.FAMILIES[family].quick["batch"] // 2, 1)}


def measure(
    what: str, contestant: Contestant, *, size: str, cap_bytes: int, seconds_max: float = SEARCH_SECONDS_MAX
) -> dict[str, Any]:
    """Search for one contestant; return a row, which may contain "inapplicable" or "error"."""
    begin = time.monotonic()
    about: dict[str, Any] = {"what": what, "name": contestant.name, "ours": contestant.is_ours, "cap_bytes": cap_bytes}
    if seconds_max <= 0:
        return {**about, "inapplicable": "left out: the time was up"}

    def probe(value: int) -> Try:
        return try_apart(setting_at(what, size, value), contestant, cap_bytes, value)

    def is_over() -> bool:
        return time.monotonic() - begin > seconds_max

    multiple, tolerance = MULTIPLES.get(what, 1), TOLERANCE[size]
    try:
        tries = search(probe, cap_bytes, SHRUNK[size][what], multiple=multiple, tolerance=tolerance, is_over=is_over)
        row = {**about, **summary(tries), "size": size, **({"cut_short": "the time was up"} if is_over() else {})}
        if row["largest"]:
            setting = setting_at(what, size, row["largest"])
            seconds = time_apart(setting, contestant, cap_bytes)
            row |= {"fitted_twice": bool(seconds), "timed_seconds": seconds, "setting": setting.to_dict()}
            row["step_seconds"] = statistics.median(seconds or [row["step_seconds"]])
    except Inapplicable as reason:
        return {**about, "inapplicable": str(reason)}
    except RuntimeError as error:
        return {**about, "error": str(error)}
    return {**row, "search_seconds": round(time.monotonic() - begin, 1)}


def summary(tries: Sequence[Try]) -> dict[str, Any]:
    """Return the result of a search as plain data for JSON."""
    found = largest_of(tries)
    return {
        "largest": found.value if found else 0,
        "growth_bytes": found.growth_bytes if found else None,
        "step_seconds": found.step_seconds if found else None,
        "tries": [[each.value, each.growth_bytes] for each in tries],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Search. Return 1 if a run failed for another reason than its cap."""
    parser = argparse.ArgumentParser(prog="largest.py", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="rewritten after every row")
    parser.add_argument("--what", action="append", choices=DEFAULT, help="again for several (all)")
    parser.add_argument("--contestant", action="append", metavar="NAME", help="again for several")
    parser.add_argument("--size", choices=tuple(CAPS), default="full")
    parser.add_argument("--cap", type=parse_bytes, metavar="SIZE", help="on the growth of the resident set")
    parser.add_argument("--seconds", type=float, default=SECONDS_MAX, metavar="S", help="of all; the rest is left out")
    args = parser.parse_args(argv)
    chosen = [contestants.by_name(name) for name in args.contestant or ()] or CHOSEN
    results = ResultFile(args.json)
    results.set("format", "offload-largest/1")
    results.set("machine", machine.describe())
    failed = 0
    deadline = time.monotonic() + args.seconds
    for what in args.what or DEFAULT:
        cap_bytes = args.cap or CAPS[args.size][what]
        for contestant in chosen:
            seconds_max = min(deadline - time.monotonic(), SEARCH_SECONDS_MAX)
            row = measure(what, contestant, size=args.size, cap_bytes=cap_bytes, seconds_max=seconds_max)
            results.append("rows", row)
            failed += "error" in row
            words = row.get("inapplicable") or row.get("error") or f"{row['largest']} at {row['step_seconds']:.2f} s"
            print(f"{what:<16} {contestant.name:<34} {words}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
