"""Rows of a test of which some run by default, and the others with `--long`."""

import pytest


def one_in(count, rows):
    """Return the rows; each but the first of every `count` is marked `long`."""
    return [row if number % count == 0 else _later(row) for number, row in enumerate(rows)]


def _later(row):
    if isinstance(row, type(pytest.param())):
        return pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.long])
    return pytest.param(row, marks=pytest.mark.long)
