"""A CUDA driver over the test double of libcuda, whose "device memory" is RAM."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from fake_cuda.build import build_fake_cuda

from offload import _core


class FakeCuda:
    """The double, loaded into this process, and a driver over it."""

    def __init__(self, library: Path) -> None:
        self.calls = ctypes.CDLL(str(library))
        self.calls.fake_first_violation.restype = ctypes.c_char_p
        self.driver = _core.cuda_driver(0, library=str(library))

    def fail_at(self, name: str, nth: int, code: int = 2) -> None:
        """Let the `nth` call of an entry point from now on fail."""
        self.calls.fake_fail_at(name.encode(), nth, code)

    def count(self, name: str) -> int:
        """How often an entry point has been called."""
        return int(self.calls.fake_calls(name.encode()))

    def hold_streams(self, held: bool) -> None:
        """Stop every stream, or let them go on."""
        self.calls.fake_hold_streams(int(held))


@pytest.fixture(scope="session")
def fake_cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The double, compiled once."""
    return build_fake_cuda(tmp_path_factory.mktemp("fake_cuda") / "libfake.so")


@pytest.fixture
def fake_cuda(fake_cuda_library: Path):
    """A driver over the double; a violation of CUDA's rules fails the test."""
    fake = FakeCuda(fake_cuda_library)
    fake.calls.fake_forget_violations()
    yield fake
    assert fake.calls.fake_first_violation() == b""
