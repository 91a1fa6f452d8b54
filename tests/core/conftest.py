"""The test double of libcuda, whose "device memory" is RAM, for the tests of the store over it."""

from __future__ import annotations

import pytest
from twin.double import Double


@pytest.fixture(scope="session")
def loaded_double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    """The double of these tests, whose callers are not its legacy stream: waiting on that does not block them."""
    return Double(tmp_path_factory.mktemp("machine"), caller_is_legacy=False)


@pytest.fixture
def fake_cuda(loaded_double: Double):
    """The double, without faults; a violation of CUDA's rules fails the test."""
    loaded_double.forget_faults()
    loaded_double.forget_violations()
    yield loaded_double
    loaded_double.hold_streams(False)
    assert loaded_double.first_violation == ""
