"""What several inputs share is in memory once: the plan for a step under `memory_limit` counts it once."""

import pytest
import torch
from torch import nn

import offload
from offload.capacity.without_data import _bytes_of
from offload.runtime.engine import bytes_of

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
    assert bytes_of(tensors) == mib * MIB


def test_a_step_that_is_counted_without_data_counts_it_once():
    assert _bytes_of((DATA, {"key": DATA, "value": [DATA.view(-1)]}, None)) == MIB


def test_what_a_transform_wraps_has_no_bytes_of_its_own():
    found = []
    torch.vmap(lambda row: found.append(bytes_of([row, DATA])) or row)(DATA)
    assert found == [MIB]


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
