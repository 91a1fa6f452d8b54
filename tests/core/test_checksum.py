"""CRC32C: every implementation gives the same value, on this processor and, under an emulator, on aarch64."""

import platform
import random
import shutil
import subprocess

import numpy as np
import pytest
from twin.build import CSRC, WARNINGS

from offload import _core

CHECKS = CSRC.parent / "tests" / "core" / "checksum_checks.cpp"
CROSS = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
BLOCK = 4096  # bytes


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


def second_line(block):
    """Where the second cache line begins that is checked in a block."""
    mixed = (block ^ block >> 33) * 0xFF51AFD7ED558CCD % 2**64
    mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
    return (1 + ((mixed ^ mixed >> 33) >> 32) % 63) * 64


def test_of_blocks_takes_two_cache_lines_of_each():
    data, offset = random.Random(0).randbytes(50_000), 3 * BLOCK + 700
    lines = [BLOCK * block + line for block in range(3, 16) for line in (0, second_line(block))]
    checked = [data[max(0, line - offset) : max(0, line + 64 - offset)] for line in lines]
    assert sum(map(len, checked)) == 23 * 64  # none of the first block, no second one of the last
    whole = _core.crc32c_of_blocks(data, offset)
    assert whole == _core.crc32c(b"".join(checked))
    for cut in (1, 3395, 3396, 3397, 3459, 3460, 3461, 20_000, 49_999):
        first = _core.crc32c_of_blocks(data[:cut], offset)
        assert _core.crc32c_of_blocks(data[cut:], offset + cut, first) == whole
    assert _core.crc32c_of_blocks(b"", 5, 77) == 77


def test_rows_of_whole_blocks_are_not_checked_in_one_column_only():
    """The beginnings of these rows are equal."""
    rows = [bytes(2048) + bytes([row]) * 2048 for row in range(32)]
    swapped = [*rows[16:], *rows[:16]]
    assert _core.crc32c_of_blocks(b"".join(rows), 0) != _core.crc32c_of_blocks(b"".join(swapped), 0)


def test_rows_of_any_length_are_checked_in_many_columns():
    lines = np.array([second_line(block) for block in range(1 << 14)])
    assert set(lines.tolist()) == set(range(64, BLOCK, 64))
    for blocks in range(1, 4097):  # a row
        assert (lines[:-blocks] == lines[blocks:]).mean() < 0.025


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
