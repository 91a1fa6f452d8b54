"""Memory of inputs that a plan under `memory_limit` counts once: what several share, and what only the graph holds."""

import inspect
import textwrap

import pytest
import torch
from torch import nn

import offload
from offload.capacity.without_data import _bytes_of
from offload.plan import unswapped_bytes
from offload.profiling.profiler import Profiler
from offload.runtime.engine import bytes_taken
from offload.torch_compat.tensors import storage_identity

MIB = 1 << 20
DATA = torch.randn(4096, 64)  # 1 MiB


@pytest.mark.parametrize(
    ("tensors", "mib"),
    [
        ([DATA], 1),
        ([DATA, DATA, DATA], 1),  # as in self-attention
        ([DATA, DATA.view(64, 64, 64), DATA.detach()], 1),
        ([DATA[:1024]], 0.25),  # a batch of data in memory
        ([DATA[:1024], DATA[1024:2048]], 0.5),
        ([DATA[:, :1].expand(4096, 4096)], 1),  # at most the storage
        ([DATA, torch.zeros(4096, 64)], 2),
        ([torch.eye(64).to_sparse()], 0),  # no storage
        ([], 0),
    ],
)
def test_bytes_of_inputs(tensors, mib):
    assert sum(bytes_taken(tensors).values()) == mib * MIB


def test_a_step_that_is_counted_without_data_counts_it_once():
    assert list(_bytes_of((DATA, {"key": DATA, "value": [DATA.view(-1)]}, None)).values()) == [MIB]


def test_what_a_transform_wraps_has_no_bytes_of_its_own():
    found = []
    torch.vmap(lambda row: found.append(bytes_taken([row, DATA])) or row)(DATA)
    assert list(found[0].values()) == [MIB]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, *inputs):
        return sum(torch.tanh(layer(each)) for layer, each in zip(self.layers, inputs, strict=True)).square().mean()


def test_a_plan_counts_an_input_that_is_given_three_times_once():
    bases = []
    for inputs in ((DATA, DATA, DATA), (DATA, DATA.clone(), DATA.clone())):
        model = Attention()
        with offload.enable(model, memory_limit=64 * MIB, min_tensor_bytes=1 << 12) as handle:
            for _ in range(2):
                model(*inputs).backward()
            bases.append(handle.trace().base_bytes[0])
    assert bases[1] - bases[0] == 2 * MIB


class Layers(nn.Sequential):
    """Its input is saved by the first layer only. Backward of the wide layer in the middle needs the most memory."""

    def __init__(self):
        wide = nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256), nn.Tanh()
        super().__init__(nn.Linear(256, 256), nn.Tanh(), *wide, nn.Linear(256, 256), nn.Tanh())


def batch():
    return torch.randn(2048, 256)  # 2 MiB


def inline(model):
    return model(batch()).square().mean()


def held(model):
    x = batch()
    loss = model(x).square().mean()
    loss.x = x  # as a variable of the training loop would hold it
    return loss


def half_of_it(model):
    return model(torch.randn(4096, 256)[:2048]).square().mean()


def least_bytes(model, step):
    """The least `memory_limit` that the refusal of a limit names."""
    with offload.enable(model, memory_limit=1 << 16, min_tensor_bytes=1 << 16, recompute=False) as handle:
        step(model).backward()
        with pytest.raises(offload.InfeasibleLimitError) as refused, handle.step():
            step(model)
    model.zero_grad()
    return refused.value.least_limit_bytes


def profiled(model, step):
    with offload.enable(model, memory_limit=1 << 30, min_tensor_bytes=1 << 16) as handle:
        for _ in range(2):
            step(model).backward()
            model.zero_grad()
        return handle.trace()


def test_an_input_that_only_the_graph_holds_counts_once():
    model = Layers()
    named, own, sliced = (profiled(model, step) for step in (held, inline, half_of_it))
    assert own.tensors[0].bytes == 2 * MIB
    assert len(own.tensors) == len(named.tensors) + 1
    assert (own.tensors[0].produced, own.tensors[0].packed) == (0, 0)
    assert own.base_bytes == tuple(nbytes - 2 * MIB for nbytes in named.base_bytes)
    assert unswapped_bytes(own) == unswapped_bytes(named)
    assert max(unswapped_bytes(sliced)) == max(unswapped_bytes(named)) + 2 * MIB, "the whole storage is in memory"


def test_a_plan_may_swap_it():
    """Its bytes are not needed at the peak: the least limit is lower."""
    model = Layers()
    assert least_bytes(model, inline) <= least_bytes(model, held) - 2 * MIB


def test_an_input_that_is_saved_late_is_in_memory_from_the_start():
    class Late(Layers):
        def forward(self, x, y):
            return super().forward(x) * y

    trace = profiled(Late(), lambda model: model(batch(), batch()).mean())
    inputs = [tensor for tensor in trace.tensors if tensor.produced == 0 and tensor.bytes == 2 * MIB]
    assert len(inputs) == 2
    assert inputs[1].packed > 0


class Reuses(nn.Module):
    """Frees its input early, and then saves a tensor whose storage has the identity that the input's had."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, given):
        x = given.pop()
        identity = storage_identity(x.untyped_storage())
        h = self.layer(torch.ones_like(x))
        del x
        others = []
        for _ in range(10_000):
            made = torch.empty(1)
            if storage_identity(made.untyped_storage()) == identity:
                break
            others.append(made)
        else:
            pytest.fail("no new storage has the identity of the input's")
        made.untyped_storage().resize_(h.nbytes)
        return (h * made.set_(made.untyped_storage(), 0, h.shape, (256, 1)).fill_(2)).square().mean()


@pytest.mark.parametrize("is_guarded", [True, False])
def test_another_storage_with_the_identity_of_a_freed_input_is_no_input(is_guarded, monkeypatch):
    if not is_guarded:
        found = Profiler.__dict__["profile"]
        source = textwrap.dedent(inspect.getsource(found))
        without = source.replace(" and number not in found.produced", "")
        assert without != source
        names = dict(vars(inspect.getmodule(found)))
        exec(without, names)
        monkeypatch.setattr(Profiler, "profile", names["profile"])
    model = Reuses()
    with offload.enable(model, memory_limit=1 << 30, min_tensor_bytes=1 << 16) as handle:
        model([batch()]).backward()
        handle.trace()
        assert handle._enabled.on_device.controller.main.profile.frees_inputs is not is_guarded
