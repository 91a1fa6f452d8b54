"""Optimizer state in the store between steps, in every framework: weights, states and `state_dict` after 20 steps."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from frameworks import ONE_WAY, need
from optimizer_rig import accelerate_run, everything, lightning_run, peft_run, transformers_run, trl_runs, words
from optimizer_state.loops import LOOPS, STEPS
from optimizer_state.state_rig import assert_equal

from offload.optimizer_state import mover

pytestmark = pytest.mark.filterwarnings("ignore")
WORKER = Path(__file__).with_name("optimizer_state_worker.py")
ON = {"n_tensors": 0, "min_tensor_bytes": 256, "optimizer_state": True}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Small states have several chunks, are read ahead and written behind."""
    monkeypatch.setattr(mover, "CHUNK_BYTES", 16 << 10)
    monkeypatch.setattr(mover, "AHEAD_BYTES", 32 << 10)
    monkeypatch.setattr(mover, "BEHIND_BYTES", 16 << 10)


def assert_moved(report, steps=STEPS):
    [counts] = report.optimizer_state
    assert (counts.steps, counts.whole_steps, counts.failed, counts.held) == (steps, 0, 0, 0)
    assert counts.in_bytes >= counts.nbytes > 0


@pytest.mark.parametrize("loop", LOOPS, ids=words)
def test_loops_of_torch(loop, tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plain = loop(False, tmp_path).train()
        warned = len(told)
        moved = loop(True, tmp_path)
        assert_equal(moved.train(), plain)
    assert len(told) == 2 * warned
    for counts in moved.handle.report().optimizer_state:
        assert counts.tensors > 0
        assert counts.failed == counts.whole_steps == counts.held == 0
        assert counts.in_bytes > 0
    moved.handle.disable()
    after = [each.state_dict() for each in moved.optimizers]
    assert_equal(tuple(after), plain[2:])
    assert all(type(each.state).__name__ == "defaultdict" for each in moved.optimizers)
    moved.step(STEPS)


@pytest.mark.parametrize("how", ONE_WAY)
@pytest.mark.parametrize(
    "switches",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"gradient_accumulation_steps": 2},
        {"bf16": True, "max_grad_norm": 0.1},
        pytest.param({"optim": "adamw_torch_fused"}, marks=pytest.mark.long),
    ],
    ids=lambda switches: ", ".join(switches) or "plain",
)
def test_transformers_trainer(how, switches, tmp_path):
    plain, _ = transformers_run("plain", tmp_path, None, max_steps=STEPS, **switches)
    moved, handle = transformers_run(how, tmp_path, ON, max_steps=STEPS, **switches)
    assert_moved(handle.report())
    assert_equal(everything(moved.model, moved.optimizer), everything(plain.model, plain.optimizer))


@pytest.mark.parametrize(
    ("adapters", "how"),
    [
        pytest.param(False, "mixin", id="full-mixin"),
        pytest.param(True, "callback", id="adapters-callback"),
        pytest.param(True, "mixin", marks=pytest.mark.full, id="adapters-mixin"),
        pytest.param(False, "callback", marks=pytest.mark.full, id="full-callback"),
    ],
)
def test_trl_trainer(how, adapters, tmp_path, monkeypatch):
    need("trl")
    import test_trl as rig

    monkeypatch.setattr(rig, "ON", ON)
    changes = {"max_steps": STEPS, "peft_config": rig.ADAPTERS if adapters else None}
    plain, moved, handle = trl_runs(how, tmp_path, **changes)
    assert_moved(handle.report())
    assert_equal(everything(moved.model, moved.optimizer), everything(plain.model, plain.optimizer))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_adapters(kind):
    plain, optimizer, _ = peft_run(kind, None, STEPS)
    model, moved, handle = peft_run(kind, ON, STEPS)
    assert_moved(handle.report())
    assert_equal(everything(model, moved), everything(plain, optimizer))
    handle.disable()
    assert_equal(everything(model, moved), everything(plain, optimizer))


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.full), 2])
def test_accelerate(when, accumulated):
    plain, optimizer, _ = accelerate_run("", None, STEPS, accumulated, max_norm=0.5)
    model, moved, handle = accelerate_run(when, ON, STEPS, accumulated, max_norm=0.5)
    assert_moved(handle.report())
    assert_equal(everything(model, moved), everything(plain, optimizer))
    handle.disable()
    assert_equal(everything(model, moved), everything(plain, optimizer))


@pytest.mark.parametrize("how", ["automatic", "manual", "accumulate_grad_batches, gradient_clip_val"])
def test_lightning(how):
    need("lightning.pytorch")
    import test_lightning as rig

    switches = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1} if "clip" in how else {}

    callback = rig.OffloadCallback(**ON)
    found = lightning_run(how, callback, steps=STEPS, **switches)
    assert_moved(callback.report())
    assert_equal(found, lightning_run(how, steps=STEPS, **switches))


@pytest.mark.parametrize("asked", [True, "auto"])
def test_the_state_of_keras_own_optimizers_stays_and_that_is_said(asked):
    need("keras")
    import test_keras as rig

    plain, model = rig.make_model(), rig.make_model()
    callback = rig.OffloadCallback(n_tensors=-1, min_tensor_bytes=1, optimizer_state=asked)
    assert rig.fit(model, callback) == rig.fit(plain)
    rig.assert_same(model, plain)
    assert callback.report().optimizer_state == ()
    said = f"optimizer_state={asked!r} has no effect: the state of Keras's own optimizers stays in memory"
    assert said in callback.report().notes
    with pytest.raises(ValueError, match='optimizer_state takes "auto", True or False'):
        rig.OffloadCallback(optimizer_state="all")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each of two gloo processes found, by run."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    import test_torch_distributed as rig

    results = tmp_path_factory.mktemp("results")
    ran = rig.torchrun(WORKER, results)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads((results / str(rank)).read_text()) for rank in range(rig.RANKS)]


@pytest.mark.long
@pytest.mark.parametrize("run", ["model", "wrapper", "no_sync"])
def test_ddp_with_two_processes_moves_state(run, outcomes):
    for found in outcomes:
        assert (found[run]["is_equal"], found[run]["moves"]) == (True, True)


@pytest.mark.long
def test_the_state_of_fsdp2_moves(outcomes):
    """Of each DTensor, the local tensor."""
    for found in outcomes:
        assert (found["fsdp2"]["is_equal"], found["fsdp2"]["moves"]) == (True, True)


@pytest.mark.long
def test_a_plan_moves_the_state_of_fsdp2(outcomes):
    for found in outcomes:
        assert (found["auto"]["is_equal"], found["auto"]["moves"]) == (True, True), found["auto"]["row"]


@pytest.mark.long
def test_sharded_state_is_loaded_one_parameter_at_a_time(outcomes):
    """In memory are what is being written and the state of the next parameter."""
    of_one = 2 * 4 * 64 * 64 // 2
    written = 16 << 10
    for found in outcomes:
        loaded = found["loaded"]
        assert (loaded["is_equal"], loaded["moves"], loaded["kinds"]) == (True, True, ["DTensor", "Tensor"])
        assert loaded["bytes"] == 20 * of_one
        assert loaded["is_whole"]
        assert loaded["sharded"] == ["(Shard(dim=0),)", "DTensor", 32]
        assert of_one < loaded["peak_bytes"] <= written + of_one + 4096 < loaded["bytes"] / 2
