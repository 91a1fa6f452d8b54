"""What every test shares: options, and GPU tests that cannot hide.

A test marked `gpu` is skipped where there is no CUDA device, with that reason; OFFLOAD_REQUIRE_CUDA=1 turns the skip
into a failure. `--all-databases` runs tests/test_databases.py on every case instead of the quick subset.

The campaigns of docs/reliability.md run in a short form; `--long` runs them in full. What they count (faults injected,
kills survived, …) is written as JSON where `--reliability-json PATH` is given.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

TALLY = pytest.StashKey[dict]()
COUNTS = pytest.StashKey[Counter]()
PASSED = pytest.StashKey[Counter]()
STARTED = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption(
        "--all-databases",
        action="store_true",
        default=os.environ.get("OFFLOAD_ALL_DATABASES") == "1",
        help="run PyTorch's whole operator and module databases (also: OFFLOAD_ALL_DATABASES=1)",
    )
    parser.addoption("--long", action="store_true", help="run the campaigns of docs/reliability.md in full")
    parser.addoption("--reliability-json", metavar="PATH", help="write what the campaigns counted to PATH")


def pytest_configure(config):
    config.stash[TALLY] = {}
    config.stash[COUNTS] = Counter()
    config.stash[PASSED] = Counter()
    config.stash[STARTED] = time.monotonic()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get("OFFLOAD_REQUIRE_CUDA") == "1":
        pytest.fail("OFFLOAD_REQUIRE_CUDA=1, and torch sees no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def tally(request):
    """Named lists of cases, by database; said at the end of the run."""
    return request.config.stash[TALLY]


@pytest.fixture(scope="session")
def is_long(request):
    """Whether the campaigns run in full."""
    return request.config.getoption("--long")


@pytest.fixture(scope="session")
def campaign_counts(request):
    """What a campaign counts: `campaign_counts["faults injected"] += 1`."""
    return request.config.stash[COUNTS]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash[PASSED][str(item.path.relative_to(item.config.rootpath))] += 1
    return report


def pytest_sessionfinish(session, exitstatus):
    path = session.config.getoption("--reliability-json")
    if path is None:
        return
    databases = {
        name: {outcome: len(cases) for outcome, cases in outcomes.items()}
        for name, outcomes in session.config.stash[TALLY].items()
    }
    found = {
        "long": session.config.getoption("--long"),
        "counts": dict(session.config.stash[COUNTS]),
        "passed": dict(session.config.stash[PASSED]),
        "failed": session.testsfailed,
        "databases": databases,
        "seconds": round(time.monotonic() - session.config.stash[STARTED], 1),
    }
    Path(path).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def pytest_terminal_summary(terminalreporter, config):
    for database, outcomes in sorted(config.stash[TALLY].items()):
        terminalreporter.section(f"{database}: what the engine's hooks were tried on")
        for outcome, names in sorted(outcomes.items()):
            listed = "" if outcome == "bit-equal" else ": " + ", ".join(sorted(names))
            terminalreporter.write_line(f"{outcome}: {len(names)}{listed}")
