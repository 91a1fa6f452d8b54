"""What every test shares: options, and GPU tests that cannot hide.

A test marked `gpu` is skipped where there is no CUDA device, with that reason; OFFLOAD_REQUIRE_CUDA=1 turns the skip
into a failure. `--all-databases` runs tests/test_databases.py on every case instead of the quick subset.
"""

import os

import pytest
import torch

TALLY = pytest.StashKey[dict]()
FIGURES = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption(
        "--all-databases",
        action="store_true",
        default=os.environ.get("OFFLOAD_ALL_DATABASES") == "1",
        help="run PyTorch's whole operator and module databases (also: OFFLOAD_ALL_DATABASES=1)",
    )
    parser.addoption("--seeds", type=int, default=2000, help="how many seeds tests/campaign walks (default: 2000)")
    parser.addoption("--rounds", type=int, default=20, help="how many rounds tests/stress runs (default: 20)")
    parser.addoption("--seed", type=int, help="replay one seed of tests/campaign, under every schedule")


def pytest_configure(config):
    config.stash[TALLY] = {}
    config.stash[FIGURES] = {}


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
def figures(request):
    """What a run counted, by name; said at its end."""
    return request.config.stash[FIGURES]


def pytest_terminal_summary(terminalreporter, config):
    for name, counted in sorted(config.stash[FIGURES].items()):
        terminalreporter.write_line(f"{name}: {counted}")
    for database, outcomes in sorted(config.stash[TALLY].items()):
        terminalreporter.section(f"{database}: what the engine's hooks were tried on")
        for outcome, names in sorted(outcomes.items()):
            listed = "" if outcome == "bit-equal" else ": " + ", ".join(sorted(names))
            terminalreporter.write_line(f"{outcome}: {len(names)}{listed}")
