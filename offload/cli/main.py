"""The `offload` command: demo, doctor, fit, plan, run and top.

The module of each command is imported with its parser; torch is imported only when a command runs.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, cast

from offload import __version__
from offload.devices import allocator


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        The words after `offload`. Default: those of this process.

    Returns
    -------
    int
        The exit status.
    """
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # such as arrows in Latin-1; in the C locale it is the second of them
    words = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if words[:1] == ["run"]:  # the words after its own options are the command to run
        end = 1
        while end < len(words) and words[end] != "--" and words[end].startswith("-"):
            end += 2 if words[end] == "--malloc" else 1
        words, command = words[:end], words[end:]
    script_args: list[str] | None = None
    if words[:1] == ["plan"]:  # the words after a script are the script's arguments
        script = next((i for i, word in enumerate(words) if word.endswith(".py") and word[:1] != "-"), None)
        if script is not None:
            script_args = words[script + 1 :]
            words = words[: script + 1]
    if words[:1] == ["fit"]:  # its options may follow the script; unknown words are the script's arguments
        own = list(itertools.takewhile(lambda word: word != "--", words))
        args, script_args = _parser().parse_known_args(own)
        script_args += words[len(own) + 1 :]
    else:
        args = _parser().parse_args(words)
    if args.command == "run":
        return _run(command[command[:1] == ["--"] :], args.malloc, preload=not args.no_preload)
    if sys.stdout is None:  # it was closed, such as by `>&-`
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            return _dispatch(args, script_args)
    with redirect_stdout(cast("TextIO", _Output(sys.stdout))):
        status = _dispatch(args, script_args)
        sys.stdout.flush()
    return status


def _dispatch(args: argparse.Namespace, script_args: list[str] | None) -> int:
    if args.command == "plan":
        from offload.cli import plan as plan_cli

        return plan_cli.run(args) if script_args is None else plan_cli.run_script(args, script_args)
    if args.command == "fit":
        from offload.cli import fit

        return fit.run(args, script_args or [])
    if args.command == "top":
        from offload.cli import top

        return top.run(args)
    if args.command == "doctor":
        from offload.cli import doctor

        return doctor.run(args)
    from offload.demo import command as demo

    return demo.run(args)


class _Output:
    """Standard output whose reader may end early, as `head` does: the rest of the output is then discarded.

    If it cannot be written for another reason, such as a full disk, the command ends with a message.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # the stream is written once more when Python ends
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise SystemExit(f"offload: the output cannot be written: {error.strerror}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _parser() -> argparse.ArgumentParser:
    from offload.cli import doctor, fit, top
    from offload.cli import plan as plan_cli
    from offload.demo import command as demo

    parser = argparse.ArgumentParser(
        prog="offload",
        description="Swap the tensors that PyTorch saves for backward to pinned memory or disk.",
    )
    parser.add_argument("--version", action="version", version=f"offload {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    demo.add_arguments(subparsers.add_parser("demo", help=demo.HELP, description=demo.HELP))
    doctor.add_arguments(subparsers.add_parser("doctor", help=doctor.HELP, description=doctor.HELP))
    fit.add_parser(subparsers)
    plan_cli.add_parser(subparsers)
    top.add_arguments(subparsers.add_parser("top", help=top.HELP, description=top.HELP))
    summary = "run a command with a malloc that reuses freed memory, if one is installed"
    run = subparsers.add_parser(
        "run",
        help=summary,
        description=summary,
        usage="offload run [--malloc NAME | --no-preload] -- COMMAND [ARGUMENT …]",
        epilog="example: offload run -- python train.py",
        allow_abbrev=False,
    )
    which = run.add_mutually_exclusive_group()
    which.add_argument(
        "--malloc",
        choices=allocator.MALLOCS,
        default="",
        help="the malloc to preload; by default the first of these that is installed",
    )
    which.add_argument("--no-preload", action="store_true", help="run the command with its own malloc")
    return parser


def _run(command: list[str], malloc: str, *, preload: bool) -> int:
    """Replace this process by `command`, with a malloc that reuses freed memory. Return only if that fails."""
    if not command or not command[0]:
        return _refuse("no command; write: offload run -- python train.py", 2)
    environment = allocator.preload_environment(name=malloc) if preload else dict(os.environ)
    if malloc not in environment.get("LD_PRELOAD", ""):
        return _refuse(f"{malloc} is not installed; {allocator.INSTALL_OF[malloc]}, or leave out --malloc", 2)
    if preload and "LD_PRELOAD" not in environment and sys.platform.startswith("linux"):
        print(
            "offload run: no allocator installed that reuses freed memory, running on this system's malloc; "
            f"{allocator.INSTALL}",
            file=sys.stderr,
        )
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed, such as by `>&-`
            stream.flush()
    try:
        os.execvpe(command[0], command, environment)
    except (FileNotFoundError, NotADirectoryError):
        return _refuse(f"{command[0]}: no such command; check its name, or write its path", 127)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ENOEXEC):
            return _refuse(f"{command[0]}: not executable; write: offload run -- python {command[0]}", 126)
        return _refuse(f"{command[0]}: {error.strerror}", 126)


def _refuse(problem: str, status: int) -> int:
    print(f"offload run: {problem}", file=sys.stderr)
    return status
