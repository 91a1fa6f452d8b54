"""A workspace, such as that of oneDNN's LSTM, has bytes that no kernel writes: they differ from run to run."""

from unittest import mock

import pytest
import torch
from forced import gradients
from torch import nn

from offload.profiling import recipe_trial
from offload.profiling.workspace import as_words

OPERATOR = "aten.mkldnn_rnn_layer.default"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.lstm, self.b = nn.Linear(32, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 32)

    def forward(self, x):
        return self.b(self.lstm(self.a(x))[0])


def step(model, number):
    model.zero_grad()
    model(torch.randn(4, 12, 32)).square().mean().backward()
    return gradients(model)


def unwritten_words():
    """Which words of the LSTM's workspace its kernel leaves as torch has filled them."""
    saved = []
    model, x = Recurrent(), torch.randn(4, 12, 32)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda each: each):
            model(x)
    finally:
        torch.use_deterministic_algorithms(False)
    words = [as_words(tensor.untyped_storage()) for tensor in saved if tensor.dtype == torch.uint8]
    if not words:
        pytest.skip("this torch was built without oneDNN's recurrent layers")
    (workspace,) = words
    return workspace == -1


def changed_in_trial(where):
    """While a workspace is tried, the words at `where` have other values than in forward."""
    original = recipe_trial._Trial.drop

    def drop(self, tensor, index, key):
        if tensor.dtype != torch.uint8:
            return original(self, tensor, index, key)
        words = as_words(tensor.untyped_storage())
        before = words.clone()
        words[where] ^= 0x5A5A5A5A
        try:
            return original(self, tensor, index, key)
        finally:
            words.copy_(before)

    return mock.patch.object(recipe_trial._Trial, "drop", drop)


def test_words_that_are_not_written_may_differ(forcing):
    unwritten = unwritten_words()
    assert unwritten.any()
    with changed_in_trial(unwritten):
        handle = forcing.compare(Recurrent, step)
    assert "its bytes came out differently" not in forcing.refused(handle)
    assert OPERATOR in forcing.operators(handle)


def test_a_written_word_that_differs_is_refused(forcing):
    first_written = (~unwritten_words()).nonzero()[0]
    with changed_in_trial(first_written):
        handle = forcing.compare(Recurrent, step, recomputes=None)
    assert "its bytes came out differently" in forcing.refused(handle)


def test_torch_fills_no_memory_afterwards(forcing):
    flags = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with changed_in_trial(unwritten_words()):
            forcing.compare(Recurrent, step, steps=3)
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = flags[1]
