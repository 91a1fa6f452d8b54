"""Steps whose forward, or all of whose work, runs in a thread that ends: torch's profiler may not stay on in it."""

from threading import Thread

import pytest
import torch
from forked_python import run_python

from offload.torch_compat import allocation_profile
from offload.torch_compat.allocation_profile import AllocationProfile

SCRIPT = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
from torch import nn
import offload
from offload.torch_compat import allocation_profile

if "unguarded" in sys.argv:
    allocation_profile.CallWhenFreed = lambda _: None
if "unprepared" in sys.argv:
    from offload.control import device_session
    device_session.prepare = int

torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())])

def forward():
    return model(torch.ones(100, 64)).square().mean()

def step():
    forward().backward()

def gradients(run):
    run()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found

def in_a_thread(run):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()

expected = gradients(step)
handle = offload.enable(model, "smallest", min_tensor_bytes="1KiB", spill_dir=sys.argv[1])
for _ in range(4):
    if "forward" in sys.argv:
        found = gradients(lambda: in_a_thread(forward).backward())
    else:
        found = gradients(lambda: in_a_thread(step))
    assert all(map(torch.equal, found, expected))
"""


def ran(folder, *words):
    done = run_python("-c", SCRIPT, str(folder), *words, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.parametrize("part", ["forward", "step"])
def test_the_process_ends_as_without_offload(part, tmp_path):
    assert ran(tmp_path, part) == (0, "")


def test_a_profiler_that_stays_on_crashes_the_process(tmp_path):
    status, _ = ran(tmp_path, "forward", "unguarded")
    assert status < 0


def test_a_profiler_that_a_thread_uses_first_says_so(tmp_path):
    status, said = ran(tmp_path, "step", "unprepared")
    assert status == 0
    assert "must run in same thread" in said


def test_a_profile_that_could_not_start_leaves_the_recording_one_its_guard():
    """Two enabled models in one thread: the second cannot record while the first does."""
    told = []

    def two():
        first, second = (AllocationProfile(torch.device("cpu")) for _ in range(2))
        assert first.start()
        assert not second.start()
        second.release()
        told.append("end" in vars(allocation_profile._of_thread))
        first.stop()
        told.append("end" in vars(allocation_profile._of_thread))

    thread = Thread(target=two)
    thread.start()
    thread.join()
    assert told == [True, False]
