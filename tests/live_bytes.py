"""How many bytes of tensors are alive on the CPU at the worst moment of a step, seen from outside of the engine.

Torch's profiler tells every allocation of torch's own; what the engine brings back is told by the blocks themselves.
"""

import logging
import weakref
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.profiler import profile, record_function

from offload import _core
from offload.runtime.engine import Engine

_BLOCK = "block of "


def tell_blocks():
    """Have every block of the engine mark its beginning and its end in a profile. Returns what undoes it."""
    init = Engine.__init__

    def telling(self, store, device, in_flight_bytes_max=None):
        init(self, store, device, in_flight_bytes_max)
        given = (store, device, self.resident, self.unswapped, self.in_flight_bytes_max)
        new_storage = partial(_told_storage, max(store.alignment_bytes, 64))
        _core.EngineCore.__init__(
            self, *given, current_stream=None, record_use=None, new_storage=new_storage, warn=logging.warning
        )

    def undo():
        Engine.__init__ = init

    Engine.__init__ = telling
    return undo


def _told_storage(alignment, nbytes, residue):
    block = _core.HostBlock(nbytes, alignment, residue)
    _mark(nbytes)
    weakref.finalize(block, _mark, -nbytes)
    return torch.frombuffer(block, dtype=torch.uint8).untyped_storage()


def _mark(nbytes):
    with record_function(f"{_BLOCK}{nbytes}"):
        pass


class Peak:
    """The most bytes alive within `watch()`, over those that were there before."""

    nbytes = 0

    @contextmanager
    def watch(self):
        with profile(use_cpu=True, profile_memory=True) as watched:
            yield
        changes = []
        events = list(watched.kineto_results.experimental_event_tree())
        while events:
            event = events.pop()
            events.extend(event.children)
            if event.typed[0].name == "Allocation":
                changes.append((event.start_time_ns, event.typed[1].alloc_size))
            elif event.name.startswith(_BLOCK):
                changes.append((event.start_time_ns, int(event.name.removeprefix(_BLOCK))))
        now = 0
        for _, change in sorted(changes):
            now += change
            self.nbytes = max(self.nbytes, now)
