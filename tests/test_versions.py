"""The versions of torch and Python that are required, promised and tested are the same ones everywhere."""

import re
from pathlib import Path

import pytest
import torch
from twin.build import TORCH_VERSION

ROOT = Path(__file__).resolve().parent.parent


def found(pattern, *path):
    (only,) = re.findall(pattern, ROOT.joinpath(*path).read_text())
    return only


def numbers(version):
    return tuple(int(part) for part in re.findall(r"\d+", version))


@pytest.fixture(scope="module")
def tested():
    """Rows of the table: Python, torch."""
    rows = re.findall(r"^\| (\d[.\d]*) \| (\d[.\d]*)[+\w]* \|", (ROOT / "docs" / "versions.md").read_text(), re.M)
    assert rows
    return [(numbers(python), numbers(version)) for python, version in rows]


def test_the_least_torch(tested):
    least = numbers(found(r'"torch>=([\d.]+)"', "pyproject.toml"))
    assert least == numbers(found(r"torch ≥ ([\d.]+)", "README.md"))
    assert least == min(version for _, version in tested)[: len(least)]
    assert numbers(torch.__version__.split("+")[0]) >= least


def test_the_torch_of_ci_is_the_simulated_accelerators(tested):
    assert found(r"OFFLOAD_TORCH:-([\d.]+)", ".ci", "run") == TORCH_VERSION
    assert numbers(TORCH_VERSION) in [version for _, version in tested]


def test_pythons(tested):
    first, last = (numbers(each) for each in found(r"Python ([\d.]+)–([\d.]+);", "README.md"))
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert sorted(map(numbers, classified)) == [(3, minor) for minor in range(first[1], last[1] + 1)]
    assert numbers(found(r'requires-python = ">=([\d.]+)"', "pyproject.toml")) == first
    assert {first, last} <= {python[:2] for python, _ in tested}
