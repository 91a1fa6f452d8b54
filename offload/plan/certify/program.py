"""A mixed-integer program, built row by row and solved by HiGHS through SciPy.

`exact` and `proof` build their programs with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Program", "Solution"]


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of the solver.

    Parameters
    ----------
    values : sequence of float or None
        The value of each variable; None if no solution was found.
    bound : float
        Lower bound on the objective of every solution; infinite if it is proven that there is none.
    optimal : bool
        Whether the solver finished within its time: `values` are optimal, or there is no solution.
    """

    values: Sequence[float] | None
    bound: float
    optimal: bool


@dataclass(slots=True)
class Program:
    """Variables with bounds, and constraints as rows of a sparse matrix in coordinate form."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    at_least: list[float] = field(default_factory=list)

    def variable(self, lower: float, upper: float, integer: bool = False) -> int:
        """Add a variable and return its column."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(int(integer))
        return len(self.lower) - 1

    def require(self, terms: Sequence[tuple[float, int]], at_least: float) -> None:
        """Add the constraint: the sum of coefficient times variable is >= at_least."""
        row = len(self.at_least)
        for value, column in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)
        self.at_least.append(at_least)

    def minimize(self, column: int, seconds_max: float, gap: float = 1e-6) -> Solution:
        """Minimize one variable.

        Parameters
        ----------
        column : int
            The variable.
        seconds_max : float
            Time limit of the solver, in seconds.
        gap : float, default 1e-6
            Relative gap between solution and bound at which the solver stops.

        Raises
        ------
        ImportError
            If scipy is not installed.
        """
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError as error:
            raise ImportError(
                'the exact planner needs scipy; in the checkout of offload, type: pip install ".[cli]"'
            ) from error
        cost = np.zeros(len(self.lower))
        cost[column] = 1.0
        matrix = csr_array((self.values, (self.rows, self.columns)), shape=(len(self.at_least), len(self.lower)))
        result: Any = milp(
            cost,
            integrality=self.integer,
            bounds=Bounds(self.lower, self.upper),
            constraints=LinearConstraint(matrix, lb=self.at_least),
            options={"time_limit": seconds_max, "mip_rel_gap": gap},
        )
        if result.status == 2:
            return Solution(None, np.inf, optimal=True)
        bound = self.lower[column] if result.mip_dual_bound is None else max(self.lower[column], result.mip_dual_bound)
        return Solution(result.x, float(bound), optimal=result.status == 0)
