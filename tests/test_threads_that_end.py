"""Steps whose forward, or all of whose work, runs in a thread that ends: torch's profiler may not stay on in it."""

from concurrent.futures import ThreadPoolExecutor
from threading import get_ident

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


@pytest.mark.parametrize("stops", [False, True])
def test_torchs_profiler_is_off_in_a_thread_that_has_ended(stops, monkeypatch):
    """With the profiler on in it, the process would crash at its end."""
    ended, disable = [], torch._C._autograd._disable_profiler

    def told():
        ended.append(get_ident())
        return disable()

    def record():
        profile = AllocationProfile(torch.device("cpu"))
        assert profile.start()
        if stops:
            profile.stop()
        return get_ident(), profile

    allocation_profile.prepare()
    monkeypatch.setattr(torch._C._autograd, "_disable_profiler", told)
    with ThreadPoolExecutor(1) as threads:
        thread, profile = threads.submit(record).result()
    assert ended == [thread], "once, in the thread itself"
    assert profile.stop() is None
    assert not AllocationProfile.is_recording()


def test_only_the_main_thread_prepares_the_profiler(monkeypatch):
    """If another thread is the first to use it, torch writes an error to standard error."""
    monkeypatch.setattr(allocation_profile, "_is_prepared", False)
    in_a_thread(allocation_profile.prepare)
    assert not allocation_profile._is_prepared
    allocation_profile.prepare()
    assert allocation_profile._is_prepared


def in_a_thread(run):
    with ThreadPoolExecutor(1) as threads:
        threads.submit(run).result()


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

    in_a_thread(two)
    assert told == [True, False]
