"""A model with moved parameters is sent to another process: both share its memory, as without offload."""

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from parameters.frozen_rig import away, enable, loss_of, make_model

from offload.parameters import moved_parameter


@pytest.mark.parametrize("parameters", ["frozen", "all"])
def test_a_model_that_is_sent_to_another_process_is_in_shared_memory(parameters, tmp_path):
    model = make_model()
    with enable(model, tmp_path, parameters=parameters):
        loss_of(model, 0).backward()
        moved = len(away(model))
        received = pickle.loads(ForkingPickler.dumps(model))
        assert moved > 0
        assert not away(model)
        for _ in range(2):
            loss_of(model, 0).backward()
        assert not away(model), "torch has placed them in shared memory, where the other process reads them"
        pairs = list(zip(model.parameters(), received.parameters(), strict=True))
        assert all(type(other) is torch.nn.Parameter and torch.equal(one, other) for one, other in pairs)
        with torch.no_grad():
            for one, other in pairs:
                other.fill_(2)
                assert torch.equal(one, other)


def test_a_forward_while_a_parameter_is_being_sent(tmp_path, monkeypatch):
    """A queue pickles in a thread of its own: a forward may begin between two of its steps."""
    model = make_model()
    original = moved_parameter.reduce_tensor

    def reduce_after_a_forward(parameter):
        loss_of(model, 1).backward()
        return original(parameter)

    monkeypatch.setattr(moved_parameter, "reduce_tensor", reduce_after_a_forward)
    with enable(model, tmp_path, parameters="all"):
        loss_of(model, 0).backward()
        received = pickle.loads(ForkingPickler.dumps(model))
        pairs = zip(model.parameters(), received.parameters(), strict=True)
        assert all(type(other) is torch.nn.Parameter and torch.equal(one, other) for one, other in pairs)
