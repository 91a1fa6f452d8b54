"""Training with all parameters in the store between uses: losses, gradients, weights and states as without it."""

import gc
import sys

import pytest
import torch
from core.store_rig import TIERS
from optimizer_state.state_rig import OPTIMIZERS
from parameters import frozen_rig
from parameters.frozen_rig import assert_away, assert_equal, away, batch, everything, loss_of
from parameters.trained_rig import KINDS, WAYS, Pictures, Run, adamw, assert_bits, assert_same, engine_of
from some_rows import one_in
from torch import nn

import offload
from offload.parameters.moved_parameter import MovedParameter
from offload.torch_compat.optimizers import runs_foreach

MODES = {
    "all": {},
    "automatic": {"n_tensors": None},
    "limit": {"n_tensors": None, "memory_limit": "64MiB"},
    "none": {"n_tensors": 0},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", one_in(2, KINDS))
def test_the_bits_of_plain_training(way, kind, tmp_path):
    assert_bits(tmp_path, way=way, kind=KINDS[kind])


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_a_session(mode, tmp_path):
    assert_bits(tmp_path, **MODES[mode])


@pytest.mark.parametrize("way", ["in backward, state", "alone"])
@pytest.mark.parametrize("name", one_in(3, OPTIMIZERS))
def test_every_optimizer_of_torch(name, way, tmp_path):
    kind, options = OPTIMIZERS[name]

    def make(params):
        matrices = [each for each in params if each.ndim == 2 or name != "Muon"]
        return kind([{"params": matrices[:3]}, {"params": matrices[3:], "lr": 0.003}], **options)

    moved, plain = Run(tmp_path, way, make=make), Run(make=make)
    assert_equal(moved.train(4), plain.train(4))
    assert_same(moved, plain)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("way", WAYS)
def test_kernels_for_many_parameters_at_once(options, way, tmp_path):
    assert_bits(tmp_path, 6, way=way, make=lambda params: torch.optim.AdamW(params, lr=1e-2, **options))


class Behind(torch.optim.Optimizer):
    """Writes through `.data`, as many optimizers of other libraries do: no version tells."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad.data, alpha=-group["lr"])
        return loss


@pytest.mark.parametrize("way", ["in backward", "alone"])
def test_an_optimizer_that_writes_behind_the_version(way, tmp_path):
    assert_bits(tmp_path, 6, way=way, make=Behind)


def in_two_parts(model, number):
    """Two forwards before their backwards."""
    return loss_of(model, number) + loss_of(model, number + 1000)


def with_autocast(model, number):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, number)


def after_evaluation(model, number):
    model.eval()
    with torch.no_grad():
        before = loss_of(model, number)
    with torch.inference_mode():
        assert torch.equal(loss_of(model, number), before)
    model.train()
    return loss_of(model, number)


def with_a_penalty(model, number):
    """The loss uses parameters themselves, outside of any module."""
    return loss_of(model, number) + 1e-3 * sum(each.square().sum() for each in model.parameters())


LOSSES = {
    "two forwards": in_two_parts,
    "autocast": with_autocast,
    "evaluation": after_evaluation,
    "penalty": with_a_penalty,
}


@pytest.mark.parametrize("way", ["in backward", "chunks"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_kind_of_step(way, loss, tmp_path):
    assert_bits(tmp_path, 4, way=way, loss=LOSSES[loss])


@pytest.mark.parametrize("way", ["in backward, state", "alone"])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_blocks(way, is_reentrant, tmp_path, monkeypatch):
    inner = frozen_rig.checkpoint
    monkeypatch.setattr(frozen_rig.Model, "is_checkpointed", True)
    monkeypatch.setattr(
        frozen_rig, "checkpoint", lambda block, x, use_reentrant: inner(block, x, use_reentrant=is_reentrant)
    )
    assert_bits(tmp_path, 4, way=way)


@pytest.mark.parametrize("way", ["chunks", "alone"])
def test_accumulated_gradients_and_clipping(way, tmp_path):
    def train(run):
        for number in range(12):
            loss_of(run.model, number).backward()
            if number % 3 == 2:
                nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
                run.optimizer.step()
                run.optimizer.zero_grad()

    moved, plain = Run(tmp_path, way), Run()
    for run in (moved, plain):
        torch.manual_seed(1)
        train(run)
    assert_same(moved, plain)
    loss_of(moved.model, 0)
    assert_away(moved.model)


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier(tier, tmp_path):
    plain, moved = Run(), Run()
    mover = frozen_rig.make_mover(moved.model, tier, tmp_path, also_trained=True)
    assert_away(moved.model)
    assert_equal(moved.train(6), plain.train(6))
    mover.close()
    assert_same(moved, plain)


def test_they_are_away_after_forward_and_after_their_update(tmp_path):
    run = Run(tmp_path, n_tensors=0)
    assert_away(run.model)
    ahead = run.handle._enabled.parameters.window.ahead
    ahead.nbytes_max = 0
    for number in range(3):
        run.optimizer.zero_grad()
        loss = loss_of(run.model.eval(), number)
        assert_away(run.model)
        loss.backward()
        assert_away(run.model)
        run.optimizer.step()
        assert_away(run.model)
    counts = run.handle.report().moved_parameters
    assert counts.rewritten == 3 * counts.trained == 3 * counts.tensors
    assert counts.out_bytes == 3 * counts.nbytes


def test_backward_reads_a_parameter_once_for_gradient_and_update(tmp_path):
    """The tied one is read for each of its uses: there is no room for it between them."""
    run = Run(tmp_path, n_tensors=0)
    run.train(2)
    before = run.handle.report().moved_parameters
    run.train(1)
    counts = run.handle.report().moved_parameters
    assert counts.in_bytes - before.in_bytes <= 2 * counts.nbytes + 4 * run.model.first.weight.nbytes


def test_an_update_takes_the_place_of_what_was_stored(tmp_path):
    """Space in the file is needed once, beside what is being written."""
    run = Run(tmp_path, n_tensors=0)
    store = engine_of(run).store
    before = store.stats()["spill_high_water_bytes"]
    run.train(10)
    assert store.stats()["spill_high_water_bytes"] == before > 0


def test_gradients_have_the_strides_of_their_parameters(tmp_path):
    """Also where a parameter has left between its use in backward and its gradient."""
    moved, plain = Run(tmp_path, "chunks", kind=Pictures), Run(kind=Pictures)
    moved.handle._enabled.parameters.window.ahead.nbytes_max = 0
    for run in (moved, plain):
        loss_of(run.model, 0).backward()
    assert_equal([each.grad for each in moved.model.parameters()], [each.grad for each in plain.model.parameters()])


def test_the_number_of_tickets_does_not_grow(tmp_path):
    run = Run(tmp_path, n_tensors=0)
    found = []
    for number in range(4):
        run.train(1, number)
        engine_of(run).drain()
        found.append(engine_of(run).store_stats()["live_tickets"])
    assert len(set(found)) == 1
    run.handle.disable()
    assert engine_of(run).store_stats()["live_tickets"] == 0


@pytest.mark.parametrize("way", ["in backward", "chunks"])
def test_some_are_frozen(way, tmp_path):
    moved, plain = Run(tmp_path, way), Run()
    for run in (moved, plain):
        run.model.blocks[0].requires_grad_(False)
    assert_equal(moved.train(3), plain.train(3))
    for run in (moved, plain):
        run.model.blocks[0].requires_grad_(True)
        run.model.first.requires_grad_(False)
    assert_equal(moved.train(3, 3), plain.train(3, 3))
    counts = moved.handle.report().moved_parameters
    assert 0 < counts.trained < counts.tensors == len(away(moved.model))
    assert_same(moved, plain)


def test_an_optimizer_that_is_added_later(tmp_path):
    moved, plain = Run(), Run()
    handle = frozen_rig.enable(moved.model, tmp_path, parameters="all")
    handle.add_optimizer(moved.optimizer, step_in_backward=True)
    assert_equal(moved.train(4), plain.train(4))
    assert handle.report().step_in_backward[0].in_backward > 0
    assert handle.report().optimizer_state[0].in_bytes > 0
    with pytest.raises(ValueError, match="is already used by an enabled model"):
        handle.add_optimizer(moved.optimizer)
    with pytest.raises(ValueError, match="is in two optimizers"):
        handle.add_optimizer(adamw(moved.model.parameters()), step_in_backward=True)
    with pytest.raises(ValueError, match="has no parameter of this model"):
        handle.add_optimizer(adamw([nn.Parameter(batch(0))]))
    with pytest.raises(ValueError, match="optimizer_state must be True or False, not 'auto'"):
        handle.add_optimizer(adamw(moved.model.parameters()), optimizer_state="auto")
    assert_same(moved, plain)
    handle.disable()
    with pytest.raises(ValueError, match="add_optimizer: offload is disabled on this model"):
        handle.add_optimizer(adamw(moved.model.parameters()))
    assert_same(moved, plain)


def test_a_model_is_evaluated_without_an_optimizer(tmp_path):
    model, plain = frozen_rig.make_model().requires_grad_(True), frozen_rig.make_model()
    handle = frozen_rig.enable(model, tmp_path, parameters="all")
    with torch.no_grad():
        assert torch.equal(model.eval()(batch(0)), plain.eval()(batch(0)))
    assert_away(model)
    assert handle.report().moved_parameters.rewritten == 0
    handle.disable()
    assert_equal(everything(model), everything(plain))


def test_torch_chooses_the_kernels_that_it_would_choose(tmp_path):
    """As on a GPU, where foreach kernels are the default."""
    chooser = sys.modules["torch.optim.optimizer"]
    if MovedParameter in chooser._foreach_supported_types:
        chooser._foreach_supported_types.remove(MovedParameter)
    run = Run(tmp_path, "chunks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chooser, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
        parameters = list(run.model.parameters())
        assert {type(each) for each in parameters} == {nn.Parameter, MovedParameter}
        assert runs_foreach(parameters, differentiable=False)


def test_trained_ones_stay_with_frozen(tmp_path):
    model = frozen_rig.make_model()
    handle = frozen_rig.enable(model, tmp_path)
    assert handle.report().moved_parameters.trained == 0
    assert {type(each) for each in frozen_rig.trained(model)} == {nn.Parameter}


def test_the_report(tmp_path):
    run = Run(tmp_path)
    run.train(3)
    report = run.handle.report()
    assert "leave memory between uses; per step" in str(report)
    assert "written" in str(report.moved_parameters)
    assert report.to_dict()["moved_parameters"]["trained"] == report.moved_parameters.tensors
    other = offload.enable(nn.Linear(2, 2), parameters="all")
    assert any('parameters="all" moves nothing: the model has no ordinary' in n for n in other.report().notes)


def test_the_report_of_a_model_that_was_freed_says_what_moved(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    handle = offload.enable(model, parameters="all", min_tensor_bytes=1 << 10, spill_dir=tmp_path)
    model(torch.ones(4, 64)).sum().backward()
    handle.report()
    del model
    gc.collect()
    report = str(handle.report())
    assert "2 tensors, 32.00 KiB, leave memory between uses" in report
    assert "moves nothing" not in report
