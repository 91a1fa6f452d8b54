"""`offload demo`: compares one training with and without offload, each in its own process.

It starts `offload.demo.worker` for each of them, compares the results, and writes the page of `offload.demo.page`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from offload.demo import page as demo_page
from offload.demo.child_process import child_process
from offload.devices import allocator
from offload.diagnostics.page_path import page_path
from offload.diagnostics.table import write_table

Row = tuple[str, list[str]]

BASELINE = "plain"
SEARCHING = "offloaded"  # the run that searches for a plan
STEPS_MAX, STEPS_OF_STATE = 60, 24
HELP = "train a small GPT plain and offloaded, and compare loss, memory and step time"
SIZES = {"layers": 8, "width": 320, "heads": 5, "batch": 20, "length": 256}
STATE_SIZES = {"layers": 8, "width": 768, "heads": 12, "batch": 2, "length": 64}  # optimizer state dominates
# With `--state` the runs have `n_tensors=0`, so their reports have this note. The demo does not show it.
NOTHING_SWAPPED = "NO SAVED TENSOR IS SWAPPED: n_tensors=0"
# What is compared besides the losses; a result has one of the two.
COMPARED = {
    "gradients": "gradients of the last step",
    "weights_and_state": "weights and state at the end",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options. Those for its child processes and for tests are not shown in the help.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The parser of the command. `run` takes the arguments that it parses.
    """
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="steps of each run (default: those of the search for a plan and a few more, at most "
        f"{STEPS_MAX}; with --state {STEPS_OF_STATE})",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to train (auto: a GPU if torch finds one)",
    )
    parser.add_argument(
        "--html",
        type=page_path,
        default="offload-demo.html",
        metavar="PATH",
        help="where to write the page (offload-demo.html)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and batches (0)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--with-checkpoint",
        action="store_true",
        help="add a third run: torch.utils.checkpoint around every block",
    )
    what.add_argument(
        "--state",
        action="store_true",
        help="train a larger model on short sequences, where optimizer state and gradients need most of the memory. "
        "Three runs: plain; optimizer state on disk between updates (on a GPU: in host memory); and the same with "
        "updates in backward",
    )
    parser.add_argument(
        "--no-preload",
        action="store_true",
        help="keep the system's malloc; by default tcmalloc, jemalloc or mimalloc is preloaded for all runs on the CPU",
    )
    hidden = parser.add_argument_group()
    hidden.add_argument("--worker", help=argparse.SUPPRESS)
    hidden.add_argument("--until-settled", action="store_true", help=argparse.SUPPRESS)
    hidden.add_argument("--contestants", help=argparse.SUPPRESS)
    for name in SIZES:
        hidden.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    hidden.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the demo with the parsed arguments.

    Returns
    -------
    int
        0 if losses and gradients (with `--state`: weights and optimizer state) of all runs are bit-equal, 1 if they
        differ, 2 if the demo could not run.
    """
    for name, default in (STATE_SIZES if args.state else SIZES).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.worker is not None:
        from offload.demo import worker as demo_worker

        args.device = _resolve_device(args.device)
        return demo_worker.run(args)
    try:
        _check(args)
        args.device = _resolve_device(args.device)
        results = _train_all(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"offload demo: {error}", file=sys.stderr)
        return 2
    rows = table_rows(results)
    equal = agreement(results)
    notes = [*setting(results), *remarks(results)]
    compared = COMPARED[_compared_key(results[0])]
    page = demo_page.render(rows, results, equal=equal, compared=compared, notes=notes)
    try:
        args.html.write_text(page, encoding="utf-8")
    except OSError as error:
        print(f"offload demo: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(_summary(results, args), indent=2))
    else:
        print("\n".join(setting(results)), end="\n\n")
        show(rows, results, sys.stdout)
        print("", *remarks(results), f"memory over time: {args.html}", sep="\n")
    return 0 if equal else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo from the command line. `python -m offload.demo` calls this."""
    parser = argparse.ArgumentParser(prog="offload demo", description=HELP)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def agreement(results: Sequence[dict[str, Any]]) -> bool:
    """Return whether all runs have the bits of the first: in the losses, and in what `COMPARED` names."""
    keys = ("losses", _compared_key(results[0]))
    return all(_agrees(key, results[0], other) for key in keys for other in results[1:])


def _compared_key(result: dict[str, Any]) -> str:
    return next(key for key in COMPARED if key in result)


def table_rows(results: Sequence[dict[str, Any]]) -> list[Row]:
    """Compare the runs with the first one. Return rows, each with a label and one cell for each run."""
    first = results[0]

    def compared(key: str, scale: float, unit: str, digits: int) -> list[str]:
        cells = [f"{result[key] * scale:.{digits}f} {unit}" for result in results]
        for place, other in enumerate(results[1:], start=1):
            if first[key] > 0:
                cells[place] += f"  {other[key] / first[key]:.2f}×"
        return cells

    def agreed(key: str) -> list[str]:
        return ["–", *("yes" if _agrees(key, first, other) else "NO" for other in results[1:])]

    memory = "peak memory (GPU allocator)" if first["gpu"] else "peak growth of the resident set"
    key = _compared_key(first)
    resident = [f"{(result['baseline_bytes'] + result['peak_bytes']) * 2.0**-20:.0f} MiB" for result in results]
    return [
        ("loss of the last step", [f"{result['losses'][-1]:.6f}" for result in results]),
        ("  as float.hex", [result["losses"][-1].hex() for result in results]),
        ("  all losses equal to the last bit", agreed("losses")),
        (f"{COMPARED[key]}, hash", [result[key][:12] for result in results]),
        ("  equal to the last bit", agreed(key)),
        (memory, compared("peak_bytes", 2.0**-20, "MiB", 0)),
        ("  in the counted steps", compared("counted_peak_bytes", 2.0**-20, "MiB", 0)),
        *([] if first["gpu"] else [("peak resident set", resident)]),
        ("median step", compared("step_seconds_median", 1.0, "s", 3 if first["gpu"] else 2)),
        ("  counted steps", [f"{result['steps_counted']} of {result['steps']}" for result in results]),
    ]


def show(rows: Sequence[Row], results: Sequence[dict[str, Any]], out: TextIO) -> None:
    """Write the rows as a table with the names of the runs as its head."""
    write_table(out, [(label, *cells) for label, cells in rows], head=("", *(result["name"] for result in results)))


def setting(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences about the model, the data and the machine, and how much autograd saved."""
    first = results[0]
    saved, parameters = first["saved_bytes"], first["parameter_bytes"]
    sizes = f"byte-level GPT of {first['parameters'] / 1e6:.1f} M parameters"
    if saved:
        sizes += (
            f" ({parameters / 2**20:.0f} MiB); saved for backward: "
            f"{saved / 2**20:.0f} MiB, {saved / parameters:.1f}× the parameters"
        )
    lines = [sizes]
    if "state_bytes" in first:
        state = first["state_bytes"]
        lines += [
            f"weights {parameters / 2**20:.0f} MiB, gradients as much, AdamW's state {state / 2**20:.0f} MiB: "
            f"{(2 * parameters + state) / 2**20:.0f} MiB together",
            'run "state moved": optimizer_state=True; run "and updated in backward": step_in_backward=True too; '
            "in both, saved tensors stay (n_tensors=0)",
        ]
    return [
        *lines,
        f"{first['steps']} steps of {first['batch']} × {first['length']} bytes of the standard "
        f"library's source text, AdamW, seed {first['seed']}",
        f"{first['device']}, {first['threads']} threads, malloc {first['allocator']}, "
        f"Python {first['python']}, torch {first['torch']}",
    ]


def remarks(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return remarks: what the figures exclude, the effect of the malloc, and the notes of the reports."""
    first = results[0]
    why = "AdamW's state is created in it" if "state_bytes" in first else "with offload it is profiled"
    said = [
        f"the first step does not count in the median: {why}",
        "the runs follow each other: another program that runs during only one of them changes the ratio of step times",
    ]
    for result in results:
        settled = result["steps_settled"]
        if settled is not None:
            counted = result["steps_counted"] == settled
            said.append(f"{result['name']}: {_SETTLED if counted else _SEARCHING.format(settled=settled)}")
    if not first["gpu"] and not allocator.recycles(first["allocator"]):
        said.append(first["allocator_costs"])
    for result in results:
        said += [note for note in (result["report"] or {}).get("notes", ()) if note != NOTHING_SWAPPED]
    return said


_SETTLED = "the median counts the steps after the search for a plan"
_SEARCHING = (
    "only {settled} steps came after the search for a plan, too few for a median: the median is of all steps but the "
    "first, including the slower steps in which the search measures. To see later steps, give more --steps"
)


def _agrees(key: str, first: dict[str, Any], other: dict[str, Any]) -> bool:
    if key == "losses":
        return [loss.hex() for loss in first[key]] == [loss.hex() for loss in other[key]]
    return bool(first[key] == other[key])


def _check(args: argparse.Namespace) -> None:
    if args.steps is not None and args.steps < 2:
        raise ValueError(f"--steps {args.steps}: the first step is not timed; give 2 or more")
    if not 0 <= args.seed < 1 << 63:
        raise ValueError(f"--seed {args.seed}: give 0 or more, and less than 2 to the power of 63")


def _contestants(args: argparse.Namespace) -> list[str]:
    if args.contestants:
        return str(args.contestants).split(",")
    if args.state:
        return [BASELINE, "state moved", "and updated in backward"]
    return [BASELINE, SEARCHING, *(["checkpointed"] if args.with_checkpoint else [])]


def _train_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all runs and return their results. Without `--steps`, the offloaded run decides how many steps there are.

    The search for a plan takes a different number of steps on each machine.
    """
    names = _contestants(args)
    results: dict[str, dict[str, Any]] = {}
    if args.steps is None:
        args.steps = STEPS_MAX if SEARCHING in names else STEPS_OF_STATE
        if SEARCHING in names:
            args.until_settled = True
            results[SEARCHING] = _train_apart(SEARCHING, args)
            args.until_settled, args.steps = False, results[SEARCHING]["steps"]
    for name in names:
        if name not in results:
            results[name] = _train_apart(name, args)
    return [results[name] for name in names]


def _resolve_device(asked: str) -> str:
    """Replace "auto" by a device. Raise a ValueError for a GPU that torch cannot use."""
    if asked == "cpu":
        return asked

    from offload.devices.device import default

    found = str(default().type)
    if found != "cpu":
        return found
    if asked == "cuda":
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu")
    return "cpu"


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of every run's process, with the same malloc for all."""
    if args.device != "cpu":
        return {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return dict(os.environ) if args.no_preload else allocator.preload_environment()


def _train_apart(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one run in a separate process and return its result.

    Raises
    ------
    RuntimeError
        The process ended without a result; the message contains the last lines of its standard error.
    """
    # Python puts the current folder first on the path, and a source tree there may have no built extension. So this
    # entry is removed from `sys.path`: with -c, it is the empty string.
    start = "import sys; sys.path[:] = filter(None, sys.path); from offload.demo.command import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "--worker", name]
    for option in (
        "steps",
        "seed",
        *SIZES,
        "threads",
    ):
        command += [f"--{option}", str(getattr(args, option))]
    command += ["--until-settled"] if args.until_settled else []
    command += ["--state"] if args.state else []
    command += ["--device", "cpu" if args.device == "cpu" else "auto"]  # "auto" finds the same accelerator
    result: dict[str, Any] | None = None
    with (
        tempfile.TemporaryFile("w+", errors="replace") as complaints,
        _progress(name, None if args.until_settled else args.steps) as advance,
        child_process(command, _environment(args), complaints) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "step":
                advance()
            elif event.get("event") == "result":
                result = event
        if child.wait() != 0 or result is None:
            complaints.seek(0)
            tail = "\n".join(complaints.read().strip().splitlines()[-20:])
            raise RuntimeError(f"the {name} run ended with exit status {child.returncode}:\n{tail}")
    return result


@contextlib.contextmanager
def _progress(name: str, steps: int | None) -> Iterator[Callable[[], Any]]:
    """Show a run's progress on standard error: with tqdm if it is installed, otherwise as a line of dots."""
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"{name:<13}", end="", file=sys.stderr, flush=True)
        yield lambda: print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return
    with tqdm(total=steps, desc=f"{name:<13}", unit="step", file=sys.stderr) as bar:
        yield bar.update


def _summary(results: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return all measurements except the curves and the plan's chart, for `--json`."""
    curves = ("event", "curve", "last_step_curve", "plan")
    return {
        "equal": agreement(results),
        "html": str(args.html),
        "contestants": [{key: value for key, value in result.items() if key not in curves} for result in results],
    }


if __name__ == "__main__":
    sys.exit(main())
