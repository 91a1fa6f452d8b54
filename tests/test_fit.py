"""`offload fit` on scripts that do not mention offload, beside what then really happens."""

from __future__ import annotations

import json
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from forked_python import run_python
from page_check import charts_of, check_page

HERE = Path(__file__).parent
SCRIPTS = HERE / "unmodified"
MIB = 1 << 20
LIMIT = {"images": 128 * MIB, "text": 32 * MIB, "catalogue": 96 * MIB}
WORDS = {"text": ["--layers", 1]}  # planning for all of them takes seconds
ROOM = 2 * MIB  # the small tensors of a loop that are not the step's


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return run_python(*words, timeout=280)


def fit(script: str, *words: object) -> tuple[int, dict[str, Any]]:
    done = run(
        "-m",
        "offload",
        "fit",
        SCRIPTS / f"{script}.py",
        "--memory",
        LIMIT[script],
        "--json",
        *words,
        *WORDS.get(script, []),
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, json.loads(done.stdout)


def happens(script: str, line: str | None = None, *words: object) -> dict[str, int]:
    """What a run of the script needs, with a line added to it or as it is."""
    added = ["--line", f"import offload; {line}"] if line else []
    done = run(HERE / "unmodified_run.py", *added, SCRIPTS / f"{script}.py", *WORDS.get(script, []), *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_script_that_fits_as_it_is() -> None:
    status, said = fit("images")
    assert status == 0
    assert said["fits"] == "keep everything"
    assert said["line"] is None
    peak = happens("images")["peak_bytes"]
    assert abs(peak - said["peak_bytes"]) <= ROOM
    assert peak <= LIMIT["images"]


@pytest.fixture(scope="module")
def text_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fit") / "fit.html"


@pytest.fixture(scope="module")
def text(text_page: Path) -> dict[str, Any]:
    return fit("text", "--plot", text_page)[1]


def test_the_page_shows_what_memory_costs_and_the_plan_that_fits(text: dict[str, Any], text_page: Path) -> None:
    page = text_page.read_text("utf-8")
    check_page(page)
    assert text["verdict"] in page
    assert text["line"] in unescape(page)
    cost, plan = charts_of(page)
    assert cost["mark"] == plan["limit"] == LIMIT["text"]
    for curve in cost["curves"]:
        assert curve["x"] == sorted(curve["x"])
        assert curve["y"] == sorted(curve["y"], reverse=True)
    assert cost["curves"][0]["name"] == "swap"
    assert cost["curves"][0]["x"][0] == text["least_bytes"]
    assert max(plan["rest"]["y"]) <= LIMIT["text"]


@pytest.mark.long
def test_a_script_that_fits_with_swapping(text: dict[str, Any]) -> None:
    assert text["fits"] in ("swap", "swap or recompute")
    assert text["line"] == 'offload.enable(model, memory_limit="32MiB")'
    assert text["batch"] == 24
    assert "twice more, with 24 items and with 12" in text["notes"][-1]
    as_it_is = happens("text")["peak_bytes"]
    assert as_it_is > LIMIT["text"]
    assert abs(as_it_is - text["peak_bytes"]) <= ROOM
    assert happens("text", text["line"])["peak_bytes"] <= LIMIT["text"] + ROOM


@pytest.mark.long
def test_the_largest_batch_runs_and_a_larger_one_does_not(text: dict[str, Any]) -> None:
    largest = {row["name"]: row["largest_batch"] for row in text["choices"]}
    keep, swap = largest["keep everything"], largest["swap"]
    assert 1 <= keep < 24 < swap
    assert happens("text", None, "--batch", keep)["peak_bytes"] <= LIMIT["text"] + ROOM
    assert happens("text", None, "--batch", keep + max(2, keep // 8))["peak_bytes"] > LIMIT["text"]
    assert happens("text", text["line"], "--batch", swap)["peak_bytes"] <= LIMIT["text"] + ROOM
    assert "least_bytes" in happens("text", text["line"], "--batch", swap + max(2, swap // 8))


@pytest.mark.long
def test_a_script_that_does_not_fit() -> None:
    status, said = fit("catalogue")
    assert status == 3
    assert said["fits"] is said["line"] is None
    assert said["least_bytes"] > LIMIT["catalogue"]
    assert "while the optimizer steps" in said["in_the_way"][0]["text"], "Adam's state and temporaries"
    everything = "offload.enable(model, n_tensors=-1, lb=1)"
    # On a busy machine copies end late, and what they read stays in memory: the smallest peak of a few runs counts.
    peaks = (happens("catalogue", everything)["peak_bytes"] for _ in range(5))
    assert any(abs(peak - said["least_bytes"]) <= ROOM for peak in peaks)


@pytest.mark.long
def test_one_screen_for_people() -> None:
    done = run("-m", "offload", "fit", "--memory", "48MiB", SCRIPTS / "text.py", "--batch", "12", "--", "--steps", "3")
    assert done.returncode == 0, done.stderr
    screen = done.stdout[done.stdout.index("text.py: ") :]
    assert len(screen.splitlines()) <= 24
    assert "FITS WITH" in screen
    assert 'offload.enable(model, memory_limit="48MiB")' in screen
    assert "step 2" not in done.stdout, "the script ends after the trial step"


@pytest.mark.long
def test_a_device_that_is_not_here() -> None:
    here = fit("images")[1]
    words = ["--device", "128MiB,12GB/s,40TFLOP/s"]
    done = run("-m", "offload", "fit", SCRIPTS / "images.py", *words, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["limit_bytes"] == LIMIT["images"]
    assert "Estimated for a device that is not here" in said["notes"][0]
    assert abs(said["peak_bytes"] - here["peak_bytes"]) <= ROOM, "bytes are those that the step needed here"
    assert said["choices"][1]["compute_seconds"] < here["choices"][1]["compute_seconds"] / 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "12G"], "is ambiguous"),
        (["--device", "cuda"], "write memory, link and speed"),
        (["--device", "12GiB,12GB/s,40"], None),
    ],
)
def test_mistakes(words: list[str], message: str | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('nothing')")
    done = run("-m", "offload", "fit", script, *words)
    assert done.returncode == 2
    assert (message or "finished no training step") in done.stderr
    assert ("nothing" in done.stdout) == (message is None)


@pytest.mark.long
def test_the_scripts_own_end_and_a_missing_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    assert run("-m", "offload", "fit", script).returncode == 7
    script.write_text("raise SystemExit('no data')")
    for more in ((), ("--without-data", "--device", "12GiB,12GB/s,40TFLOP/s")):
        done = run("-m", "offload", "fit", script, *more)
        assert (done.returncode, done.stderr) == (1, "no data\n")
    done = run("-m", "offload", "fit", tmp_path / "none.py")
    assert done.returncode == 2
    assert "no such script" in done.stderr
    (tmp_path / "train.ipynb").write_text("{}")
    done = run("-m", "offload", "fit", tmp_path / "train.ipynb")
    assert done.returncode == 2
    assert "train.ipynb is a notebook: call offload.fit(model, make_batch) in it" in done.stderr
