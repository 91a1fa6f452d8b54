"""Disk and memory that fail while frozen parameters move: nothing is lost, and nothing wrong is used."""

import errno

import pytest
import torch
from core.store_rig import TIERS
from faults.inject import inject_fault
from parameters import frozen_rig as rig
from parameters.frozen_rig import assert_away, assert_equal, away, everything, loss_of, make_model, make_mover, train

import offload

KINDS = ["error", "wrong_block"]


def pair(tier, tmp_path):
    plain, moved = make_model(), make_model()
    return plain, moved, make_mover(moved, tier, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_that_fails_is_repeated(kind, tmp_path):
    plain, moved, mover = pair("direct", tmp_path)
    for _ in range(2):
        inject_fault(mover.engine.store, "read", kind, 3, errno.EIO)
        assert_equal(train(moved, 3), train(plain, 3))
    mover.close()
    assert_equal(everything(moved), everything(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_that_goes_on_failing_names_the_parameter(kind, tmp_path):
    plain, moved, mover = pair("direct", tmp_path)
    loss = loss_of(moved, 0)
    inject_fault(mover.engine.store, "read", kind, 1, errno.EIO, persistent=True)
    for call in (
        lambda: loss_of(moved, 0),
        lambda: moved.first.weight.sum(),
        lambda: moved.state_dict(),
        lambda: loss.backward(),
        mover.close,
    ):
        with pytest.raises(offload.ParameterError, match="the frozen parameter p1024 cannot be read back") as told:
            call()
        assert told.value.parameter == "p1024"
        assert isinstance(told.value, OSError)
        assert told.value.errno == errno.EIO
        assert_away(moved)
    inject_fault(mover.engine.store, "read", kind, 0)
    moved.zero_grad()
    assert_equal(train(moved, 3), train(plain, 3))
    mover.close()
    assert_equal(everything(moved), everything(plain))


def test_a_parameter_that_no_longer_exists_has_no_name(tmp_path):
    _, moved, mover = pair("direct", tmp_path)
    train(moved, 1)
    record = moved.first.weight._offload_stored
    inject_fault(mover.engine.store, "read", "error", 1, errno.EIO, persistent=True)
    del moved
    with pytest.raises(offload.ParameterError, match="a parameter of a model that no longer exists cannot be") as told:
        record.read(record.content)
    assert told.value.parameter == ""


def test_the_name_is_that_in_the_model(tmp_path):
    model = make_model()
    handle = rig.enable(model, tmp_path)
    inject_fault(handle._enabled.parameters.engine.store, "read", "error", 1, errno.EIO, persistent=True)
    with pytest.raises(offload.ParameterError, match=r"frozen parameter blocks.1.into.layer.weight cannot be read"):
        model.blocks[1](rig.batch(0))
    inject_fault(handle._enabled.parameters.engine.store, "read", "error", 0)
    handle.disable()


def test_a_write_that_fails_keeps_the_parameter_in_memory(tmp_path, monkeypatch):
    store = rig.make_store("direct", tmp_path)
    inject_fault(store, "write", "error", 3, errno.ENOSPC, persistent=True)
    monkeypatch.setattr(rig, "make_store", lambda *_, **__: store)
    plain, moved, mover = pair("direct", tmp_path)
    mover.look()
    assert mover.counts.failed > 0
    assert "No space left" in mover.counts.failure
    assert any("could not be written" in note for note in mover.counts.notes())
    assert_equal(train(moved, 3), train(plain, 3))
    mover.close()
    assert_equal(everything(moved), everything(plain))


@pytest.mark.parametrize("tier", TIERS)
def test_a_store_that_is_full_keeps_the_parameter_in_memory(tier, tmp_path, monkeypatch):
    store = rig.make_store(tier, tmp_path, host_bytes_max=64 << 10, slab_bytes=64 << 10)
    if tier != "slab":
        inject_fault(store, "allocate", "error", 2, errno.ENOSPC, persistent=True)
    monkeypatch.setattr(rig, "make_store", lambda *_, **__: store)
    plain, moved, mover = pair(tier, tmp_path)
    assert_equal(train(moved, 3), train(plain, 3))
    mover.look()
    assert mover.counts.failed > 0 or tier != "slab"
    mover.close()
    assert_equal(everything(moved), everything(plain))


def test_a_changed_parameter_that_cannot_be_written_stays_in_memory(tmp_path):
    plain, moved, mover = pair("direct", tmp_path)
    inject_fault(mover.engine.store, "allocate", "error", 1, errno.ENOSPC, persistent=True)
    inject_fault(mover.engine.store, "write", "error", 1, errno.ENOSPC, persistent=True)
    for model in (plain, moved):
        with torch.no_grad():
            model.first.weight.mul_(2)
    assert_equal(train(moved, 3), train(plain, 3))
    mover.look()
    assert mover.counts.failed > 0
    inject_fault(mover.engine.store, "allocate", "error", 0)
    inject_fault(mover.engine.store, "write", "error", 0)
    assert_equal(train(moved, 3), train(plain, 3))
    mover.close()
    assert_equal(everything(moved), everything(plain))
    assert away(moved) == []
