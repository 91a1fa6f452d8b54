"""`offload.enable`: wrong arguments, the true no-op, what the report counts, and faults of the disk below."""

import errno
import logging
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from faults.inject import inject_fault, truncate
from torch import nn

import offload

IS_ROOT = os.geteuid() == 0


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def step(model, rows=32):
    """One step from a seed: loss and gradients."""
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(torch.randn(rows, 64)).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@contextmanager
def refused(model, kind, message):
    """The call inside raises, and nothing is half-enabled: the model is as before and can be enabled at once."""
    before = dict(model.__dict__)
    with pytest.raises(kind, match=message):
        yield
    assert model.__dict__ == before
    assert "forward" not in model.__dict__
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle:
        step(model)
        assert handle.report().swapped.tensors > 0
    assert "forward" not in model.__dict__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_tensors": -2}, r"n_tensors must be -1 \(all\), 0 \(none\) or a count, not -2"),
        ({"n_tensors": 1.5}, "n_tensors must be .* not 1.5"),
        ({"n_tensors": "all"}, "n_tensors must be -1 .* not 'all'"),
        ({"n_tensors": True}, "n_tensors must be .* not True"),
        ({"n_tensors": -1, "lb": 0}, 'lb must be at least 1 backward node, or "auto", not 0'),
        ({"n_tensors": -1, "lb": -3}, "lb must be at least 1 backward node.* not -3"),
        ({"n_tensors": -1, "lb": 2.0}, "lb must be at least 1 backward node.* not 2.0"),
        ({"n_tensors": -1, "lb": "soon"}, "lb must be .*\"auto\", not 'soon'"),
        ({"n_tensors": -1, "lb": True}, "lb must be .* not True"),
        ({"lb": 4}, r"lb needs n_tensors: add n_tensors=-1"),
        ({"lb": "auto"}, r"lb needs n_tensors: add n_tensors=-1"),
        ({"min_tensor_bytes": 0}, "min_tensor_bytes: .*positive size such as"),
        ({"min_tensor_bytes": -1}, "min_tensor_bytes: .*positive size such as"),
        ({"min_tensor_bytes": "12GB!"}, "min_tensor_bytes: .*'?12GB!'?.*|min_tensor_bytes: .*positive size such as"),
        ({"min_tensor_bytes": "-4KiB"}, "min_tensor_bytes: .*positive size such as"),
        ({"min_tensor_bytes": ""}, "min_tensor_bytes: .*positive size such as"),
        ({"min_tensor_bytes": None}, "min_tensor_bytes: .*positive size such as"),
        ({"min_tensor_bytes": float("nan")}, "min_tensor_bytes: .*positive size such as"),
        ({"min_tensor_bytes": float("inf")}, "min_tensor_bytes: .*positive size such as"),
        ({"host_limit": 0}, "host_limit: .*positive size such as"),
        ({"host_limit": -(1 << 30)}, "host_limit: .*positive size such as"),
        ({"host_limit": "12GB!"}, "host_limit: .*positive size such as"),
        ({"host_limit": "half"}, "host_limit: .*positive size such as"),
        ({"exclude": ("third",)}, r"exclude: the model has no module 'third'; it has first, second"),
        ({"exclude": ("first.weight",)}, "exclude: the model has no module 'first.weight'"),
        ({"exclude": ("",)}, "exclude: the model has no module ''"),
        ({"exclude": (3,)}, "exclude: the model has no module 3"),
        ({"exclude": "first"}, r'exclude takes several module names: write exclude=\("first",\)'),
        ({"exclude": None}, "exclude takes .*module names"),
        ({"exclude": 3}, "exclude takes .*module names"),
    ],
    ids=str,
)
def test_wrong_argument(arguments, message):
    model = Net()
    with refused(model, ValueError, message):
        offload.enable(model, **arguments)


def test_unknown_argument():
    model = Net()
    with refused(model, TypeError, "unexpected keyword argument 'tensors'"):
        offload.enable(model, tensors=3)


@pytest.mark.parametrize("model", [None, Net, lambda x: x, [Net()]], ids=["None", "class", "function", "list"])
def test_not_a_module(model):
    with pytest.raises(ValueError, match=r"offload.enable takes a torch.nn.Module, not \w+"):
        offload.enable(model)


def test_spill_dir_that_does_not_exist(tmp_path):
    model = Net()
    with refused(model, FileNotFoundError, "spill_dir does not exist; create it, or name another folder.*absent"):
        offload.enable(model, spill_dir=tmp_path / "absent")


def test_spill_dir_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    model = Net()
    with refused(model, NotADirectoryError, "spill_dir is not a folder.*file"):
        offload.enable(model, spill_dir=path)


@pytest.mark.skipif(IS_ROOT, reason="root may write anywhere")
def test_spill_dir_that_is_not_writable(tmp_path):
    path = tmp_path / "read_only"
    path.mkdir(mode=0o500)
    model = Net()
    with refused(model, PermissionError, "spill_dir is not writable; name a folder that is.*read_only"):
        offload.enable(model, spill_dir=path)


def test_spill_dir_where_no_file_can_be_made():
    """Writable by its mode bits, and still no place for files."""
    model = Net()
    with refused(model, OSError, "spill_dir|cannot create the spill file"):
        offload.enable(model, spill_dir="/proc/self/fd")


def test_spill_dir_without_space(tmp_path, monkeypatch):
    about = os.statvfs(tmp_path)

    def full(path):
        return os.statvfs_result([about.f_bsize, about.f_frsize, about.f_blocks, 0, 0, *about[5:]])

    model = Net()
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", full)
        with pytest.raises(OSError, match="less than 64 MiB free; name a folder") as raised:
            offload.enable(model, spill_dir=tmp_path)
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(tmp_path)
    assert "forward" not in model.__dict__
    offload.enable(model, spill_dir=tmp_path).disable()


@pytest.mark.parametrize("spill_dir", [3.5, ["/tmp"]], ids=str)
def test_spill_dir_of_another_type(spill_dir):
    model = Net()
    with refused(model, (TypeError, ValueError), "spill_dir|path|PathLike"):
        offload.enable(model, spill_dir=spill_dir)


def test_already_enabled():
    model = Net()
    handle = offload.enable(model, min_tensor_bytes=1)
    forward = model.__dict__["forward"]
    with pytest.raises(ValueError, match=r"already enabled on this model; call offload.disable\(model\) first"):
        offload.enable(model)
    assert model.__dict__["forward"] is forward
    step(model)
    assert handle.report().steps == 1
    handle.disable()


def test_already_enabled_with_zero_tensors():
    model = Net()
    handle = offload.enable(model, n_tensors=0)
    with pytest.raises(ValueError, match="already enabled"):
        offload.enable(model)
    handle.disable()
    offload.enable(model).disable()
    assert "forward" not in model.__dict__


def test_unknown_device():
    model = Net().to("meta")
    with pytest.raises(ValueError, match=r"offload knows cpu and cuda devices, and the model is on meta; move it with"):
        offload.enable(model)
    assert "forward" not in model.__dict__


def test_two_devices():
    model = Net()
    model.second = model.second.to("meta")
    with pytest.raises(ValueError, match="the model is spread over cpu, meta; move it to one device"):
        offload.enable(model)
    assert "forward" not in model.__dict__
    model.second = nn.Linear(64, 64)
    offload.enable(model).disable()


def test_engine_that_cannot_be_made_leaves_nothing(monkeypatch, tmp_path):
    def broken(device, options):
        raise OSError(errno.EIO, "no disk today", str(tmp_path))

    model = Net()
    with monkeypatch.context() as patched:
        patched.setattr("offload.session.make_engine", broken)
        with pytest.raises(OSError, match="no disk today"):
            offload.enable(model)
    assert "forward" not in model.__dict__
    offload.enable(model).disable()


def test_disable_twice_and_of_a_plain_model():
    model = Net()
    assert offload.disable(model) is None
    handle = offload.enable(model)
    offload.disable(model)
    handle.disable()
    offload.disable(model)
    assert "forward" not in model.__dict__


def test_handle_cannot_be_copied():
    import copy

    handle = offload.enable(Net())
    with pytest.raises(TypeError, match=r"a session belongs to one model; copy the model and call offload\.enable"):
        copy.deepcopy(handle)


def test_context_manager():
    model = Net()
    expected = step(model)
    with offload.enable(model, min_tensor_bytes=1) as handle:
        assert_same(step(model), expected)
        assert "forward" in model.__dict__
    assert "forward" not in model.__dict__
    assert_same(step(model), expected)
    assert handle.report().steps == 1
    with pytest.raises(RuntimeError, match="as asked"), offload.enable(model):
        raise RuntimeError("as asked")
    assert "forward" not in model.__dict__


def test_step_after_disable_does_nothing():
    model = Net()
    handle = offload.enable(model, min_tensor_bytes=1)
    handle.disable()
    with handle.step():
        result = step(model)
    assert_same(result, step(model))
    assert handle.report().steps == 0


def test_zero_tensors_is_a_true_no_op():
    model = Net()
    packs = torch._C._autograd._top_saved_tensors_default_hooks
    seen = []
    model.first.register_forward_hook(lambda *_: seen.append(packs(False)))
    before = dict(model.__dict__)
    expected = step(model)
    handle = offload.enable(model, n_tensors=0)
    assert model.__dict__ == before
    with handle.step():
        assert_same(step(model), expected)
    assert seen == [None, None]
    about = handle.report()
    assert (about.steps, about.swapped.tensors, about.misses, about.kept) == (0, 0, 0, {})
    assert about.notes == ("NOTHING IS SWAPPED: n_tensors=0 turns the engine off",)
    assert "NOTHING IS SWAPPED: n_tensors=0" in str(about)
    handle.disable()


def test_zero_effect_is_said_loudly():
    model = Net()
    with offload.enable(model) as handle:
        assert "NOTHING WAS SWAPPED: no training step has run yet" in str(handle.report())
        step(model)
        about = handle.report()
    assert about.swapped.tensors == 0
    assert "NOTHING WAS SWAPPED: every saved tensor was kept" in str(about)
    assert "small" in str(about.notes), "with the reason"
    assert about.to_dict()["notes"] == list(about.notes)


class Counted(nn.Module):
    """Saves, in this order, what the tests below count."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(100, 100))
        self.register_buffer("mask", torch.rand(100, 100))
        self.left_alone = nn.Tanh()

    def forward(self, x):
        big = x * 2  # saves nothing: the factor is a number
        result = big.sin().sum()  # 40,000 bytes: moves
        result = result + big.cos().sum() + big.t().tan().sum()  # tan saves its own result; cos the same storage again
        result = result + (big * self.weight).sum()  # the storage once more; a parameter
        result = result + (big[:10] * self.mask[:10]).sum()  # a view of the storage once more; a view of a buffer
        result = result + self.left_alone(big).sum()  # its result is left alone
        return result + big[0, :5].exp().sum()  # 20 bytes: small


def test_report_counts_what_was_moved_and_what_was_not():
    model = Counted()
    torch.manual_seed(0)
    x = torch.rand(100, 100).requires_grad_()
    with offload.enable(model, min_tensor_bytes=1000, exclude=("left_alone",)) as handle:
        model(x).backward()
        about = handle.report()
    counted = about.to_dict()
    # big, and what tan returns.
    assert counted["swapped"] == {"tensors": 2, "bytes": 2 * 40_000}
    # cos's input, the two factors.
    assert counted["deduplicated"]["tensors"] >= 2
    assert counted["kept"]["excluded"] == {"tensors": 1, "bytes": 40_000}
    assert counted["kept"]["parameter"]["tensors"] == 2
    assert counted["kept"]["small"] == {"tensors": 1, "bytes": 20}
    assert set(counted["kept"]) == {"excluded", "parameter", "small"}
    assert counted["steps"] == 1
    assert counted["verdict"]["activation_bytes_unswapped"] == 2 * 40_000
    lines = str(about).splitlines()
    assert any(line.startswith("kept: excluded") and "1 tensors" in line for line in lines)
    assert any(line.startswith("swapped") and "2 tensors" in line for line in lines)


def test_report_counts_bytes_that_went_and_came():
    model = Net()
    with offload.enable(model, n_tensors=-1, lb=1, min_tensor_bytes=1) as handle:
        for _ in range(2):
            loss = model(torch.rand(500, 64).requires_grad_() * 2).sum()
            handle._engine.drain()
            loss.backward()
        counted = handle.report().to_dict()
    # The first linear layer's input, and what tanh returns (the second one's input is the same).
    assert counted["swapped"] == {"tensors": 4, "bytes": 4 * 500 * 64 * 4}
    assert counted["deduplicated"]["tensors"] == 2
    for direction in ("copy_out", "copy_in"):
        assert counted[direction]["bytes"] == 4 * 500 * 64 * 4
        assert counted[direction]["copies"] == 4
        assert counted[direction]["bytes_per_second"] > 0
    assert counted["prefetched"] + counted["misses"] == 4
    assert counted["prefetched"] >= 1
    assert counted["failed"] == counted["cancelled"] == 0
    assert counted["spilled_bytes"] <= 4 * 500 * 64 * 4
    assert counted["spill_file_bytes"] > 0


def test_view_of_a_larger_storage_is_a_reason():
    data = torch.rand(1000, 100)

    class Sliced(nn.Module):
        def forward(self, x):
            return (data[3:4] * x).sum()

    model = Sliced()
    with offload.enable(model, min_tensor_bytes=1000) as handle:
        model(torch.rand(100).requires_grad_()).backward()
        about = handle.report()
    assert about.kept["view of a larger storage"].to_dict() == {"tensors": 1, "bytes": 400}
    assert about.swapped.tensors == 0


# -- faults below -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["error", "flipped_bit"])
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
        assert "a prefetch failed; the tensor is read again on demand: [Errno 5]" in caplog.text
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


def test_a_storage_that_stays_counts_its_bytes_once():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1, exclude=("1", "2")) as handle:
        model(torch.randn(32, 64)).sum().backward()
        kept = handle.report().kept["excluded"]
    assert (kept.tensors, kept.nbytes) == (2, 32 * 64 * 4)  # tanh's result, which is the last layer's input too


def test_the_postfix_of_a_progress_bar():
    model = Net()
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle:
        assert handle.postfix()["swapped"] == "0 B"
        step(model)
        postfix = handle.postfix()
    assert set(postfix) == {"peak", "swapped", "stalled"}
    assert postfix["swapped"] == "16.00 KiB"
    assert postfix["peak"].endswith("iB")
    assert postfix["stalled"].endswith("s")


def test_the_plan_says_when_there_will_be_one():
    script = """
import torch, offload
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
handle = offload.enable(model, min_tensor_bytes=1)
for _ in range(2):
    assert handle.plan is None
    loss = model(torch.randn(8, 64)).sum()
    print(handle.plan is None)
    loss.backward()
assert handle.plan.peak_bytes > 0
offload.disable(model)
handle = offload.enable(model, n_tensors=1)
assert handle.plan is None
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert ran.stdout.split() == ["True", "False"]
    not_yet, by_hand = ran.stderr.splitlines()
    assert "its plan is made when the second begins" in not_yet
    assert "n_tensors is the manual mode" in by_hand
