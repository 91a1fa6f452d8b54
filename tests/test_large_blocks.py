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
    "Whether a block of this size comes from the system, and goes back there. Not if the heap has room for it."
    before = libc.mallinfo2().hblks
    block = libc.malloc(nbytes)
    after = libc.mallinfo2().hblks
    libc.free(block)
    return after > before

libc.free(libc.malloc(24 << 20))  # from now on, glibc takes blocks of less from its heap
assert allocator.current() == "glibc" and not is_returned()
torch.set_num_threads(1)
if {unchanged}:
    allocator.LargeBlocks.return_at_once = lambda self, wanted: None

def train(**knobs):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    handle = offload.enable(model, **knobs)
    meter = MemoryMeter("cpu")
    at, asked = [is_returned()], [allocator._is_returning()]
    for number in range(5):
        if number == 3:
            meter.start()
        model(torch.ones(2048, 256)).square().mean().backward()
        model.zero_grad()
        at.append(is_returned())
        asked.append(allocator._is_returning())
    meter.stop()
    report = handle.report()
    handle.disable()
    return {"at": at, "asked": asked, "after": is_returned(), "peak": meter.peak_bytes, "allocator": report.allocator,
            "process": dict(report.verdict.rows()).get("process", "")}

print(json.dumps([train(**knobs) for knobs in {knobs}]))
"""

needs_glibc = pytest.mark.skipif(
    not sys.platform.startswith("linux") or "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="needs glibc"
)


def train(*knobs: dict[str, Any], unchanged: bool = False, **environment: str) -> list[dict[str, Any]]:
    """What a script under glibc's malloc tells that trains with these arguments of `enable`, one after another."""
    script = SCRIPT.replace("{knobs}", repr(knobs)).replace("{unchanged}", str(unchanged))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


SMALLEST = {"preset": "smallest"}


@pytest.mark.long
@needs_glibc
def test_under_a_limit_the_resident_set_falls_with_the_tensors() -> None:
    (found,), (kept,) = train(SMALLEST), train(SMALLEST, unchanged=True)
    assert found["at"] == [True] * 6
    assert not found["after"], "disable leaves malloc as it was"
    assert kept["at"] == [False] * 6
    assert found["peak"] <= kept["peak"] - (16 << 20)
    assert "returns large blocks when they are freed" in found["process"]
    assert "new blocks cause page faults" in found["allocator"]
    assert "keeps part of the freed memory" in kept["process"]


@pytest.mark.long
@needs_glibc
def test_malloc_stays_as_it_is_where_memory_is_not_limited_or_nothing_moves() -> None:
    slowdown, by_hand, roomy = train({"max_slowdown": 0.5}, {"n_tensors": -1, "lb": 2}, {"memory_limit": "100GiB"})
    assert not any([*slowdown["at"], *slowdown["asked"], *by_hand["at"], *by_hand["asked"], roomy["after"]])
    # The profiled step swaps everything, the plan nothing.
    assert roomy["asked"] == [True, True, False, False, False, False]


@pytest.mark.long
@needs_glibc
@pytest.mark.parametrize(
    "chosen",
    [
        {"MALLOC_MMAP_THRESHOLD_": str(64 << 20)},
        pytest.param({"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={64 << 20}"}, marks=pytest.mark.full),
    ],
)
def test_a_threshold_of_the_environment_stays(chosen: dict[str, str]) -> None:
    (found,) = train(SMALLEST, **chosen)
    assert not any([*found["at"], found["after"]])
