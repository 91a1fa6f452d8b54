"""Running out of memory, explained: for real on the CPU under a limit, on a GPU, and with a GPU's figures by hand."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import KIND, gpu
from page_check import check_page
from torch import nn

import offload
from offload.devices import memory as device_memory
from offload.devices.memory import DeviceMemory, Process
from offload.diagnostics import oom
from offload.runtime.counters import Count

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
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")


@needs_notes
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


@needs_notes
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


@needs_notes
def test_pythons_own_memory_error_is_explained() -> None:
    body = """
    with handle.explain_oom():
        bytearray(1 << 30)
    """
    told = run_out(body)
    assert told.startswith("MemoryError")
    assert re.search(r"requested +unknown", told)
    assert "the caller's own code" in told


class Refuses(torch.autograd.Function):
    """Finds no memory in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        raise MemoryError


class RefusingOptimizer(torch.optim.SGD):
    """Finds no memory for its state."""

    def step(self, closure: Any = None) -> None:
        raise MemoryError


def refuse_in_forward(model: nn.Sequential, x: torch.Tensor) -> None:
    model[0].forward = lambda x: bytearray(1 << 62)
    model(x)


PLACES: dict[str, Any] = {
    "backward": lambda model, x: Refuses.apply(model(x)).sum().backward(),
    "the optimizer's step": lambda model, x: RefusingOptimizer(model.parameters()).step(),
    "forward of 0 (Linear)": refuse_in_forward,
    "the caller's own code": lambda model, x: bytearray(1 << 62),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_place_is_told(place: str, handle: Any) -> None:
    with pytest.raises(MemoryError) as caught, handle.explain_oom():
        PLACES[place](handle.model, torch.ones(2, 8))
    assert caught.value.offload_explanation.where.startswith(place)


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


# -- words, with figures given ----------------------------------------------------------------------------------------


def gpu_memory(**changes: Any) -> DeviceMemory:
    about: dict[str, Any] = {
        "device": "cuda:0",
        "is_accelerator": True,
        "asked_bytes": 2 * GIB,
        "used_bytes": 20 * GIB,
        "reserved_bytes": 21 * GIB,
        "free_bytes": GIB // 2,
        "total_bytes": 24 * GIB,
        "limit": "device memory",
        "peak_bytes": 21 * GIB,
    }
    return DeviceMemory(**{**about, **changes})


@pytest.fixture
def handle() -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with offload.enable(model, n_tensors=1, lb=2) as handle:
        handle.model = model
        yield handle


def explained(
    handle: Any, memory: DeviceMemory, kept: dict[str, Count], monkeypatch: pytest.MonkeyPatch
) -> oom.Explanation:
    monkeypatch.setattr(oom, "memory_of", lambda device, asked_bytes=None: memory)
    subject = oom.Subject(handle.model, handle._engine, handle._options, Count(), kept)
    return oom.explain(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), subject)


@pytest.mark.parametrize(
    ("changes", "kept", "verdict"),
    [
        ({}, {"n_tensors": Count(9, 4 * GIB)}, "Offloading can lower this peak: 512.00 MiB are missing, and 4.00 GiB"),
        ({}, {"n_tensors": Count(9, GIB // 4)}, "Offloading alone is not enough: 512.00 MiB are missing, and only 256"),
        ({}, {}, "Offloading cannot lower this peak: nothing saved for backward"),
        ({"asked_bytes": 30 * GIB}, {"n_tensors": Count(9, GIB)}, "Nothing can make this fit: one tensor of 30.00 GiB"),
        ({"asked_bytes": None}, {"n_tensors": Count(9, GIB)}, "Offloading can lower this peak: 1.00 GiB"),
    ],
)
def test_verdicts(
    changes: dict[str, Any], kept: dict[str, Count], verdict: str, handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert explained(handle, gpu_memory(**changes), kept, monkeypatch).verdict.startswith(verdict)


@pytest.mark.parametrize(
    ("options", "kept", "line"),
    [
        ({"n_tensors": 3}, {"n_tensors": Count(9, GIB)}, "n_tensors=-1, lb=1"),
        ({}, {"kept by plan": Count(9, GIB)}, 'memory_limit="20.4GiB"'),
        ({"memory_limit": "8GiB"}, {"kept by plan": Count(9, GIB)}, 'memory_limit="7.2GiB"'),
        ({"n_tensors": 0}, {}, "n_tensors=-1, lb=1"),
        ({"n_tensors": -1, "lb": 1}, {"small": Count(900, GIB)}, 'n_tensors=-1, lb=1, min_tensor_bytes="64KiB"'),
        ({"n_tensors": -1, "lb": 1, "exclude": ("0",)}, {"excluded": Count(1, GIB)}, "n_tensors=-1, lb=1"),
        (
            {"n_tensors": -1, "lb": 1, "host_limit": "3GiB", "min_tensor_bytes": 4096},
            {"host limit": Count(4, 5 * GIB // 2)},
            'n_tensors=-1, lb=1, min_tensor_bytes=4096, host_limit="6GiB"',
        ),
        ({"n_tensors": 1, "exclude": ("0",)}, {"n_tensors": Count(1, GIB)}, 'n_tensors=-1, lb=1, exclude=("0",)'),
        ({"n_tensors": -1, "lb": 1}, {"parameter": Count(1, GIB)}, None),
    ],
)
def test_the_line_to_type(
    options: dict[str, Any], kept: dict[str, Count], line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with offload.enable(model, **options) as handle:
        handle.model = model  # type: ignore[attr-defined]
        lines = [remedy.line for remedy in explained(handle, gpu_memory(), kept, monkeypatch).remedies]
    calls = [each for each in lines if each.startswith("offload.enable(")]
    assert calls == ([f"offload.enable(model, {line})"] if line else [])
    assert any("halve the batch" in each for each in lines)


def test_fragments_and_other_processes_have_remedies(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = gpu_memory(used_bytes=17 * GIB, processes=(Process(77, "other", 2 * GIB, can_be_ended=True),))
    found = explained(handle, memory, {}, monkeypatch)
    text = str(found)
    assert "expandable_segments:True" in text
    assert re.search(r"process 77 +2\.00 GiB \(other\)", text)
    assert "end process" not in text, "what is free is enough, were it in one piece"
    assert re.search(r"not torch's +2\.50 GiB", text)
    assert re.search(r"reserved by torch, unused +4\.00 GiB", text)
    check_page(found.html())


def holding(*rows: tuple[int, int, bool]) -> tuple[Process, ...]:
    return tuple(Process(pid, f"job{pid}", quarters * GIB // 4, can_be_ended) for pid, quarters, can_be_ended in rows)


@pytest.mark.parametrize(
    ("processes", "changes", "line"),
    [
        (holding((77, 8, True)), {}, "end process 77 (job77)"),
        (holding((77, 8, True), (78, 3, True)), {}, "end process 78 (job78)"),  # the least that is enough
        (holding((77, 1, True), (78, 1, True)), {}, "end processes 78 (job78) and 77 (job77)"),
        (holding((77, 8, False)), {}, None),  # another user's
        (holding((77, 1, True), (78, 8, False)), {}, None),  # enough with another user's alone
        (holding((77, 1, True)), {}, None),  # it would not have helped
        (holding((77, 8, True)), {"asked_bytes": None}, None),  # nobody knows how much is short
        (holding((77, 8, True)), {"free_bytes": 19 * GIB}, None),  # there is room: something else is the matter
    ],
)
def test_only_processes_of_one_s_own_that_would_help_are_to_be_ended(
    processes: tuple[Process, ...],
    changes: dict[str, Any],
    line: str | None,
    handle: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = gpu_memory(**{"reserved_bytes": 20 * GIB, "asked_bytes": GIB, "processes": processes, **changes})
    lines = [remedy.line for remedy in explained(handle, memory, {}, monkeypatch).remedies]
    assert [each for each in lines if each.startswith("end ")] == ([line] if line else [])


def test_whose_processes_may_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    can_be_ended = device_memory._can_be_ended
    child = subprocess.Popen(["sleep", "100"])
    # Its parent ends at once: it is nobody's child then, as a job that was started elsewhere.
    command = ["sh", "-c", "sleep 100 >&- 2>&- & echo $!"]
    stranger = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=20).stdout)
    try:
        assert can_be_ended(stranger)
        assert not can_be_ended(child.pid), "a worker of this very run"
        assert not can_be_ended(os.getpid())
        assert not can_be_ended(os.getppid()), "what has started it"
        assert not can_be_ended(2**22 + 1), "there is none"
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert not can_be_ended(stranger), "another user's"
    finally:
        child.kill()
        child.wait()
        os.kill(stranger, signal.SIGKILL)


def test_another_rank_of_this_run_is_not_to_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have a launcher in common."""
    lines = {os.getpid(): [os.getpid(), 500, 1], 600: [600, 500, 1], 700: [700, 1]}
    monkeypatch.setattr(device_memory, "_with_ancestors", lines.__getitem__)
    monkeypatch.setattr(device_memory, "_read", lambda path: f"Uid:\t{os.getuid()}\t{os.getuid()}\t0\t0\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not device_memory._can_be_ended(600)
    assert device_memory._can_be_ended(700)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert device_memory._can_be_ended(600), "started from the same shell"


@pytest.mark.parametrize(
    ("limit", "who"),
    [
        ("RAM", "other processes"),
        ("address space, ulimit -v", "mapped and not resident"),
        ("control group", "the rest of the control group"),
    ],
)
def test_the_bar_names_who_else_counts_towards_the_limit(limit: str, who: str) -> None:
    about = {"device": "cpu", "is_accelerator": False, "limit": limit}
    memory = gpu_memory(**about, used_bytes=3 * GIB, free_bytes=GIB, total_bytes=10 * GIB)
    assert (who, 6 * GIB) in memory.parts(0, 0)
    assert sum(nbytes for _, nbytes in memory.parts(0, 0)[:-1]) == 10 * GIB


# -- what counts as running out, and what must not happen -------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_one", "asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), True, 5 * GIB // 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), True, 4096),
        (MemoryError("Unable to allocate 8.00 KiB for an array with shape (1,)"), True, 8192),
        (MemoryError(), True, None),
        (RuntimeError("CUDA error: out of memory"), True, None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, None),
        (ValueError("out of memory"), False, None),
    ],
)
def test_what_is_running_out_of_memory(error: BaseException, is_one: bool, asked: int | None) -> None:
    assert oom.is_out_of_memory(error) == is_one
    assert oom.asked_bytes(str(error)) == asked


def test_other_errors_are_left_alone(handle: Any) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught, handle.explain_oom():
        handle.model(torch.ones(3, 5))
    assert not hasattr(caught.value, "offload_explanation")


def test_a_page_that_cannot_be_written_hides_nothing(
    handle: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    error = MemoryError("first")
    with (
        caplog.at_level(logging.WARNING, "offload"),
        pytest.raises(MemoryError, match="first") as caught,
        handle.explain_oom(tmp_path / "missing" / "oom.html"),
    ):
        raise error
    assert caught.value is error
    assert any("could not be explained" in record.getMessage() for record in caplog.records)


def test_a_refusal_is_taken_down_before_anything_unwinds(monkeypatch: pytest.MonkeyPatch) -> None:
    observers: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    stats = {"allocated_bytes.all.current": 7, "reserved_bytes.all.current": 9, "allocated_bytes.all.peak": 8}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 20))
    monkeypatch.setattr(device_memory, "_gpu_processes", lambda device: [Process(5, "other", 4)])
    monkeypatch.setattr(device_memory, "_watching", False)
    device_memory.record_out_of_memory()
    device_memory.record_out_of_memory()
    (observer,) = observers  # attached once: there is no way to take it off
    device = torch.device("cuda", 0)
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
