"""The CUDA driver over a test double of libcuda: contexts, errors, forks, registrations, order.

The checks themselves are C++ (twin/driver_checks.cpp), each in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from twin.build import build_driver_checks, build_machine

CHECKS = [
    "a_thread_that_ends_may_call",
    "capture_is_refused",
    "context_is_restored",
    "context_is_retained_late",
    "copies_cross_chunks",
    "default_stream_is_legacy",
    "destruction_never_throws",
    "double_is_strict",
    "events_order_streams",
    "every_error_is_typed",
    "fork_is_refused",
    "missing_things_are_named",
    "optional_entries_may_be_missing",
    "registration_is_chunked",
    "registration_is_rolled_back",
    "threads_share_a_driver",
    "waits_keep_their_record",
]
OPTIONAL = (
    "cuEventElapsedTime",
    "cuStreamIsCapturing",
    "cuMemcpyBatchAsync",
    "cuDeviceGetPCIBusId",
    "cuGetErrorName",
    "cuGetErrorString",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """The checks' program and the three libraries it takes."""
    directory = tmp_path_factory.mktemp("machine")
    libraries = [
        build_machine(directory / "libsim.so"),
        build_machine(directory / "libwithout_query.so", without=("cuEventQuery",)),
        build_machine(directory / "libwithout_optional.so", without=OPTIONAL),
    ]
    return build_driver_checks(directory / "driver_checks", libraries[0]), libraries


@pytest.mark.parametrize("check", CHECKS)
def test_cuda_driver(check: str, program: tuple[Path, list[Path]]) -> None:
    checks, libraries = program
    run = subprocess.run([checks, check, *libraries], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_every_check_is_listed(program: tuple[Path, list[Path]]) -> None:
    run = subprocess.run([program[0]], capture_output=True, text=True, check=True)
    assert run.stdout.split() == CHECKS


def test_a_process_takes_many_libraries(tmp_path: Path) -> None:
    """As a worker of the whole suite does: it keeps every one that its tests have opened."""
    libraries = [build_machine(tmp_path / f"libsim{number}.so") for number in range(24)]
    opens = "import ctypes, sys; [ctypes.CDLL(each) for each in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", opens, *map(str, libraries)], check=True)
