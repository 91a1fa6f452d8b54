"""The simulated accelerator's own tests, and those marked `gpu` on it: each row a process of its own.

A process has one such backend, for good, and its `torch.accelerator` is that; so nothing of it may enter this one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from campaign.build import mutants_package
from twin.build import TORCH_VERSION, build_backend

ROOT = Path(__file__).resolve().parents[2]
MARKED_GPU = (
    "test_calibration",
    "test_doctor",
    "test_gpu",
    "test_gpu_feed",
    "test_gpu_planned",
    "test_gpu_reference_steps",
    "test_gpu_store",
    "test_gpu_training",
    "test_gpu_update_room",
    "test_oom",
    "test_timeline",
    "test_torch_compat",
    "integrations/test_torch_refusals",
)
ROWS = {
    "backend": [
        f"tests/twin/inside/test_{name}.py" for name in ("clock", "virtual_steps", "backend", "order", "operators")
    ],
    "models": ["tests/twin/inside/test_models.py", "tests/twin/inside/test_recomputation.py"],
    "edges": ["tests/twin/inside/test_edges.py"],  # what misses the guards of copies on an accelerator
    "training": [f"tests/twin/inside/test_{name}.py" for name in ("training", "optimizer_state", "moved_parameters")],
    "limit": [f"tests/twin/inside/test_{name}.py" for name in ("memory_limit", "memory_of_a_loss")],
    "processes": ["--long", "tests/twin/inside/test_processes.py"],
}
LATER = {"backend": "long", "models": "full", "training": "long", "processes": "full", "limit": "full"}
ON_GPUS = ["-m", "gpu", *(f"tests/{path}.py" for path in MARKED_GPU)]
LONG_FILES = (
    "twin/inside/test_memory_limit",
    "twin/inside/test_moved_parameters",
    "twin/inside/test_optimizer_state",
    "twin/inside/test_processes",
    "twin/inside/test_training",
    "test_gpu",
    "test_gpu_planned",
    "test_gpu_store",
    "test_gpu_training",
)
LONG = ["--full", "-m", "long or full", *(f"tests/{path}.py" for path in LONG_FILES)]

needs_simulated = pytest.mark.skipif(
    torch.__version__.split("+")[0] != TORCH_VERSION,
    reason=f"the simulated accelerator needs torch {TORCH_VERSION}",
)
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="device memory is mapped twice, as Linux does it"),
    needs_simulated,
]


@pytest.fixture(scope="module")
def backend():
    """Built before the first row's time begins to count."""
    return build_backend()


def run_row(row, arguments, figures, folder=ROOT):
    """Tests in a process of their own; `offload` comes from `folder`."""
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--device", "sim"]
    paths = [str(ROOT / each) if each.startswith("tests/") else each for each in arguments]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    inside = os.pathsep.join([str(folder), str(ROOT / "tests" / "twin" / "inside")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": inside}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-5_000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    figures.setdefault("tests on the simulated accelerator", Counter())[row] += int(passed[1])


def share(is_full):
    """Options of pytest: without `--full`, half of a row's tests run, because all take too long for CI."""
    return [] if is_full else ["--share", "1/2"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=getattr(pytest.mark, LATER[row])) if row in LATER else row for row in ROWS],
)
def test_on_the_simulated_accelerator(row, backend, is_full, figures):
    run_row(row, [*(share(is_full) if row == "training" else []), *ROWS[row]], figures)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_long_ones_on_the_simulated_accelerator(backend, figures):
    run_row("long", LONG, figures)


def test_no_file_is_forgotten():
    marked = {
        path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(@|pytestmark = )pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
    }
    assert marked == set(MARKED_GPU)
    inside = (ROOT / "tests" / "twin" / "inside").glob("test_*.py")
    long = {f"twin/inside/{path.stem}" for path in inside if re.search(r"pytest\.mark\.(long|full)", path.read_text())}
    assert long == {name for name in LONG_FILES if name.startswith("twin/")}


@pytest.mark.long
@pytest.mark.timeout(1800)  # it builds the engine with edges left out, and runs a process for each
def test_an_edge_that_is_left_out_is_named(backend, figures):
    with mutants_package() as folder:
        run_row("edges", ["tests/twin/inside/test_edges.py"], figures, folder)
