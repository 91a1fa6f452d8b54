"""The slowdown of steps beside reference steps, and its standard error, with noise of known kinds."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from fresh_python import run_fresh_python

from offload.control import measured_slowdown
from offload.control.limits import LIMITS
from offload.control.measured_slowdown import compared, lower_quartiles, standard_error

FREE = replace(LIMITS, deviation_min=0.0)
NODES, SLOWDOWN, SERIES = 40, 0.04, 150


def noise_of_nodes(random, pairs):
    """Each node of each step varies on its own, and some of them by much."""
    noise = random.normal(0, 0.2, (2, pairs, NODES)) + (random.random((2, pairs, NODES)) < 0.1)
    return np.maximum(0.5, 1 + noise)


def noise_of_steps(random, pairs):
    """Each step varies as a whole."""
    return np.broadcast_to(1 + random.normal(0, 0.04, (2, pairs, 1)), (2, pairs, NODES))


def noise_of_pairs(random, pairs):
    """Two steps that follow one another are slow together."""
    drift = np.cumsum(random.normal(0, 0.05, (1, pairs, 1)), axis=1)
    return np.broadcast_to(1 + drift + random.normal(0, 0.01, (2, pairs, 1)), (2, pairs, NODES))


def measured(noise, pairs):
    """Slowdown and standard error in each of many series of steps."""
    found = []
    for seed in range(SERIES):
        references, steps = noise(np.random.default_rng(seed), pairs) * np.linspace(0.5, 1.5, NODES)
        compute, taken, deviation = compared(steps * (1 + SLOWDOWN), references, [0.0] * pairs, ())
        found.append((taken / compute - 1, standard_error(deviation, pairs, [], FREE)))
    return np.array(found)


def ratio_of_errors(noise, pairs=8):
    """The mean standard error, relative to how far the slowdowns really are off."""
    slowdowns, errors = measured(noise, pairs).T
    assert np.median(slowdowns) == pytest.approx(SLOWDOWN, abs=0.01)
    return errors.mean() / np.sqrt(np.mean((slowdowns - SLOWDOWN) ** 2))


@pytest.mark.parametrize("noise", [noise_of_nodes, noise_of_steps])
@pytest.mark.parametrize(("pairs", "at_most"), [(3, 1.8), (5, 1.8), (8, 1.35)])
def test_the_standard_error_is_how_far_the_slowdown_is_off(noise, pairs, at_most):
    """With few pairs it is larger."""
    assert 0.9 < ratio_of_errors(noise, pairs) < at_most


def test_steps_that_follow_one_another_are_drawn_together():
    """What slows both alike adds nothing to the error."""
    references, steps = noise_of_pairs(np.random.default_rng(0), 8)
    pairs, mixed = (compared(steps, others, [0.0] * 8, ()).deviation for others in (references, references[::-1]))
    assert mixed > 2 * pairs


def deviation_beside_slow_steps(count):
    """Relative to the same steps without them: the mean of 20 series."""
    ratios = []
    for seed in range(20):
        steps, references = np.random.default_rng(seed).normal(1.0, 0.01, (2, 8, NODES))
        usual = compared(steps, references, [0.0] * 8, ())
        steps[:count] *= 3
        off = compared(steps, references, [0.0] * 8, ())
        assert off.step_seconds == pytest.approx(usual.step_seconds, rel=0.01)
        ratios.append(off.deviation / usual.deviation)
    return np.mean(ratios)


def test_one_slow_step_hardly_changes_the_error():
    assert deviation_beside_slow_steps(1) < 2


def test_three_slow_steps_of_eight_change_it_little():
    assert deviation_beside_slow_steps(3) < 4


def test_they_would_if_all_that_was_drawn_counted(monkeypatch):
    """A mutant."""
    monkeypatch.setattr(measured_slowdown, "_OUTSIDE", 0.0)
    assert deviation_beside_slow_steps(3) > 6


def test_seconds_outside_nodes_count_and_vary():
    nodes = np.ones((8, 4))
    steady = compared(nodes, nodes, [0.4] * 8, ())
    assert (steady.compute_seconds, steady.step_seconds, steady.deviation) == (4.0, pytest.approx(4.4), 0.0)
    assert compared(nodes, nodes, [0.0, 0.8] * 4, ()).deviation > 0.02 * sqrt(8)


@pytest.mark.parametrize("more", ["steps", "references"])
def test_steps_beyond_the_pairs_change_nothing(more):
    """The lower quartile of more values is expected to be nearer to the median."""
    steps, references = np.random.default_rng(0).normal(1.0, 0.2, (2, 8, NODES))
    outside = [0.1] * 8
    usual = compared(steps, references, outside, {3})
    if more == "steps":
        found = compared(np.concatenate([references[:2], steps]), references, [0.0] * 2 + outside, {3})
    else:
        found = compared(steps, np.concatenate([steps[:2], references]), outside, {3})
    assert found == usual


def test_of_more_steps_of_one_kind_the_last_are_pairs():
    nodes = np.ones((8, 4))
    steps = np.concatenate([100 * nodes[:1], nodes])
    assert compared(steps[:4], nodes[:3], [0.0] * 4, ()).deviation == 0.0


def test_steps_in_which_nothing_was_computed_are_no_pairs():
    """The CPU time of a thread, without that of hooks, can be zero."""
    nodes = np.ones((4, 3))
    references = np.concatenate([np.zeros((1, 3)), nodes[1:]])
    assert compared(nodes, references, [0.0] * 4, ()).deviation == 0.0
    assert compared(nodes, 0 * nodes + [[1e-9]] * 4, [0.0] * 4, ()).deviation == 0.0
    assert compared(nodes[:2], references[:2], [0.0] * 2, ()) == (3.0, 3.0, 0.0)
    assert compared(nodes[:3], references[:3], [0.0] * 3, ()) == (3.0, 3.0, 0.0)


def test_waits_count_in_each_draw():
    """Reference steps take twice as long after their wait in half of the steps: without the waits nothing varies."""
    nodes = np.ones((8, 4))
    references = nodes * np.array([1.0, 2.0] * 4)[:, None]
    assert compared(nodes, references, [0.0] * 8, {0}).deviation < compared(nodes, references, [0.0] * 8, ()).deviation


def test_it_imports_nothing_in_the_middle_of_a_training():
    script = """
        import sys
        from offload.control.measured_slowdown import compared

        before = set(sys.modules)
        compared([[1.0, 2.0]] * 4, [[1.0, 2.0]] * 4, [0.0] * 4, {1})
        print(*sys.modules.keys() - before)
        assert "numpy.ma" not in sys.modules
    """
    assert run_fresh_python(script).split() == []


def noise_of_bursts(random, pairs):
    """In each step another program slows some nodes: half of all."""
    return 1 + (random.random((2, pairs, NODES)) < 0.5) * random.uniform(0, 0.6, (2, pairs, NODES))


def distance_beside_bursts():
    """How far the slowdowns of many series are off."""
    return np.sqrt(np.mean((measured(noise_of_bursts, 8)[:, 0] - SLOWDOWN) ** 2))


def test_nodes_that_are_slow_in_half_of_the_steps_hardly_change_the_slowdown():
    assert distance_beside_bursts() < 0.01


def test_the_medians_of_nodes_would_be_further_off(monkeypatch):
    """A mutant."""
    monkeypatch.setattr(measured_slowdown, "lower_quartiles", lambda rows: np.median(rows, axis=0))
    assert distance_beside_bursts() > 0.015


def test_quartiles_are_interpolated():
    rows = [[4.0, 1.0], [2.0, 1.0], [8.0, 5.0], [6.0, 1.0], [16.0, 1.0]]
    for count in range(1, 6):
        assert lower_quartiles(rows[:count]) == pytest.approx(np.quantile(rows[:count], 0.25, axis=0))


def test_waits_of_some_steps_count():
    """They are outside nodes, and their median counts."""
    nodes = np.ones((8, 4))
    assert compared(nodes, nodes, [0.0, 0.4] * 4, ()).step_seconds == pytest.approx(4.2)
