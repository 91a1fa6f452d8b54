"""Refused calls of `offload.enable`: arguments, folders, devices; nothing is half-enabled."""

import errno
import os
from contextlib import contextmanager

import numpy
import pytest
import torch
from test_enable import Net, step
from torch import nn

import offload

IS_ROOT = os.geteuid() == 0


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
        ({"exclude": "first"}, r'exclude takes a list of module names, not a string: write exclude=\("first",\)'),
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


@pytest.mark.parametrize("given", [5, b"/tmp"])
def test_spill_dir_that_is_no_path(given):
    model = Net()
    with refused(model, ValueError, f"spill_dir takes the path of a folder, not {given!r}"):
        offload.enable(model, spill_dir=given)


def test_spill_dir_that_is_empty():
    model = Net()
    with refused(model, ValueError, "spill_dir is empty; name a folder, or leave it out"):
        offload.enable(model, spill_dir="")


def test_spill_dir_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    model = Net()
    with refused(model, NotADirectoryError, "spill_dir is not a folder; name one.*file"):
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
    with pytest.raises(ValueError, match=r"the model is on meta, so its parameters have no values; use"):
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


@pytest.mark.parametrize(
    "asked", [{"optimizer_state": True}, {"optimizer_state": True, "gradients": True}, {"step_in_backward": True}]
)
def test_an_optimizer_in_a_wrapper_that_passes_its_attributes(asked):
    model = Net()
    inner = torch.optim.AdamW(model.parameters())
    wrapper = offload.contrib.GradAccumulator(inner, steps=2)
    hooks = {name: len(value) for name, value in vars(inner).items() if "hooks" in name}
    message = r"optimizer takes a torch.optim.Optimizer, .*Write optimizer=optimizer\.optimizer"
    for optimizer in (wrapper, [wrapper]):
        with refused(model, ValueError, f"(?s){message}"):
            offload.enable(model, optimizer=optimizer, **asked)
    with offload.enable(model) as handle, pytest.raises(ValueError, match=f"(?s){message}"):
        handle.add_optimizer(wrapper)
    assert hooks == {name: len(value) for name, value in vars(inner).items() if "hooks" in name}


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"memory_limit": numpy.int64(1 << 30)}, {"memory_limit": 1 << 30}),
        ({"memory_limit": numpy.float32(0.5)}, {"memory_limit": 0.5}),
        ({"n_tensors": numpy.int64(-1), "lb": numpy.uint8(4)}, {"n_tensors": -1, "lb": 4}),
        ({"max_slowdown": numpy.float64(0.25)}, {"max_slowdown": 0.25}),
        ({"max_slowdown": numpy.float32(0.25)}, {"max_slowdown": 0.25}),
        ({"min_tensor_bytes": numpy.int64(4096)}, {"min_tensor_bytes": 4096}),
    ],
)
def test_numbers_of_numpy_are_numbers(given, own):
    always = {"host_limit": "1GiB"}  # by default it depends on free memory
    with offload.enable(Net(), **given, **always) as handle, offload.enable(Net(), **own, **always) as other:
        assert handle._options == other._options
        assert repr(handle._options) == repr(other._options)
