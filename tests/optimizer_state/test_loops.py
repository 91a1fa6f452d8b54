"""`offload.enable` with an optimizer: its arguments, its report. The loops are compared in tests/integrations."""

import pytest
import torch
from optimizer_state.loops import STEPS, Loop, Planned, make_model
from torch import nn

import offload


def test_the_report_says_what_moves(tmp_path):
    loop = Loop(True, tmp_path)
    loop.train()
    report = loop.handle.report()
    counts = report.optimizer_state[0]
    assert (counts.optimizer, counts.steps) == ("AdamW", STEPS)
    assert report.to_dict()["optimizer_state"][0]["out_bytes_per_step"] == counts.nbytes
    assert "leave memory between steps" in str(report)


def test_the_memory_that_moves_is_not_counted_as_activations(tmp_path):
    loop = Planned(True, tmp_path)
    loop.train()
    assert loop.handle._engine.unswapped.now == 0
    held = loop.handle._on_device.held.look()
    parameters = sum(p.nbytes for p in loop.model.parameters())
    state = loop.handle.report().optimizer_state[0].nbytes
    assert held.kept < parameters + state


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: {"optimizer_state": True}, "add optimizer=optimizer"),
        (lambda m: {"optimizer": optimizer_of(m), "optimizer_state": "yes"}, 'takes "auto", True or False'),
        (lambda m: {"optimizer": m, "optimizer_state": True}, "takes a torch.optim.Optimizer"),
        (lambda m: {"optimizer": optimizer_of(make_model()), "optimizer_state": True}, "no parameter of this model"),
    ],
)
def test_wrong_arguments_say_what_to_write(make, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        offload.enable(model, **make(model))
    offload.enable(model).disable()


def test_an_optimizer_belongs_to_one_session(tmp_path):
    loop = Loop(True, tmp_path)
    loop.train()
    loop.model.append(nn.Linear(10, 10))
    other = nn.Sequential(*loop.model)
    with pytest.raises(ValueError, match="is already used by an enabled model"):
        offload.enable(other, optimizer=loop.optimizer, optimizer_state=True)
    loop.handle.disable()


@pytest.mark.parametrize("choice", ["auto", False])
def test_otherwise_state_stays_in_memory(choice):
    model = make_model()
    optimizer = optimizer_of(model)
    with offload.enable(model, optimizer=optimizer, optimizer_state=choice) as handle:
        assert type(optimizer.state).__name__ == "defaultdict"
        assert handle.report().optimizer_state == ()
