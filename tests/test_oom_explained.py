"""What an out-of-memory error is, where it came, what would help: in words, with figures given."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from page_check import check_page
from torch import nn

import offload
from offload.devices import memory as device_memory
from offload.devices.memory import DeviceMemory, Process
from offload.diagnostics import oom
from offload.runtime.counters import Count

GIB = 1 << 30


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


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"optimizer_state": True, "gradients": True}, "optimizer_state=True, gradients=True, optimizer=optimizer"),
        (
            {"step_in_backward": True, "parameters": "all"},
            'step_in_backward=True, parameters="all", optimizer=optimizer',
        ),
        ({"parameters": "frozen"}, 'parameters="frozen"'),
    ],
)
def test_the_line_to_type_moves_what_is_moved_now(asked: dict[str, Any], line: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False))
    own = {} if "frozen" in asked.values() else {"optimizer": torch.optim.Adam(model[0].parameters())}
    with offload.enable(model, n_tensors=0, min_tensor_bytes=1024, **own, **asked) as handle:
        with pytest.raises(torch.OutOfMemoryError) as failed, handle.explain_oom():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        assert f"offload.enable(model, n_tensors=-1, lb=1, min_tensor_bytes=1024, {line})" in notes_of(failed.value)


def test_a_step_without_hooks_does_not_count_what_is_saved() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with offload.enable(model) as handle:
        while not handle.report().bare_steps:
            model(torch.ones(4, 8)).sum().backward()
        model(torch.ones(4, 8)).sum()
        with pytest.raises(torch.OutOfMemoryError) as failed, handle.explain_oom():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    told = notes_of(failed.value)
    assert "the plan swaps nothing, so the latest step ran without hooks" in told
    assert "offload.enable(model, n_tensors=-1, lb=1)\n      swaps what it can" in told


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", [])) or str(error.offload_explanation)  # type: ignore[attr-defined]


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
    monkeypatch.setattr(device_memory, "read", lambda path: f"Uid:\t{os.getuid()}\t{os.getuid()}\t0\t0\n")
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
