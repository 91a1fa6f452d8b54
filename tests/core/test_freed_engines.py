"""An engine is freed while the worker thread copies: it waits, so that the memory of the source is still there."""

import pytest
from fresh_python import run_fresh_python

SCRIPT = """
    import sys, torch
    from offload import _core
    from offload.runtime.engine import Engine

    def begin(nbytes):
        engine = Engine(store, torch.device("cpu"))
        tensor = torch.ones(nbytes, dtype=torch.uint8)
        key, _ = engine.look(tensor, nbytes)
        return engine.swap_out(tensor, key, 0)

    store = _core.SwapStore.direct(_core.HostDriver(), sys.argv[1])
    for _ in range(5):
        stored = begin(128 << 20)  # so large that malloc gives it back to the system at once
        while sys.argv[2] == "begun" and stored.ticket.state == "queued":
            pass
        del stored
    assert store.stats()["live_tickets"] == 0
    print("alive")
"""


@pytest.mark.parametrize("moment", ["begun", "queued"])
def test_an_engine_that_is_freed_waits_for_its_copies(moment, tmp_path):
    assert run_fresh_python(SCRIPT, str(tmp_path), moment) == "alive\n"


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
