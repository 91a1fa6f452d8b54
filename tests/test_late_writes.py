"""Modules whose kernels write into what autograd has just saved: that stays, so that no copy has other bytes."""

import copy
import gc
import inspect
import pickle
import textwrap
from unittest import mock

import pytest
import torch
from torch import nn

import offload
from offload.control import device_session
from offload.torch_compat import late_writes

REASON = "written later"


class Normalized(nn.Module):
    """Repeats the running statistics of 64 features for each of 512 samples: 128 KiB."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(64, track_running_stats=True)

    def forward(self, x):
        return self.norm(x.view(-1, 64, 1).expand(-1, 64, 4) * torch.arange(1.0, 5)).mean(-1)


KINDS = {"rrelu": nn.RReLU, "instance norm": Normalized}


def made(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), KINDS[kind](), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def trained(model, steps=5):
    """The gradients of each step, and the buffers after the last one."""
    found = []
    for number in range(steps):
        torch.manual_seed(number)
        model.zero_grad()
        model(torch.randn(512, 8)).square().mean().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def check(kind, spill_dir, **options):
    model = made(kind)
    expected = trained(copy.deepcopy(model))
    with offload.enable(model, min_tensor_bytes="1KiB", spill_dir=spill_dir, **options) as handle:
        found = trained(model)
        report = handle.report()
    assert all(map(torch.equal, found, expected))
    assert report.swapped.tensors > 0
    return report


@pytest.mark.parametrize("options", [{"n_tensors": -1, "lb": 1}, {"max_slowdown": 100.0}], ids=["by hand", "planned"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_later_stays(kind, options, tmp_path):
    report = check(kind, tmp_path, **options)
    assert report.kept[REASON].tensors >= 5, "at least one in each step"
    assert report.kept[REASON].tensors <= 4 * 5, "what has a history is swapped"


@pytest.mark.parametrize("kind", KINDS)
def test_without_this_guard_bits_differ(kind, tmp_path):
    function = device_session.DeviceSession.why_held
    source = textwrap.dedent(inspect.getsource(function))
    assert "late_writes.is_writing()" in source
    names = dict(function.__globals__)
    exec(source.replace("late_writes.is_writing()", "False"), names)

    def train_often():
        for _ in range(20):  # a copy can be so slow that it has the new bytes
            check(kind, tmp_path, n_tensors=-1, lb=1)

    patched = mock.patch.object(device_session.DeviceSession, "why_held", names["why_held"])
    with patched, pytest.raises((AssertionError, OSError)):
        train_often()
    gc.collect()


def test_a_hook_of_the_program_that_raises_before_ours(tmp_path):
    """Torch calls the hooks after forward all the same."""
    model = made("rrelu")
    error = [ZeroDivisionError]

    def fail(module, args):
        if error:
            raise error.pop()

    model[2].register_forward_pre_hook(fail)
    with offload.enable(model, n_tensors=-1, lb=1, spill_dir=tmp_path):
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(512, 8))
        assert not late_writes.is_writing()
        late_writes._leave(model[2], (), None)
        late_writes._enter(model[2], ())
        assert late_writes.is_writing()
        late_writes._leave(model[2], (), None)


def test_modules_that_write_nothing_later_are_not_watched(tmp_path):
    model = nn.Sequential(nn.InstanceNorm1d(4), nn.BatchNorm1d(4), nn.LeakyReLU())
    assert late_writes.watch(model) == []


def test_a_model_is_copied_and_pickled_as_before(tmp_path):
    model = made("rrelu")
    expected = trained(copy.deepcopy(model))
    with offload.enable(model, n_tensors=-1, spill_dir=tmp_path):
        others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert not model[2]._forward_hooks
    assert not model[2]._forward_pre_hooks
    for other in (model, *others):
        assert all(map(torch.equal, trained(other), expected))


def test_a_block_that_raises_is_left_all_the_same(tmp_path):
    class Failing(nn.RReLU):
        error = ZeroDivisionError

        def forward(self, x):
            if self.error is not None:
                raise self.error
            return super().forward(x)

    model = nn.Sequential(nn.Linear(8, 64), Failing())
    with offload.enable(model, n_tensors=-1, spill_dir=tmp_path):
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(512, 8))
        assert not late_writes.is_writing()
        model[1].error = KeyboardInterrupt  # torch does not call a module's hooks after it
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(512, 8))
        model[1].error = None
        model(torch.randn(512, 8))
        assert not late_writes.is_writing()


@pytest.mark.parametrize("compiled_first", [False, True])
def test_a_compiled_block_has_no_graph_break(compiled_first, tmp_path):
    """Compiled code saves what its kernels have written."""
    model = made("instance norm")
    expected = trained(copy.deepcopy(model))

    def compile_it():
        model[2].compile(backend="aot_eager", fullgraph=True)

    if compiled_first:
        compile_it()
    with offload.enable(model, n_tensors=-1, lb=1, min_tensor_bytes="1KiB", spill_dir=tmp_path) as handle:
        if not compiled_first:
            compile_it()
        found = trained(model)
        assert handle.report().swapped.tensors > 0
    torch._dynamo.reset()
    assert all(map(torch.equal, found, expected))
