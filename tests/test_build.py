"""The built extension and the build's own checks: what it links, what it needs, what it says."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign.mutants import edges_in_sources
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parents[1]

IMPORT_ALONE = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("_core", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
assert importlib.util.find_spec("torch") is None
print(pathlib.Path("/proc/self/maps").read_text())
"""
BEFORE_TORCH = (
    IMPORT_ALONE
    + """
for call in (lambda: core.StorageWatch(object()), lambda: core.StateWatch().look(object())):
    try:
        call()
    except RuntimeError as error:
        assert str(error) == "set_tensor_interface was not called", error
    else:
        raise AssertionError("no error")
"""
)


@pytest.fixture
def extension() -> Path:
    """The shared library, found without importing the package."""
    package = importlib.util.find_spec("offload")
    assert package, "offload is not installed: pip install -e ."
    for directory in package.submodule_search_locations or []:
        path = Path(directory) / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
        if path.is_file():
            return path
    raise AssertionError("offload/_core is not built: pip install -e .")


@pytest.fixture
def build() -> dict[str, Any]:
    """What setup.py defines."""
    return runpy.run_path(str(ROOT / "setup.py"), run_name="build")


def test_links_neither_cuda_nor_torch(extension: Path) -> None:
    listing = subprocess.run(["readelf", "-d", str(extension)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", listing)
    assert any(name.startswith("libc.so") for name in needed)
    assert [name for name in needed if re.search(r"cuda|nvidia|torch|c10", name)] == []


def test_imports_without_torch_and_opens_no_cuda(extension: Path) -> None:
    # -I -S: no site-packages, so nothing but the standard library can be imported.
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", IMPORT_ALONE, str(extension)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert extension.name in run.stdout
    assert "libcuda" not in run.stdout


def test_what_needs_torch_raises_an_error_before_it_is_known(extension: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", BEFORE_TORCH, str(extension)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_guards_leave_nothing_in_the_build(extension: Path) -> None:
    # The names by which tests leave guards out (csrc/mutants.h), and what tests replace (csrc/file_io.h).
    assert [edge for edge in edges_in_sources() if edge.encode() in extension.read_bytes()] == []
    assert b"FaultyIo" not in extension.read_bytes()


def test_every_source_is_built() -> None:
    listed = re.findall(r"^  (\w+\.cpp)", (ROOT / "csrc/CMakeLists.txt").read_text(), re.MULTILINE)
    assert listed == sorted(path.name for path in (ROOT / "csrc").glob("*.cpp"))


def test_missing_compiler_is_named(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SetupError, match=r"no C\+\+17 compiler found: apt install g\+\+"):
        build["find_compiler"]()


def test_unfit_compiler_is_named(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SetupError, match=r"found \(c\+\+ cannot compile C\+\+17\): apt install"):
        build["find_compiler"]()


@pytest.mark.parametrize(
    ("finder", "module", "remedy"),
    [
        ("find_cmake", "cmake", "cmake not found: pip install cmake, apt install cmake"),
        ("find_ninja", "ninja", "ninja not found: pip install ninja, apt install ninja-build"),
    ],
)
def test_missing_tool_is_named(
    finder: str,
    module: str,
    remedy: str,
    build: dict[str, Callable[[], str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SetupError, match=remedy):
        build[finder]()


@pytest.mark.parametrize(("value", "option"), [("1", "ON"), ("0", "OFF"), (None, "OFF")])
def test_switches_reach_cmake(
    value: str | None, option: str, build: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("OFFLOAD_WERROR", raising=False)
    else:
        monkeypatch.setenv("OFFLOAD_WERROR", value)
    monkeypatch.setenv("OFFLOAD_SANITIZE", "thread")
    command = build["configure_command"]("cmake", "ninja", Path("build"))
    assert f"-DOFFLOAD_WERROR={option}" in command
    assert "-DOFFLOAD_SANITIZE=thread" in command


def in_unbuilt_checkout(use: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A fresh Python beside a copy of the package without its extension, as where nothing is installed."""
    shutil.copytree(ROOT / "offload", folder / "offload", ignore=shutil.ignore_patterns("_core*.so", "__pycache__"))
    nothing_installed = "import sys; sys.meta_path = [f for f in sys.meta_path if '__editable__' not in f.__module__]\n"
    command = [sys.executable, "-c", nothing_installed + use]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.long
@pytest.mark.parametrize(
    "use",
    [
        "import offload; offload.enable",
        "from offload import enable",
        "import offload; offload.PoolExhausted",
        "import offload.session",
        "from offload.integrations.switch import Switch",
        "import offload.handle",
        "from offload.contrib import Prefetcher",
        "from offload.cli.main import main; main(['doctor'])",
    ],
)
def test_an_unbuilt_checkout_says_what_to_type(use: str, tmp_path: Path) -> None:
    run = in_unbuilt_checkout(use, tmp_path)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("ImportError: the extension of offload is not built for Python 3.")
    assert "pip install -e ." in last
    assert str(tmp_path / "offload") in last


def test_what_needs_no_extension_works_without(tmp_path: Path) -> None:
    use = "import offload, offload.plan; offload.__version__; print('enable' in dir(offload), hasattr(offload, 'x'))"
    run = in_unbuilt_checkout(use, tmp_path)
    assert run.stdout.split() == ["True", "False"], run.stderr
