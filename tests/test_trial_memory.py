"""The trial step keeps `memory_limit` where an operator returns several results and autograd packs them in turn."""

import pytest
import torch
from live_bytes import Peak, end_copies_at_once, tell_blocks
from torch import nn

import offload
from offload.control import trial
from offload.plan import least_feasible_limit
from offload.plan.trace import Node, SavedTensor, Trace

KNOBS = {"min_tensor_bytes": 1 << 15}


def step(model):
    x = torch.ones(32, 64, 64)
    model(x)[0].square().mean().backward()
    model.zero_grad()


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_layer_whose_workspace_is_packed_after_its_result(is_guarded, monkeypatch, tmp_path):
    """While the recipe of the result is tried, the workspace is in memory."""
    monkeypatch.setenv("OFFLOAD_THROTTLE", "20MB/s")
    if not is_guarded:
        monkeypatch.setattr(trial, "_unpacked_bytes", lambda trace: [0] * len(trace.nodes))
    model = nn.LSTM(64, 64, 2, batch_first=True)
    with offload.enable(model, memory_limit="1GiB", spill_dir=tmp_path, **KNOBS) as handle:
        for _ in range(2):
            step(model)
        limit = least_feasible_limit(handle.trace())
    held = sum(parameter.nbytes for parameter in model.parameters())
    with offload.enable(model, memory_limit=limit, spill_dir=tmp_path, **KNOBS) as handle:
        tell_blocks(handle._engine)
        end_copies_at_once(handle._engine)
        step(model)
        handle.trace()  # ends its profiler, so that there is only that of `Peak`
        peak = Peak()
        with peak.watch():
            step(model)
        assert handle.report().to_dict()["trial_steps"] == 1
    assert (held + peak.nbytes <= limit) is is_guarded


def test_bytes_that_exist_before_their_pack():
    nodes = tuple(Node(str(k), 1.0, k > 4) for k in range(8))
    late, at_once, latest = (10, 0, 2, 2), (100, 1, 1, 2), (1000, 1, 4, 4)  # bytes, produced, packed, last_forward
    tensors = tuple(SavedTensor(k, *each, 6, 6) for k, each in enumerate((late, at_once, latest)))
    assert trial._unpacked_bytes(Trace(nodes, (0,) * 8, tensors)) == [10, 1010, 1000, 1000, 0, 0, 0, 0]
