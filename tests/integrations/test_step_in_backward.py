"""Parameters that are updated in backward, in every framework: equal to the last bit, or refused with what to do."""

from __future__ import annotations

import pytest
import torch
from frameworks import ONE_WAY, need
from optimizer_rig import accelerate_run, everything, lightning_run, peft_run, transformers_run, trl_runs, words
from optimizer_state import loops
from optimizer_state.state_rig import assert_equal
from process_group import destroy_process_group
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.optimizer_state import mover
from offload.optimizer_state.freed_gradient import FreedGradient

pytestmark = pytest.mark.filterwarnings("ignore")
IN_BACKWARD = {"step_in_backward": True}
MOVED = {"step_in_backward": True, "optimizer_state": True}
ON = {"n_tensors": 0, "min_tensor_bytes": 256, **MOVED}
NEED_ALL = [loops.Scaler, loops.ScalerOfFused, loops.Accumulation, loops.Clipping, loops.HookThatClips]
LOOPS = [each for each in loops.LOOPS if each not in NEED_ALL]
HOW = pytest.mark.parametrize("how", ONE_WAY)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Small states are read ahead and written behind."""
    monkeypatch.setattr(mover, "AHEAD_BYTES", 32 << 10)
    monkeypatch.setattr(mover, "BEHIND_BYTES", 16 << 10)


def assert_all_in_backward(report, steps=loops.STEPS):
    [counts] = report.step_in_backward
    assert (counts.steps, counts.at_step) == (steps, 0)
    assert counts.in_backward > 0
    assert counts.freed_bytes > 0
    [moved] = report.optimizer_state
    assert (moved.steps, moved.whole_steps, moved.failed, moved.held) == (steps, 0, 0, 0)
    assert moved.in_bytes > 0


@pytest.mark.parametrize(
    "asked", [pytest.param(IN_BACKWARD, marks=pytest.mark.full, id="state in memory"), pytest.param(MOVED, id="moved")]
)
@pytest.mark.parametrize("loop", LOOPS, ids=words)
def test_loops_that_step_in_backward(loop, asked, tmp_path):
    plain = loop(False, tmp_path).train()
    stepped = loop(True, tmp_path, asked)
    weights, gradients, *states = stepped.train()
    assert_equal((weights, *states), (plain[0], *plain[2:]))
    is_gone = [isinstance(gradient, FreedGradient) for gradient in gradients]
    own = {id(p) for each in stepped.optimizers for group in each.param_groups for p in group["params"]}
    had_one = [gradient is not None for gradient in plain[1]]
    assert is_gone == [had and id(p) in own for had, p in zip(had_one, stepped.model.parameters(), strict=True)]
    report = stepped.handle.report()
    assert sum(counts.in_backward for counts in report.step_in_backward) == sum(is_gone)
    assert all(counts.freed_bytes > 0 for counts in report.step_in_backward)
    assert all(c.in_bytes > 0 and c.failed == c.held == c.whole_steps == 0 for c in report.optimizer_state)
    stepped.handle.disable()
    stepped.model.zero_grad()
    stepped.step(loops.STEPS)


@pytest.mark.parametrize("loop", NEED_ALL, ids=words)
def test_loops_that_need_all_gradients(loop, tmp_path):
    with pytest.raises(offload.StepInBackwardError, match="step_in_backward=False"):
        loop(True, tmp_path, MOVED).train()


@HOW
@pytest.mark.parametrize(
    "switches", [pytest.param({}, id="plain"), pytest.param({"bf16": True}, id="bf16", marks=pytest.mark.full)]
)
def test_transformers_trainer_steps_in_backward(how, switches, tmp_path):
    switches = {
        "max_steps": loops.STEPS,
        "max_grad_norm": 0.0,
        "logging_strategy": "steps",
        "logging_steps": 5,
        **switches,
    }
    plain, _ = transformers_run("plain", tmp_path, None, **switches)
    stepped, handle = transformers_run(how, tmp_path, ON, **switches)
    assert all(any("loss" in each for each in trainer.state.log_history) for trainer in (plain, stepped))
    assert_all_in_backward(handle.report())
    assert_equal(everything(stepped.model, stepped.optimizer), everything(plain.model, plain.optimizer))
    assert "_get_grad_norm" not in vars(stepped)


@HOW
@pytest.mark.parametrize("switches", [{"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}], ids=", ".join)
def test_transformers_trainer_that_needs_all_gradients(how, switches, tmp_path):
    [name] = switches
    with pytest.raises(ValueError, match=f"TrainingArguments\\({name}=.* needs all gradients after backward"):
        transformers_run(how, tmp_path, ON, **{"max_grad_norm": 0.0, **switches})


@HOW
@pytest.mark.parametrize(
    "adapters", [pytest.param(False, id="full"), pytest.param(True, id="adapters", marks=pytest.mark.full)]
)
def test_trl_trainer_steps_in_backward(how, adapters, tmp_path, monkeypatch):
    need("trl")
    import test_trl as rig

    monkeypatch.setattr(rig, "ON", ON)
    changes = {"max_steps": loops.STEPS, "max_grad_norm": 0.0, "peft_config": rig.ADAPTERS if adapters else None}
    plain, stepped, handle = trl_runs(how, tmp_path, **changes)
    assert_all_in_backward(handle.report())
    assert_equal(everything(stepped.model, stepped.optimizer), everything(plain.model, plain.optimizer))


@HOW
def test_trl_trainer_that_needs_all_gradients(how, tmp_path, monkeypatch):
    need("trl")
    import test_trl as rig

    monkeypatch.setattr(rig, "ON", ON)
    with pytest.raises(ValueError, match=r"SFTConfig\(max_grad_norm=1.0\), which max_grad_norm=0 switches off"):
        rig.make_trainer(tmp_path, how, max_steps=1).train()


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.full)])
def test_peft_adapters_step_in_backward(kind):
    plain, optimizer, _ = peft_run(kind, None, loops.STEPS)
    model, stepped, handle = peft_run(kind, ON, loops.STEPS)
    assert_all_in_backward(handle.report())
    assert_equal(everything(model, stepped), everything(plain, optimizer))
    handle.disable()


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_accelerate_steps_in_backward(when):
    plain, optimizer, _ = accelerate_run("", None, loops.STEPS)
    model, stepped, handle = accelerate_run(when, ON, loops.STEPS)
    assert_all_in_backward(handle.report())
    assert_equal(everything(model, stepped), everything(plain, optimizer))
    handle.disable()


@pytest.mark.parametrize("switches", [{"accumulated": 2}, {"max_norm": 0.5}], ids=", ".join)
def test_accelerate_that_needs_all_gradients(switches):
    with pytest.raises(offload.StepInBackwardError, match="step_in_backward=False"):
        accelerate_run("after prepare", ON, loops.STEPS, **switches)


@pytest.mark.parametrize("how", ["automatic", "manual"])
def test_lightning_steps_in_backward(how):
    need("lightning.pytorch")
    import test_lightning as rig

    callback = rig.OffloadCallback(**ON)
    found = lightning_run(how, callback, steps=loops.STEPS)
    assert_all_in_backward(callback.report())
    assert_equal(found, lightning_run(how, steps=loops.STEPS))


@pytest.mark.parametrize("switches", [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=", ".join)
def test_lightning_that_needs_all_gradients(switches):
    need("lightning.pytorch")
    import test_lightning as rig

    [name] = switches
    with pytest.raises(ValueError, match=f"Trainer\\({name}=.* needs all gradients after backward"):
        lightning_run("automatic", rig.OffloadCallback(**ON), steps=loops.STEPS, **switches)


def test_kerass_own_optimizers_do_not_step_in_backward():
    need("keras")
    import test_keras as rig

    with pytest.raises(ValueError, match="step_in_backward=True cannot be used with Keras"):
        rig.OffloadCallback(step_in_backward=True)


@pytest.mark.parametrize("which", ["DDP", "the model in it", "FSDP2"])
def test_gradients_that_processes_reduce(which):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        inner = torch.nn.Linear(16, 16)
        model = fully_shard(inner) if which == "FSDP2" else DistributedDataParallel(inner)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match="a process group is initialized, and gradients"):
            offload.enable(inner if which == "the model in it" else model, optimizer=optimizer, **ON)
    finally:
        destroy_process_group()
