"""docs/errors.md lists what the sources raise, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "errors.md").read_text()
ENTRIES = dict(re.findall(r"^`(.+)`\n:   (.+(?:\n    .+)*)", PAGE, re.M))
ANY = "…"
LONG_ENOUGH = 12  # a shorter piece says too little to be looked for
# What no caller of the public interface meets, or what one row of the page tells of for all.
UNLISTED = {
    "offload/__init__.py": "Python's own words for a name that does not exist",
    "offload/calibration.py": "a cached file that cannot be used is measured anew, and that is logged for developers",
    "offload/plan/search.py": "offload.enable and the command line check these before",
    "offload/plan/simulate.py": "offload.enable and the command line check these before",
    "offload/trace.py": "every message names the place in the file, what was expected and what was found",
}
INTERNAL_OF_CSRC = (  # of tests, of the engine's own mistakes, and one word of a longer message
    "cannot scribble",
    "cannot truncate",
    "this address is registered already",
    "deadlock: nothing can run",
    "no reason given",
)


def template(node: ast.expr) -> str:
    """A message with every value replaced by an ellipsis."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return ANY


def raised(path: Path) -> Iterator[str]:
    """The messages of a module's `raise` statements that have words of their own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = [template(argument) for argument in node.exc.args]
            yield from (text for text in texts if longest_piece(text))


def longest_piece(text: str) -> str:
    longest = max(text.split(ANY), key=len)
    return longest if len(longest.strip()) >= LONG_ENOUGH else ""


def literals_of_python() -> Iterator[str]:
    for path in sorted((ROOT / "offload").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                yield template(node)


def literals_of_csrc(text: str) -> list[str]:
    """The string literals of C++ code; those that stand side by side are one."""
    found = re.findall(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', text)
    return [re.sub(r'"\s*"', "", each)[1:-1].replace('\\"', '"') for each in found]


def csrc_files() -> list[Path]:
    return sorted((ROOT / "csrc").glob("*.cpp")) + sorted((ROOT / "csrc").glob("*.h"))


SOURCES = "\n".join(
    [*literals_of_python(), *(each for path in csrc_files() for each in literals_of_csrc(path.read_text()))]
)
PYTHON = sorted((ROOT / "offload").rglob("*.py"))


def test_the_page_is_read_whole():
    assert len(ENTRIES) == len(re.findall(r"^:   ", PAGE, re.M))
    assert len(ENTRIES) > 80


@pytest.mark.parametrize("message", ENTRIES)
def test_a_listed_message_is_in_the_sources(message):
    for piece in re.split(rf"{ANY}|\(|\)", message):
        if len(piece.strip()) >= LONG_ENOUGH:
            assert piece.strip() in SOURCES, piece


@pytest.mark.parametrize("message", ENTRIES)
def test_every_message_has_its_remedy(message):
    assert "**Do:**" in ENTRIES[message]


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_raised_message_is_listed(path):
    if str(path.relative_to(ROOT)) in UNLISTED:
        return
    listed = "\n".join(ENTRIES)
    for text in raised(path):
        assert longest_piece(text).strip() in listed, text


def test_what_is_not_listed_is_there():
    for name in UNLISTED:
        assert (ROOT / name).is_file()


@pytest.mark.parametrize("path", csrc_files(), ids=lambda path: path.name)
def test_every_error_of_the_data_plane_is_listed(path):
    listed = "\n".join(ENTRIES)
    for call in re.findall(r"\b(?:fail|DriverError|SpillError|PoolExhausted)\(([^;]*);", path.read_text()):
        for text in literals_of_csrc(call):
            if " " in text and len(text.strip()) >= LONG_ENOUGH and not text.startswith(INTERNAL_OF_CSRC):
                assert text.strip() in listed, text
