"""All parameters in the store while no module uses them, in every framework: weights, states and what is saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import test_step_in_backward as in_backward
import torch
from frameworks import ONE_WAY, need
from optimizer_state import loops
from optimizer_state.state_rig import assert_equal
from parameters.frozen_rig import STEPS, everything, loss_of, make_model
from some_rows import one_in

import offload

pytestmark = pytest.mark.filterwarnings("ignore")
WORKER = Path(__file__).with_name("frozen_parameters_worker.py")
IN_CHUNKS = {"parameters": "all", "optimizer_state": True}
IN_BACKWARD = {**IN_CHUNKS, "step_in_backward": True}
ON = {"n_tensors": -1, "min_tensor_bytes": 256, **IN_CHUNKS}
HOW = pytest.mark.parametrize("how", ONE_WAY)
ALONE = [loops.Loop, loops.Scaler, loops.Clipping, loops.Frozen]


def assert_moved(report, steps=STEPS):
    counts = report.moved_parameters
    assert (counts.failed, counts.held) == (0, 0)
    assert counts.trained > 0
    assert counts.rewritten >= (steps - 1) * counts.trained


@pytest.mark.parametrize(
    ("loop", "asked"),
    one_in(
        3,
        [
            *(
                pytest.param(each, IN_BACKWARD, id=f"{in_backward.words(each)}, in backward")
                for each in in_backward.LOOPS
            ),
            *(pytest.param(each, IN_CHUNKS, id=f"{in_backward.words(each)}, in chunks") for each in loops.LOOPS),
            *(pytest.param(each, {"parameters": "all"}, id=f"{in_backward.words(each)}, alone") for each in ALONE),
        ],
    ),
)
def test_trained_loops(loop, asked, tmp_path):
    plain, moved = loop(False, tmp_path), loop(True, tmp_path, asked)
    expected, found = plain.train(), moved.train()
    assert_equal((found[0], *found[2:]), (expected[0], *expected[2:]))
    counts = moved.handle.report().moved_parameters
    assert counts.tensors > 0
    assert counts.failed == counts.held == 0
    moved.handle.disable()
    assert_equal([p.detach() for p in moved.model.parameters()], [p.detach() for p in plain.model.parameters()])


@HOW
@pytest.mark.parametrize("kind", one_in(2, ["in backward", "in chunks"]))
def test_trained_transformers_trainer(how, kind, tmp_path):
    need("transformers")
    options = {**ON, **(IN_BACKWARD if kind == "in backward" else {})}
    needs_all = {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
    switches = {"max_steps": STEPS, **({"max_grad_norm": 0.0} if kind == "in backward" else needs_all)}
    plain, _ = in_backward.transformers_run("plain", tmp_path, None, **switches)
    moved, handle = in_backward.transformers_run(how, tmp_path, options, **switches)
    assert_moved(handle.report())
    both = [in_backward.everything(each.model, each.optimizer) for each in (moved, plain)]
    assert_equal(*both)
    for name, trainer in (("moved", moved), ("plain", plain)):
        trainer.save_model(str(tmp_path / name))
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("moved", "plain")]
    assert saved[0] == saved[1]


@HOW
@pytest.mark.parametrize("kind", one_in(2, ["in backward", "in chunks"]))
def test_trained_trl_trainer(how, kind, tmp_path, monkeypatch):
    need("trl")
    import test_trl as rig

    monkeypatch.setattr(rig, "ON", {**ON, **(IN_BACKWARD if kind == "in backward" else {})})
    switches = {"max_grad_norm": 0.0} if kind == "in backward" else {"max_grad_norm": 0.1}
    plain, moved, handle = in_backward.trl_runs(how, tmp_path, max_steps=STEPS, **switches)
    assert_moved(handle.report())
    assert_equal(*[in_backward.everything(each.model, each.optimizer) for each in (moved, plain)])


@pytest.mark.parametrize("kind", ["in backward", "in chunks"])
def test_trained_peft_adapters(kind):
    options = {**ON, **(IN_BACKWARD if kind == "in backward" else {})}
    plain, optimizer, _ = in_backward.peft_run("lora", None, STEPS)
    model, moved, handle = in_backward.peft_run("lora", options, STEPS)
    report = handle.report()
    assert_moved(report)
    assert report.moved_parameters.trained < report.moved_parameters.tensors, "the base model moves too"
    assert_equal(in_backward.everything(model, moved), in_backward.everything(plain, optimizer))
    handle.disable()
    assert_equal(in_backward.everything(model, moved), in_backward.everything(plain, optimizer))


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_trained_accelerate(when):
    need("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def run(is_moved):
        accelerator = Accelerator(cpu=True)
        model = make_model().requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = None
        if is_moved and when == "before prepare":
            handle = offload.enable(model, optimizer=optimizer, **ON)
        model, prepared = accelerator.prepare(model, optimizer)
        if is_moved and handle is None:
            handle = offload.enable(model, optimizer=prepared.optimizer, **ON)
        torch.manual_seed(0)
        for number in range(STEPS):
            prepared.zero_grad()
            accelerator.backward(loss_of(model, number))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            prepared.step()
        if is_moved:
            assert_moved(handle.report())
        found = list(accelerator.get_state_dict(model).values())
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return found, optimizer.state_dict()

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("kind", ["in backward", "in chunks"])
def test_trained_lightning(kind, tmp_path):
    need("lightning")
    import lightning

    from offload.integrations.lightning import OffloadCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model().requires_grad_(True)

        def training_step(self, batch, index):
            return loss_of(self.model, index)

        def forward(self, x):
            return self.model(x)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def run(is_moved):
        options = {**ON, **(IN_BACKWARD if kind == "in backward" else {})}
        callbacks = [OffloadCallback(**options)] if is_moved else []
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
            assert_moved(callbacks[0].handle.report())
        return everything(module)

    assert_equal(run(True), run(False))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(f"DDP, enabled {when}", marks=pytest.mark.full) for when in ("before", "after")), "FSDP2"],
)
def test_trained_several_processes(kind, tmp_path):
    command = [sys.executable, str(WORKER), kind, str(tmp_path), "all"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["equal"] == [True, True]
    assert all(found["in_bytes"]) == (kind != "FSDP2")
    said = 'parameters="all" moves nothing: FSDP shards the parameters, and gathers and frees them itself'
    assert [said in notes for notes in found["notes"]] == [kind == "FSDP2"] * 2
