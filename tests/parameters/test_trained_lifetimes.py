"""Processes that fork and end while trained parameters are away, compiled blocks, and memory that is bounded."""

import gc
import json
import textwrap
import weakref
from pathlib import Path

import pytest
from fresh_python import run_fresh_python
from parameters.frozen_rig import assert_all_freed, assert_equal, enable
from parameters.trained_rig import Run, assert_same, engine_of

ROOT = Path(__file__).parents[2]


def test_a_model_that_goes_takes_its_parameters_along(tmp_path):
    moved = Run(tmp_path, n_tensors=0)
    moved.train(2)
    moved.optimizer.zero_grad()
    engine, gone = engine_of(moved), weakref.ref(moved.model)
    gc.collect()
    gc.disable()
    try:
        del moved
        assert gone() is None, "no collection is needed"
    finally:
        gc.enable()
    assert_all_freed(engine)


def test_enabled_again_with_another_store(tmp_path):
    plain, moved = Run(), Run(tmp_path)
    for number in range(3):
        assert_equal(moved.train(2, number), plain.train(2, number))
        moved.handle.disable()
        assert_same(moved, plain)
        knobs = {"optimizer": moved.optimizer, "step_in_backward": number == 1}
        moved.handle = enable(moved.model, tmp_path, parameters="all", **knobs)


SCRIPT = """
import os, sys, torch, offload
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
handle = offload.enable(model, parameters="all", optimizer=optimizer, optimizer_state=True, step_in_backward=True)
def step():
    optimizer.zero_grad()
    model(torch.randn(4, 600)).square().mean().backward()
    optimizer.step()
step()
expected = model[0].weight.sum().item()
"""
ENDINGS = {
    "exit": "step()",
    "in backward": "optimizer.zero_grad(); model(torch.randn(4, 600)).square().mean().backward()",
    "exception": "raise SystemExit(0)",
    "disabled": "handle.disable(); assert model[0].weight.sum().item() == expected; step()",
    "model freed": "del model, handle, optimizer, step",
    "fork": """
        with torch.no_grad():
            model(torch.randn(4, 600))
        pid = os.fork()
        if pid == 0:
            for use in (model[0].weight.sum, step):
                try:
                    use()
                    os._exit(4)
                except offload.DriverError:
                    pass
            handle.disable()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert model[0].weight.sum().item() == expected
        step()
    """,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "ending", [each if each == "fork" else pytest.param(each, marks=pytest.mark.full) for each in ENDINGS]
)
def test_a_process_ends_while_parameters_are_away(ending):
    run_fresh_python(SCRIPT + textwrap.dedent(ENDINGS[ending]))


COMPILED = """
import sys, torch, offload
sys.path.insert(0, sys.argv[1])
from parameters.frozen_rig import assert_equal
from parameters.trained_rig import Run, assert_same

def trained(how, way, folder=None):
    torch._dynamo.reset()
    run = Run()
    run.model.eval()
    if how == "in place":
        for block in run.model.blocks:
            block.compile(backend="aot_eager")
    elif how == "wrapped":
        for number, block in enumerate(run.model.blocks):
            run.model.blocks[number] = torch.compile(block, backend="aot_eager")
    elif how == "whole":
        run.model.compile(backend="aot_eager")
    if folder:
        from parameters.frozen_rig import enable
        from parameters.trained_rig import WAYS
        run.handle = enable(run.model, folder, parameters="all", optimizer=run.optimizer, **WAYS[way])
    if how == "later":
        for block in run.model.blocks:
            block.compile(backend="aot_eager")
    return run, run.train(4)

for how in sys.argv[3:]:
    for way in ("in backward, state", "chunks"):
        moved, found = trained(how, way, sys.argv[2])
        plain, expected = trained(how, way)
        assert_equal(found, expected)
        assert_same(moved, plain)
        notes = moved.handle.report().notes
        assert any("it is one compiled graph" in note for note in notes) == (how == "whole"), notes
        assert moved.handle.report().moved_parameters.rewritten >= 4 * 7
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "how", ["in place", *(pytest.param(each, marks=pytest.mark.full) for each in ("wrapped", "later", "whole"))]
)
def test_compiled_blocks_have_the_bits_of_compiled_blocks(how, tmp_path):
    run_fresh_python(COMPILED, str(ROOT / "tests"), str(tmp_path), how)


# Memory of the process is what is asked, so that one of its own runs, in which freed memory goes back to the system.
LIMITED = """
import torch, offload
from offload.optimizer_state import mover as states
from offload.parameters import mover as parameters
from torch import nn

for module in (states, parameters):
    module.AHEAD_BYTES = module.BEHIND_BYTES = 4 << 20
states.CHUNK_BYTES = 4 << 20

def resident(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) << 10

def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 1024, requires_grad=True)).square().mean().backward()
    optimizer.step()

small = nn.Sequential(nn.Linear(1024, 8))
train(small, torch.optim.AdamW(small.parameters()))
before, limit = resident("VmRSS"), 64 << 20
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(12)])
weights = 12 * 4 << 20
optimizer = torch.optim.AdamW(model.parameters())
on = {"optimizer": optimizer, "optimizer_state": True, "step_in_backward": True, "parameters": "all"}
handle = offload.enable(model, memory_limit=limit, recompute=False, **on)
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here: the model was made in memory
for number in range(6):
    train(model, optimizer)
grown = resident("VmHWM") - before
assert handle.plan is not None and handle.plan.peak_bytes <= limit, handle.plan
assert grown < 2 * weights < 4 * weights, grown
counts = handle.report().moved_parameters
assert counts.nbytes == weights and counts.out_bytes >= 5 * weights
"""


@pytest.mark.long
def test_weights_gradients_and_states_larger_than_the_limit_train_within_a_plan():
    mapped = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_TOP_PAD_": "0"}
    run_fresh_python(LIMITED, **mapped)


# The example under a hard bound: a process may not allocate more than this beyond its imports. The windows, which are
# 64 MiB for models of any size, are made as small as this model.
BOUNDED = """
import resource, runpy, sys, torch, offload
from safetensors.torch import save_file
from offload.optimizer_state import mover as states, streamed_state
from offload.parameters import mover as parameters
from torch import nn

for module in (states, parameters):
    module.AHEAD_BYTES = module.BEHIND_BYTES = 4 << 20
states.CHUNK_BYTES = streamed_state.ASKED_BYTES = 4 << 20
script, bound, *arguments = sys.argv[1:]
warm = nn.Linear(256, 256)
warm(torch.randn(4, 256)).sum().backward()
torch.optim.AdamW(warm.parameters()).step()
allocated = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (allocated + int(bound),) * 2)
sys.argv = [script, *arguments]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    assert end.code == 0
except (MemoryError, RuntimeError) as error:
    print("no room:", repr(error))
"""
BOUND = 128 << 20
SHAPE = ("--layers", "4", "--width", "512", "--steps", "4", "--batch", "2", "--length", "64")
FREED = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}


def run_example(folder, bound, *more):
    pytest.importorskip("safetensors")
    script = str(ROOT / "examples" / "larger_than_memory.py")
    return run_fresh_python(BOUNDED, script, str(bound), str(folder), *SHAPE, *more, **FREED)


@pytest.mark.long
def test_more_than_fits_is_built_trained_saved_and_resumed(tmp_path):
    first = run_example(tmp_path / "moved", BOUND, "--stop", "2")
    second = run_example(tmp_path / "moved", BOUND)
    unbounded = run_example(tmp_path / "plain", 1 << 40, "--plain")
    assert "no room" not in first + second
    losses = [line.split()[:4] for line in (first + second).splitlines() if line.startswith("step")]
    assert losses == [line.split()[:4] for line in unbounded.splitlines() if line.startswith("step")]
    figures = json.loads(next(line for line in second.splitlines() if line.startswith("{")))
    assert figures["all_mb"] * 1e6 > 1.5 * BOUND
    plain, moved = tmp_path / "plain" / "step-4", tmp_path / "moved" / "step-4"
    files = sorted(path.relative_to(plain) for path in plain.rglob("*.safetensors"))
    assert len(files) > 60
    assert sorted(path.relative_to(moved) for path in moved.rglob("*.safetensors")) == files
    for name in files:
        assert (moved / name).read_bytes() == (plain / name).read_bytes(), name


@pytest.mark.long
def test_without_offload_it_does_not_fit(tmp_path):
    assert "no room" in run_example(tmp_path, BOUND, "--plain")
