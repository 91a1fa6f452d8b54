"""Parameters that are updated in backward, in every framework: equal to the last bit, or refused with what to do."""

from __future__ import annotations

import re
from contextlib import contextmanager

import pytest
import torch
from frameworks import need
from optimizer_state import loops
from optimizer_state.state_rig import assert_equal
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
HOW = pytest.mark.parametrize("how", ["mixin", "callback"])


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Small states are read ahead and written behind."""
    monkeypatch.setattr(mover, "AHEAD_BYTES", 32 << 10)
    monkeypatch.setattr(mover, "BEHIND_BYTES", 16 << 10)


def everything(model, optimizer):
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


def assert_all_in_backward(report, steps=loops.STEPS):
    [counts] = report.step_in_backward
    assert (counts.steps, counts.at_step) == (steps, 0)
    assert counts.in_backward > 0
    assert counts.freed_bytes > 0
    [moved] = report.optimizer_state
    assert (moved.steps, moved.whole_steps, moved.failed, moved.held) == (steps, 0, 0, 0)
    assert moved.in_bytes > 0


def words(loop):
    """A class's name as words."""
    return re.sub(r"(?<=[a-z])([A-Z])", r" \1", loop.__name__).lower().replace("loop", "plain loop")


@pytest.mark.parametrize(
    "asked", [pytest.param(IN_BACKWARD, marks=pytest.mark.long, id="state in memory"), pytest.param(MOVED, id="moved")]
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


def transformers_run(how, folder, options, **switches):
    """What `train` leaves: model, optimizer and, with offload, the handle."""
    import test_transformers as rig

    switches = {"max_grad_norm": 0.0, "logging_strategy": "steps", "logging_steps": 5, **switches}
    given = {"args": rig.arguments(folder, max_steps=loops.STEPS, **switches), "train_dataset": rig.Rows()}
    if how == "mixin":
        trainer = rig.OffloadUnshuffled(model=rig.make_model(), offload=options, **given)
    else:
        callbacks = [rig.OffloadTrainerCallback(**options)] if options else []
        trainer = rig.Unshuffled(model=rig.make_model(), callbacks=callbacks, **given)
    trainer.train()
    assert any("loss" in each for each in trainer.state.log_history)
    handle = options and (trainer.offload_handle if how == "mixin" else callbacks[0].handle)
    return trainer, handle


@HOW
@pytest.mark.parametrize(
    "switches", [pytest.param({}, id="plain"), pytest.param({"bf16": True}, id="bf16", marks=pytest.mark.long)]
)
def test_transformers_trainer_steps_in_backward(how, switches, tmp_path):
    need("transformers")
    plain, _ = transformers_run("plain", tmp_path, None, **switches)
    stepped, handle = transformers_run(how, tmp_path, ON, **switches)
    assert_all_in_backward(handle.report())
    assert_equal(everything(stepped.model, stepped.optimizer), everything(plain.model, plain.optimizer))
    assert "_get_grad_norm" not in vars(stepped)


@HOW
@pytest.mark.parametrize("switches", [{"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}], ids=", ".join)
def test_transformers_trainer_that_needs_all_gradients(how, switches, tmp_path):
    need("transformers")
    [name] = switches
    with pytest.raises(ValueError, match=f"TrainingArguments\\({name}=.* needs all gradients after backward"):
        transformers_run(how, tmp_path, ON, **switches)


@HOW
@pytest.mark.parametrize(
    "adapters", [pytest.param(False, id="full"), pytest.param(True, id="adapters", marks=pytest.mark.long)]
)
def test_trl_trainer_steps_in_backward(how, adapters, tmp_path, monkeypatch):
    need("trl")
    import test_trl as rig

    monkeypatch.setattr(rig, "ON", ON)
    changes = {"max_steps": loops.STEPS, "max_grad_norm": 0.0, "peft_config": rig.ADAPTERS if adapters else None}
    plain, stepped = (rig.make_trainer(tmp_path, each, **changes) for each in ("plain", how))
    for trainer in (plain, stepped):
        torch.manual_seed(1)
        trainer.train()
    assert_all_in_backward(rig.handle_of(stepped).report())
    assert_equal(everything(stepped.model, stepped.optimizer), everything(plain.model, plain.optimizer))


@HOW
def test_trl_trainer_that_needs_all_gradients(how, tmp_path, monkeypatch):
    need("trl")
    import test_trl as rig

    monkeypatch.setattr(rig, "ON", ON)
    with pytest.raises(ValueError, match=r"SFTConfig\(max_grad_norm=1.0\), which max_grad_norm=0 switches off"):
        rig.make_trainer(tmp_path, how, max_steps=1).train()


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.long)])
def test_peft_adapters_step_in_backward(kind):
    need("peft")
    import test_peft as rig

    def train(is_on):
        model = rig.make_model(**rig.KINDS[kind])
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        handle = offload.enable(model, optimizer=optimizer, **ON) if is_on else None
        for step in range(loops.STEPS):
            optimizer.zero_grad()
            model(input_ids=rig.tokens(step), labels=rig.tokens(step)).loss.backward()
            optimizer.step()
        return model, optimizer, handle

    plain, optimizer, _ = train(False)
    model, stepped, handle = train(True)
    assert_all_in_backward(handle.report())
    assert_equal(everything(model, stepped), everything(plain, optimizer))
    handle.disable()


@contextmanager
def accelerator(**switches):
    need("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        yield Accelerator(cpu=True, **switches)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def accelerated(when, accumulated=1, max_norm=None):
    with accelerator(gradient_accumulation_steps=accumulated) as its:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 3))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.9)
        handle = offload.enable(model, optimizer=inner, **ON) if when == "before prepare" else None
        model, optimizer, scheduler = its.prepare(model, inner, scheduler)
        if when == "after prepare":
            handle = offload.enable(model, optimizer=optimizer.optimizer, **ON)
        for step in range(accumulated * loops.STEPS):
            with its.accumulate(model):
                its.backward(model(torch.full((8, 16), 0.1 * step)).square().mean())
                if max_norm is not None:
                    its.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return model, optimizer, handle


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_accelerate_steps_in_backward(when):
    plain, optimizer, _ = accelerated("")
    model, stepped, handle = accelerated(when)
    assert_all_in_backward(handle.report())
    assert_equal(everything(model, stepped), everything(plain, optimizer))
    handle.disable()


@pytest.mark.parametrize("switches", [{"accumulated": 2}, {"max_norm": 0.5}], ids=", ".join)
def test_accelerate_that_needs_all_gradients(switches):
    with pytest.raises(offload.StepInBackwardError, match="step_in_backward=False"):
        accelerated("after prepare", **switches)


def lightning_run(how, *callbacks, **switches):
    import test_lightning as rig

    model = rig.make(rig.Manual if how == "manual" else rig.Net)
    trainer = rig.fit(model, *callbacks, max_epochs=-1, max_steps=loops.STEPS, **switches)
    return everything(model, trainer.optimizers[0])


@pytest.mark.parametrize("how", ["automatic", "manual"])
def test_lightning_steps_in_backward(how):
    need("lightning.pytorch")
    import test_lightning as rig

    callback = rig.OffloadCallback(**ON)
    found = lightning_run(how, callback)
    assert_all_in_backward(callback.report())
    assert_equal(found, lightning_run(how))


@pytest.mark.parametrize("switches", [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=", ".join)
def test_lightning_that_needs_all_gradients(switches):
    need("lightning.pytorch")
    import test_lightning as rig

    [name] = switches
    with pytest.raises(ValueError, match=f"Trainer\\({name}=.* needs all gradients after backward"):
        lightning_run("automatic", rig.OffloadCallback(**ON), **switches)


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
        torch.distributed.destroy_process_group()
