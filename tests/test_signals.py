"""Ctrl-C, and any other signal whose handler raises: it arrives wherever it strikes, and training goes on then."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from forked_python import run_python

WORKER = Path(__file__).with_name("signals_worker.py")
SIGNALS = 10
SIGNALS_FULL = 400
# The signal that comes, and how the model is enabled: by default, by a plan that swaps, and by hand.
CASES = {
    "default": ("SIGINT", {}),
    "planned": ("SIGTERM", {"n_tensors": -1, "lb": "auto"}),
    "by hand": ("SIGALRM", {"n_tensors": -1}),
}


def train(name, count, seed, knobs):
    run = run_python(WORKER, name, count, seed, json.dumps(knobs), timeout=600)
    assert run.returncode == 0, run.stderr
    assert "ignored" not in run.stderr, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def count(is_full):
    return SIGNALS_FULL if is_full else SIGNALS


@pytest.fixture(scope="module")
def plain(count):
    """The same steps without offload and without signals."""
    return train("SIGINT", count, 0, None)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", [each if each == "default" else pytest.param(each, marks=pytest.mark.full) for each in CASES]
)
def test_every_signal_arrives_and_training_goes_on(case, count, plain, figures):
    name, knobs = CASES[case]
    seed = random.randrange(2**32)
    print(f"seed {seed}: python {WORKER} {name} {count} {seed} '{json.dumps(knobs)}'")
    found = train(name, count, seed, knobs)
    assert found["sent"] == found["arrived"] == count
    assert found["swapped"] > 0
    assert found["digest"] == plain["digest"]
    figures.setdefault("signals", Counter()).update(sent=found["sent"], arrived=found["arrived"])
