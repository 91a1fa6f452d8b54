"""Builds csrc/ into offload/_core with CMake and Ninja; the rest of the package: pyproject.toml.

Two environment variables reach the build through pip: ``OFFLOAD_WERROR=1`` makes warnings errors,
``OFFLOAD_SANITIZE=address,undefined`` (or ``thread``) builds with sanitizers.
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(f"csrc/{path.name}" for path in ROOT.glob("csrc/*.cpp"))
HEADERS = sorted(f"csrc/{path.name}" for path in ROOT.glob("csrc/*.h"))

CXX17_PROBE = """
#include <optional>
std::optional<int> probe;
#if __cplusplus < 201703L
#error "no C++17"
#endif
"""


def find_compiler() -> list[str]:
    """Return the command of a C++17 compiler (``$CXX``, else the first of the usual names)."""
    remedy = "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), or xcode-select --install (macOS)"
    if os.environ.get("CXX"):
        candidates = [shlex.split(os.environ["CXX"])]
    else:
        candidates = [[name] for name in ("c++", "g++", "clang++")]
    rejected = []
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        probe = subprocess.run(
            [*command, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"],
            input=CXX17_PROBE,
            capture_output=True,
            text=True,
            check=False,
        )
        if probe.returncode == 0:
            return command
        rejected.append(shlex.join(command))
    tried = f" ({', '.join(rejected)} cannot compile C++17)" if rejected else ""
    raise SetupError(f"no C++17 compiler found{tried}: {remedy}")


def find_program(names: tuple[str, ...], module: str, directory: str, remedy: str) -> str:
    """Return a build tool's path: from its Python package if that is installed, else a command."""
    try:
        program = Path(getattr(importlib.import_module(module), directory), names[0])
        if program.is_file():
            return str(program)
    except (ImportError, AttributeError):
        pass
    for name in names:
        if found := shutil.which(name):
            return found
    raise SetupError(f"{names[0]} not found: {remedy}")


def find_cmake() -> str:
    """Return the path of CMake."""
    remedy = (
        "pip install cmake, apt install cmake (Debian, Ubuntu), dnf install cmake (Fedora), "
        "or brew install cmake (macOS)"
    )
    return find_program(("cmake",), "cmake", "CMAKE_BIN_DIR", remedy)


def find_ninja() -> str:
    """Return the path of Ninja."""
    remedy = (
        "pip install ninja, apt install ninja-build (Debian, Ubuntu), "
        "dnf install ninja-build (Fedora), or brew install ninja (macOS)"
    )
    return find_program(("ninja", "ninja-build"), "ninja", "BIN_DIR", remedy)


def require_python_headers() -> None:
    """Fail where Python's C headers are missing, as on a bare Debian."""
    include_dir = sysconfig.get_path("include")
    if not Path(include_dir, "Python.h").is_file():
        raise SetupError(
            f"Python.h not found in {include_dir}: apt install python3-dev (Debian, Ubuntu) "
            "or dnf install python3-devel (Fedora)"
        )


def configure_command(cmake: str, ninja: str, build_dir: Path) -> list[str]:
    """Return the CMake call that configures `build_dir`.

    Paths are passed each time, since an isolated build's tools have moved by the next one.
    """
    werror = os.environ.get("OFFLOAD_WERROR", "0").lower() in ("1", "on", "true", "yes")
    command = [
        *(cmake, "-S", str(ROOT / "csrc"), "-B", str(build_dir), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DOFFLOAD_WERROR={'ON' if werror else 'OFF'}",
        f"-DOFFLOAD_SANITIZE={os.environ.get('OFFLOAD_SANITIZE', '')}",
    ]
    try:
        pybind11 = importlib.import_module("pybind11")
    except ImportError:
        return command  # CMake may know a system-wide one, and says what to install if not
    return [*command, f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]


class CMakeBuild(build_ext):
    """The extension's build: one directory per interpreter, kept, so that rebuilds are short."""

    def build_extension(self, ext: Extension) -> None:
        """Build with CMake and copy the module to where setuptools expects it."""
        compiler = find_compiler()
        cmake, ninja = find_cmake(), find_ninja()
        require_python_headers()
        build_dir = ROOT / "build" / str(sys.implementation.cache_tag)
        environment = {**os.environ, "CXX": shlex.join(compiler)}
        for command in (
            configure_command(cmake, ninja, build_dir),
            [cmake, "--build", str(build_dir)],
        ):
            status = subprocess.run(command, env=environment, check=False).returncode
            if status != 0:
                raise CompileError(f"{shlex.join(command)} ended with status {status}; see above")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file, never the old one overwritten: a running process may have that one mapped.
        target.unlink(missing_ok=True)
        shutil.copy2(build_dir / "_core.so", target)


if __name__ == "__main__":
    setup(
        license="Apache-2.0",
        ext_modules=[Extension("offload._core", sources=SOURCES, depends=[*HEADERS, "csrc/CMakeLists.txt"])],
        cmdclass={"build_ext": CMakeBuild},
    )
