"""What every benchmark's JSON carries besides: the machine, and what could not run here and why."""

from __future__ import annotations

from typing import Any

import machine
import pytest

NOT_RUN = pytest.StashKey[list[dict[str, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOT_RUN] = []


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
