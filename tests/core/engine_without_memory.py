"""A child process: one more allocation of `Engine.swap_out` succeeds, then one fails, until none does.

Prints how many were refused, and at how many of these the copy had been queued.
"""

import ctypes
import faulthandler
import json
import sys

import torch
from campaign.broken_engine import break_as_told

from offload import _core
from offload._core import view_of
from offload.runtime.engine import Engine

ROUNDS_MAX = 200
NUMEL = 1 << 17
SLOW = 4 << 20  # bytes per second: a copy takes an eighth of a second
LATE_US = 50_000  # until an allocation fails: the copy has begun by then, and has not ended


def refused_copies(fail, directory):
    """Numbers of refused calls, and of copies among them that had been queued."""
    store = _core.SwapStore.direct(_core.HostDriver(bandwidth=SLOW), directory)
    engine = Engine(store, torch.device("cpu"))
    refused = queued = 0
    # Each three times: one of them may be an allocation that few calls make, of a part of a lane's queue.
    for nth in (nth for nth in range(1, ROUNDS_MAX) for _ in range(3)):
        faulthandler.dump_traceback_later(60, exit=True)
        tensor = torch.arange(NUMEL, dtype=torch.int32) * nth
        key, slot = engine.look(tensor, tensor.nbytes)
        assert slot is None
        before = store.stats()
        fail(False, nth, 1)
        try:
            saved = engine.swap_out(tensor, key, 1)
        except MemoryError:
            saved = None
        except RuntimeError as error:  # what torch's own functions make of it
            if str(error) != "std::bad_alloc":
                raise
            saved = None
        if fail(False, 0, 0) < nth:  # no allocation failed: there are no more
            assert saved is not None
            return refused, queued
        if saved is not None:
            continue  # one whose failure is made good
        refused += 1
        assert store.stats()["live_tickets"] == 0, f"allocation {nth}: the copy was left to itself"
        store.quiesce()  # a cancelled copy is counted when its lane comes to it
        now = store.stats()
        queued += now["out_copies"] + now["cancelled"] > before["out_copies"] + before["cancelled"]
        assert (engine.sources_held, engine.in_flight_bytes, engine.live_storages()) == (0, 0, [])
        assert torch.equal(tensor, torch.arange(NUMEL, dtype=torch.int32) * nth)
        saved = engine.swap_out(tensor, key, 1)  # with memory, the same call succeeds
        view, expected = view_of(tensor, saved, 0), tensor.clone()
        saved.wait_copied_out()
        del tensor
        engine.drain()
        assert torch.equal(view.restore(), expected)
        del saved, view
        engine.drain()
    raise AssertionError(f"allocation {ROUNDS_MAX} of one call still fails")


def main():
    break_as_told()
    preloaded, directory = sys.argv[1:]
    fail = ctypes.CDLL(preloaded).fail
    fail.argtypes, fail.restype = [ctypes.c_bool, ctypes.c_long, ctypes.c_long], ctypes.c_long
    ctypes.CDLL(preloaded).fail_late(LATE_US)
    refused, queued = refused_copies(fail, directory)
    print(json.dumps({"refused": refused, "queued": queued}))


if __name__ == "__main__":
    main()
