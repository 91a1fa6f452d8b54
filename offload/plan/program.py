"""A mixed-integer program as it is written down, row by row, and its solution by scipy's HiGHS.

Place on the data path: none; `exact` and `proof` state what they want to know with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Program", "Solution"]


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found.

    Parameters
    ----------
    values : sequence of float or None
        Of every variable; None where no solution was found.
    bound : float
        What no solution is below; infinite where it is proven that there is none.
    optimal : bool
        Whether the search ended: nothing is better than `values`, or there is no solution at all.
    """

    values: Sequence[float] | None
    bound: float
    optimal: bool


@dataclass(slots=True)
class Program:
    """Rows and columns of a program as they are written down."""

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
        """Add the row: sum of coefficient times variable >= at_least."""
        row = len(self.at_least)
        for value, column in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)
        self.at_least.append(at_least)

    def minimize(self, column: int, seconds_max: float, gap: float = 1e-6) -> Solution:
        """Return the solution with the least value of one variable, to a relative `gap`.

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
