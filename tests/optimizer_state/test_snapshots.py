"""`state_dict()` of moved state: copies in files, which take no memory that the system cannot take back."""

import errno
import gc
import os
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
from live_bytes import Peak, tell_blocks_of_all
from optimizer_state import loops
from optimizer_state.state_rig import assert_equal
from torch import nn

import offload
from offload.optimizer_state import snapshot

MIB = 1 << 20


@pytest.fixture(autouse=True)
def a_disk(monkeypatch):
    """Also where the folder for temporary files is a tmpfs."""
    monkeypatch.setattr(snapshot, "is_in_memory", lambda _: False)


def layouts():
    torch.manual_seed(0)
    return {
        "plain": torch.randn(100, 30),
        "channels last": torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        "bfloat16": torch.randn(333).bfloat16(),
        "part of a storage": torch.randn(40, 40)[3:7],
        "complex": torch.randn(20, dtype=torch.complex64),
    }


def copies(tensors, folder):
    """Copies of named tensors in a snapshot."""
    made, found = (
        snapshot.Snapshot(str(folder), sum(snapshot.Snapshot.space_for(t.nbytes) for t in tensors.values())),
        {},
    )
    with closing(made):
        for name, tensor in tensors.items():
            made.put(found, name, tensor)
        made.end()
    assert list(found) == list(tensors)
    return found


def test_bytes_and_strides(tmp_path):
    tensors = layouts()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with torch.device("meta"):  # a default device of the program
        found = copies(tensors, tmp_path)
    assert list(tmp_path.iterdir()) == []
    for name, copied in found.items():
        assert is_in_a_file(copied), name
        assert torch.equal(copied, before[name])
        assert (copied.stride(), copied.dtype) == (tensors[name].stride(), tensors[name].dtype)
        copied.zero_()
        assert torch.equal(tensors[name], before[name])
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name])


def test_tensors_with_gaps_and_lazy_ones_stay_in_memory(tmp_path):
    tensors = {
        "every second": torch.randn(40)[::2],
        "expanded": torch.randn(1, 5).expand(3, 5),
        "conjugate": torch.randn(20, dtype=torch.complex64).conj(),
        "overlapping with gaps": torch.randn(4).as_strided((2, 2), (0, 3)),
        "in a file": torch.randn(40),
    }
    found = copies(tensors, tmp_path)
    assert [name for name, copied in found.items() if is_in_a_file(copied)] == ["in a file"]
    assert all(torch.equal(copied, tensors[name]) for name, copied in found.items())


def is_in_a_file(tensor):
    """Whether the mapping that contains the tensor's memory is of a deleted file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith("(deleted)")
    return False


@pytest.fixture(autouse=True)
def nothing_left():
    """What earlier tests left behind closes its files now, and not while they are counted."""
    gc.collect()


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["os.posix_fallocate", "os.pwrite", "tempfile.TemporaryFile"])
def test_without_room_copies_are_in_memory(call, tmp_path, monkeypatch):
    loop = loops.Loop(True, tmp_path)
    loop.step(0)
    expected, before = states(loop.optimizer), descriptors()
    assert any(map(is_in_a_file, expected))
    with monkeypatch.context() as patch:
        patch.setattr(f"offload.optimizer_state.snapshot.{call}", full)
        found = states(loop.optimizer)
    assert descriptors() == before
    assert not any(map(is_in_a_file, found))
    assert_equal(found, expected)


@pytest.mark.parametrize("name", ["is_in_memory", "free_disk_bytes"])
def test_on_a_tmpfs_or_a_nearly_full_disk_copies_are_in_memory(name, tmp_path, monkeypatch):
    loop = loops.Loop(True, tmp_path)
    loop.step(0)
    expected = states(loop.optimizer)
    answer = {"is_in_memory": True, "free_disk_bytes": 64 * MIB}[name]
    monkeypatch.setattr(snapshot, name, lambda _: answer)
    found = states(loop.optimizer)
    assert not any(map(is_in_a_file, found))
    assert_equal(found, expected)


def test_one_file_descriptor_for_any_number_of_tensors_until_they_are_gone(tmp_path):
    model = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(50)))
    optimizer = torch.optim.AdamW(model.parameters())
    knobs = {"min_tensor_bytes": 1024, "spill_dir": tmp_path, "n_tensors": 0}
    with offload.enable(model, optimizer=optimizer, optimizer_state=True, **knobs):
        model(torch.ones(1, 20)).sum().backward()
        optimizer.step()
        before = descriptors()
        saved = optimizer.state_dict()
        assert sum(is_in_a_file(state["exp_avg"]) for state in saved["state"].values()) == 50
        assert descriptors() <= before + 1
        del saved
        assert descriptors() == before


def test_state_that_the_plan_keeps_is_in_the_file_too(tmp_path):
    loop = loops.Loop(True, tmp_path)
    loop.step(0)
    kept = next(iter(loop.optimizer.param_groups[0]["params"]))
    loop.handle._states.follow([p for p in loop.model.parameters() if p is not kept])
    loop.step(1)
    assert not dict.get(loop.optimizer.state, kept)["exp_avg"].isnan().any()
    saved = loop.optimizer.state_dict()["state"][0]
    assert is_in_a_file(saved["exp_avg"])
    assert torch.equal(saved["exp_avg"], dict.get(loop.optimizer.state, kept)["exp_avg"])


def test_state_that_has_not_left_yet_is_in_the_file_too(tmp_path):
    loop = loops.Loop(True, tmp_path)
    loop.step(0)
    for parameter in loop.model.parameters():
        loop.optimizer.state[parameter] = {"own": torch.ones(40, 40)}
    found = states(loop.optimizer)
    assert len(found) > 1
    assert all(map(is_in_a_file, found))
    assert_equal(found, [torch.ones(40, 40)] * len(found))


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


def memory_at(address):
    """What the system knows of the memory at an address: its file, and the bytes that no file can give back."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        mapping = re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *(.*)", line)
        if mapping and int(mapping[1], 16) <= address < int(mapping[2], 16):
            anonymous = next(line for line in lines if line.startswith("Anonymous:"))
            return mapping[3], int(anonymous.split()[1]) << 10
    raise AssertionError(f"no memory at {address:#x}")


def test_a_snapshot_takes_no_memory_that_the_system_cannot_take_back(tmp_path):
    undo = tell_blocks_of_all()
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    with offload.enable(model, n_tensors=0, optimizer=optimizer, optimizer_state=True, spill_dir=tmp_path) as handle:
        undo()
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        assert handle.report().optimizer_state[0].nbytes == 64 * MIB
        optimizer.state_dict()  # the updates' last copies-out end
        peak = Peak()
        with peak.watch():
            saved = optimizer.state_dict()
        of_one = 8 * MIB
        assert 4 * MIB <= peak.nbytes <= of_one + MIB
        torch.save(saved, tmp_path / "checkpoint.pt")
        for state in saved["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                file, anonymous = memory_at(state[name].data_ptr())
                assert file.startswith(str(tmp_path))
                assert anonymous == 0
    loaded = torch.load(tmp_path / "checkpoint.pt")["state"]
    for number, state in loaded.items():
        assert all(torch.equal(value, saved["state"][number][name]) for name, value in state.items())
