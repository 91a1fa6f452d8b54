"""Frozen parameters in the store while no module uses them, in every framework: losses, weights and what is saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from frameworks import ONE_WAY, need
from optimizer_state.state_rig import assert_equal
from parameters.frozen_rig import STEPS, Model, assert_away, everything, loss_of, make_model, train, trained

import offload

pytestmark = pytest.mark.filterwarnings("ignore")
WORKER = Path(__file__).with_name("frozen_parameters_worker.py")
ON = {"n_tensors": -1, "min_tensor_bytes": 256, "parameters": "frozen"}


def assert_moved(report):
    counts = report.moved_parameters
    assert (counts.failed, counts.held, counts.rewritten) == (0, 0, 0)
    assert counts.tensors > 0
    assert counts.in_bytes > STEPS * counts.nbytes


@pytest.mark.parametrize("switches", [{}, {"memory_limit": "64MiB", "n_tensors": None}], ids=["manual", "limit"])
def test_frozen_plain_loop(switches):
    plain, moved = make_model(), make_model()
    handle = offload.enable(moved, **{**ON, **switches})
    assert_equal(train(moved), train(plain))
    assert_moved(handle.report())
    handle.disable()
    assert_equal(everything(moved), everything(plain))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_frozen_peft_adapters(kind, tmp_path):
    need("peft")
    import test_peft as rig

    def run(is_moved):
        model = rig.make_model(**rig.KINDS[kind])
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        handle = offload.enable(model, **ON) if is_moved else None
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(input_ids=rig.tokens(step), labels=rig.tokens(step)).loss
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
        if is_moved:
            assert_moved(handle.report())
        model.save_pretrained(tmp_path / str(is_moved))
        model.eval()
        said = model.generate(input_ids=rig.tokens(0)[:, :4], max_new_tokens=4, do_sample=False)
        merged = model.merge_and_unload()
        return losses, said, everything(merged), merged(input_ids=rig.tokens(1)).logits

    assert_equal(run(True), run(False))
    files = sorted(path.name for path in (tmp_path / "True").iterdir())
    for name in files:
        assert (tmp_path / "True" / name).read_bytes() == (tmp_path / "False" / name).read_bytes()


@pytest.mark.parametrize("how", ONE_WAY)
def test_frozen_trl_trainer(how, tmp_path, monkeypatch):
    need("trl")
    import test_trl as rig

    monkeypatch.setattr(rig, "ON", ON)
    changes = {"max_steps": STEPS, "peft_config": rig.ADAPTERS}
    plain, moved = (rig.make_trainer(tmp_path, each, **changes) for each in ("plain", how))
    for trainer in (plain, moved):
        torch.manual_seed(1)
        trainer.train()
    assert rig.handle_of(moved).report().moved_parameters.in_bytes > 0
    assert_equal(everything(moved.model), everything(plain.model))


@pytest.mark.parametrize("how", ONE_WAY)
def test_frozen_transformers_trainer(how, tmp_path):
    need("transformers")
    import test_transformers as rig

    def run(is_moved):
        model = rig.make_model()
        for parameter in list(model.parameters())[:-4]:
            parameter.requires_grad_(False)
        given = {"args": rig.arguments(tmp_path / str(is_moved), max_steps=STEPS), "train_dataset": rig.Rows()}
        if is_moved and how == "mixin":
            trainer = rig.OffloadUnshuffled(model=model, offload=ON, **given)
        else:
            callbacks = [rig.OffloadTrainerCallback(**ON)] if is_moved else []
            trainer = rig.Unshuffled(model=model, callbacks=callbacks, **given)
        trainer.train()
        if is_moved:
            handle = trainer.offload_handle if how == "mixin" else callbacks[0].handle
            assert handle.report().moved_parameters.in_bytes > 0
        trainer.save_model(str(tmp_path / str(is_moved)))
        return everything(trainer.model)

    assert_equal(run(True), run(False))
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("True", "False")]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_frozen_accelerate(when):
    need("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def run(is_moved):
        accelerator = Accelerator(cpu=True)
        model = make_model()
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        handle = offload.enable(model, **ON) if is_moved and when == "before prepare" else None
        model, optimizer = accelerator.prepare(model, optimizer)
        if is_moved and when == "after prepare":
            handle = offload.enable(model, **ON)
        torch.manual_seed(0)
        for number in range(STEPS):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, number))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if is_moved:
            assert_moved(handle.report())
        found = list(accelerator.get_state_dict(model).values())
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return found

    assert_equal(run(True), run(False))


def test_frozen_lightning(tmp_path):
    need("lightning")
    import lightning

    from offload.integrations.lightning import OffloadCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, index):
            return loss_of(self.model, index)

        def forward(self, x):
            return self.model(x)

        def configure_optimizers(self):
            return torch.optim.AdamW(trained(self.model), lr=1e-2)

    def run(is_moved):
        callbacks = [OffloadCallback(**ON)] if is_moved else []
        module = Module()
        torch.manual_seed(0)
        lightning.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            callbacks=callbacks,
        ).fit(module, list(range(STEPS)))
        if is_moved:
            assert callbacks[0].handle.report().moved_parameters.in_bytes > 0
        return everything(module)

    assert_equal(run(True), run(False))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["DDP, enabled before", pytest.param("DDP, enabled after", marks=pytest.mark.full), "FSDP2"]
)
def test_frozen_several_processes(kind, tmp_path):
    command = [sys.executable, str(WORKER), kind, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["equal"] == [True, True]
    assert all(found["in_bytes"]) == (kind != "FSDP2")
    said = 'parameters="frozen" moves nothing: FSDP shards the parameters, and gathers and frees them itself'
    assert [said in notes for notes in found["notes"]] == [kind == "FSDP2"] * 2


def test_frozen_a_part_of_the_model_is_enabled():
    plain, moved = make_model(), make_model()
    handles = [offload.enable(block, **ON) for block in moved.blocks]
    assert_equal(train(moved), train(plain))
    for handle, block in zip(handles, moved.blocks, strict=True):
        assert handle.report().moved_parameters.in_bytes > 0
        assert_away(block)
    assert isinstance(moved, Model)
