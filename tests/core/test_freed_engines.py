"""An engine is freed while the worker thread copies: it waits, so that the memory that is copied is still there."""

import pytest
from fresh_python import run_fresh_python

BEGIN = """
    import sys, torch
    from offload import _core
    from offload.runtime.engine import Engine

    NBYTES = 128 << 20  # so large that malloc gives it back to the system at once

    def begin(store):
        engine = Engine(store, torch.device("cpu"))
        tensor = torch.ones(NBYTES, dtype=torch.uint8)
        key, _ = engine.look(tensor, NBYTES)
        return engine.swap_out(tensor, key, 0)
"""
COPIES_OUT = f"""{BEGIN}
    store = _core.SwapStore.direct(_core.HostDriver(), sys.argv[1])
    for _ in range(5):
        stored = begin(store)
        while sys.argv[2] == "begun" and stored.ticket.state == "queued":
            pass
        del stored
        store.quiesce()  # what still copies finds no memory at the address, as no other tensor has been made since
    assert store.stats()["live_tickets"] == 0
    print("alive")
"""
COPIES_IN = f"""{BEGIN}
    lanes = _core.HostDriver()
    store = _core.SwapStore.slab(lanes, lanes, 2 * NBYTES, slab_bytes=2 * NBYTES, slice_bytes=NBYTES)
    for number in range(5):
        stored = begin(store)
        stored.add_view()
        stored.wait_copied_out()
        stored.prefetch()
        while store.stats()["in_transfers"] == number:
            pass
        del stored
        store.quiesce()
    print("alive")
"""


@pytest.mark.parametrize("moment", ["begun", "queued"])
def test_an_engine_that_is_freed_waits_for_its_copies(moment, tmp_path):
    assert run_fresh_python(COPIES_OUT, str(tmp_path), moment) == "alive\n"


def test_an_engine_that_is_freed_waits_for_a_copy_in():
    assert run_fresh_python(COPIES_IN) == "alive\n"


def test_a_model_that_is_freed_while_its_parameters_are_written(tmp_path):
    script = """
        import sys, torch, offload
        from torch import nn

        def train():
            model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            moved = {"parameters": "all", "optimizer": optimizer, "step_in_backward": True}
            offload.enable(model, n_tensors=-1, spill_dir=sys.argv[1], **moved)
            for _ in range(2):
                model(torch.ones(8, 2048)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        for _ in range(3):
            train()
        print("alive")
    """
    assert run_fresh_python(script, str(tmp_path)) == "alive\n"
