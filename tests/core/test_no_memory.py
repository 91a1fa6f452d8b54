"""Memory runs out at every allocation there is: on a copy lane, or in the thread that calls the store.

On a lane the tickets it was working on fail, nothing else. No lane ends the process, nobody waits for ever, a source
whose copy failed is whole, and what did not come back can be asked for again. A caller is refused as if it had never
called: no ticket is left, nothing is written anywhere, and the same call succeeds when there is memory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from core.store_rig import TIERS
from twin.build import compile_sources

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory):
    """A library that takes a thread's memory away."""
    output = tmp_path_factory.mktemp("preloaded") / "failing_new.so"
    return compile_sources(output, [HERE / "failing_new.cpp"], "-shared", "-fPIC")


def run_rounds(preloaded, *arguments, program="core.without_memory"):
    run = subprocess.run(
        [sys.executable, "-m", program, str(preloaded), *map(str, arguments)],
        env={**os.environ, "LD_PRELOAD": str(preloaded), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "times",
    [
        pytest.param(1, id="once", marks=pytest.mark.long),
        pytest.param(3, id="three times", marks=pytest.mark.full),
        pytest.param(1 << 20, id="from then on"),
    ],
)
@pytest.mark.parametrize("tier", TIERS)
def test_no_memory_on_a_lane(tmp_path, preloaded, tier, times, campaign_counts):
    told = run_rounds(preloaded, tier, tmp_path, times)
    campaign_counts["faults injected"] += told["rounds"]
    assert told["out"] + told["in"] > 0
    if tier != "slab+disk":
        assert told["spill"] == 0
    elif times > 3:  # few rounds meet a single failure, or three, in the midst of a spill: perhaps none
        assert told["spill"] > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tier", TIERS)
def test_no_memory_for_the_caller(tmp_path, preloaded, tier, campaign_counts):
    told = run_rounds(preloaded, tier, tmp_path, "caller")
    campaign_counts["faults injected"] += told["swap_out"] + told["prefetch"]
    assert told["swap_out"] > 3
    assert told["prefetch"] > 3


@pytest.mark.timeout(300)
def test_no_memory_for_the_engine(tmp_path, preloaded, campaign_counts):
    """A storage whose entry finds no memory: its copy is queued by then, and has ended when the call is refused."""
    told = run_rounds(preloaded, tmp_path, program="core.engine_without_memory")
    campaign_counts["faults injected"] += told["refused"]
    assert told["refused"] > 3
    assert told["queued"] > 0
