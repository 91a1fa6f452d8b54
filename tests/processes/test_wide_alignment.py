"""A file system whose direct I/O wants more than the 4096 bytes that extents are aligned to gets buffered I/O."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from twin.build import compile_sources

HERE = Path(__file__).resolve().parent
PROGRAM = """
import json, sys
import numpy as np
from core.store_rig import TIERS, Source, make_store
from offload import _core
whole = []
for tier in TIERS:
    store = make_store(tier, sys.argv[1])
    sources = [Source(store, np.random.default_rng(0), nbytes, residue=64) for nbytes in (5, 20_000, 100_000)]
    for source in sources:
        source.wait_copied_out()
        source.prefetch()
        source.swap_in()
    whole.append(tier)
print(json.dumps({"alignment": _core.SpillFile(sys.argv[1]).alignment_bytes, "whole": whole}))
"""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory):
    """A library that asks for an alignment."""
    output = tmp_path_factory.mktemp("preloaded") / "wide_alignment.so"
    return compile_sources(output, [HERE / "wide_alignment.cpp"], "-shared", "-fPIC", "-ldl")


@pytest.mark.parametrize(("asked_bytes", "alignment_bytes"), [(4096, 4096), (8192, 1), (65536, 1)])
def test_what_extents_cannot_give_is_not_tried(spill_directory, preloaded, asked_bytes, alignment_bytes):
    try:
        os.close(os.open(spill_directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct I/O here: {error}")
    environment = {
        "LD_PRELOAD": str(preloaded),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WIDE_ALIGNMENT": str(asked_bytes),
    }
    command = [sys.executable, "-c", PROGRAM, str(spill_directory)]
    run = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads(run.stdout) == {"alignment": alignment_bytes, "whole": ["direct", "slab", "slab+disk"]}
