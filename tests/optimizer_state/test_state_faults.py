"""Disk and memory that fail while optimizer state moves: nothing is lost, and nothing wrong is used."""

import copy
import errno

import pytest
import torch
from core.store_rig import TIERS, make_store
from faults.inject import inject_fault
from state_rig import OPTIMIZERS, assert_equal, everything, make_mover, make_optimizer, params_of, run, set_gradients
from users_rig import On, make_model, train, trained
from users_rig import everything as all_of

import offload
from offload.optimizer_state import mover as mover_module
from offload.optimizer_state import state_tensor
from offload.optimizer_state.state_tensor import StateTensor
from offload.runtime.engine import Engine

ON_DISK = [tier for tier in TIERS if tier != "slab"]


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch):
    monkeypatch.setattr(mover_module, "CHUNK_BYTES", 1)


def pair(tier, tmp_path):
    plain, moved = make_optimizer(*OPTIMIZERS["AdamW"]), make_optimizer(*OPTIMIZERS["AdamW"])
    mover = make_mover(moved, tier, tmp_path)
    run(plain, 3)
    run(moved, 3)
    mover.engine.drain()
    return plain, moved, mover


def test_a_write_that_fails_keeps_the_state_in_memory(tmp_path):
    plain, moved, mover = pair("direct", tmp_path)
    inject_fault(mover.engine.store, "write", "error", 1, errno.ENOSPC, persistent=True)
    run(plain, 3, begin=3)
    run(moved, 3, begin=3)
    mover.engine.drain()
    mover.look()
    assert mover.counts.failed > 0
    assert "No space left" in mover.counts.failure
    assert any("writing them failed" in note for note in mover.counts.notes())
    assert_equal(everything(moved), everything(plain))
    inject_fault(mover.engine.store, "write", "error", 0)
    run(plain, 3, begin=6)
    run(moved, 3, begin=6)
    assert_equal(everything(moved), everything(plain))
    mover.close()
    assert mover.engine.store.stats()["live_tickets"] == 0


@pytest.mark.parametrize("kind", ["error", "wrong_block"])
def test_a_read_that_fails_once_is_repeated(kind, tmp_path):
    plain, moved, mover = pair("direct", tmp_path)
    inject_fault(mover.engine.store, "read", kind, 2, errno.EIO)
    run(plain, 3, begin=3)
    run(moved, 3, begin=3)
    assert_equal(everything(moved), everything(plain))
    mover.close()


@pytest.mark.parametrize("kind", ["error", "wrong_block"])
def test_a_read_that_fails_names_the_parameter(kind, tmp_path):
    plain, moved, mover = pair("direct", tmp_path)
    before = everything(moved)
    inject_fault(mover.engine.store, "read", kind, 1, errno.EIO, persistent=True)
    set_gradients(moved, 4)
    gradients = [p.grad for p in params_of(moved)]
    with pytest.raises(offload.OptimizerStateError, match="parameter p8481 cannot be read back; load the") as raised:
        moved.step()
    assert raised.value.parameter == "p8481"
    assert raised.value.errno == errno.EIO
    assert isinstance(raised.value, OSError)
    assert all(a is b for a, b in zip(gradients, (p.grad for p in params_of(moved)), strict=True))
    assert moved.state.peek(params_of(moved)[0])["exp_avg"].isnan().all()
    with pytest.raises(offload.OptimizerStateError):
        moved.state_dict()
    inject_fault(mover.engine.store, "read", kind, 0)
    assert_equal(everything(moved), before)
    run(plain, 2, begin=4)
    run(moved, 2, begin=4)
    assert_equal(everything(moved), everything(plain))
    mover.close()


@pytest.mark.parametrize("more", [{}, {"step_in_backward": True}, {"gradients": True}], ids=str)
def test_after_a_read_that_fails_the_checkpoint_is_loaded(more, tmp_path):
    """It is loaded while nothing can be read. Its own state cannot be used either until the fault is gone."""
    on = On(True, tmp_path, optimizer_state=True, **more)
    model, optimizer = trained(on)
    weights, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 2, begin=2)
    engine = optimizer.state.engine
    engine.drain()
    inject_fault(engine.store, "read", "error", 1, errno.EIO, persistent=True)
    for _ in range(2):
        with pytest.raises(offload.OptimizerStateError, match="load the optimizer's state_dict of the latest"):
            train(model, optimizer, 1, begin=4)
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(states))  # steps change the small tensors of what is loaded
        engine.drain()
        assert optimizer.state.peek(model[0].weight)["exp_avg"].isnan().all()
    inject_fault(engine.store, "read", "error", 0)
    plain = make_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    plain.load_state_dict(weights)
    plain_optimizer.load_state_dict(states)
    for each in ((model, optimizer), (plain, plain_optimizer)):
        train(*each, 3, begin=2)
    assert on.counts[0].in_bytes > 0
    assert_equal(all_of(model, optimizer), all_of(plain, plain_optimizer))
    on.off()


def one_at_a_time(optimizer, first_failing):
    """What torch's loop over the parameters leaves where it fails at one of them."""
    with_gradient = [p for p in params_of(optimizer) if p.grad is not None]
    gradients = {p: p.grad for p in with_gradient}
    for param in with_gradient[first_failing:]:
        param.grad = None
    optimizer.step()
    for param, gradient in gradients.items():
        param.grad = gradient


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_in_the_middle_of_a_step_leaves_what_a_loop_would_have_left(error, tier, tmp_path, monkeypatch):
    plain, moved, mover = pair(tier, tmp_path)
    set_gradients(plain, 4)
    set_gradients(moved, 4)
    one_at_a_time(plain, 3)
    run_chunk, chunks = mover_module.ChunkedStep.run, []

    def failing(self, chunk):
        chunks.append(chunk)
        if len(chunks) == 4:
            raise error
        run_chunk(self, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(mover_module.ChunkedStep, "run", failing)
        with pytest.raises(error):
            moved.step()
    assert_equal([p.grad for p in params_of(moved)], [p.grad for p in params_of(plain)])
    assert_equal(everything(moved), everything(plain))
    run(plain, 3, begin=5)
    run(moved, 3, begin=5)
    assert_equal(everything(moved), everything(plain))
    mover.close()
    assert mover.engine.store.stats()["live_tickets"] == 0


@pytest.mark.parametrize("tier", TIERS)
def test_a_copy_in_that_nobody_waits_for_leaves_the_tensor_readable(tier, tmp_path):
    """In the stepped schedule nothing is copied before somebody waits: the copy-in is surely under way."""
    engine = Engine(make_store(tier, tmp_path, "stepped", host_bytes_max=2 << 20), torch.device("cpu"))
    each = StateTensor("exp_avg", torch.randn(64, 64))
    expected = each.tensor.clone()
    each.leave(engine, 0)
    engine.drain()
    for _ in range(2):
        assert each.begin()
        each.abandon()
    assert torch.equal(each.copy(), expected)
    each.bring()
    assert torch.equal(each.tensor, expected)
    engine.drain()
    assert engine.resident.now == engine.targets_held == 0


def test_an_error_in_a_closure_changes_nothing(tmp_path):
    _, moved, mover = pair("direct", tmp_path)
    before = everything(moved)

    def closure():
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        moved.step(closure)
    assert_equal(everything(moved), before)
    mover.close()


def test_state_that_cannot_be_brought_back_is_tried_again(tmp_path):
    plain, moved, mover = pair("direct", tmp_path)
    inject_fault(mover.engine.store, "read", "error", 1, errno.EIO, persistent=True)
    with pytest.raises(offload.OptimizerStateError):
        mover.close()
    inject_fault(mover.engine.store, "read", "error", 0)
    mover.close()
    assert_equal(everything(moved), everything(plain))


def test_a_read_that_failed_is_no_memory(tmp_path, monkeypatch):
    """The guard left out: whoever asks the store's ticket takes bytes that were never read."""
    _, moved, mover = pair("direct", tmp_path)
    parameter = params_of(moved)[0]
    inject_fault(mover.engine.store, "read", "error", 1, errno.EIO, persistent=True)
    for _ in range(2):
        with pytest.raises(offload.OptimizerStateError):
            moved.state[parameter]
    assert all(each.is_away for each in moved.state.tensors[parameter])

    def bring(self):
        stored, self._stored = self._stored, None
        self.tensor.data = self._filled(stored)

    monkeypatch.setattr(state_tensor.StateTensor, "bring", bring)
    with pytest.raises(offload.OptimizerStateError):
        moved.state[parameter]
    assert not all(each.is_away for each in moved.state.tensors[parameter]), "the mutant is caught by the line above"
    inject_fault(mover.engine.store, "read", "error", 0)
    mover.close()


@pytest.mark.parametrize("tier", ON_DISK)
def test_a_pool_or_a_disk_that_is_full(tier, tmp_path):
    plain, moved, mover = pair(tier, tmp_path)
    inject_fault(mover.engine.store, "allocate", "error", 1, errno.ENOSPC, persistent=True)
    run(plain, 3, begin=3)
    run(moved, 3, begin=3)
    assert_equal(everything(moved), everything(plain))
    mover.close()


def test_a_slab_pool_that_is_too_small(tmp_path, monkeypatch):
    """Without a disk, what finds no room stays in memory."""
    import state_rig

    store = state_rig.make_store("slab", tmp_path, host_bytes_max=64 << 10)
    monkeypatch.setattr(state_rig, "make_store", lambda *_, **__: store)
    plain, moved, mover = pair("slab", tmp_path)
    run(plain, 3, begin=3)
    run(moved, 3, begin=3)
    assert mover.counts.failed > 0
    assert_equal(everything(moved), everything(plain))
    mover.close()


def test_state_on_another_device_stays(tmp_path):
    optimizer = make_optimizer(*OPTIMIZERS["AdamW"])
    mover = make_mover(optimizer, "direct", tmp_path)
    run(optimizer, 1)
    mover.engine.device = torch.device("meta")
    before = [dict(s) for s in optimizer.state.values()]
    run(optimizer, 1, begin=1)
    assert not any(t.isnan().any() for s in before for t in s.values())
    mover.close()
