"""How many bytes of tensors are alive on the CPU at the worst moment of a step, seen from outside of the engine.

Torch's profiler tells every allocation of torch's own; what the engine brings back is told by the blocks themselves.
"""

import weakref
from contextlib import contextmanager

from torch.autograd.profiler import profile, record_function

from offload import _core
from offload.runtime.engine import Engine
from offload.torch_compat.borrowed_memory import storage_over

_BLOCK = "block of "


def told_blocks(alignment, told):
    """What an engine's `new_storage` may be: `told` is called with the bytes of every block that begins or ends."""

    def new_storage(nbytes, residue):
        block = _core.HostBlock(nbytes, max(alignment, 64), residue)
        told(nbytes)
        weakref.finalize(block, told, -nbytes)
        return storage_over(block)

    return new_storage


def tell_blocks(engine):
    """Have every block of the engine mark its beginning and its end in a profile."""
    engine.new_storage = told_blocks(engine.store.alignment_bytes, _mark)


def tell_blocks_of_all():
    """The same for every engine that is made from now on. Returns what undoes it."""
    init = Engine.__init__

    def telling(self, *args, **kwargs):
        init(self, *args, **kwargs)
        tell_blocks(self)

    def undo():
        Engine.__init__ = init

    Engine.__init__ = telling
    return undo


def end_copies_at_once(engine):
    """Have every copy-out end before the hook that begins it returns: what is in memory is then no matter of speed."""
    engine.in_flight_bytes_max = 0
    engine.limit_in_flight = engine.drain


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
