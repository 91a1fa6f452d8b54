"""How many bytes of tensors are alive on the CPU at the worst moment of a step, seen from outside of the engine.

Torch's profiler tells every allocation of torch's own; what the engine brings back is told by the blocks themselves.
"""

import weakref
from contextlib import contextmanager

from torch.autograd.profiler import profile, record_function

from offload.runtime.engine import Engine

_BLOCK = "block of "


def tell_blocks():
    """Have every block of the engine mark its beginning and its end in a profile. Returns what undoes it."""
    allocate = Engine.allocate

    def telling(self, nbytes, residue):
        allocated = allocate(self, nbytes, residue)
        _mark(nbytes)
        weakref.finalize(allocated[2], _mark, -nbytes)
        return allocated

    def undo():
        Engine.allocate = allocate

    Engine.allocate = telling
    return undo


def end_copies_at_once(engine):
    """Have every copy-out end before the hook that begins it returns: what is in memory is then no matter of speed."""

    def await_all():
        while engine._copies_out:
            engine._await_oldest()

    engine.in_flight_bytes_max = 0
    engine.limit_in_flight = await_all


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
