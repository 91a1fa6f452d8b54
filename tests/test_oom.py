"""Running out of memory, for real: on the CPU under a limit, and on a GPU; what is recovered afterwards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import KIND, gpu
from page_check import check_page
from torch import nn

import offload
from offload.devices import memory as device_memory
from offload.devices.memory import Process

MIB = 1 << 20
GIB = 1 << 30

SCRIPT = """
import re, resource, sys, torch, offload
from torch import nn

def limit(left_bytes):
    mapped = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (mapped + left_bytes,) * 2)

torch.set_num_threads(1)
model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())))
handle = offload.enable(model, {options})
x = torch.randn(65536, 64)
model(x).sum().backward()  # the step that is recorded moves everything; threads, pools and code are there from then on
limit(80 << 20)
try:
    {body}
except (RuntimeError, MemoryError) as error:
    print(type(error).__name__)
    print("\\n".join(getattr(error, "__notes__", ["no notes"])))
"""


def run_out(body: str, options: str = "n_tensors=2") -> str:
    """What a process prints that trains under a limit of its address space, too low."""
    body = textwrap.indent(textwrap.dedent(body), "    ").strip()
    program = SCRIPT.replace("{body}", body).replace("{options}", options)
    # What glibc keeps of freed blocks may serve a whole step: have it give back the large ones.
    # A thread's arena would take 64 MiB of what is left.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_forward_that_does_not_fit_says_what_would() -> None:
    told = run_out("model(x).sum().backward()")
    assert re.search(r"out of memory in forward of \d+ \((Linear|Tanh)\)", told), told
    assert re.search(r"requested +16\.00 MiB", told)
    assert re.search(r"free .* \(address space, ulimit -v\)", told)
    assert re.search(r"kept: n_tensors +\d+\.00 MiB in \d+ tensors  \(could be swapped\)", told)
    assert re.search(r"kept: parameter .*\(cannot be swapped\)", told)
    assert "offload.enable(model, n_tensors=-1, lb=1)" in told
    assert told.count("offload: out of memory in") == 1
    assert "end process" not in told, "the limit is this process's own"


def test_the_step_adds_the_note_and_the_page_is_asked_for(tmp_path: Path) -> None:
    page = tmp_path / "oom.html"
    body = f"""
    with handle.explain_oom({str(page)!r}), handle.step():
        model(x).sum().backward()
    """
    told = run_out(body)
    assert told.count("offload: out of memory in") == 1  # once, though two saw it
    assert f"explained with a picture in {page}" in told
    text = page.read_text(encoding="utf-8")
    check_page(text)
    assert "offload.enable(model, n_tensors=-1, lb=1)" in text


@pytest.mark.long
def test_pythons_own_memory_error_is_explained() -> None:
    body = """
    with handle.explain_oom():
        bytearray(1 << 30)
    """
    told = run_out(body)
    assert told.startswith("MemoryError")
    assert re.search(r"requested +unknown", told)
    assert "the caller's own code" in told


def test_a_tensor_that_finds_no_room_to_come_back_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle:
        loss = model(torch.randn(64, 64)).sum()
        handle._engine.drain()

        def refuse(nbytes: int, residue: int) -> Any:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(handle._engine, "new_storage", refuse)
            with pytest.raises(MemoryError) as caught:
                loss.backward()
        assert caught.value.offload_explanation.where == "backward"
        loss.backward()  # the tensors are safe below


@pytest.mark.long
def test_the_training_goes_on_after_a_smaller_batch() -> None:
    body = """
    try:
        model(x).sum().backward()
    except RuntimeError:
        del x
        freed = offload.recover()
    model(torch.randn(2048, 64)).sum().backward()
    print("went on", handle.report().swapped.tensors, sorted(freed))
    """
    assert re.search(r"went on \d+ \['cpu'\]", run_out(body))


def test_a_refusal_is_taken_down_before_anything_unwinds(monkeypatch: pytest.MonkeyPatch) -> None:
    observers: list[Any] = []
    initialized: list[bool] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: initialized.append(True))
    monkeypatch.setattr(
        torch._C,
        "_cuda_attach_out_of_memory_observer",
        lambda observer: observers.append(observer) if initialized else None,  # torch's allocators are there by then
        raising=False,
    )
    stats = {"allocated_bytes.all.current": 7, "reserved_bytes.all.current": 9, "allocated_bytes.all.peak": 8}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 20))
    monkeypatch.setattr(device_memory, "_gpu_processes", lambda device: [Process(5, "other", 4)])
    monkeypatch.setattr(device_memory, "_watching", False)
    device = torch.device("cuda", 0)
    device_memory.record_out_of_memory(torch.device("cpu"))
    assert observers == []
    device_memory.record_out_of_memory(device)
    device_memory.record_out_of_memory(device)
    (observer,) = observers  # attached once: there is no way to take it off
    observer(0, 1000, 20, 3)
    found = device_memory.last_out_of_memory(device, 1000)
    assert found is not None
    assert (found.asked_bytes, found.used_bytes, found.reserved_bytes, found.free_bytes) == (1000, 7, 9, 3)
    assert (found.foreign_bytes, found.short_bytes, found.peak_bytes) == (8, 995, 8)
    assert found.processes == (Process(5, "other", 4),)
    assert device_memory.last_out_of_memory(device, 1000) is None  # told once
    observer(0, 1000, 20, 3)
    assert device_memory.last_out_of_memory(device, 500) is None  # another request: that one was dealt with


def test_recover_drops_what_the_last_exception_holds() -> None:
    block: list[Any] = []

    def step() -> None:
        held = torch.ones(48 * MIB // 4)
        block.append(torch._C._WeakTensorRef(held))  # type: ignore[attr-defined]
        try:
            raise MemoryError("inner")
        except MemoryError as inner:
            raise RuntimeError("out of memory") from inner

    try:
        step()
    except RuntimeError as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__  # as an interactive interpreter does
    assert not block[0].expired()
    freed = offload.recover()
    assert block[0].expired()
    assert freed["cpu"] > 24 * MIB
    assert not hasattr(sys, "last_value")


@pytest.mark.gpu
def test_a_gpu_that_is_full_is_explained(tmp_path: Path) -> None:
    model = nn.Linear(64, 64, device=KIND)
    free, total = gpu.mem_get_info()
    with (
        offload.enable(model, n_tensors=-1) as handle,
        pytest.raises(torch.OutOfMemoryError) as caught,
        handle.explain_oom(tmp_path / "oom.html"),
    ):
        torch.empty(2 * total, dtype=torch.uint8, device=KIND)
    found = caught.value.offload_explanation
    assert found.memory.total_bytes == total
    assert abs(found.memory.asked_bytes - 2 * total) < 0.01 * total
    assert "Nothing can make this fit" in found.verdict
    check_page((tmp_path / "oom.html").read_text())
    assert offload.recover()[f"{KIND}:0"] >= 0
    assert gpu.mem_get_info()[0] >= free - GIB
