"""Tables for terminals: aligned, at most 80 columns wide in a pipe, and the same words with rich and without."""

from __future__ import annotations

import io
import random
import sys

import pytest

from offload.diagnostics.table import write_table

HEAD = ("tensor", "of", "bytes", "leaves at node", "returns at node", "lead", "")
ROWS = [
    (str(i), f"blocks.{i}.mlp.project_in", f"{i * 131.25:.2f} MiB", f"{i * 7}", f"{900 - i}", f"{i}", "hidden")
    for i in range(12)
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(*args: object, out: io.StringIO | None = None, **options: object) -> list[str]:
    out = io.StringIO() if out is None else out
    write_table(out, *args, **options)  # type: ignore[arg-type]
    return out.getvalue().splitlines()


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)


def test_columns_are_aligned() -> None:
    lines = written([("a", "1"), ("longer", "22")], head=("name", "count"))
    assert lines == ["name    count", "a       1", "longer  22"]


def test_a_pipe_gets_at_most_80_columns_and_whole_values() -> None:
    lines = written(ROWS, head=HEAD)
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:3] == ["tensor", "of", "bytes"]
    for row in ROWS:  # the heads are wrapped, and not the values
        (line,) = [line for line in lines if row[1] in line]
        assert line.split() == " ".join(row).split()


def test_a_long_name_is_broken_before_short_values() -> None:
    rows = [(number, f"{name}.a.long.tail", *rest) for number, name, *rest in ROWS]
    lines = written(rows, head=HEAD)
    assert max(map(len, lines)) <= 80
    for _, _, nbytes, *rest in rows:
        assert any(nbytes in line and line.endswith("  ".join(["", rest[-1]])) for line in lines)


def test_long_text_is_wrapped_in_its_column() -> None:
    text = "one two three four five six seven eight nine ten " * 4
    lines = written([("name", text.strip()), ("  inner " * 8, "x")])
    assert max(map(len, lines)) <= 80
    assert " ".join(line.removeprefix("name") for line in lines[:4]).split()[:10] == text.split()[:10]
    start = lines[0].index("one")
    assert all(line[: start - 2].strip() in ("", "name") for line in lines if "three" in line)


def test_words_longer_than_the_width_are_broken() -> None:
    lines = written([("x" * 200, "y" * 100)])
    assert max(map(len, lines)) <= 80
    assert sum(line.count("x") for line in lines) == 200
    assert sum(line.count("y") for line in lines) == 100


def test_no_character_is_lost_whatever_the_cells() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        columns = rng.randint(1, 6)
        rows = [
            ["".join(rng.choices("ab ", k=rng.randint(0, 60))).strip() for _ in range(columns)]
            for _ in range(rng.randint(1, 5))
        ]
        lines = written(rows)
        assert max(map(len, lines)) <= 80, seed
        assert sorted("".join(lines).replace(" ", "")) == sorted("".join(map("".join, rows)).replace(" ", "")), seed


def test_an_empty_row_is_an_empty_line() -> None:
    assert written([("a", "b"), (), ("c", ("d", "bold red"))]) == ["a  b", "", "c  d"]
    assert written([], head=("a", "b")) == ["a  b"]


def test_a_terminal_gets_its_whole_width_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = [("a", ("warning", "yellow"), "word " * 19), (), ("c", "d", "e")]
    shown = "\n".join(written(rows, out=Terminal()))
    assert "\x1b[33mwarning" in shown
    assert "word " * 18 + "word" in shown


@pytest.mark.usefixtures("without_rich")
def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = written([("a", ("warning", "yellow"), "word " * 30)], out=Terminal())
    assert lines[0].startswith("a  warning  word word")
    assert 80 < max(map(len, lines)) <= 100
