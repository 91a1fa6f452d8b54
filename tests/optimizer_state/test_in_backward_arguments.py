"""`step_in_backward` at `enable`: optimizers that cannot, arguments that contradict; clipping by the handle."""

import math
import re

import pytest
import torch
from optimizer_state.state_rig import assert_equal
from optimizer_state.users_rig import Momentum, On, everything, loss_of, make_model, train
from torch import nn
from torch.optim import AdamW

import offload


class DrawsNumbers(Momentum):
    def extra(self):
        self.noise = [torch.randn(()) for _ in self.with_gradient]

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.with_gradient:
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


class IsFreed(Momentum):
    def __del__(self):
        pass


KINDS = {
    "LBFGS": (torch.optim.LBFGS, {}, "LBFGS uses the state of all parameters"),
    "capturable": (AdamW, {"capturable": True}, "may run in a CUDA graph"),
    "differentiable": (AdamW, {"differentiable": True}, "differentiable=True"),
    "random numbers": (DrawsNumbers, {}, "in any order"),
    "a finalizer": (IsFreed, {}, "__del__"),
}


@pytest.mark.parametrize("which", KINDS)
def test_optimizers_that_are_refused(which, tmp_path):
    kind, options, said = KINDS[which]
    model = make_model()
    optimizer = kind(model.parameters(), **options)
    with pytest.raises(ValueError, match=f"cannot be used with this {kind.__name__}: .*{said}"):
        offload.enable(model, optimizer=optimizer, step_in_backward=True, spill_dir=tmp_path)
    assert not optimizer._optimizer_step_pre_hooks
    offload.enable(model, n_tensors=0).disable()


def test_arguments_that_are_refused(tmp_path):
    model = make_model()
    optimizer, other = AdamW(model.parameters()), AdamW(model[0].parameters())
    for given, said in (
        ({}, "needs the optimizer"),
        ({"optimizer": []}, "step_in_backward=True needs the optimizer"),
        ({"optimizer": (), "optimizer_state": True}, "optimizer_state=True needs the optimizer"),
        ({"optimizer": [optimizer, other]}, "parameter 0.weight is in two optimizers"),
        ({"optimizer": optimizer, "step_in_backward": "yes"}, "takes True or False"),
    ):
        with pytest.raises(ValueError, match=said):
            offload.enable(model, **{"step_in_backward": True, **given})
    mixed = AdamW([*model.parameters(), nn.Parameter(torch.ones(1, device="meta"))])
    with pytest.raises(ValueError, match="group 0 has parameters of several kinds or devices; give foreach=True"):
        offload.enable(model, optimizer=mixed, step_in_backward=True)
    handle = offload.enable(model, optimizer=optimizer, step_in_backward=True)
    for asked in ({"step_in_backward": True}, {"optimizer_state": True}):
        with pytest.raises(ValueError, match="used by an enabled model; give it to one"):
            offload.enable(nn.Sequential(*make_model(), model[0]), optimizer=optimizer, **asked)
    handle.disable()


def test_a_process_group(tmp_path):
    model = make_model()
    optimizer = AdamW(model.parameters())
    handle = offload.enable(model, optimizer=optimizer, step_in_backward=True, n_tensors=0)
    before = everything(model, optimizer)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(offload.StepInBackwardError, match="a process group is initialized"):
            train(model, optimizer, 1)
        assert_equal(everything(model, optimizer), before)
        handle.disable()
        with pytest.raises(ValueError, match="a process group is initialized"):
            offload.enable(model, optimizer=optimizer, step_in_backward=True)
    finally:
        torch.distributed.destroy_process_group()


def test_a_step_with_other_arguments(tmp_path):
    on, model = On(True, tmp_path, step_in_backward=True), make_model()
    optimizer = Momentum(model.parameters())
    on(model, optimizer)
    loss_of(model, 0).backward()
    with pytest.raises(offload.StepInBackwardError, match="may call its closure more than once"):
        optimizer.step(lambda: loss_of(model, 0))
    with pytest.raises(offload.StepInBackwardError, match="other arguments than a closure"):
        optimizer.step(None, 1)
    optimizer.step()
    on.off()


def test_clipping_by_the_handle(tmp_path):
    model, plain = make_model(), make_model()
    optimizer = AdamW(model.parameters())
    handle = offload.enable(model, optimizer=optimizer, optimizer_state=True, n_tensors=0, spill_dir=tmp_path)
    for options in ({}, {"norm_type": 1.0}, {"norm_type": math.inf, "foreach": False}):
        for each in (model, plain):
            each.zero_grad()
            loss_of(each, 0).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, **options)
        assert_equal(handle.clip_grad_norm_(0.1, **options), expected)
        assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    model[0].weight.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        handle.clip_grad_norm_(0.1, error_if_nonfinite=True)
    handle.disable()
    handle = offload.enable(model, optimizer=optimizer, step_in_backward=True, n_tensors=0)
    with pytest.raises(offload.StepInBackwardError, match=re.escape("clip each gradient by itself")):
        handle.clip_grad_norm_(0.1)
    handle.disable()
