"""The `offload` command's front: what it refuses, and what `offload run` hands on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest

from offload import __version__
from offload.cli import main as cli
from offload.devices import allocator
from offload.diagnostics.page_path import page_path

ROOT = Path(__file__).parents[1]


def offload(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offload", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_help_lists_the_commands() -> None:
    shown = offload("--help")
    assert shown.returncode == 0
    for command in ("demo", "doctor", "plan", "run"):
        assert command in shown.stdout


def test_the_version_is_that_of_the_package() -> None:
    shown = offload("--version")
    assert (shown.returncode, shown.stdout) == (0, f"offload {__version__}\n")


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["teleport"])
    assert stopped.value.code == 2
    assert "teleport" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["run", "--"], ""),
        (["run"], ""),
        (["run", "--malloc", "jemalloc", "--"], "jemalloc"),
        (["run", "--malloc", "jemalloc"], "jemalloc"),
        (["run", "--malloc=jemalloc"], "jemalloc"),
    ],
)
def test_run_hands_the_command_on_word_for_word(words: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def become(*call: Any) -> NoReturn:
        started.append(call)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvpe", become)
    monkeypatch.setattr(allocator, "preload_environment", lambda name: {"LD_PRELOAD": f"lib{name}.so"})
    command = ["python", "train.py", "--no-preload", "--malloc", "--", "x"]
    with pytest.raises(SystemExit):
        cli.main([*words, *command])
    assert started == [("python", command, {"LD_PRELOAD": f"lib{name}.so"})]


@pytest.mark.parametrize(
    "words",
    [["--malloc"], ["--malloc", "--", "x"], ["--malloc", "jemalloc", "--no-preload", "--", "x"], ["--mal", "x"]],
)
def test_options_of_run_that_make_no_sense_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", *words])
    assert stopped.value.code == 2
    assert "usage: offload" in capsys.readouterr().err


def test_run_becomes_the_command_with_its_exit_status() -> None:
    program = "from offload.devices import allocator; print(allocator.current()); raise SystemExit(7)"
    done = offload("run", "--", sys.executable, "-c", program)
    assert done.returncode == 7
    library = allocator.find_recycling_allocator()
    if library is None:
        assert allocator.INSTALL in done.stderr
    else:
        assert done.stdout.strip() in library.name


def test_run_preloads_the_named_malloc() -> None:
    program = "from offload.devices import allocator; print(allocator.current())"
    done = offload("run", "--malloc", "mimalloc", "--", sys.executable, "-c", program)
    assert done.stdout.strip() == "mimalloc", done.stderr


def test_a_malloc_that_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(allocator, "find_recycling_allocator", lambda name: None)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert cli.main(["run", "--malloc", "jemalloc", "--", "true"]) == 2
    remedy = "install Debian's libjemalloc2 or your system's jemalloc, or leave out --malloc"
    assert capsys.readouterr().err == f"offload run: jemalloc is not installed; {remedy}\n"


def test_run_without_preload_leaves_the_environment_alone() -> None:
    program = "import os; print(os.environ.get('LD_PRELOAD'))"
    done = offload("run", "--no-preload", "--", sys.executable, "-c", program)
    assert done.stdout.strip() == str(os.environ.get("LD_PRELOAD"))


def test_run_without_a_command_says_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run"]) == 2
    assert cli.main(["run", "--"]) == 2
    assert "write: offload run -- python train.py" in capsys.readouterr().err


def test_run_of_a_missing_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--no-preload", "--", "no-such-command-here"]) == 127
    assert "no-such-command-here: no such command" in capsys.readouterr().err


def test_run_of_a_script_that_is_not_executable_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()", encoding="utf-8")
    assert cli.main(["run", "--no-preload", "--", str(script)]) == 126
    assert f"offload run -- python {script}" in capsys.readouterr().err


def test_run_of_what_the_system_refuses_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()", encoding="utf-8")
    script.chmod(0o755)  # without a line that names the interpreter
    assert cli.main(["run", "--no-preload", "--", str(script)]) == 126
    assert f"offload run -- python {script}" in capsys.readouterr().err
    assert cli.main(["run", "--no-preload", "--", str(script / "train.py")]) == 127
    assert "no such command" in capsys.readouterr().err
    assert cli.main(["run", "--no-preload", "--", ""]) == 2
    assert "no command" in capsys.readouterr().err
    monkeypatch.setattr(os, "execvpe", mock.Mock(side_effect=OSError(errno.E2BIG, os.strerror(errno.E2BIG))))
    assert cli.main(["run", "--no-preload", "--", "true"]) == 126
    assert "true: Argument list too long" in capsys.readouterr().err


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    run = ["bash", "-c", line.replace("offload", f"{sys.executable} -m offload")]
    return subprocess.run(
        run, capture_output=True, text=True, encoding="latin-1", check=False, env={**os.environ, **environment}
    )


LATIN_1 = {"PYTHONIOENCODING": "latin-1"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("words", "environment"), [("fit --help", LATIN_1), ("doctor", LATIN_1), ("plan -h", C_LOCALE)]
)
def test_what_the_terminal_cannot_show_is_replaced(words: str, environment: dict[str, str]) -> None:
    shown = shell(f"offload {words}", **environment)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "?" in shown.stdout


@pytest.mark.parametrize("output", ["| head -1; exit ${PIPESTATUS[0]}", ">&-"])
def test_an_output_that_is_closed_is_no_error(output: str) -> None:
    shown = shell(f"offload doctor {output}")
    assert (shown.returncode, shown.stderr) == (0, "")


@pytest.mark.parametrize("words", ["doctor", "doctor --json"])
def test_an_output_that_cannot_be_written_ends_with_a_message(words: str) -> None:
    shown = shell(f"offload {words} >/dev/full")
    assert shown.returncode == 1
    assert shown.stderr == "offload: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_a_folder_that_is_missing_is_refused_before_a_script_runs(command: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    done = offload(command, "--plot", str(tmp_path / "no" / "page.html"), str(script))
    assert done.returncode == 2
    assert "page.html: its folder does not exist" in done.stderr


@pytest.mark.parametrize("command", ["plan train.py --plot", "fit train.py --plot", "demo --html"])
def test_a_page_that_is_a_folder_is_refused_before_anything_runs(command: str, tmp_path: Path) -> None:
    name, *words = command.split()
    done = offload(name, words[-1], str(tmp_path), *words[:-1])
    assert done.returncode == 2
    assert f"{tmp_path}: this is a folder; name a file in it" in done.stderr


def test_a_page_is_written_where_the_command_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script may change the folder before the page is written."""
    monkeypatch.chdir(tmp_path)
    assert page_path("page.html") == tmp_path / "page.html"
