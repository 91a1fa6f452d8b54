"""Gradients that leave in backward, in every framework: weights, states and `state_dict` after 20 steps."""

from __future__ import annotations

import re

import pytest
import torch
from frameworks import need
from optimizer_state.loops import LOOPS, STEPS
from optimizer_state.state_rig import assert_equal
from torch.nn.parallel import DistributedDataParallel

from offload.optimizer_state import mover

pytestmark = pytest.mark.filterwarnings("ignore")
MOVED = {"optimizer_state": True, "gradients": True}
ON = {"n_tensors": 0, "min_tensor_bytes": 256, **MOVED}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Small gradients have several chunks, are read ahead and written behind."""
    monkeypatch.setattr(mover, "CHUNK_BYTES", 16 << 10)
    monkeypatch.setattr(mover, "AHEAD_BYTES", 32 << 10)
    monkeypatch.setattr(mover, "BEHIND_BYTES", 16 << 10)


def words(loop):
    """A class's name as words."""
    return re.sub(r"(?<=[a-z])([A-Z])", r" \1", loop.__name__).lower().replace("loop", "plain loop")


def everything(model, optimizer):
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


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


@pytest.mark.parametrize("how", ["mixin", "callback"])
@pytest.mark.parametrize(
    "switches",
    [{"max_grad_norm": 0.0}, {"gradient_accumulation_steps": 2}, {"bf16": True, "max_grad_norm": 0.1}],
    ids=lambda switches: ", ".join(switches),
)
def test_transformers_trainer(how, switches, tmp_path):
    need("transformers")
    import test_transformers as rig

    def train(is_moved):
        given = {"args": rig.arguments(tmp_path, max_steps=STEPS, **switches), "train_dataset": rig.Rows()}
        if is_moved and how == "mixin":
            trainer = rig.OffloadUnshuffled(model=rig.make_model(), offload=ON, **given)
        else:
            callbacks = [rig.OffloadTrainerCallback(**ON)] if is_moved else []
            trainer = rig.Unshuffled(model=rig.make_model(), callbacks=callbacks, **given)
        trainer.train()
        handle = is_moved and (trainer.offload_handle if how == "mixin" else callbacks[0].handle)
        return trainer.model, trainer.optimizer, handle

    plain, optimizer, _ = train(False)
    model, moved, handle = train(True)
    assert_left(handle.report())
    assert handle.report().gradients[0].brought == 0
    assert_equal(everything(model, moved), everything(plain, optimizer))


def test_gradients_of_several_processes_stay(tmp_path):
    import offload

    def train(is_moved):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        handle = offload.enable(model, optimizer=optimizer, spill_dir=tmp_path, **ON) if is_moved else None
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store{is_moved}", rank=0, world_size=1)
        try:
            outer = DistributedDataParallel(model)
            for number in range(3):
                optimizer.zero_grad()
                x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
                outer(x).square().mean().backward()
                optimizer.step()
        finally:
            torch.distributed.destroy_process_group()
        return everything(model, optimizer), handle

    expected, _ = train(False)
    found, handle = train(True)
    assert_equal(found, expected)
    assert handle.report().gradients[0].out_bytes == 0
    handle.disable()
