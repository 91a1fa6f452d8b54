"""Processes that a test starts have the simulated accelerator too: the commands, and two ranks with a device each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[2]
SIZES = ("--layers=2", "--width=64", "--heads=2", "--batch=2", "--length=64", "--steps=3")


def run(*arguments):
    """Python with these arguments."""
    paths = [TESTS / "twin" / "startup", TESTS, TESTS / "integrations", TESTS.parent]
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])])
    environment = {**os.environ, "PYTHONPATH": path, "OFFLOAD_TEST_DEVICE": "sim"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_demo(tmp_path):
    shown = run("-m", "offload", "demo", f"--html={tmp_path / 'demo.html'}", *SIZES)
    assert "simulated accelerator" in shown
    assert (tmp_path / "demo.html").stat().st_size > 10_000


def test_the_doctor():
    found = json.loads(run("-m", "offload", "doctor", "--json"))
    assert found["ok"] is True
    named = {each["name"]: each for each in found["findings"]}
    assert named["10 steps on sim:1"]["value"]["tensors_swapped"] > 0


@pytest.mark.long
def test_two_ranks_train_as_one(tmp_path):
    """DistributedDataParallel over gloo, which takes buckets of gradients through the host's memory."""
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone")
    run(*ranks, str(TESTS / "twin" / "rank.py"), str(tmp_path))
    plain, offloaded = (
        [torch.load(tmp_path / f"{enabled}-{rank}.pt") for rank in range(2)] for enabled in ("plain", "offloaded")
    )
    assert all(map(torch.equal, plain[0], plain[1]))
    assert all(map(torch.equal, plain[0], offloaded[0]))
    assert all(map(torch.equal, plain[1], offloaded[1]))
