"""The spill file belongs to its process alone: no name, mode 0600, and no link is followed to another file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from twin.build import compile_sources

from offload import _core

HERE = Path(__file__).resolve().parent
PROGRAM = """
import importlib.machinery, importlib.util, json, os, sys
loader = importlib.machinery.ExtensionFileLoader("_core", sys.argv[1])
core = importlib.util.module_from_spec(importlib.util.spec_from_loader("_core", loader))
loader.exec_module(core)
directory = sys.argv[2]
try:
    file = core.SpillFile(directory)
except OSError as error:
    print(json.dumps({"error": str(error), "errno": error.errno, "left": os.listdir(directory)}))
    sys.exit()
held = {each.name: os.readlink(each) for each in os.scandir("/proc/self/fd") if os.path.islink(each)}
(descriptor,) = [int(name) for name, target in held.items() if target.startswith(directory + "/")]
about = os.fstat(descriptor)
block, back = core.HostBlock(8192), core.HostBlock(8192)
memoryview(block)[:] = bytes(range(256)) * 32
extent = file.allocate(8192)
crc = file.write(extent, block)
print(json.dumps({
    "mode": oct(about.st_mode & 0o7777),
    "links": about.st_nlink,
    "whole": file.read(extent, back) == crc and bytes(back) == bytes(block),
    "left": os.listdir(directory),
}))
"""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory):
    """A library that takes O_TMPFILE away."""
    output = tmp_path_factory.mktemp("preloaded") / "without_tmpfile.so"
    return compile_sources(output, [HERE / "without_tmpfile.cpp"], "-shared", "-fPIC", "-fvisibility=default", "-ldl")


def open_spill_file(directory, preloaded=None, victim=None):
    environment = dict(os.environ)
    if preloaded is not None:
        environment["LD_PRELOAD"] = str(preloaded)
    if victim is not None:
        environment["PLANT"] = str(victim)
    command = [sys.executable, "-c", PROGRAM, _core.__file__, str(directory)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True, umask=0)
    return json.loads(run.stdout)


@pytest.mark.parametrize("way", ["without a name", "fallback"])
def test_private_and_unlinked(spill_directory, preloaded, way):
    about = open_spill_file(spill_directory, preloaded if way == "fallback" else None)
    assert about == {"mode": "0o600", "links": 0, "whole": True, "left": []}


def test_planted_link_is_refused(spill_directory, tmp_path, preloaded):
    """O_EXCL and O_NOFOLLOW: whoever got a link into the folder gets neither our bytes nor a damaged victim."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    about = open_spill_file(spill_directory, preloaded, victim)
    assert about["errno"] == 17
    assert "cannot create the spill file" in about["error"]
    assert str(spill_directory) in about["error"]
    assert victim.read_text() == "precious"
    assert about["left"] == [], "the folder is gone, and the link with it"
