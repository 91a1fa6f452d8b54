"""docs/errors.md lists what the sources raise, and nothing else."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "errors.md").read_text()
ENTRIES = dict(re.findall(r"^`(.+)`\n:   (.+(?:\n    .+)*)", PAGE, re.M))
ANY = "…"
LONG_ENOUGH = 12  # a shorter piece says too little to be looked for
# What no caller of the public interface meets, or what one row of the page tells of for all.
UNLISTED = {
    "offload/__init__.py": "Python's own words for a name that does not exist",
    "offload/contrib/__init__.py": "Python's own words for a name that does not exist",
    "offload/profiling/cache_files.py": "a cached file that cannot be used is left aside, and that is logged",
    "offload/profiling/calibration.py": "a cached file that cannot be used is measured again, and that is logged",
    "offload/plan/json_fields.py": "every message names the place in the file, what was expected and what was found",
    "offload/plan/recompute.py": "the planner names only tensors that have a recipe",
    "offload/recomputation/recipe.py": "the trial step meets it first, and the recipe is not used",
    "offload/plan/search.py": "offload.enable and the command line check these before",
    "offload/plan/simulate.py": "offload.enable and the command line check these before",
    "offload/plan/trace.py": "every message names the place in the file, what was expected and what was found",
}
INTERNAL_OF_CSRC = (  # of the engine's own mistakes, and one word of a longer message
    "this address is registered already",
    "deadlock: the awaited event is not done",
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


PYTHON = sorted((ROOT / "offload").rglob("*.py"))


@pytest.fixture(scope="module")
def sources():
    """Every string literal of the sources."""
    of_csrc = (each for path in csrc_files() for each in literals_of_csrc(path.read_text()))
    return "\n".join([*literals_of_python(), *of_csrc])


def test_the_page_is_read_whole():
    assert len(ENTRIES) == len(re.findall(r"^:   ", PAGE, re.M))
    assert len(ENTRIES) > 80


def test_every_listed_message_is_in_the_sources(sources):
    pieces = [(message, piece.strip()) for message in ENTRIES for piece in re.split(rf"{ANY}|\(|\)", message)]
    assert [each for each in pieces if len(each[1]) >= LONG_ENOUGH and each[1] not in sources] == []


def test_every_message_has_its_remedy():
    assert [message for message, entry in ENTRIES.items() if "**Do:**" not in entry] == []


def test_every_raised_message_is_listed():
    listed = "\n".join(ENTRIES)
    names = {path: str(path.relative_to(ROOT)) for path in PYTHON}
    found = [(name, text) for path, name in names.items() if name not in UNLISTED for text in raised(path)]
    assert len(found) > 80
    assert [(name, text) for name, text in found if longest_piece(text).strip() not in listed] == []


def test_no_message_installs_by_a_name_that_is_not_published(sources):
    assert not re.search(r"pip install (?!-)[^\n]*\boffload\b", sources + PAGE)


def test_what_is_not_listed_is_there():
    for name in UNLISTED:
        assert (ROOT / name).is_file()


def messages_of_the_data_plane() -> Iterator[tuple[str, str]]:
    """File and text of each error that C++ raises, but for the engine's own mistakes."""
    for path in csrc_files():
        source = re.sub(r'OFFLOAD_BROKEN\("[^"]*"\)', "", path.read_text())  # marks of mutants are nobody's message
        for call in re.findall(r"\b(?:fail|DriverError|SpillError|PoolExhausted)\(([^;]*);", source):
            for text in literals_of_csrc(call):
                if " " in text and len(text.strip()) >= LONG_ENOUGH and not text.startswith(INTERNAL_OF_CSRC):
                    yield path.name, text.strip()


def test_every_error_of_the_data_plane_is_listed():
    listed = "\n".join(ENTRIES)
    found = list(messages_of_the_data_plane())
    assert len(found) > 10
    assert [(name, text) for name, text in found if text not in listed] == []


# -- mistakes as users make them --------------------------------------------------------------------------------------

ARGUMENTS = [
    {"lb": 2},
    {"memory_limit": 1, "n_tensors": 1},
    {"memory_limit": 8e9},
    {"memory_limit": [1]},
    {"memory_limit": "plenty"},
    {"memory_limit": 12},
    {"memory_limit": "12"},
    {"memory_limit": "12G"},
    {"max_slowdown": -1},
    {"max_slowdown": 5},
    {"n_tensors": -2},
    {"n_tensors": 1, "lb": 0},
    {"exclude": "0"},
    {"exclude": 3},
    {"exclude": ("head",)},
    {"spill_dir": "/nonexistent"},
    {"spill_dir": "/proc"},
    {"min_tensor_bytes": 0},
    {"host_limit": -1},
]


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))


def train(model: nn.Module, **knobs: Any) -> None:
    with offload.enable(model, min_tensor_bytes="16KiB", **knobs) as handle:
        for _ in range(2):
            with handle.step():
                loss = model(torch.randn(512, 256)).sum()
            loss.backward()


def change_in_place() -> None:
    with offload.enable(model := make_model(), n_tensors=-1, min_tensor_bytes="16KiB") as handle:
        with handle.step():
            y = torch.tanh(model(torch.randn(512, 256)))
            y.add_(1)
        y.sum().backward()


def with_handle(use: Callable[[nn.Sequential, Any], object], **knobs: Any) -> Callable[[], object]:
    def call() -> object:
        model = make_model()
        with offload.enable(model, **knobs) as handle:
            return use(model, handle)

    return call


def accumulator(**knobs: Any) -> offload.contrib.GradAccumulator:
    return offload.contrib.GradAccumulator(torch.optim.SGD(make_model().parameters(), lr=0.1), **{"steps": 2, **knobs})


def scale_twice() -> None:
    optimizer = accumulator()
    optimizer.scale(torch.ones(()), items=1)
    optimizer.scale(torch.ones(()), items=1)


MISTAKES: dict[str, Callable[[], object]] = {
    "no module": lambda: offload.enable(3),  # type: ignore[arg-type]
    "enabled twice": with_handle(lambda model, _: offload.enable(model)),
    "a part": with_handle(lambda model, _: offload.enable(model[0])),
    "a whole": with_handle(lambda model, _: offload.enable(nn.Sequential(model))),
    "DataParallel": lambda: offload.enable(nn.DataParallel(make_model())),
    "meta": lambda: offload.enable(make_model().to("meta")),
    "copied handle": with_handle(lambda _, handle: copy.deepcopy(handle)),
    "no trace yet": with_handle(lambda _, handle: handle.trace()),
    "no trace by hand": with_handle(lambda _, handle: handle.trace(), n_tensors=-1),
    "timeline's ending": with_handle(lambda _, handle: handle.timeline("step.txt")),
    "two timelines": with_handle(lambda _, handle: [handle.timeline("step.html") for _ in range(2)]),
    "torch.func": with_handle(
        lambda model, _: torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 256)), parameters="all"
    ),
    "infeasible": lambda: train(make_model(), memory_limit="1MiB"),
    "changed in place": change_in_place,
    "steps": lambda: accumulator(steps=0),
    "no optimizer": lambda: offload.contrib.GradAccumulator(3, steps=2),  # type: ignore[arg-type]
    "wrapped twice": lambda: offload.contrib.GradAccumulator(accumulator(), steps=2),
    "max_norm": lambda: accumulator(max_norm=0),
    "step without a loss": lambda: accumulator().step(),
    "closure": lambda: accumulator().step(lambda: 1),  # type: ignore[arg-type]
    "items": lambda: accumulator().scale(torch.ones(()), items=0),
    "scaled twice": scale_twice,
    "no loader": lambda: offload.contrib.Prefetcher(3),  # type: ignore[type-var]
    "fed twice": lambda: offload.contrib.Prefetcher(offload.contrib.Prefetcher([])),
    "another device": lambda: offload.contrib.Prefetcher([], device="meta"),
}


def is_listed(message: str) -> bool:
    patterns = (".*".join(map(re.escape, entry.split(ANY))) for entry in ENTRIES if longest_piece(entry))
    return any(re.search(pattern, message, re.S) for pattern in patterns)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_a_wrong_argument_s_message_is_listed(arguments):
    with pytest.raises((ValueError, OSError)) as caught:
        offload.enable(make_model(), **arguments)
    assert is_listed(str(caught.value)), caught.value


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_s_message_is_listed(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError, RuntimeError, MemoryError)) as caught:
        MISTAKES[mistake]()
    assert is_listed(str(caught.value)), caught.value


def test_a_message_of_nobody_is_not_listed():
    assert not is_listed("something else went wrong")
