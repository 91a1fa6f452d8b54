"""Steps in virtual time, in short: the engine's and the peers', with plain's bits, on a simulated card."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from twin.test_twin import ROOT
from twin.test_twin import pytestmark as same_machines

pytestmark = [*same_machines, pytest.mark.long]


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("simulated") / "quick.json"
    command = [sys.executable, str(ROOT / "bench" / "simulated.py"), "--quick", "--json", str(path)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(path.parent)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("SIMULATED: ")
    return json.loads(path.read_text())


def ran(content):
    return [row for row in content["rows"] if "inapplicable" not in row]


def test_every_way_ran_that_can_run_here(content):
    left_out = {row["name"] for row in content["rows"]} - {row["name"] for row in ran(content)}
    assert left_out == (set() if importlib.util.find_spec("trl") else {"TRL"})
    assert {row["family"] for row in content["rows"]} == {"gpt"}
    assert sum(row["ours"] for row in ran(content)) == 2


def test_every_way_gives_plains_bits(content):
    assert all(row["equal"] for row in ran(content))


def test_every_way_but_plain_moved_something(content):
    for row in ran(content):
        assert (row["out_seconds"] > 0) == (row["in_seconds"] > 0) == (row["name"] != "plain"), row
        assert (row["overlap"] is None) == (row["name"] == "plain"), row


def test_no_direction_of_the_link_is_busy_for_longer_than_the_step(content):
    for row in ran(content):
        assert max(row["out_seconds"], row["in_seconds"]) <= row["seconds"] * (1 + 1e-9), row
        assert row["kernel_seconds"] <= row["seconds"] * (1 + 1e-9), row
        assert 0 <= row["exposed_seconds"] <= row["copy_seconds"], row


def test_the_planned_step_keeps_its_limit(content):
    """And takes no more memory than was asked for: the limit is 60 % of plain's growth, beside model and optimizer."""
    (planned,) = (row for row in ran(content) if "predicted_seconds" in row)
    assert planned["memory_over_plain"] <= 0.6 + 0.01
    assert planned["swaps"] > 0
