"""What a recorded step's memory is made of."""

import threading

import pytest
import torch
from torch.autograd.profiler import profile, record_function

from offload.plan.trace import SavedTensor
from offload.profiling.allocations import StepAllocations
from offload.torch_compat import allocation_profile

MiB = 1 << 20
CPU = torch.device("cpu")


def empty(mebibytes):
    return torch.empty(mebibytes * MiB, dtype=torch.uint8)


def place(tensor):
    return tensor.untyped_storage().data_ptr()


def saved(number, mebibytes, *, packed, last_forward, first_backward, last_use):
    return SavedTensor(number, mebibytes * MiB, packed, packed, last_forward, first_backward, last_use)


def test_temporaries_and_what_is_saved_are_told_apart():
    watched = StepAllocations(CPU)
    watched.begin()
    watched.node(0)
    first = empty(4)
    watched.saved(7)
    places = {7: place(first)}
    row = saved(7, 4, packed=0, last_forward=1, first_backward=3, last_use=3)
    watched.node(1)
    temporary = empty(8)
    del temporary
    late = empty(2)
    watched.node(2)
    del first
    gradient = empty(1)
    watched.node(3)
    del late
    watched.node(4)
    assert watched.stop()
    assert watched.complete
    found = watched.footprint([row], places, {place(gradient)}, node_count=5)
    assert [nbytes // MiB for nbytes in found.others] == [0, 8, 3, 3, 1]
    assert [nbytes // MiB for nbytes in found.gradients] == [0, 0, 0, 1, 1]
    assert found.made_gradients // MiB == 1
    assert found.produced == {7: 0}


def test_a_gradient_of_the_last_node_is_counted_for_the_update():
    watched = StepAllocations(CPU)
    watched.begin()
    watched.node(0)
    first = empty(1)
    watched.node(1)
    last = empty(2)
    assert watched.stop()
    found = watched.footprint([], {}, {place(first), place(last)}, node_count=2)
    assert [nbytes // MiB for nbytes in found.gradients] == [0, 1]
    assert found.made_gradients // MiB == 3


def test_a_storage_made_before_its_pack_is_known_from_its_beginning():
    watched = StepAllocations(CPU)
    watched.begin()
    watched.node(0)
    watched.node(1)
    made = empty(4)
    watched.node(2)
    watched.saved(1)
    row = saved(1, 4, packed=2, last_forward=2, first_backward=3, last_use=3)
    watched.node(3)
    watched.stop()
    found = watched.footprint([row], {1: place(made)}, set(), 4)
    assert found.others == [0, 0, 0, 0]
    assert found.produced == {1: 1}


def test_spans_count_for_their_own_bytes_only():
    """What of a storage no span covers stays with the rest."""
    watched = StepAllocations(CPU)
    watched.begin()
    watched.node(0)
    whole = empty(9)
    watched.saved(1)
    places = {1: place(whole)}
    row = saved(1, 6, packed=0, last_forward=0, first_backward=1, last_use=1)
    watched.node(1)
    del whole
    watched.node(2)
    watched.stop()
    assert [n // MiB for n in watched.footprint([row], places, set(), 3).others] == [3, 3, 0]


def test_an_address_that_comes_back_is_another_storage():
    watched = StepAllocations(CPU)
    watched.begin()
    watched.node(0)
    old = empty(3)
    where = place(old)
    del old
    new = empty(3)
    watched.saved(1)
    row = saved(1, 3, packed=0, last_forward=0, first_backward=1, last_use=1)
    watched.node(1)
    watched.stop()
    found = watched.footprint([row], {1: place(new)}, set(), 2)
    assert found.others[0] == 3 * MiB, "the old one was nobody's"
    assert found.others[1] == (0 if where == place(new) else found.others[1])


def test_another_profiler_comes_first(caplog):
    with caplog.at_level("INFO", "offload"), profile(use_cpu=True):
        watched = StepAllocations(CPU)
        watched.begin()
        watched.node(0)
        assert watched.stop()
    assert not watched.complete
    assert "another profiler is running" in caplog.text
    assert watched.footprint([], {}, set(), 1).others == [0]


def test_a_scheduled_profiler_comes_first():
    """Torch crashes if it records while another profiler warms up."""
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1)) as scheduled:
        for _ in range(3):  # it waits, warms up and records
            profile_of_step = allocation_profile.AllocationProfile(CPU)
            assert not profile_of_step.start()
            scheduled.step()
    assert profile_of_step.start()
    assert profile_of_step.stop() is not None


def test_it_ends_where_it_began():
    watched = StepAllocations(CPU)
    watched.begin()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(watched.stop()))
    thread.start()
    thread.join()
    assert answers == [False]
    assert watched.stop()
    with profile(use_cpu=True):
        pass  # nobody is profiling any more


def test_no_operator_is_recorded(monkeypatch):
    """A network may run 100,000 of them a step, and the record would take more memory than the step."""
    names = []

    def seen(tree, device):
        pending = list(tree)
        while pending:
            event = pending.pop()
            pending.extend(event.children)
            names.append(event.name)
        return ()

    monkeypatch.setattr(allocation_profile, "AllocationEvents", seen)
    watched = StepAllocations(CPU)
    watched.begin()
    watched.node(0)
    with record_function("a user's own"):
        made = empty(4) + 1
    watched.node(1)
    watched.stop()
    assert set(names) == {"offload: node 0", "a user's own", "offload: node 1", "[memory]"}
    del made


def test_it_is_quiet(capfd):
    block = empty(1)
    watched = StepAllocations(CPU)
    watched.begin()
    del block  # older than the profile: torch would warn
    watched.stop()
    assert capfd.readouterr().err == ""


def test_what_is_allocated_for_a_reload_is_not_counted():
    watched = StepAllocations(CPU)
    watched.begin()
    watched.node(0)
    watched.reload(begins=True)
    back = empty(4)
    watched.reload(begins=False)
    other = empty(2)
    watched.node(1)
    del back
    watched.node(2)
    assert watched.stop()
    assert [nbytes // MiB for nbytes in watched.footprint([], {}, set(), 3).others] == [2, 2, 2]
    del other


def test_a_thread_that_is_not_recorded_is_noticed():
    watched = StepAllocations(CPU)
    watched.begin()
    watched.node(0)
    thread = threading.Thread(target=watched.node, args=(1,))
    thread.start()
    thread.join()
    assert watched.stop()
    assert not watched.complete


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("entry", ["__enter__", "__exit__"])
def test_an_interrupt_as_a_node_begins_leaves_a_record_that_can_be_stopped(monkeypatch, entry):
    watched = begun()
    with monkeypatch.context() as patch:
        patch.setattr(record_function, entry, interrupted)
        with pytest.raises(KeyboardInterrupt):
            watched.node(1)
    assert watched.stop()
    assert not torch._C._autograd._profiler_enabled()


def test_an_interrupt_as_the_record_ends_leaves_no_profiler_on(monkeypatch):
    watched = begun()
    with monkeypatch.context() as patch:
        patch.setattr(record_function, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            watched.stop()
    assert not torch._C._autograd._profiler_enabled()


def begun():
    watched = StepAllocations(CPU)
    watched.begin()
    watched.node(0)
    return watched
