"""Saved-tensor hooks of a program around an enabled model: offload's own replace them, and say so."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import offload
from offload.runtime.refusals import name_of_others


def make():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())])


def compressed(tensor):
    return tensor.bfloat16()


def restored(tensor):
    return tensor.float()


@pytest.mark.parametrize(
    ("around", "name"),
    [
        (partial(saved_tensors_hooks, compressed, restored), f"{__name__}.compressed"),
        (save_on_cpu, "torch.autograd.graph.save_on_cpu"),
        (allow_mutation_on_saved_tensors, "torch.autograd.graph"),
    ],
)
@pytest.mark.parametrize("begins_in", ["forward", "step"])
def test_a_warning_and_a_note_name_them(around, name, begins_in, caplog):
    model = make()
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle, caplog.at_level(logging.WARNING, "offload"):
        for _ in range(2):
            with around():
                if begins_in == "forward":
                    loss = model(torch.ones(8, 32)).sum()
                else:
                    with handle.step():
                        loss = model(torch.ones(8, 32)).sum()
            loss.backward()
        notes = [note for note in handle.report().notes if "set around the model" in note]
    assert len(notes) == 1
    assert f"({name}" in notes[0]
    assert [record.getMessage() for record in caplog.records] == notes


def test_nothing_is_said_of_hooks_of_offload_or_checkpoint(caplog):
    outer, inner = make(), make()

    class Both(nn.Module):
        def forward(self, x):
            return checkpoint(nested, outer(x), use_reentrant=False)

    nested = inner.forward
    model = Both()
    model.outer = outer
    with (
        offload.enable(model, n_tensors=-1, min_tensor_bytes=1, parameters="all"),
        offload.enable(inner, n_tensors=-1, min_tensor_bytes=1) as handle,
        caplog.at_level(logging.WARNING, "offload"),
    ):
        model(torch.ones(8, 32)).sum().backward()
        with offload.enable(other := make(), n_tensors=-1, min_tensor_bytes=1) as also, also.step():
            loss = other(inner(torch.ones(8, 32))).sum()
        loss.backward()
        notes = [*handle.report().notes, *also.report().notes]
    assert caplog.records == []
    assert not any("set around the model" in note for note in notes)


def test_names():
    assert name_of_others(None) == ""
    assert name_of_others((compressed, restored)) == f"{__name__}.compressed"
    assert name_of_others((partial(compressed), restored)) == f"{__name__}.compressed"
    assert name_of_others((name_of_others, name_of_others)) == ""
