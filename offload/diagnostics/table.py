"""Writes tables: with rich on a terminal, otherwise, or without rich, as aligned plain text.

All commands print their tables with it.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

__all__ = ["Cell", "write_table"]

Cell = str | tuple[str, str]  # text, or text and its style: "bold", "green", …

_PIPED_COLUMNS = 80
_SHORT, _NARROWEST = 16, 8  # columns of at most the first width are narrowed last; the second is the minimum width
_GAP = "  "


def write_table(out: TextIO, rows: Sequence[Sequence[Cell]], *, head: Sequence[str] = ()) -> None:
    """Write aligned columns; cells that are too long for the width are wrapped.

    Parameters
    ----------
    out : text file
        Output. A terminal gets colours and text of its whole width; other files get plain text of at most 80 columns.
    rows : sequence of sequence of str or (text, style)
        One cell per column; a row without cells is an empty line.
    head : sequence of str, optional
        Names of the columns.

    Examples
    --------
    >>> import sys
    >>> write_table(sys.stdout, [("a", "1"), ("longer", "2")], head=("name", "count"))
    name    count
    a       1
    longer  2
    """
    if not _write_rich(out, rows, head):
        width = shutil.get_terminal_size().columns if out.isatty() else _PIPED_COLUMNS
        plain = [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in rows]
        out.writelines(f"{line}\n" for line in _plain(plain, head, width))


def _write_rich(out: TextIO, rows: Sequence[Sequence[Cell]], head: Sequence[str]) -> bool:
    """Write with rich. Return False if rich is not installed or the output is not a terminal."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console(file=out, highlight=False)
    if not console.is_terminal:
        return False
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, len(_GAP), 0, 0), show_header=bool(head))
    for number in range(max(map(len, [head, *rows]))):
        table.add_column(head[number] if head else "", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
    console.print(table)
    return True


def _plain(rows: Sequence[Sequence[str]], head: Sequence[str], width: int) -> Iterator[str]:
    widths = _widths([row for row in rows if row], head, width)
    for row in [head, *rows] if head else rows:
        cells = [_wrap(cell, column) for cell, column in zip(row, widths, strict=bool(row))]
        for number in range(max(map(len, cells), default=1)):
            lines = [cell[number] if number < len(cell) else "" for cell in cells]
            yield _GAP.join(line.ljust(column) for line, column in zip(lines, widths, strict=False)).rstrip()


def _wrap(cell: str, width: int) -> list[str]:
    """Return the lines of a cell. Leading spaces indent all of them."""
    indent = cell[: len(cell) - len(cell.lstrip())]
    return (
        [cell] if len(cell) <= width else textwrap.wrap(cell, width, subsequent_indent=indent, break_on_hyphens=False)
    )


def _widths(rows: Sequence[Sequence[str]], head: Sequence[str], width: int) -> list[int]:
    """Return the widths of the columns. Heads are wrapped first, then sentences, then long words, last short values."""
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    heads = head or [""] * len(columns)
    cells = [max(map(len, column), default=0) for column in columns]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    names = [max(map(len, name.split()), default=0) for name in heads]
    widths = [max(len(name), cell) for name, cell in zip(heads, cells, strict=True)]
    sizes = list(zip(names, cells, words, strict=True))
    floors = (
        map(max, names, cells),
        [max(name, cell if cell <= _SHORT else min(word, width // 3)) for name, cell, word in sizes],
        [max(name, min(cell, _SHORT)) for name, cell, _ in sizes],
        [_NARROWEST] * len(cells),
    )
    for floor in map(list, floors):
        while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
            spare = [number for number, least in enumerate(floor) if widths[number] > least]
            if not spare:
                break
            widths[max(spare, key=widths.__getitem__)] -= 1
    return widths
