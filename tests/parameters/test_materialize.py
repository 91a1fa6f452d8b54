"""Models that are built on the meta device and filled from files: as if they had been loaded, in less memory."""

import errno
import json
import struct

import pytest
import torch
from fresh_python import run_fresh_python
from parameters.frozen_rig import (
    MIN_BYTES,
    Model,
    assert_away,
    assert_equal,
    away,
    batch,
    everything,
    make_model,
    train,
)
from torch import nn

import offload
from offload.parameters import materialize, safetensors_file
from offload.session import session_of

safetensors = pytest.importorskip("safetensors.torch")


def save(model, path):
    unique = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    safetensors.save_file(unique, path)
    return path


def on_meta(kind=Model):
    with torch.device("meta"):
        return kind()


def fill(model, weights, **knobs):
    return offload.materialize(model, weights, n_tensors=-1, min_tensor_bytes=MIN_BYTES, **knobs)


def test_a_materialized_model_trains_as_a_loaded_one(tmp_path):
    plain = make_model()
    model = on_meta()
    handle = fill(model, save(plain, tmp_path / "model.safetensors"))
    assert_away(model)
    assert model.head.weight is model.first.weight
    assert handle.report().moved_parameters.tensors == 7
    assert_equal(train(model, 4), train(plain, 4))
    handle.disable()
    assert_equal(everything(model), everything(plain))


def test_all_of_it_in_memory(tmp_path):
    plain, model = make_model(), on_meta()
    handle = fill(model, save(plain, tmp_path / "model.safetensors"), parameters=False)
    assert away(model) == []
    assert_equal(everything(model), everything(plain))
    assert handle.report().moved_parameters is None


class Mixed(nn.Module):
    """Buffers, empty tensors, types, attributes, and a part that is no meta tensor."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.small = nn.Parameter(torch.randn(40, 40).to(torch.bfloat16), requires_grad=False)
        self.small.remark = "kept"
        self.register_buffer("scalar", torch.tensor(3))
        with torch.device("cpu"):
            self.register_buffer("computed", torch.arange(4.0), persistent=False)


def test_every_kind_of_tensor(tmp_path):
    torch.manual_seed(0)
    plain = Mixed()
    plain.norm.running_mean += 1
    for index, names in enumerate((["small", "none"], [])):
        chosen = plain.state_dict() if not names else {name: plain.state_dict()[name] for name in names}
        rest = {name: value for name, value in chosen.items() if index == 0 or name not in ("small", "none")}
        safetensors.save_file(rest, tmp_path / f"model-{index}.safetensors", metadata={"format": "pt"})
    paths = sorted(tmp_path.glob("*.safetensors"))
    for weights in (tmp_path, paths, str(tmp_path)):
        model = on_meta(Mixed)
        handle = fill(model, weights)
        assert_equal(everything(model), everything(plain))
        assert torch.equal(model.computed, torch.arange(4.0))
        assert model.small.remark == "kept"
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
        assert model.norm.num_batches_tracked.dtype == torch.int64
        handle.disable()


class NamedTwice(nn.Module):
    """One tensor under two names of a module, and under a third one in another."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Parameter(torch.randn(40, 40), requires_grad=False)
        self.register_buffer("scale", torch.randn(4))
        self.register_buffer("same_scale", self.scale)
        self.inner = nn.Linear(40, 40, bias=False)
        self.inner.weight = self.first


@pytest.mark.parametrize("names", [("first", "scale"), ("second", "same_scale"), ("inner.weight", "scale")])
def test_every_name_of_a_tensor(names, tmp_path):
    plain, model = NamedTwice(), on_meta(NamedTwice)
    safetensors.save_file({name: plain.state_dict()[name] for name in names}, tmp_path / "model.safetensors")
    handle = fill(model, tmp_path / "model.safetensors")
    assert model.first is model.second is model.inner.weight
    assert model.scale is model.same_scale
    handle.disable()
    assert_equal(everything(model), everything(plain))


def test_values_take_the_types_of_the_model(tmp_path):
    plain = make_model()
    model = on_meta().to(torch.float64)
    fill(model, save(plain, tmp_path / "model.safetensors"))
    assert torch.equal(model.eval()(batch(0).double()), plain.double().eval()(batch(0).double()))


def headed(path, header, data=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


WRONG = {
    "too short": lambda path: path.write_bytes(b"abc"),
    "not the format": lambda path: path.write_bytes(b"x" * 100),
    "no json": lambda path: headed(path, b"{" * 20),
    "no dictionary": lambda path: headed(path, [1, 2]),
    "cut off": lambda path: headed(path, {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"1234"),
    "wrong size": lambda path: headed(path, {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    "negative": lambda path: headed(path, {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
    "another type": lambda path: headed(path, {"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_that_is_wrong(kind, tmp_path):
    WRONG[kind](tmp_path / "model.safetensors")
    model = on_meta()
    with pytest.raises(ValueError, match="is not a safetensors file, or is incomplete"):
        fill(model, tmp_path / "model.safetensors")
    assert all(parameter.is_meta for parameter in model.parameters())


def without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


REFUSED = {
    "are missing": (without("first.weight"), "first.weight: on the meta device, but not in the given files"),
    "unknown": (lambda s: {**s, "more": torch.ones(3)}, "more: among the weights, but not in the model"),
    "shape": (lambda s: {**s, "first.weight": torch.ones(3, 3)}, r"first.weight has the shape \[32, 32\] in the model"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_weights_of_another_model_are_refused(kind, tmp_path):
    change, message = REFUSED[kind]
    state = without("head.weight")(make_model().state_dict())
    safetensors.save_file(change(state), tmp_path / "model.safetensors")
    model = on_meta()
    with pytest.raises(ValueError, match=message):
        fill(model, tmp_path / "model.safetensors")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert session_of(model) is None


def test_arguments_that_are_refused(tmp_path):
    path = save(make_model(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="materialize has no argument memory_limti"):
        offload.materialize(nn.Linear(2, 2), "x.safetensors", memory_limti="1GiB")
    with pytest.raises(ValueError, match="materialize takes no optimizer"):
        fill(on_meta(), path, optimizer=None)
    with pytest.raises(ValueError, match="has no file"):
        fill(on_meta(), tmp_path / "..")
    with pytest.raises(ValueError, match=r"both have 'blocks.0"):
        fill(on_meta(), [path, path])
    with pytest.raises(FileNotFoundError):
        fill(on_meta(), tmp_path / "none.safetensors")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=["disk", "interrupt"])
def test_an_error_on_the_way_leaves_the_model_as_before(error, tmp_path, monkeypatch):
    path = save(make_model(), tmp_path / "model.safetensors")
    count = 0

    def fails_later(entry):
        nonlocal count
        count += 1
        if count == 8:
            raise error
        return safetensors_file.read_tensor(entry)

    monkeypatch.setattr(materialize, "read_tensor", fails_later)
    model = on_meta()
    with pytest.raises(type(error)):
        fill(model, path)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.first.weight
    monkeypatch.undo()
    handle = fill(model, path)
    assert_equal(train(model, 2), train(make_model(), 2))
    handle.disable()


def test_a_file_that_becomes_shorter(tmp_path):
    path = save(make_model(), tmp_path / "model.safetensors")
    entries = safetensors_file.read_entries(path)
    path.write_bytes(path.read_bytes()[:-100])
    last = max(entries.values(), key=lambda entry: entry.begin)
    with pytest.raises(OSError, match="shorter than its header says"):
        safetensors_file.read_tensor(last)


SMALL_MEMORY = """
import sys, torch, offload
from torch import nn
from offload.parameters import mover

def resident(name="VmHWM"):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) << 10

layers, width = 12, 1024
make = lambda: nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)], nn.Linear(width, 4))
with torch.device("meta"):
    model = make()
model[:-1].requires_grad_(False)
nn.Linear(width, 8)(torch.randn(4, width)).sum().backward()
torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports half of torch
before = resident()
mover.AHEAD_BYTES = mover.BEHIND_BYTES = 4 << 20
handle = offload.materialize(model, sys.argv[1], n_tensors=0)
optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
for number in range(4):
    model(torch.randn(8, width, requires_grad=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({name: p for name, p in model.named_parameters() if p.requires_grad}, sys.argv[1] + ".trained")
grown = resident() - before
assert grown < 32 << 20 < layers * width * width * 4, grown
"""


@pytest.mark.long
def test_no_moment_needs_memory_for_all_of_it(tmp_path):
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(12)]
    safetensors.save_file(nn.Sequential(*layers, nn.Linear(1024, 4)).state_dict(), tmp_path / "model.safetensors")
    freed = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_TOP_PAD_": "0"}
    run_fresh_python(SMALL_MEMORY, str(tmp_path / "model.safetensors"), **freed)
