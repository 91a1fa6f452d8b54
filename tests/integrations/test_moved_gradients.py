"""Gradients that leave in backward, in every framework: weights, states and `state_dict` after 20 steps."""

from __future__ import annotations

import pytest
import torch
from frameworks import ONE_WAY, need
from optimizer_rig import accelerate_run, everything, lightning_run, peft_run, transformers_run, trl_runs, words
from optimizer_state.loops import LOOPS, STEPS
from optimizer_state.state_rig import assert_equal
from process_group import destroy_process_group
from torch.nn.parallel import DistributedDataParallel

from offload.optimizer_state import mover
from offload.torch_compat.tensors import local_of

pytestmark = pytest.mark.filterwarnings("ignore")
MOVED = {"optimizer_state": True, "gradients": True}
ON = {"n_tensors": 0, "min_tensor_bytes": 256, **MOVED}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Small gradients have several chunks, are read ahead and written behind."""
    monkeypatch.setattr(mover, "CHUNK_BYTES", 16 << 10)
    monkeypatch.setattr(mover, "AHEAD_BYTES", 32 << 10)
    monkeypatch.setattr(mover, "BEHIND_BYTES", 16 << 10)


def assert_left(report, steps=STEPS):
    [counts] = report.gradients
    assert (counts.stays, counts.held, counts.failed) == ("", 0, 0)
    assert counts.out_bytes > 0
    assert counts.steps == steps


@pytest.mark.parametrize("loop", LOOPS, ids=words)
def test_loops_of_torch(loop, tmp_path):
    plain = loop(False, tmp_path).train()
    moved = loop(True, tmp_path, MOVED)
    assert_equal(moved.train(), plain)
    for counts in moved.handle.report().gradients:
        assert counts.out_bytes > 0
        assert counts.held == counts.failed == 0
    moved.handle.disable()
    moved.step(STEPS)


@pytest.mark.parametrize("how", ONE_WAY)
@pytest.mark.parametrize(
    "switches",
    [
        pytest.param({"max_grad_norm": 0.0}, marks=pytest.mark.long),
        pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.long),
        {"bf16": True, "max_grad_norm": 0.1},
    ],
    ids=lambda switches: ", ".join(switches),
)
def test_transformers_trainer(how, switches, tmp_path):
    plain, _ = transformers_run("plain", tmp_path, None, max_steps=STEPS, **switches)
    moved, handle = transformers_run(how, tmp_path, ON, max_steps=STEPS, **switches)
    assert_left(handle.report())
    assert handle.report().gradients[0].brought == 0
    assert_equal(everything(moved.model, moved.optimizer), everything(plain.model, plain.optimizer))


@pytest.mark.parametrize("how", ["mixin", pytest.param("callback", marks=pytest.mark.full)])
def test_trl_trainer(how, tmp_path, monkeypatch):
    need("trl")
    import test_trl as rig

    monkeypatch.setattr(rig, "ON", ON)
    plain, moved, handle = trl_runs(how, tmp_path, max_steps=STEPS)
    assert_left(handle.report())
    assert_equal(everything(moved.model, moved.optimizer), everything(plain.model, plain.optimizer))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_adapters(kind):
    plain, optimizer, _ = peft_run(kind, None, STEPS)
    model, moved, handle = peft_run(kind, ON, STEPS)
    assert_left(handle.report())
    assert_equal(everything(model, moved), everything(plain, optimizer))
    handle.disable()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_accelerate(accumulated):
    plain, optimizer, _ = accelerate_run("", None, STEPS, accumulated, max_norm=0.5)
    model, moved, handle = accelerate_run("after prepare", ON, STEPS, accumulated, max_norm=0.5)
    assert_left(handle.report())
    assert_equal(everything(model, moved), everything(plain, optimizer))
    handle.disable()


@pytest.mark.parametrize("how", ["automatic", "manual", "accumulate_grad_batches, gradient_clip_val"])
def test_lightning(how):
    need("lightning.pytorch")
    import test_lightning as rig

    switches = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1} if "clip" in how else {}
    callback = rig.OffloadCallback(**ON)
    found = lightning_run(how, callback, steps=STEPS, **switches)
    assert_left(callback.report())
    assert_equal(found, lightning_run(how, steps=STEPS, **switches))


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_gradients_of_several_processes_stay(kind, tmp_path):
    from torch.distributed.fsdp import fully_shard

    import offload

    def train(is_moved):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8))
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store{is_moved}", rank=0, world_size=1)
        try:
            outer = fully_shard(model) if kind == "FSDP2" else model
            optimizer = torch.optim.AdamW(model.parameters())
            handle = offload.enable(model, optimizer=optimizer, spill_dir=tmp_path, **ON) if is_moved else None
            outer = DistributedDataParallel(model) if kind == "DDP" else outer
            for number in range(STEPS):
                optimizer.zero_grad()
                x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
                outer(x).square().mean().backward()
                optimizer.step()
            found = [[local_of(p).clone() for p in model.parameters()], states(optimizer)]
        finally:
            destroy_process_group()
        return found, handle

    expected, _ = train(False)
    found, handle = train(True)
    assert_equal(found, expected)
    report = handle.report()
    assert report.gradients[0].out_bytes == 0
    assert report.optimizer_state[0].in_bytes > 0
    handle.disable()


def states(optimizer):
    return [[local_of(value).clone() for value in each.values()] for each in optimizer.state_dict()["state"].values()]


def test_gradients_of_kerass_own_optimizers():
    need("keras")
    import test_keras as rig

    with pytest.raises(ValueError, match="gradients=True cannot be used with Keras"):
        rig.OffloadCallback(gradients=True)
