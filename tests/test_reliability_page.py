"""The page on reliability: made from its results, with what was not compared, the days and the machine of each run."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import model_state_failures
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(name="reliability")
def reliability_fixture():
    specification = importlib.util.spec_from_file_location("reliability_page", ROOT / "tests" / "reliability.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["reliability_page"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules["reliability_page"]


def about(part, **more):
    machine = {
        "date": "2026-01-03T04:05:06+00:00",
        "processor": "Some CPU",
        "processors": 2,
        "python": "3",
        "torch": "2",
    }
    return {"part": part, "shares": 1, "full": True, "seconds": 1800, "failed": 0, "machine": machine, **more}


def test_the_page_is_made_from_the_results(reliability):
    assert reliability.PAGE.read_text() == reliability.page(reliability.read()["parts"]), "tests/reliability.py --table"


def test_the_page_says_what_was_not_compared(reliability):
    outcomes = {
        "bit-equal": 8,
        "FAILED": 1,
        "not differentiable on this device": 2,
        "nothing to compare": 1,
        "some samples vary without the engine too": 4,
    }
    found = reliability.figures({"databases": about("databases", databases={"operators": outcomes})})
    assert found["operators"] == "8 of 9"
    assert found["operators: without gradient"] == "2"
    assert found["operators: varying"] == "4"
    assert found["operators: nothing comparable"] == "1"
    assert found["modules"] == found["modules: varying"] == reliability.NOT_RUN


def test_the_page_says_when_and_where(reliability):
    old = about("seeds") | {"machine": {"date": "2026-01-01"}}
    text = " ".join(reliability.page({"scenarios": about("scenarios", passed={"x": 3}), "seeds": old}).split())
    assert "3 tests passed and 0 failed. The runs are from 2026-01-01 to 2026-01-03 and took 1.0 hours" in text
    assert "Machine: Some CPU, 2 cores, Python 3, torch 2. For 1 of 2 runs the machine was not recorded" in text
    assert "| test cases of autograd | 3 | 0 | 30 min | full | 2026-01-03 |" in text
    assert "ran in full" not in text
    short = {"seeds": about("seeds"), "double": about("double") | {"full": False}}
    said = "In the short form of CI: *the CUDA code on a simulated driver*. All other parts ran in full. [Each part"
    assert said in reliability.page(short)
    assert "| failing disk and memory | not run | | | | |" in text


def test_the_tests_of_model_state_exist():
    files = [files for each in model_state_failures.FAILURES for files in each.tests.items()]
    named = {(file, test) for file, tests in files for test in tests}
    assert len(named) > 40
    texts = {file: (ROOT / "tests" / file).read_text() for file, _ in files}
    assert [(file, test) for file, test in named if f"def {test}(" not in texts[file]] == []


def test_the_guards_of_model_state_are_all_named():
    tests = ROOT / "tests"
    found = {*tests.glob("optimizer_state/*guards.py"), *tests.glob("parameters/*guards.py")}
    assert found == {tests / file for file in model_state_failures.GUARDS}


def test_a_page_without_results(reliability):
    assert "not run tests passed" not in reliability.page({})


def test_a_run_records_its_machine(reliability, tmp_path, monkeypatch):
    monkeypatch.setattr(reliability, "JSON", tmp_path / "reliability.json")

    def run(command, **_):
        counted = next(word for word in command if word.startswith("--reliability-json="))
        Path(counted.partition("=")[2]).write_text(json.dumps({"failed": 0, "passed": {"tests/x.py": 1}}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(reliability.subprocess, "run", run)
    monkeypatch.setattr(reliability, "described", lambda: {"date": "2026-01-01", "processor": "CPU", "ram_bytes": 1})
    assert reliability.run_share("double", is_full=False) == 0
    held = json.loads((tmp_path / "reliability.json").read_text())["parts"]["double"]
    assert held["machine"] == {"date": "2026-01-01", "processor": "CPU"}
    assert not held["full"]
