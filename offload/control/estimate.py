"""Estimates the slowdowns of all tried plans from the measurements of all of them.

A slowdown that is measured from a few steps can be far off: by about 4 percentage points on a machine where steps vary
by 6 %. But the plans of a search have something in common. A plan's slowdown consists of what the plan predicts (waits,
recomputation, hooks) and of an unpredicted rest. Most of the rest is the time by which copies slow the computation. It
grows with the bytes that a plan copies, and the calibration has measured what a copied byte costs. So the measurement
of one plan says something about the others.

This is a linear regression with prior knowledge (Bayesian, with normal distributions). The rest, as a share of the
step, is taken as the sum of

* a cost for each copied byte, with the calibrated mean and a wide deviation,
* a cost for each recomputed byte, because operators are recorded,
* a fixed cost, the same for all plans and not negative,
* a deviation of each plan's own, which is larger if the predicted slowdown is large.

Each measurement has its standard error. If steps hardly vary, a plan's estimate is what was measured of it. If they
vary much, the other plans and the calibration count too. No plan is faster than a step without swapping, so an estimate
below zero counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np

from offload.control.limits import Limits
from offload.control.tried_plan import TriedPlan

__all__ = ["Estimate", "estimated"]


class Estimate(NamedTuple):
    """The estimated plans, and the seconds by which each copied and each recomputed byte slows the computation."""

    tried: list[TriedPlan]
    byte_seconds: float
    recompute_byte_seconds: float


def estimated(tried: Sequence[TriedPlan], byte_seconds: float, limits: Limits) -> Estimate:
    """Estimate the slowdown of each plan, and what each byte costs.

    Parameters
    ----------
    tried
        The plans whose steps have been measured in this search.
    byte_seconds
        Seconds by which each copied byte is expected to slow the computation, before any measurement.
    limits
        `cost_spread`, `cost_spread_more`, `fixed_spread`, `plan_spread`, `predicted_spread`, `standard_errors`.

    Returns
    -------
    Estimate
        The same plans with new `slowdown` and `error`; costs of at least 0.
    """
    step_seconds = median(each.compute_seconds for each in tried)
    all_bytes = max(1, *(sum(tensor.copied_bytes for tensor in each.plan.trace.tensors) for each in tried))
    copied, recomputed = (
        np.array([float(getattr(each, name)) for each in tried]) / all_bytes
        for name in ("copied_bytes", "recomputed_bytes")
    )
    own_seconds = np.array([each.compute_seconds for each in tried])
    rest = np.array([each.unexplained_seconds for each in tried]) / own_seconds
    predicted = np.array([each.measured for each in tried]) - rest
    expected = byte_seconds * all_bytes / step_seconds  # relative to the step: the cost of copying every tensor once
    spreads = limits.cost_spread * expected + limits.cost_spread_more, limits.cost_spread_more
    own = limits.plan_spread**2 + (limits.predicted_spread * predicted) ** 2
    covariance = np.diag(own)
    covariance += spreads[0] ** 2 * np.outer(copied, copied) + spreads[1] ** 2 * np.outer(recomputed, recomputed)
    variances = np.array([each.measured_error for each in tried]) ** 2
    difference = rest - expected * copied
    weights = np.linalg.inv(covariance + limits.fixed_spread**2 + np.diag(variances))
    if float(np.sum(weights @ difference)) < 0:  # the fixed cost would be negative
        weights = np.linalg.inv(covariance + np.diag(variances))
    # With a normal prior and normal errors: mean = measured − variances × (weights @ difference), and
    # variance = variances − variances² × diagonal of `weights`.
    surprise = weights @ difference
    corrections = -variances * surprise
    errors = np.sqrt(np.maximum(0.0, variances - variances**2 * np.diag(weights)))
    plans = [
        replace(each, slowdown=max(0.0, each.measured + more), error=limits.standard_errors * deviation)
        for each, more, deviation in zip(tried, corrections.tolist(), errors.tolist(), strict=True)
    ]
    costs = expected + spreads[0] ** 2 * copied @ surprise, spreads[1] ** 2 * recomputed @ surprise
    return Estimate(plans, *(max(0.0, float(cost)) * step_seconds / all_bytes for cost in costs))
