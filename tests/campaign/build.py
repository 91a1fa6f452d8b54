"""Builds the native parts for tests: with mutants, with faults, as a stress program. Cached by the sources' hash."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "csrc", *(ROOT / "tests" / name for name in ("campaign", "faults", "stress"))]


def sources_hash(*salt: str) -> str:
    """Changes whenever a native source, or `salt`, does."""
    digest = hashlib.sha256("\0".join(salt).encode())
    for directory in SOURCES:
        for path in sorted([*directory.glob("*.cpp"), *directory.glob("*.h"), *directory.glob("CMakeLists.txt")]):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cmake_build(target: str, *options: str) -> Path:
    """Configure `csrc` with `options` and build `target`; an earlier build of the same sources is taken as it is."""
    # The checkout is part of the key: two of them must not build into one folder at a time.
    cache = Path(tempfile.gettempdir()) / f"offload-tests-{sources_hash(target, str(ROOT), *options)}"
    finished = cache / target
    with FileLock(cache.with_suffix(".lock")):  # two processes of pytest may want it at once
        if not finished.is_file():
            build_into(cache, target, options)
    return finished


def build_into(cache: Path, target: str, options: tuple[str, ...]) -> None:
    """Configure and build; `cache` appears when all is done."""
    building = cache.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)
    configure = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(building), "-G", "Ninja", "-DOFFLOAD_WERROR=ON"]
    commands = [
        [*configure, f"-DPython_EXECUTABLE={sys.executable}", *pybind11_option(), *options],
        ["cmake", "--build", str(building), "--target", Path(target).stem],
    ]
    for command in commands:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
    cache.mkdir(exist_ok=True)
    (building / target).replace(cache / target)
    shutil.rmtree(building)


def pybind11_option() -> list[str]:
    """Where CMake finds pybind11: beside this interpreter, if it is there."""
    if importlib.util.find_spec("pybind11") is None:
        return []
    import pybind11

    return [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]


def build_mutants() -> Path:
    """The extension in which guards can be left out, and which carries the walk."""
    # In half the time of a release, whose flags CMakeLists.txt sets itself.
    faster = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -DNDEBUG")
    return cmake_build("_core.so", "-DOFFLOAD_MUTANTS=ON", *faster)


@contextmanager
def mutants_package() -> Iterator[Path]:
    """A folder to import `offload` from, the package as it is but with the mutants' extension."""
    core = build_mutants()
    with tempfile.TemporaryDirectory(prefix="offload-mutants-") as folder:
        package = Path(folder, "offload")
        package.mkdir()
        for each in (ROOT / "offload").iterdir():
            if not each.name.startswith("_core."):
                (package / each.name).symlink_to(each)
        (package / "_core.so").symlink_to(core)
        yield Path(folder)


def load_core(path: str | Path) -> ModuleType:
    """The extension at `path`, under a name of its own. It cannot share a process with `offload._core`."""
    spec = importlib.util.spec_from_file_location("campaign_build._core", path)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core
