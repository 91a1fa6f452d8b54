"""The package's structure, read from its sources: `python tests/package_graph.py [CHECKOUT]` prints it.

Files, lines, the longest file, how deep imports go and which imports form cycles. `test_tidy.py` checks the same.
"""

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def module_of(path: Path, package: Path) -> str:
    """The dotted name of a module below `package`, without the package's own: "plan.search"."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, known: set[str]) -> set[str]:
    """The modules among `known` that a file imports, also inside its functions; not those for type checkers alone."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ignored = {
        id(each)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for each in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        for name in names if id(node) not in ignored else []:
            inside = name.removeprefix("offload").removeprefix(".")
            if name.split(".")[0] == "offload" and inside in known:
                found.add(inside)
    return found - {""}


def import_graph(package: Path) -> dict[str, set[str]]:
    """Which module imports which, by dotted name; a package's `__init__` only where its own names are imported."""
    paths = {module_of(path, package): path for path in sorted(package.rglob("*.py"))}
    graph = {}
    for module, path in paths.items():
        imported = imports_of(path, set(paths)) - {module}
        # "from offload.plan.trace import Trace" is an import of the module, not of the package around it.
        graph[module] = {name for name in imported if not any(other.startswith(f"{name}.") for other in imported)}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another, directly or around (strongly connected components of two or more)."""
    reach = {module: _reachable(module, graph) for module in graph}
    groups = {frozenset(other for other in reach[module] if module in reach[other]) for module in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for other in graph.get(waiting.pop(), ()):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def levels(graph: Mapping[str, set[str]]) -> int:
    """Modules on the longest chain of imports; cycles count once."""
    depth: dict[str, int] = {}

    def depth_of(module: str, above: tuple[str, ...]) -> int:
        if module not in depth:
            below = [depth_of(other, (*above, module)) for other in graph[module] if other not in (*above, module)]
            depth[module] = 1 + max(below, default=0)
        return depth[module]

    return max(depth_of(module, ()) for module in graph)


def packages(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same graph by package: a package below `offload`, or a module at its top."""
    by_package: dict[str, set[str]] = {}
    for module, imported in graph.items():
        package = module.split(".")[0]
        by_package.setdefault(package, set()).update(name.split(".")[0] for name in imported)
    return {package: imported - {package} for package, imported in by_package.items()}


def main(checkout: Path) -> None:
    """Print the structure of a checkout."""
    package = checkout / "offload"
    graph = import_graph(package)
    lines = {module_of(path, package): len(path.read_text().splitlines()) for path in sorted(package.rglob("*.py"))}
    by_package: dict[str, list[str]] = {}
    for module in graph:
        by_package.setdefault(module.split(".")[0] or "__init__", []).append(module)
    print(f"{'package':<16}{'files':>6}{'lines':>7}  {'longest file':<42}imports")
    for name, modules in sorted(by_package.items()):
        longest = max(modules, key=lines.__getitem__)
        imported = " ".join(sorted(packages(graph).get(name, set())))
        print(
            f"{name:<16}{len(modules):>6}{sum(lines[m] for m in modules):>7}  "
            f"{longest + f' ({lines[longest]})':<42}{imported}"
        )
    top = [module for module in graph if "." not in module and (not module or not (package / module).is_dir())]
    print(
        f"\n{len(graph)} files, {sum(lines.values())} lines, {len(top)} files at the top, "
        f"{sum(count > 400 for count in lines.values())} files over 400 lines\n"
        f"import levels: {levels(graph)} of modules, {levels(packages(graph))} of packages\n"
        f"cycles of modules: {cycles(graph) or 'none'}\ncycles of packages: {cycles(packages(graph)) or 'none'}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
