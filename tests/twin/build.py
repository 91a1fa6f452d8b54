"""Compiles the machine as a libcuda, torch's side of it, and the program that checks the CUDA driver over it.

What was compiled once is kept in the system's temporary folder, by a hash of its sources.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
MACHINE = [HERE / f"{name}.cpp" for name in ("clock", "controls", "cuda", "files", "order", "runtime", "streams")]
HEADERS = [*HERE.rglob("*.h"), CSRC / "cuda_api.h"]
DRIVER_SOURCES = ("cuda_driver.cpp", "cuda_library.cpp", "numa.cpp", "process.cpp")
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
TORCH_VERSION = "2.13.0"  # the backend uses what torch promises to nobody


def run(command: list[str], source: str | None = None) -> None:
    """Run a compiler, on the text `source` where it reads stdin; what it says where it fails is the error."""
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")


def compiler() -> list[str]:
    """The C++ compiler; ``OFFLOAD_SANITIZE`` applies here as it does to the extension."""
    sanitize = os.environ.get("OFFLOAD_SANITIZE")
    return [
        *shlex.split(os.environ.get("CXX", "g++")),
        *("-O1", "-g", "-fvisibility=hidden", "-pthread"),
        *([f"-fsanitize={sanitize}"] if sanitize else []),
    ]


def in_one(sources: Iterable[Path]) -> str:
    """A text that has these sources compiled as one: headers, which take most of the time, are read once."""
    return "".join(f'#include "{source}"\n' for source in sources)


def compile_sources(output: Path, sources: list[Path], *options: str) -> Path:
    """Compile `sources` as one, and link them."""
    command = [*compiler(), "-std=c++17", *WARNINGS, f"-I{CSRC}", *("-x", "c++", "-", "-x", "none")]
    run([*command, *options, *("-o", str(output))], in_one(sources))
    return output


def files_hash(paths: Iterable[Path], *salt: str) -> str:
    """Changes whenever a file, the compiler's options or `salt` do."""
    digest = hashlib.sha256("\0".join([*salt, *compiler()]).encode())
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build_machine(output: Path, without: tuple[str, ...] = ()) -> Path:
    """Build the machine as a shared library that lacks the entry points named in `without`; a new file each time."""
    renamed = [f"-D{name}=without_{name}" for name in without]
    # The leak sanitizer crashes on the dynamic thread-local storage of a library opened by dlopen. Without it that is
    # what there has to be: a process has static storage for a few such libraries only, and then dlopen fails.
    static_storage = ["-ftls-model=initial-exec"] if os.environ.get("OFFLOAD_SANITIZE") else []
    options = ("-shared", "-fPIC", *static_storage, *renamed)
    kept = Path(tempfile.gettempdir(), f"offload-machine-{files_hash([*MACHINE, *HEADERS], *options)}.so")
    with FileLock(kept.with_suffix(".lock")):
        if not kept.is_file():
            compile_sources(kept.with_suffix(".building"), MACHINE, *options).replace(kept)
    shutil.copyfile(kept, output)
    return output


def build_driver_checks(output: Path, machine: Path) -> Path:
    """Build driver_checks.cpp with the real cuda_driver.cpp, linked to the library `machine`."""
    checks = [HERE / "driver_checks.cpp", HERE / "driver_order_checks.cpp"]
    sources = [*checks, *(CSRC / name for name in DRIVER_SOURCES)]
    return compile_sources(output, sources, str(machine), f"-Wl,-rpath,{machine.parent}", "-ldl")


@cache
def build_backend() -> Path:
    """The folder with the machine, libsim.so, and torch's side of it, libtorch_sim.so."""
    import torch

    sources = HERE.rglob("*.cpp")
    name = f"offload-twin-{files_hash([*sources, *HEADERS], torch.__version__, torch.__file__)}"
    folder = Path(tempfile.gettempdir(), name)
    finished = folder / "libtorch_sim.so"
    with FileLock(folder.with_suffix(".lock")):
        if not finished.is_file():
            folder.mkdir(exist_ok=True)
            build_machine(folder / "libsim.so")
            compile_backend(folder, Path(torch.__file__).parent).replace(finished)
    return folder


def compile_backend(folder: Path, torch_folder: Path) -> Path:
    """Compile torch/ beside this as one, and link it with the machine in `folder`."""
    include = torch_folder / "include"
    # Not all of our warnings: torch's headers are inlined into what is compiled.
    options = ["-std=c++20", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-stringop-overflow", f"-I{CSRC}", f"-I{HERE}"]
    options += [f"-isystem{include}", f"-isystem{include}/torch/csrc/api/include"]
    building = folder / "libtorch_sim.building"
    libraries = [f"-L{folder}", "-lsim", f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10", "-ltorch"]
    paths = ["-Wl,-rpath,$ORIGIN", f"-Wl,-rpath,{torch_folder}/lib"]
    command = [*compiler(), "-g0", *options, "-shared", "-x", "c++", "-", "-x", "none", *libraries, *paths]
    run([*command, "-o", str(building)], in_one(sorted((HERE / "torch").glob("*.cpp"))))
    return building
