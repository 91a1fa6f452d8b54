"""The autograd scenarios on the simulated accelerator: beside test_twin.py, so that both run at once."""

import pytest
from twin.test_twin import backend, pytestmark, run_row

__all__ = ["backend", "pytestmark"]


@pytest.mark.timeout(1200)
def test_autograd_on_the_simulated_accelerator(backend, figures):
    run_row("autograd", ["tests/autograd"], figures)
