"""Places the labels of a chart: next to what they name, not over other labels, and over as few curves as possible.

It works with rectangles in the units of the drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LINE", "Area", "Labels"]

LINE, _LETTER = 16, 8  # maximum height of a line and width of a letter
_FIRST = ((0, -1), (1, 0), (-1, 0), (0, 1))  # above, to the right, to the left, below
_OFFSETS = (*_FIRST, *((dx, side * row) for row in range(1, 12) for side in (-1, 1) for dx in (0, 1, -1)))


class Area(NamedTuple):
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Area) -> bool:
        """Whether the two overlap."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    @classmethod
    def around(cls, x: float, y: float, across: float, up: float) -> Area:
        """Return the rectangle around a point."""
        return cls(x - across, y - up, x + across, y + up)


class Labels:
    """The labels of one drawing.

    Parameters
    ----------
    inside : Area
        Area that contains all labels.
    """

    def __init__(self, inside: Area) -> None:
        self._inside = inside
        self._taken: list[Area] = []
        self._curves: NDArray[np.float64] = np.empty((4, 0))

    def avoid(self, area: Area) -> None:
        """Do not place later labels over an area, such as a mark."""
        self._taken.append(area)

    def avoid_curve(self, corners: Sequence[tuple[float, float]]) -> None:
        """Do not place later labels over a curve, if there is other space."""
        points = np.array(corners, dtype=np.float64).reshape(-1, 2).T
        begin, end = points[:, :-1], points[:, 1:]
        around = np.concatenate([np.minimum(begin, end) - 1, np.maximum(begin, end) + 1])
        self._curves = np.concatenate([self._curves, around], axis=1)

    def place(self, words: str, anchors: Sequence[tuple[float, float]]) -> Area:
        """Choose and reserve the area of a label.

        Parameters
        ----------
        words : str
            The label.
        anchors : sequence of (x, y)
            Points that it can be placed next to; the first one is preferred.

        Returns
        -------
        Area
            One line high, and wide enough for the text.
        """
        half = _LETTER * len(words) / 2
        found: list[tuple[int, Area]] = []
        for dx, rows in _OFFSETS:
            for anchor_x, anchor_y in anchors:
                x = anchor_x + dx * (half + 8)
                x = min(max(x, self._inside.left + half), self._inside.right - half)
                area = Area.around(x, anchor_y + rows * (LINE - 1), half, LINE / 2)
                if self._inside.top <= area.top and area.bottom <= self._inside.bottom:
                    found.append((self._cost(area) + 2 * abs(rows), area))
        best = min(found, key=lambda each: each[0])[1]
        self._taken.append(best)
        return best

    def _cost(self, area: Area) -> int:
        left, top, right, bottom = self._curves
        crossed = (left < area.right) & (area.left < right) & (top < area.bottom) & (area.top < bottom)
        return 1000 * sum(map(area.meets, self._taken)) + 5 * int(np.count_nonzero(crossed))
