"""The layering and the house rules that a reader may rely on, checked on the sources as they stand."""

import ast
import re
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "offload"
SOURCES = sorted((ROOT / "csrc").glob("*.[ch]*"))
MODULES = sorted(PACKAGE.rglob("*.py"))
GRAPH = house.import_graph(PACKAGE)
ADDRESSES = re.compile(r"data_ptr\(|cuda_stream\b|\.address\b|_cdata\b|_weak_ref\(")
# Rooms from the bottom up: a module may import from its own room and from those below.
ROOMS = [
    {"units", "_core"},
    {"torch_compat", "plan"},
    {"devices"},
    {"options"},
    {"runtime"},
    {"profiling"},
    {"control"},
    {"diagnostics"},
    {"session"},
    {"__init__"},
    {"contrib", "integrations", "demo"},
    {"cli"},
    {"__main__"},
]
TOP = {"__init__", "__main__", "options", "session", "units"}
LINES_MAX = 400


def imported_modules(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(module: str) -> str:
    return module.split(".")[0] or "__init__"


def test_the_data_plane_knows_no_torch_and_no_toolkit():
    assert SOURCES
    for path in SOURCES:
        for line in path.read_text().splitlines():
            assert not re.search(r"#\s*include.*(torch|ATen|c10|cuda\.h|cuda_runtime)", line), path


def test_only_the_cuda_files_know_cuda():
    for path in SOURCES:
        if not path.name.startswith(("cuda_", "bindings")):
            assert not re.search(r"\bcu[A-Z]\w+\(|dlopen|dlsym", path.read_text()), path


def test_only_bindings_know_python():
    for path in SOURCES:
        assert ("pybind11" in path.read_text()) == (path.name == "bindings.cpp"), path


@pytest.mark.parametrize("path", sorted((PACKAGE / "plan").rglob("*.py")), ids=lambda p: p.name)
def test_the_planner_is_pure(path):
    for name in imported_modules(ast.parse(path.read_text())):
        assert not name.startswith("torch"), (path, name)
        if name.startswith("offload."):
            assert name.startswith(("offload.plan", "offload.units")), (path, name)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_addresses_stay_in_the_runtime(path):
    if path.parent.name != "runtime":
        assert not ADDRESSES.search(path.read_text())


def test_every_module_has_a_room():
    assert {room_of(module) for module in GRAPH} <= set().union(*ROOMS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == TOP


@pytest.mark.parametrize("module", GRAPH)
def test_no_room_imports_from_above(module):
    rank = {name: number for number, names in enumerate(ROOMS) for name in names}
    for name in GRAPH[module]:
        assert rank[room_of(name)] <= rank[room_of(module)], f"{module} imports {name}, which is above it"


def test_no_imports_form_a_cycle():
    assert house.cycles(GRAPH) == []
    assert house.cycles(house.rooms(GRAPH)) == []


@pytest.mark.parametrize("path", [*MODULES, *SOURCES], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= LINES_MAX


@pytest.mark.parametrize("path", [*MODULES, *SOURCES], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_open_with_their_place(path):
    text = path.read_text()
    if path.suffix == ".py":
        assert ast.get_docstring(ast.parse(text)), f"{path} has no opening docstring"
    elif path.suffix == ".h" or not (path.parent / f"{path.stem}.h").exists():
        assert text.startswith("//"), f"{path} does not say what it is for"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_swallowed_or_printed(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path}:{node.lineno}: bare except"
            broad = ast.unparse(node.type) in ("Exception", "BaseException")
            reraises = any(isinstance(each, ast.Raise) for each in ast.walk(node))
            assert not broad or reraises, f"{path}:{node.lineno}: swallows everything"
        is_front = path.parent.name in ("cli", "demo")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            assert is_front, f"{path}:{node.lineno}: the library never prints"


def test_names_are_nouns():
    vague = {"utils", "util", "common", "helpers", "manager", "misc"}
    assert not {path.stem for path in [*MODULES, *SOURCES]} & vague
