"""`state_dict()` of moved state: copies in files, which take no memory that the system cannot take back."""

import errno
import os
from pathlib import Path

import pytest
import torch
from optimizer_state import loops
from optimizer_state.state_rig import assert_equal
from torch import nn

import offload
from offload.optimizer_state import snapshot

MIB = 1 << 20


def layouts():
    torch.manual_seed(0)
    return {
        "plain": torch.randn(100, 30),
        "channels last": torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        "bfloat16": torch.randn(333).bfloat16(),
        "part of a storage": torch.randn(40, 40)[3:7],
        "complex": torch.randn(20, dtype=torch.complex64),
    }


@pytest.mark.parametrize("name", layouts())
def test_bytes_and_strides(name, tmp_path):
    tensor = layouts()[name]
    copied = snapshot.in_file(tensor, str(tmp_path))
    assert is_in_a_file(copied)
    assert torch.equal(copied, tensor)
    assert (copied.stride(), copied.dtype) == (tensor.stride(), tensor.dtype)
    assert list(tmp_path.iterdir()) == []
    before = tensor.clone()
    copied.zero_()
    assert torch.equal(tensor, before)


def is_in_a_file(tensor):
    """Whether the mapping that contains the tensor's memory is of a deleted file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith("(deleted)")
    return False


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "open"])
def test_without_room_it_stays_in_memory(call, tmp_path, monkeypatch):
    tensor, files = torch.randn(1000), len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(f"offload.optimizer_state.snapshot.os.{call}", full)
    assert snapshot.in_file(tensor, str(tmp_path)) is tensor
    monkeypatch.undo()
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_without_files_of_no_name_or_on_a_tmpfs_it_stays_in_memory(tmp_path, monkeypatch):
    tensor = torch.randn(1000)
    assert snapshot.in_file(tensor, "") is tensor
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "is_in_memory", lambda _: True)
        assert snapshot.in_file(tensor, str(tmp_path)) is tensor
    monkeypatch.delattr(os, "O_TMPFILE")
    assert snapshot.in_file(tensor, str(tmp_path)) is tensor


def states(optimizer):
    saved = optimizer.state_dict()["state"]
    return [value for key in sorted(saved) for value in saved[key].values()]


def test_later_steps_do_not_change_a_snapshot_and_it_does_not_change_them(tmp_path):
    moved, plain = loops.Loop(True, tmp_path), loops.Loop(False, tmp_path)
    for loop in (moved, plain):
        for number in range(3):
            loop.step(number)
    found, expected = states(moved.optimizer), [value.clone() for value in states(plain.optimizer)]
    assert sum(map(is_in_a_file, found)) == sum(value.nbytes >= 1024 for value in expected) > 0
    for loop in (moved, plain):
        loop.step(3)
    assert_equal(found, expected)
    for value in found:
        value.zero_()
    assert_equal(states(moved.optimizer), states(plain.optimizer))
    moved.handle.disable()
    assert_equal(states(moved.optimizer), states(plain.optimizer))


def moved_values(saved):
    """The values that move. Torch itself steps a small loaded tensor, such as the number of steps, in place."""
    return [value for state in saved["state"].values() for value in state.values() if value.nbytes >= 1024]


def test_a_snapshot_is_loaded_and_stays_as_it_was(tmp_path):
    loop = loops.Loop(True, tmp_path)
    loop.step(0)
    saved = loop.optimizer.state_dict()
    before = [value.clone() for value in moved_values(saved)]
    loop.step(1)
    loop.optimizer.load_state_dict(saved)
    assert loop.handle._states.away_bytes()[0] > 0, "it moves out again"
    loop.step(2)
    assert_equal(moved_values(saved), before)
    loop.handle.disable()
    assert_equal(moved_values(saved), before)
    assert len(before) > 0


def anonymous_bytes():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def test_a_snapshot_takes_no_memory_that_the_system_cannot_take_back(tmp_path):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    with offload.enable(model, n_tensors=0, optimizer=optimizer, optimizer_state=True, spill_dir=tmp_path) as handle:
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        assert handle.report().optimizer_state[0].nbytes == 64 * MIB
        before = anonymous_bytes()
        saved = optimizer.state_dict()
        grown = anonymous_bytes() - before
        torch.save(saved, tmp_path / "checkpoint.pt")
        assert grown < 24 * MIB
    loaded = torch.load(tmp_path / "checkpoint.pt")["state"]
    for number, state in loaded.items():
        assert all(torch.equal(value, saved["state"][number][name]) for name, value in state.items())
