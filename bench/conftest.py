"""What every benchmark's JSON carries besides: the machine, and what could not run here and why."""

from __future__ import annotations

import time
from typing import Any

import machine
import pytest

NOT_RUN = pytest.StashKey[list[dict[str, str]]]()
BEGIN = pytest.StashKey[float]()
SECONDS_MAX = 600.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bench-seconds",
        type=float,
        default=SECONDS_MAX,
        metavar="S",
        help=f"benchmarks that would begin later than this are left out, and said to be ({SECONDS_MAX:.0f})",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOT_RUN] = []
    config.stash[BEGIN] = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    seconds_max = item.config.getoption("--bench-seconds")
    if time.monotonic() - item.config.stash[BEGIN] > seconds_max:
        pytest.skip(f"left out: {seconds_max:.0f} s were up; --bench-seconds allows more")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        item.config.stash[NOT_RUN].append({"name": item.name, "reason": reason})
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["offload"] = machine.describe()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    output_json["not_run"] = config.stash[NOT_RUN]
