"""Faults of the disk below an enabled model: tensors stay, reads are repeated, and errors tell where."""

import errno
import logging

import pytest
import torch
from faults.inject import inject_fault, truncate
from forked_python import run_python
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
        assert about.swapped.tensors == about.swapped.nbytes == 0
    assert (about.kept["write failed"].tensors, about.kept["write failed"].nbytes > 0) == (failed, True)
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


FULL = """
import resource
import torch
from torch import nn
import offload

def train(model):
    found = []
    for _ in range(6):
        loss = model(torch.ones(512, 256)).square().mean()
        loss.backward()
        found += [loss.detach().clone(), *(each.grad.clone() for each in model.parameters())]
        model.zero_grad()
    return found

torch.manual_seed(0)
model = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(256, 256), nn.GELU())])
expected = train(model)
for knobs in ({}, {"preset": "smallest"}, {"memory_limit": "8MiB"}):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with offload.enable(model, min_tensor_bytes="64KiB", spill_dir=FOLDER, **knobs) as handle:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))  # stands for a disk that has become full
        found = train(model)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
        if not knobs:
            assert handle.plan is not None and not handle.plan.swaps, handle.plan
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
"""


def test_a_disk_that_is_full_before_the_first_plan_does_not_end_training(tmp_path):
    script = FULL.replace("FOLDER", repr(str(tmp_path)))
    ran = run_python("-c", script, timeout=120, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "the disk fails, so plans swap only what memory_limit requires" in ran.stderr
