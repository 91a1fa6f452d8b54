"""Optimizers that are copied, pickled, saved, freed; processes that fork and exit while their state is away."""

import copy
import gc
import io
import pickle
import textwrap
import weakref

import pytest
import torch
from core.store_rig import TIERS
from fresh_python import run_fresh_python
from state_rig import OPTIMIZERS, assert_equal, everything, make_mover, make_optimizer, params_of, run


def pair(tier, tmp_path, steps=3):
    plain, moved = make_optimizer(*OPTIMIZERS["AdamW"]), make_optimizer(*OPTIMIZERS["AdamW"])
    mover = make_mover(moved, tier, tmp_path)
    run(plain, steps)
    run(moved, steps)
    return plain, moved, mover


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "save": lambda optimizer: torch.load(_saved(optimizer), weights_only=False),
}


def _saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.parametrize("tier", TIERS)
def test_a_copy_of_the_optimizer_is_a_plain_one(make_copy, tier, tmp_path):
    plain, moved, mover = pair(tier, tmp_path)
    made = COPIES[make_copy](moved)
    assert type(made.state) is type(plain.state)
    run(plain, 2, begin=3)
    run(made, 2, begin=3)
    assert_equal(everything(made), everything(plain))
    run(moved, 2, begin=3)
    assert_equal(everything(moved), everything(plain))
    mover.close()


@pytest.mark.parametrize("tier", TIERS)
def test_a_checkpoint_while_states_are_leaving(tier, tmp_path):
    plain, moved, mover = pair(tier, tmp_path)
    assert mover.engine.in_flight_bytes >= 0
    checkpoint = moved.state_dict()  # right after a step: the last chunks are being written
    expected = copy.deepcopy(plain.state_dict())
    assert_equal(checkpoint, expected)
    assert moved.state.peek(params_of(moved)[0])["exp_avg"].isnan().all(), "nothing was brought back"
    assert_equal(torch.load(_saved(checkpoint), weights_only=True), expected)
    run(moved, 3, begin=3)
    assert_equal(
        {p: s["exp_avg"] for p, s in checkpoint["state"].items()},
        {p: s["exp_avg"] for p, s in expected["state"].items()},
    )
    run(plain, 3, begin=3)
    assert_equal(everything(moved), everything(plain))
    resumed = make_optimizer(*OPTIMIZERS["AdamW"])
    other = make_mover(resumed, tier, tmp_path / "..")
    resumed.load_state_dict(expected)
    assert_equal(resumed.state_dict(), expected)
    assert_equal(expected, torch.load(_saved(expected), weights_only=True))
    other.close()
    mover.close()


def test_an_interrupted_state_dict_leaves_true_values(tmp_path):
    plain, moved, mover = pair("direct", tmp_path)

    def interrupt(optimizer):
        raise KeyboardInterrupt

    hook = moved.register_state_dict_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        moved.state_dict()
    hook.remove()
    assert_equal(everything(moved), everything(plain))
    run(plain, 2, begin=3)
    run(moved, 2, begin=3)
    assert_equal(everything(moved), everything(plain))
    mover.close()


@pytest.mark.parametrize("tier", TIERS)
def test_an_optimizer_that_goes_takes_its_state_along(tier, tmp_path):
    _, moved, mover = pair(tier, tmp_path)
    engine = mover.engine
    gone = weakref.ref(moved), weakref.ref(mover)
    gc.disable()
    try:
        del moved, mover
        assert [each() for each in gone] == [None, None], "no collection is needed"
    finally:
        gc.enable()
    engine.drain()
    assert engine.store.stats()["live_tickets"] == 0
    assert engine.resident.now == 0


SCRIPT = """
import atexit, os, sys

@atexit.register  # before those of the library: it runs after them
def no_copy_is_under_way():
    for engine in offload.runtime.stores.engines():
        engine.collect()
        assert engine.in_flight_bytes == 0

import torch, offload
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
handle = offload.enable(model, optimizer=optimizer, optimizer_state=True)
def step():
    optimizer.zero_grad()
    model(torch.randn(4, 600)).square().mean().backward()
    optimizer.step()
step()
step()
"""
ENDINGS = {
    "exit": "",
    "exception": """
        assert handle._states.away_bytes()[1] > 0, "nothing is being written"
        raise SystemExit(0)
    """,
    "disabled": "handle.disable(); assert not optimizer.state[model[0].weight]['exp_avg'].isnan().any()",
    "optimizer freed": "del optimizer",
    "model freed": "del model, handle; optimizer.step()",
    "fork": """
        handle._states._alive()[0].engine.drain()  # what is still leaving is in the child's memory too
        pid = os.fork()
        if pid == 0:
            try:
                optimizer.state[model[0].weight]
            except offload.DriverError:
                handle.disable()
                os._exit(0)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        step()
        assert not optimizer.state[model[0].weight]["exp_avg"].isnan().any()
    """,
    "loader": """
        data = torch.utils.data.DataLoader(list(range(8)), num_workers=1, multiprocessing_context="fork")
        assert sum(len(batch) for batch in data) == 8
        step()
    """,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "ending",
    [
        each if each in ("exception", "fork", "loader") else pytest.param(each, marks=pytest.mark.full)
        for each in ENDINGS
    ],
)
def test_a_process_ends_with_copies_in_flight(ending):
    run_fresh_python(SCRIPT + textwrap.dedent(ENDINGS[ending]), OFFLOAD_THROTTLE="25MB/s")


COMPILED = """
import sys, torch, offload

def train(moves, compiled):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.GELU(), torch.nn.Linear(600, 600))
    optimizer = torch.optim.AdamW(model.parameters())
    handle = offload.enable(model, optimizer=optimizer, optimizer_state=True) if moves else None
    steps = {"not": optimizer.step, "step": optimizer.step, "function": lambda: optimizer.step()}
    step = steps[compiled] if compiled == "not" else torch.compile(steps[compiled], backend="eager")
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 600)).square().mean().backward()
        step()
    if moves:
        assert handle.report().optimizer_state[0].in_bytes > 0
        handle.disable()
    return [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]

with_state_moved = train(True, sys.argv[1])
assert all(map(torch.equal, with_state_moved, train(False, "not")))
"""


@pytest.mark.long
@pytest.mark.parametrize("compiled", ["step", "function"])
def test_a_compiled_step_has_the_bits_of_an_uncompiled_one(compiled):
    run_fresh_python(COMPILED, compiled, TORCH_LOGS="-dynamo")  # torch itself warns of a region of its profiler
