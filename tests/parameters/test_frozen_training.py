"""Training with frozen parameters in the store: losses, gradients and weights as without it."""

import pytest
import torch
from core.store_rig import TIERS
from parameters.frozen_rig import (
    STEPS,
    Attends,
    Model,
    assert_away,
    assert_equal,
    away,
    batch,
    enable,
    everything,
    loss_of,
    make_model,
    make_mover,
    train,
    trained,
)
from some_rows import one_in

import offload


def with_autocast(model, number):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, number)


def in_two_parts(model, number):
    """Two forwards before their backwards."""
    return loss_of(model, number) + loss_of(model, number + 1000)


def after_looking(model, number):
    """Evaluation between steps, without gradients and with."""
    model.eval()
    with torch.no_grad():
        before = loss_of(model, number)
    with torch.inference_mode():
        assert torch.equal(loss_of(model, number), before)
    again = loss_of(model, number)
    model.train()
    loss_of(model, number).backward()  # gradients are accumulated
    return loss_of(model, number) + again


LOSSES = {"plain": loss_of, "autocast": with_autocast, "two forwards": in_two_parts, "evaluation": after_looking}
MODES = {
    "automatic": {"n_tensors": None},
    "limit": {"n_tensors": None, "memory_limit": "64MiB"},
    "all": {},
    "none": {"n_tensors": 0},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", one_in(2, [Model, Attends]))
def test_a_session_gives_the_bits_of_plain_training(kind, mode, tmp_path):
    plain, moved = make_model(kind), make_model(kind)
    handle = enable(moved, tmp_path, **MODES[mode])
    assert_away(moved)
    assert_equal(train(moved), train(plain))
    counts = handle.report().moved_parameters
    assert (counts.held, counts.failed, counts.rewritten) == (0, 0, 0)
    assert counts.tensors == len(away(moved)) > 5
    assert counts.in_bytes > STEPS * counts.nbytes
    assert_equal(everything(moved), everything(plain))
    handle.disable()
    assert away(moved) == []
    assert_equal(everything(moved), everything(plain))
    assert_equal(train(moved, 2, STEPS), train(plain, 2, STEPS))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("loss", one_in(3, LOSSES))
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpoint"])
def test_every_tier_and_kind_of_step(tier, loss, is_checkpointed, tmp_path):
    plain, moved = make_model(), make_model()
    plain.is_checkpointed = moved.is_checkpointed = is_checkpointed
    mover = make_mover(moved, tier, tmp_path)
    assert_away(moved)
    assert_equal(train(moved, 4, loss=LOSSES[loss]), train(plain, 4, loss=LOSSES[loss]))
    mover.close()
    assert_equal(everything(moved), everything(plain))
    del mover
    assert away(moved) == []


def test_nothing_is_written_after_the_first_copy(tmp_path):
    model = make_model()
    handle = enable(model, tmp_path, n_tensors=0)
    engine = handle._enabled.parameters.engine
    written = engine.store_stats()["out_bytes"]
    assert written == handle.report().moved_parameters.nbytes
    train(model)
    assert engine.store_stats()["out_bytes"] == written
    assert engine.resident.now == engine.targets_held == 0
    assert_away(model)
    handle.disable()
    assert engine.store_stats()["live_tickets"] == 0


def test_parameters_are_read_ahead_in_the_order_of_the_step_before(tmp_path):
    model = make_model()
    mover = make_mover(model, "direct", tmp_path)
    train(model, 1)
    misses = mover.engine.misses
    assert misses == 0, "each use begins its own copy-in before it waits"
    begun = []
    ahead = mover.window.ahead
    inner = ahead._begin
    ahead._begin = lambda stored, nbytes: (begun.append((stored, stored in ahead._begun)), inner(stored, nbytes))
    train(model, 1, 1)
    known = [each for each, is_begun in begun if is_begun]
    assert len(known) >= 6, "asked for again when it was needed, and found under way"
    mover.close()


def test_saved_parameters_hold_no_memory(tmp_path):
    """Also without a session's hooks, and after the session has ended."""
    for knobs in ({}, {"n_tensors": 0}):
        plain, moved = make_model(), make_model()
        handle = enable(moved, tmp_path, **knobs)
        loss, expected = loss_of(moved.eval(), 0), loss_of(plain.eval(), 0)
        assert_away(moved)
        handle.disable()
        loss.backward()
        expected.backward()
        assert_equal([p.grad for p in trained(moved)], [p.grad for p in trained(plain)])


def test_a_graph_that_is_kept_is_differentiated_twice(tmp_path):
    plain, moved = make_model(), make_model()
    enable(moved, tmp_path)
    for model in (plain, moved):
        loss = loss_of(model.eval(), 0)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_equal([p.grad for p in trained(moved)], [p.grad for p in trained(plain)])


@pytest.mark.parametrize("where", ["around", "inside"])
def test_hooks_of_the_program_that_hold_what_they_are_given(where, tmp_path):
    class Wrapped(Attends):
        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                return super().forward(x)

    plain, moved = (make_model(Attends if where == "around" else Wrapped) for _ in range(2))
    enable(moved, tmp_path)
    found = []
    for model in (plain, moved):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            loss = loss_of(model, 0)
        loss_of(model, 1)
        loss.backward()
        found.append([p.grad for p in trained(model)])
    assert_equal(*found)


def test_second_derivatives(tmp_path):
    found = []
    for is_moved in (False, True):
        model = make_model().eval()
        if is_moved:
            enable(model, tmp_path)
        x = batch(0).requires_grad_()
        [gradient] = torch.autograd.grad(model.first(model(x)).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append([x.grad, *(p.grad for p in trained(model))])
    assert_equal(*found)


@pytest.mark.parametrize("value", [True, "trained", None])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r'"all", "frozen" .*, "auto" .* or False \(none\), not'):
        offload.enable(make_model(), parameters=value)


def test_the_report_says_what_leaves(tmp_path):
    model = make_model()
    handle = enable(model, tmp_path)
    train(model, 2)
    report = handle.report()
    assert "7 tensors, 76.00 KiB, leave memory between uses" in str(report)
    assert report.to_dict()["moved_parameters"]["tensors"] == 7
    handle.disable()
    other = offload.enable(make_model(), parameters="frozen")
    assert any("moves nothing" in note for note in other.report().notes)
    assert offload.enable(make_model()).report().moved_parameters is None
