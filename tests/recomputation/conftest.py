"""Every test here runs with the garbage collector off, and leaves nothing: no record, no byte, no mode."""

import gc

import pytest
import torch
from forced import Forcing


@pytest.fixture
def forcing(tmp_path):
    """With the collector off: no reference may go in a circle."""
    gc.collect()
    gc.disable()
    made = Forcing(str(tmp_path))
    try:
        yield made
        for handle in made.handles:
            engine = handle._engine
            handle.disable()
            engine.collect()
            assert engine.live_records == 0, "a graph is gone, and its records are not"
            assert engine.resident.now == 0
            assert engine.unswapped.now == 0
        assert torch._C._len_torch_dispatch_stack() == 0
    finally:
        gc.enable()
