"""Models that are freed, processes that fork and end while parameters are away, memory that the system gets back."""

import gc
import textwrap
import weakref
from pathlib import Path

import pytest
from fresh_python import run_fresh_python
from parameters.frozen_rig import (
    assert_all_freed,
    assert_equal,
    away,
    enable,
    everything,
    loss_of,
    make_model,
    train,
    trained,
)

import offload


def test_a_model_that_goes_takes_its_parameters_along(tmp_path):
    model = make_model()
    handle = enable(model, tmp_path)
    train(model, 2)
    engine = handle._enabled.parameters.engine
    gone = weakref.ref(model), weakref.ref(handle._enabled.parameters)
    model.first.weight.sum()
    gc.collect()
    gc.disable()
    try:
        del model, handle
        assert [each() for each in gone] == [None, None], "no collection is needed"
    finally:
        gc.enable()
    assert_all_freed(engine)


def test_a_graph_outlives_its_model(tmp_path):
    found = []
    for is_moved in (False, True):
        model = make_model().eval()
        if is_moved:
            enable(model, tmp_path)
        adapters = trained(model)
        loss = loss_of(model, 0)
        del model
        loss.backward()
        found.append([each.grad for each in adapters])
    assert_equal(*found)


def test_enabled_again_with_another_store(tmp_path):
    plain, moved = make_model(), make_model()
    for number in range(3):
        with enable(moved, tmp_path):
            assert_equal(train(moved, 2, number), train(plain, 2, number))
        assert away(moved) == []
    assert_equal(everything(moved), everything(plain))


def test_enable_that_fails_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    model = make_model()
    monkeypatch.setattr(offload.session, "Session", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        enable(model, tmp_path)
    assert away(model) == []
    assert_equal(everything(model), everything(make_model()))


SCRIPT = """
import os, sys, torch, offload
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(4)])
for layer in model[:3]:
    layer.requires_grad_(False)
expected = model[0].weight.sum().item()
handle = offload.enable(model, parameters="frozen")
def step():
    model(torch.randn(4, 600)).square().mean().backward()
step()
"""
ENDINGS = {
    "exit": "loss = model(torch.randn(4, 600)).sum()",
    "exception": "raise SystemExit(0)",
    "disabled": "handle.disable(); assert model[0].weight.sum().item() == expected",
    "model freed": "del model, handle",
    "fork": """
        pid = os.fork()
        if pid == 0:
            try:
                model[0].weight.sum()
            except offload.DriverError:
                handle.disable()
                os._exit(0)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        step()
        assert model[0].weight.sum().item() == expected
    """,
    "loader": """
        data = torch.utils.data.DataLoader(list(range(8)), num_workers=1, multiprocessing_context="fork")
        assert sum(len(batch) for batch in data) == 8
        step()
    """,
}


@pytest.mark.parametrize(
    "ending", [pytest.param(each, marks=getattr(pytest.mark, "long" if each == "fork" else "full")) for each in ENDINGS]
)
def test_a_process_ends_while_parameters_are_away(ending):
    run_fresh_python(SCRIPT + textwrap.dedent(ENDINGS[ending]))


# Memory of the process is what is asked, so that one of its own runs, in which freed memory goes back to the system.
RESIDENT = """
import sys, torch, offload
from torch import nn

class Adapted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
    def forward(self, x):
        return torch.tanh(self.layer(x) + self.up(self.down(x)))

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) << 10

def train(model, optimizer):
    x = torch.randn(4, 1024, requires_grad=True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

small = nn.Sequential(Adapted(8), Adapted(8))
train(nn.Sequential(nn.Linear(1024, 8), small), torch.optim.SGD(small.parameters(), lr=0.1))
before = resident()
limit = 24 << 20
model = nn.Sequential(*[Adapted(1024) for _ in range(12)])
base_bytes = 12 * 4 << 20
assert resident() - before >= base_bytes
handle = offload.enable(model, parameters="frozen", memory_limit=limit, recompute=False)
assert resident() - before < limit, resident() - before
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for number in range(6):
    train(model, optimizer)
    assert resident() - before < base_bytes, (number, resident() - before)
assert handle.plan is not None and handle.plan.peak_bytes <= limit < base_bytes
counts = handle.report().moved_parameters
assert counts.nbytes == base_bytes and counts.in_bytes >= 10 * base_bytes
print(resident() - before)
"""


@pytest.mark.long
def test_a_frozen_base_larger_than_the_limit_trains_within_it():
    run_fresh_python(RESIDENT, MALLOC_MMAP_THRESHOLD_="1048576", MALLOC_TRIM_THRESHOLD_="1048576", MALLOC_TOP_PAD_="0")


COMPILED = """
import sys, torch, offload
sys.path.insert(0, sys.argv[1])
from parameters.frozen_rig import assert_equal, enable, everything, make_model, train

def trained(how, folder=None):
    torch._dynamo.reset()
    model = make_model().eval()
    if how == "in place":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    elif how == "wrapped":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, backend="aot_eager")
    elif how == "whole":
        model.compile(backend="aot_eager")
    handle = enable(model, folder) if folder else None
    if how == "later":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    found = train(model, 4)
    if folder:
        report = handle.report()
        assert report.moved_parameters.in_bytes > 4 * report.moved_parameters.nbytes
        assert any("in one compiled" in note or "is one compiled" in note for note in report.notes) == (how == "whole")
        assert not any("broke" in note for note in report.notes), report.notes
        handle.disable()
    return found + everything(model)

for how in sys.argv[3:]:
    assert_equal(trained(how, sys.argv[2]), trained(how))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "how", ["in place", *(pytest.param(each, marks=pytest.mark.full) for each in ("wrapped", "later", "whole"))]
)
def test_compiled_blocks_have_the_bits_of_compiled_blocks(how, tmp_path):
    run_fresh_python(COMPILED, str(Path(__file__).parents[1]), str(tmp_path), how)
