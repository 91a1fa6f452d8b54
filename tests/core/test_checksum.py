"""CRC32C: every implementation gives the same value, on this processor and, under an emulator, on aarch64."""

import platform
import shutil
import subprocess

import pytest
from twin.build import CSRC, WARNINGS

from offload import _core

CHECKS = CSRC.parent / "tests" / "core" / "checksum_checks.cpp"
CROSS = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"


def run_checks(tmp_path, compiler, *runner):
    program = tmp_path / "checks"
    command = [compiler, "-std=c++17", "-O2", "-static", *WARNINGS, f"-I{CSRC}", str(CHECKS), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    run = subprocess.run([*runner, str(program)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.split()


def test_known_values():
    assert _core.crc32c(b"123456789") == 0xE3069283
    assert _core.crc32c(bytes(32)) == 0x8A9136AA
    assert _core.crc32c(b"6789", _core.crc32c(b"12345")) == 0xE3069283
    assert _core.crc32c(b"") == 0


@pytest.mark.long
def test_every_implementation_agrees(tmp_path):
    names = run_checks(tmp_path, "g++")
    assert names[0] == "table"
    if platform.machine() == "x86_64":
        assert names[1] == "lanes"


@pytest.mark.long  # few machines have both programs
@pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which(EMULATOR)),
    reason=f"needs {CROSS} and {EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user)",
)
def test_aarch64_has_its_instruction(tmp_path):
    assert run_checks(tmp_path, CROSS, EMULATOR) == ["table", "lanes"]
