"""Memory runs out on a copy lane, at every allocation there is: the tickets it was working on fail, nothing else.

No lane ends the process, nobody waits for ever, a source whose copy failed is whole, and what did not come back can be
asked for again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from core.store_rig import TIERS
from fake_cuda.build import compile_sources

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory):
    """A library that takes the lanes' memory away."""
    output = tmp_path_factory.mktemp("preloaded") / "lanes_without_memory.so"
    return compile_sources(output, [HERE / "lanes_without_memory.cpp"], "-shared", "-fPIC")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("times", [1, 3, 1 << 20], ids=["once", "three times", "from then on"])
@pytest.mark.parametrize("tier", TIERS)
def test_no_memory_on_a_lane(tmp_path, preloaded, tier, times, campaign_counts):
    run = subprocess.run(
        [sys.executable, "-m", "core.without_memory", str(preloaded), tier, str(tmp_path), str(times)],
        env={**os.environ, "LD_PRELOAD": str(preloaded), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    told = json.loads(run.stdout)
    campaign_counts["faults injected"] += told["rounds"]
    assert told["rounds"] >= 5  # how many allocations there are depends on how many blocks travel together
    assert told["out"] + told["in"] > 0
    assert (told["spill"] > 0) == (tier == "slab+disk")
