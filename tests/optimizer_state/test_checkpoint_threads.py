"""A thread copies an optimizer's state, as for a checkpoint, while another one trains: the values of some step."""

import sys
import threading

import pytest
import torch
from optimizer_state.state_rig import OPTIMIZERS, assert_equal, everything, make_mover, make_optimizer, run

from offload.optimizer_state.snapshot import Snapshot

STEPS = 60


@pytest.fixture
def switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def test_a_checkpoint_thread_gets_true_values(tmp_path, switching):
    plain, moved = make_optimizer(*OPTIMIZERS["AdamW"]), make_optimizer(*OPTIMIZERS["AdamW"])
    run(plain, 1)
    run(moved, 1)
    mover = make_mover(moved, "direct", tmp_path)
    stop, copies, wrong, errors = threading.Event(), [], [], []

    def checkpoint():
        try:
            while not stop.is_set():
                states = moved.state_dict()["state"]
                values = [each for state in states.values() for each in state.values()]
                wrong.extend(each for each in values if torch.isnan(each).any())
                copies.append(len(values))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=checkpoint)
    thread.start()
    try:
        run(moved, STEPS, begin=1)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert copies
    assert not wrong
    run(plain, STEPS, begin=1)
    assert_equal(everything(moved), everything(plain))
    mover.close()


def test_state_for_which_the_file_has_no_room_is_copied_to_memory(tmp_path, monkeypatch):
    """Another thread has added state since the space was counted."""
    moved = make_optimizer(*OPTIMIZERS["AdamW"])
    mover = make_mover(moved, "direct", tmp_path)
    run(moved, 2)
    expected = moved.state_dict()
    begin = Snapshot.__init__
    monkeypatch.setattr(Snapshot, "__init__", lambda self, folder, nbytes: begin(self, folder, nbytes // 2))
    assert_equal(moved.state_dict(), expected)
    mover.close()
