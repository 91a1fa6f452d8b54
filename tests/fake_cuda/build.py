"""Compiles the test double of libcuda, and the program that checks the CUDA driver over it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
DRIVER_SOURCES = ("cuda_driver.cpp", "cuda_library.cpp", "numa.cpp")
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]


def compile_sources(output: Path, sources: list[Path], *options: str) -> Path:
    """Compile and link `sources`; ``OFFLOAD_SANITIZE`` applies here as it does to the extension."""
    sanitize = os.environ.get("OFFLOAD_SANITIZE")
    command = [
        *shlex.split(os.environ.get("CXX", "g++")),
        *("-std=c++17", "-O1", "-g", "-fvisibility=hidden", "-pthread", *WARNINGS),
        *([f"-fsanitize={sanitize}"] if sanitize else []),
        f"-I{CSRC}",
        *map(str, sources),
        *options,
        *("-o", str(output)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{run.stderr}")
    return output


def build_fake_cuda(output: Path, without: tuple[str, ...] = ()) -> Path:
    """Build the double as a shared library that lacks the entry points named in `without`."""
    renamed = [f"-D{name}=without_{name}" for name in without]
    # The leak sanitizer crashes on the dynamic thread-local storage of a library opened by dlopen.
    options = ("-shared", "-fPIC", "-ftls-model=initial-exec", *renamed)
    return compile_sources(output, [HERE / "fake_cuda.cpp"], *options)


def build_driver_checks(output: Path, fake_cuda: Path) -> Path:
    """Build driver_checks.cpp with the real cuda_driver.cpp, linked to the double `fake_cuda`."""
    sources = [HERE / "driver_checks.cpp", *(CSRC / name for name in DRIVER_SOURCES), fake_cuda]
    return compile_sources(output, sources, f"-Wl,-rpath,{fake_cuda.parent}", "-ldl")
