"""Faults of the disk below an enabled model: tensors stay, reads are repeated, and errors tell where."""

import errno
import logging

import pytest
import torch
from faults.inject import inject_fault, truncate
from test_enable import Net, assert_same, step
from torch import nn

import offload


@pytest.mark.parametrize(("operation", "persistent"), [("allocate", True), ("write", False), ("write", True)])
def test_failing_spill_keeps_the_tensor(tmp_path, caplog, operation, persistent):
    model = Net()
    expected = step(model, rows=500)
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1, spill_dir=tmp_path) as handle:
        inject_fault(handle._engine.store, operation, "error", nth=1, error_number=errno.ENOSPC, persistent=persistent)
        with caplog.at_level(logging.WARNING, logger="offload"):
            for _ in range(3):
                torch.manual_seed(0)
                model.zero_grad()
                loss = model(torch.randn(500, 64)).square().mean()
                handle._engine.drain()
                loss.backward()
                found = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
                assert_same(found, expected)
        about = handle.report()
        del loss
        handle._engine.drain()
        assert handle._engine.live_records == 0
        assert handle._engine.store.stats()["live_tickets"] == 0
    failed = about.to_dict()["failed"]
    assert failed >= (3 if persistent else 1)
    if persistent and operation == "write":
        assert failed == about.swapped.tensors
    assert any(f"{failed} tensors stayed because writing them failed" in note for note in about.notes)
    warnings = [record.getMessage() for record in caplog.records if record.name == "offload"]
    assert len(warnings) == 1, "said once"
    assert "stays" in warnings[0]
    for text in (warnings[0], str(about)):
        assert "No space left on device" in text
        assert str(tmp_path) in text


@pytest.mark.parametrize("kind", ["error", "wrong_block"])
def test_failing_read_is_an_error_and_the_graph_survives(tmp_path, kind):
    model = Net()
    expected = step(model, rows=500)
    with offload.enable(model, min_tensor_bytes=1, spill_dir=tmp_path) as handle:
        torch.manual_seed(0)
        model.zero_grad()
        loss = model(torch.randn(500, 64)).square().mean()
        handle._engine.drain()
        inject_fault(handle._engine.store, "read", kind, nth=1, error_number=errno.EIO)
        with pytest.raises(OSError, match="offset") as raised:
            loss.backward(retain_graph=True)
        assert raised.value.errno == errno.EIO
        assert raised.value.filename == str(tmp_path)
        del raised
        for _ in range(2):
            model.zero_grad()
            loss.backward(retain_graph=True)
            assert_same([loss.detach(), *(parameter.grad for parameter in model.parameters())], expected)
        del loss
        handle._engine.drain()
        assert handle._engine.live_records == 0
        assert handle._engine.store.stats()["live_tickets"] == 0
        assert_same(step(model, rows=500), expected)


@pytest.mark.parametrize("persistent", [False, True])
def test_failing_prefetch_is_an_error_only_where_it_is_needed(tmp_path, caplog, persistent):
    """A copy that begins ahead of need fails: it is repeated on demand. If that fails too, backward may ask again."""
    model = nn.Sequential(*[nn.Tanh() for _ in range(6)])
    x = torch.rand(500, 64)

    def forward():
        leaf = x.clone().requires_grad_()
        return leaf, model(leaf * 2)

    with offload.enable(model, n_tensors=-1, lb=4, min_tensor_bytes=1, spill_dir=tmp_path) as handle:
        for _ in range(2):
            leaf, out = forward()
            handle._engine.drain()
            out.sum().backward()
        expected = leaf.grad
        leaf, out = forward()
        handle._engine.drain()
        store = handle._engine.store
        inject_fault(store, "read", "error", nth=3, error_number=errno.EIO, persistent=persistent)
        if persistent:
            with pytest.raises(OSError, match="offset"):
                out.sum().backward(retain_graph=True)
            inject_fault(store, "read", "error", nth=0)
            leaf.grad = None
        out.sum().backward()
        assert torch.equal(leaf.grad, expected)
        assert "a prefetch failed; the tensor is swapped in on demand instead: [Errno 5]" in caplog.text
        del out
        handle._engine.drain()
        assert handle._engine.live_records == 0


def test_truncated_spill_file_is_an_error(tmp_path):
    model = Net()
    with offload.enable(model, min_tensor_bytes=1, spill_dir=tmp_path) as handle:
        loss = model(torch.randn(500, 64)).square().mean()
        handle._engine.drain()
        truncate(handle._engine.store, 4096)
        with pytest.raises(OSError, match="ends early"):
            loss.backward()
        del loss
        handle._engine.drain()
        assert handle._engine.live_records == 0
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
