"""Every guard of the data plane and of the engine, left out by name: somebody must notice."""

import subprocess
import sys

import pytest
from campaign.broken_engine import BROKEN, belongs
from campaign.build import ROOT, build_mutants
from campaign.mutants import (
    EDGES,
    JUDGED,
    ON_ACCELERATORS,
    OUTSIDE,
    PYTHON,
    SANITIZED,
    SCENARIOS,
    TESTED,
    WALK,
    break_engine,
    edges_in_sources,
    walk_without,
    without_paths,
)
from twin.test_twin import LATER, ROWS, needs_simulated

pytestmark = pytest.mark.timeout(600)


def test_every_guard_is_in_the_table():
    assert edges_in_sources() == EDGES | set(SANITIZED) | set(OUTSIDE) | ON_ACCELERATORS
    assert set(BROKEN) == set(PYTHON)
    assert len(JUDGED) == 5


def collected(*arguments):
    """The tests that pytest would run without `--long` and `--full`."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr  # it fails where one of these tests does not exist, too
    return [line for line in run.stdout.splitlines() if "::" in line]


def is_the_default_run(config):
    """Whether this is `pytest` as it is: what it has collected is then what pytest runs by default."""
    narrowed = ("long", "full", "markexpr", "keyword", "deselect", "ignore", "ignore_glob", "share", "lf")
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return is_whole and not any(config.getoption(name, default=None) for name in narrowed)


def test_who_misses_a_guard_runs_by_default(request):
    """All but those two tests that read what a sanitizer says, whose builds take minutes."""
    named = sorted({WALK, *(test for tests in TESTED.values() for test in tests)})
    here = [item.nodeid for item in request.session.items]
    found = here if is_the_default_run(request.config) else collected(*named)  # in a process of its own
    assert [test for test in named if not any(belongs(each, test) for each in found)] == []
    file = SCENARIOS.partition("::")[0]
    assert [row for row, paths in ROWS.items() if file in paths and row not in LATER], "a row that runs by default"


@needs_simulated
def test_scenarios_run_on_the_simulated_accelerator():
    found = collected("--device", "sim", SCENARIOS.partition("::")[0])
    assert any(belongs(each, SCENARIOS) for each in found)


def test_rows_name_tests_and_no_places():
    row = {"first": "[Errno 5] at offset 0: '/some/where/x_0' in tests/core/test_a.py, 3/4", "caught": True}
    assert without_paths(row) == {
        "first": "[Errno 5] at offset 0: 'PATH' in tests/core/test_a.py, 3/4",
        "caught": True,
    }


@pytest.mark.long
@pytest.mark.parametrize("edge", sorted(EDGES))
def test_a_missing_guard_is_noticed(edge):
    row = walk_without(build_mutants(), edge)
    assert row["first"], f"{edge}: nobody missed it"
    if edge in JUDGED:
        assert row["oracle"], f"{edge}: the oracle did not miss it"


@pytest.mark.long
def test_a_broken_engine_is_noticed():
    rows = break_engine(TESTED, unbroken=False)  # that they pass otherwise is for the long run
    assert [row["name"] for row in rows] == list(TESTED)
    assert [row for row in rows if not row["caught"]] == []
