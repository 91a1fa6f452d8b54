"""Disk and memory that fail while trained parameters move: nothing is lost, nothing wrong is used, and it is said."""

import copy
import errno

import pytest
import torch
from core.store_rig import TIERS
from faults.inject import inject_fault
from parameters import frozen_rig
from parameters.frozen_rig import assert_equal, loss_of
from parameters.trained_rig import WAYS, Run, assert_same, engine_of

import offload

KINDS = ["error", "wrong_block"]


def checkpoint(run):
    return {
        "model": {name: value.clone() for name, value in run.model.state_dict().items()},
        "optimizer": copy.deepcopy(run.optimizer.state_dict()),
    }


def resume(run, saved):
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    run.optimizer.zero_grad()
    run.gradients.clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_read_that_fails_is_repeated(kind, way, tmp_path):
    moved, plain = Run(tmp_path, way), Run()
    for number in range(3):
        inject_fault(engine_of(moved).store, "read", kind, 4, errno.EIO)
        assert_equal(moved.train(2, number), plain.train(2, number))
    assert_same(moved, plain)


@pytest.mark.parametrize("kind", ["error", pytest.param("wrong_block", marks=pytest.mark.full)])
@pytest.mark.parametrize("when", range(1, 30, 4))
@pytest.mark.parametrize("way", WAYS)
def test_a_read_that_goes_on_failing_is_told_and_a_checkpoint_goes_on(kind, when, way, tmp_path):
    """Also where the parameter itself is lost: loading gives it other memory."""
    moved, plain = Run(tmp_path, way, n_tensors=0), Run()
    moved.train(2)
    plain.train(2)
    saved = checkpoint(moved)
    inject_fault(engine_of(moved).store, "read", kind, when, errno.EIO, persistent=True)
    errors = offload.ParameterError, offload.OptimizerStateError
    with pytest.raises(errors, match=r"parameter .* cannot be read back; load .*latest checkpoint to go on") as told:
        moved.train(2, 2)
    assert told.value.parameter in {name for name, _ in moved.model.named_parameters()}
    resume(moved, saved)  # reading still fails
    inject_fault(engine_of(moved).store, "read", kind, 0)
    assert_same(moved, plain)
    assert_equal(moved.train(2, 2), plain.train(2, 2))
    moved.handle.disable()
    assert_same(moved, plain)


def test_an_update_that_cannot_begin_is_made_later(tmp_path):
    fails_at_its_update(tmp_path)


def fails_at_its_update(folder):
    """A parameter that cannot be read for its update is updated in `optimizer.step()`, as soon as it can be read."""
    moved, plain = Run(folder, n_tensors=0), Run()
    window = moved.handle._enabled.parameters.window
    window.ahead.nbytes_max = 0
    moved.train(1)
    plain.train(1)
    for run in (moved, plain):
        run.optimizer.zero_grad()
    weight = moved.model.blocks[0].out.layer.weight
    loss = loss_of(moved.model.eval(), 1)
    loss_of(plain.model.eval(), 1).backward()

    def fail(gradient):
        frozen_rig.away(moved.model)
        inject_fault(engine_of(moved).store, "read", "error", 1, errno.EIO, persistent=True)
        with window.lock:
            weight._offload_stored.settle(weight)
        assert weight._offload_stored.is_away_in(weight)

    hook = weight.register_hook(fail)
    with pytest.raises(offload.ParameterError):
        loss.backward()
    hook.remove()
    with pytest.raises(offload.ParameterError):
        moved.optimizer.step()
    inject_fault(engine_of(moved).store, "read", "error", 0)
    moved.optimizer.step()
    for parameter in plain.model.parameters():
        if all(parameter is not each for each in late(plain.model)):
            continue
        parameter.grad = None  # backward did not reach it
    plain.optimizer.step()
    assert_same(moved, plain)


def late(model):
    """Whose gradients backward has not reached."""
    block = model.blocks[0]
    return [model.first.weight, *block.into.parameters(), *block.norm.parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_a_write_that_fails_keeps_the_parameter_in_memory(way, tmp_path, monkeypatch):
    moved, plain = Run(tmp_path, way), Run()
    store = engine_of(moved).store
    for number in range(2):
        inject_fault(store, "write", "error", 3 + 20 * number, errno.ENOSPC, persistent=True)
        assert_equal(moved.train(3, 6 * number), plain.train(3, 6 * number))
        inject_fault(store, "write", "error", 0)
        assert_equal(moved.train(3, 6 * number + 3), plain.train(3, 6 * number + 3))
    report = moved.handle.report()
    assert report.moved_parameters.failed > 0
    assert any("because they could not be written" in note for note in report.notes)
    assert_same(moved, plain)
    moved.handle.disable()
    assert_same(moved, plain)


@pytest.mark.parametrize("tier", TIERS)
def test_a_store_that_is_full_keeps_the_parameter_in_memory(tier, tmp_path, monkeypatch):
    store = frozen_rig.make_store(tier, tmp_path, host_bytes_max=64 << 10, slab_bytes=64 << 10)
    monkeypatch.setattr(frozen_rig, "make_store", lambda *_, **__: store)
    if tier != "slab":
        inject_fault(store, "allocate", "error", 2, errno.ENOSPC, persistent=True)
    moved, plain = Run(), Run()
    mover = frozen_rig.make_mover(moved.model, tier, tmp_path, also_trained=True)
    assert_equal(moved.train(3), plain.train(3))
    mover.look()
    assert mover.counts.failed > 0 or tier != "slab"
    if tier != "slab":
        inject_fault(store, "allocate", "error", 0)
    assert_equal(moved.train(3, 3), plain.train(3, 3))
    mover.close()
    assert_same(moved, plain)


def test_what_is_not_all_overwritten_is_not_given_up(tmp_path):
    run = Run(tmp_path, n_tensors=0)
    before = run.everything()
    with torch.no_grad():
        loss_of(run.model, 0)
    inject_fault(engine_of(run).store, "read", "error", 1, errno.EIO, persistent=True)
    weight = run.model.first.weight
    with torch.no_grad():
        for change in (
            lambda: weight.copy_(torch.ones(1)),
            lambda: weight.copy_(weight),
            lambda: weight.add_(1),
            lambda: weight[0].copy_(torch.ones(32)),
        ):
            with pytest.raises(offload.ParameterError):
                change()
    inject_fault(engine_of(run).store, "read", "error", 0)
    assert_equal(run.everything(), before)
