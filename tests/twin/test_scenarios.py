"""The autograd scenarios and the tests marked `gpu`, on the simulated accelerator: beside test_twin.py, at once.

With `--long` half of them run, with `--full` all.
"""

import pytest
from twin.test_twin import ON_GPUS, backend, pytestmark, run_row, share

__all__ = ["backend", "pytestmark"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_autograd_on_the_simulated_accelerator(backend, is_full, figures):
    run_row("autograd", [*share(is_full), "tests/autograd"], figures)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_is_marked_gpu_on_the_simulated_accelerator(backend, is_full, figures):
    run_row("marked gpu", [*share(is_full), *ON_GPUS], figures)
