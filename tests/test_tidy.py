"""The layering and the house rules that a reader may rely on, checked on the sources as they stand."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "offload"
SOURCES = sorted((ROOT / "csrc").glob("*.[ch]*"))
MODULES = sorted(PACKAGE.rglob("*.py"))
ADDRESSES = re.compile(r"data_ptr\(|cuda_stream\b|\.address\b|_cdata\b|_weak_ref\(")
# Layers from the bottom up: a module may import from its own layer and from those below.
LAYERS = [
    {"units", "weak", "call_stack", "control_group", "processes", "compiled", "refusals", "page", "_core"},
    {"trace", "allocator", "device_memory", "oom_page", "timeline"},
    {"timeline_page"},
    {"plan"},
    {"engine", "report", "options", "forward_wrapper"},
    {"allocations", "calibration", "held", "oom", "schedule", "stores"},
    {"course"},
    {"hooks", "profiler"},
    {"planning", "step_recording"},
    {"answers"},
    {"session"},
    {"recovery", "accumulate", "feed"},
    {"__init__"},
    {"integrations"},
    {"checkup"},
    {"doctor", "plan_page", "demo_model", "demo_memory", "demo_page"},
    {"plan_cli", "demo_worker"},
    {"demo"},
    {"cli"},
    {"__main__"},
]


def imported_modules(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


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
            assert name.startswith(("offload.plan", "offload.trace", "offload.units")), (path, name)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_addresses_stay_in_the_engine(path):
    if path.name != "engine.py":
        assert not ADDRESSES.search(path.read_text())


def test_every_module_has_a_layer():
    assert {layer_of(path) for path in MODULES} <= set().union(*LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_imports_upward(path):
    rank = {name: number for number, names in enumerate(LAYERS) for name in names}
    own = rank[layer_of(path)]
    for name in imported_modules(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "offload" and len(parts) > 1 and parts[1] in rank:
            assert rank[parts[1]] <= own, f"{path.name} imports {name}, which is above it"


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
        is_front = path.stem in ("demo", "demo_worker", "doctor", "cli", "plan_cli", "__main__")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            assert is_front, f"{path}:{node.lineno}: the library never prints"


def test_names_are_nouns():
    vague = {"utils", "util", "common", "helpers", "manager", "misc"}
    assert not {path.stem for path in [*MODULES, *SOURCES]} & vague
