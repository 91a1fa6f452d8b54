"""The layering and the code rules that a reader may rely on, checked on the sources as they stand."""

import ast
import re
from pathlib import Path

import package_graph
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "offload"
SOURCES = sorted((ROOT / "csrc").glob("*.[ch]*"))
MODULES = sorted(PACKAGE.rglob("*.py"))
ADDRESSES = re.compile(r"data_ptr\(|cuda_stream\b|\.address\b|_cdata\b|_weak_ref\(")
PRIVATE_TORCH = re.compile(
    r"torch\._[A-Za-z]|_execution_engine|_functorch|from torch\._|\._(cdata|base|version|weak_ref|expired|is_view)\b"
)
# Packages from the bottom up: a module may import from its own package and from those below.
PACKAGES = [
    {"units", "_core"},
    {"torch_compat", "plan"},
    {"devices"},
    {"options"},
    {"recomputation"},
    {"runtime"},
    {"optimizer_state", "parameters"},
    {"profiling"},
    {"control"},
    {"diagnostics"},
    {"handle"},
    {"session"},
    {"__init__"},
    {"capacity", "contrib", "integrations", "demo"},
    {"cli"},
    {"__main__"},
]
TOP = {"__init__", "__main__", "handle", "options", "session", "units"}
LINES_MAX = 400
PYTHON_TYPES = {"python_errors", "tensor_interface"}
# What runs Python code when an object dies, and weak references, which may.
REFERENCES = {"weakref.ref", "weakref.proxy", "weakref.ReferenceType"}
RUN_PYTHON_CODE = {
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "WeakSet",
    "WeakMethod",
    "finalize",
    "StorageWeakRef",
    "TensorWeakRef",
    "WeakTensorKeyDictionary",
    "WeakIdKeyDictionary",
}


@pytest.fixture(scope="module")
def graph():
    return package_graph.import_graph(PACKAGE)


def imported_modules(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def package_of(module: str) -> str:
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
        text = path.read_text()
        assert ("pybind11" in text) == path.name.endswith("bindings.cpp"), path
        # Python's own C interface, where pybind11's handling of arguments costs more than the work.
        may = path.stem in PYTHON_TYPES or path.name.endswith("bindings.cpp")
        assert may or "Python.h" not in text, path


@pytest.mark.parametrize("path", sorted((PACKAGE / "plan").rglob("*.py")), ids=lambda p: p.name)
def test_the_planner_is_pure(path):
    for name in imported_modules(ast.parse(path.read_text())):
        assert not name.startswith("torch"), (path, name)
        if name.startswith("offload."):
            is_placement = (path.name, name) == ("placement.py", "offload._core")  # computes with numbers only
            assert name.startswith(("offload.plan", "offload.units")) or is_placement, (path, name)


def modules_outside(*packages):
    """The files of all other packages, with their text."""
    return [(str(path), path.read_text()) for path in MODULES if path.parent.name not in packages]


def test_addresses_stay_in_the_runtime():
    outside = modules_outside("runtime", "devices", "torch_compat")
    assert [path for path, text in outside if ADDRESSES.search(text)] == []


def test_private_interfaces_of_torch_stay_in_their_package():
    assert [path for path, text in modules_outside("torch_compat") if PRIVATE_TORCH.search(text)] == []


def test_kinds_of_devices_are_told_apart_in_one_place():
    kinds = re.compile(r"torch\.cuda\b|\bis_cuda\b|type == \"cuda\"")
    assert [path for path, text in modules_outside("devices") if kinds.search(text)] == []


def test_every_module_has_a_package(graph):
    assert {package_of(module) for module in graph} <= set().union(*PACKAGES)
    assert {path.stem for path in PACKAGE.glob("*.py")} == TOP


def test_no_package_imports_from_above(graph):
    rank = {name: number for number, names in enumerate(PACKAGES) for name in names}
    for module, names in graph.items():
        for name in names:
            assert rank[package_of(name)] <= rank[package_of(module)], f"{module} imports {name}, which is above it"


def test_no_imports_form_a_cycle(graph):
    assert package_graph.cycles(graph) == []
    assert package_graph.cycles(package_graph.packages(graph)) == []


def test_files_are_short():
    lines = {str(path): len(path.read_text().splitlines()) for path in [*MODULES, *SOURCES]}
    assert {path: count for path, count in lines.items() if count > LINES_MAX} == {}


def test_files_of_tests_differ_in_name():
    """Pytest imports each by its bare name; those in tests/twin/inside run in a pytest of their own."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "inside" not in path.parts]
    names = sorted(path.name for path in files)
    assert names == sorted(set(names))


def test_files_open_with_their_place():
    for path in [*MODULES, *SOURCES]:
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


def own_references(tree):
    """A module's own kinds of weak references, by name."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).partition("[")[0] in REFERENCES for base in node.bases)
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_python_code_runs_where_its_exceptions_are_lost(path):
    """The handler of a signal may raise in any Python code, and Python drops what is raised as an object dies.

    So nothing of ours runs there: no finalizer, no callback of a weak reference but an append to a queue, and none of
    the standard library's containers and references that have such callbacks.
    """
    tree = ast.parse(path.read_text())
    references = REFERENCES | own_references(tree)
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.name != "__del__", f"{where}: a finalizer"
        named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert ast.unparse(node) != "gc.callbacks" if isinstance(node, ast.Attribute) else True, where
        assert named not in RUN_PYTHON_CODE, f"{where}: {named} runs Python code when an object dies"
        if isinstance(node, ast.ClassDef):
            is_reference = any(ast.unparse(base).partition("[")[0] in REFERENCES for base in node.bases)
            assert not (is_reference and any(isinstance(each, ast.FunctionDef) for each in node.body)), where
        if isinstance(node, ast.Call) and ast.unparse(node.func).partition("[")[0] in references:
            given = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
            assert all(ast.unparse(each).endswith(".append") for each in given), f"{where}: a callback in Python"


def test_names_are_nouns():
    vague = {"utils", "util", "common", "helpers", "manager", "misc"}
    assert not {path.stem for path in [*MODULES, *SOURCES]} & vague
