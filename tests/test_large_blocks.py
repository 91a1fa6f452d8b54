"""A process that `offload run` did not start: where memory is limited, glibc's malloc returns what is freed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import ctypes, json, sys
import torch
from torch import nn
import offload
from offload.demo.memory import MemoryMeter
from offload.devices import allocator

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks "
                "fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)

def is_returned(nbytes=2 << 20):
    "Whether a block of this size comes from the system, and goes back there."
    before = libc.mallinfo2().hblks
    block = libc.malloc(nbytes)
    after = libc.mallinfo2().hblks
    libc.free(block)
    return after > before

libc.free(libc.malloc(24 << 20))  # from now on, glibc takes blocks of less from its heap
assert allocator.current() == "glibc" and not is_returned()
torch.set_num_threads(1)
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
model = nn.Sequential(*blocks)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step():
    model(torch.ones(4096, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

if {unchanged}:
    allocator.LargeBlocks.return_at_once = lambda self, wanted: None
handle = offload.enable(model, {knobs})
meter = MemoryMeter("cpu")
at = [is_returned()]
for number in range(4):
    step()
    at.append(is_returned())
meter.start()
for _ in range(3):
    step()
meter.stop()
process = dict(handle.report().verdict.rows()).get("process", "")
described = handle.report().allocator
handle.disable()
print(json.dumps({"at": at, "after": is_returned(), "peak": meter.peak_bytes, "process": process,
                  "allocator": described}))
"""

needs_glibc = pytest.mark.skipif(
    not sys.platform.startswith("linux") or "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="needs glibc"
)


def train(knobs: str, *, unchanged: bool = False, **environment: str) -> dict[str, Any]:
    """What a script under glibc's malloc tells."""
    script = SCRIPT.replace("{knobs}", knobs).replace("{unchanged}", str(unchanged))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_glibc
def test_under_a_limit_the_resident_set_falls_with_the_tensors() -> None:
    found, kept = train('"smallest"'), train('"smallest"', unchanged=True)
    assert found["at"] == [True] * 5
    assert not found["after"], "disable leaves malloc as it was"
    assert kept["at"] == [False] * 5
    assert found["peak"] <= kept["peak"] - (40 << 20)
    assert "returns large blocks when they are freed" in found["process"]
    assert "new blocks cause page faults" in found["allocator"]
    assert "keeps part of the freed memory" in kept["process"]


@needs_glibc
@pytest.mark.parametrize("knobs", ["max_slowdown=0.5", "n_tensors=-1, lb=2"])
def test_without_a_limit_malloc_stays_as_it_is(knobs: str) -> None:
    found = train(knobs)
    assert not any([*found["at"], found["after"]])


@needs_glibc
def test_a_plan_that_keeps_every_tensor_leaves_malloc_alone() -> None:
    found = train('memory_limit="100GiB"')
    assert found["at"] == [True, True, False, False, False]  # the profiled step swaps everything; the plan nothing


@needs_glibc
@pytest.mark.parametrize(
    "chosen",
    [{"MALLOC_MMAP_THRESHOLD_": str(64 << 20)}, {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={64 << 20}"}],
)
def test_a_threshold_of_the_environment_stays(chosen: dict[str, str]) -> None:
    found = train('"smallest"', **chosen)
    assert not any([*found["at"], found["after"]])
