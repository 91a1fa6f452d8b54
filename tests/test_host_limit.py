"""How much host memory may be pinned by default: half of what is available, and what every control group leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload import options
from offload.options import check_options, default_host_limit

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """Plants files under a root of their own, in which 8 GiB are available."""

    def plant(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    plant({"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {8 * GIB // 1024} kB\n"})
    return plant


def group(path: str, limit: int | str, usage: int, cached: int = 0) -> dict[str, str]:
    """A control group of version 2."""
    stat = f"active_file {9 * GIB}\ninactive_file {cached}\n"
    return {f"{path}/memory.max": f"{limit}\n", f"{path}/memory.current": f"{usage}\n", f"{path}/memory.stat": stat}


def group_1(path: str, limit: int, usage: int, cached: int = 0) -> dict[str, str]:
    """A control group of version 1."""
    return {
        f"{path}/memory.limit_in_bytes": f"{limit}\n",
        f"{path}/memory.usage_in_bytes": f"{usage}\n",
        f"{path}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cached}\n",
    }


def test_half_of_what_is_available(machine):
    assert default_host_limit(machine({})) == 4 * GIB


@pytest.mark.parametrize("tight", ["", "/user.slice", "/user.slice/job", "/user.slice/job/step"])
def test_every_ancestor_counts(machine, tight):
    top = "sys/fs/cgroup"
    files = {"proc/self/cgroup": "0::/user.slice/job/step\n"}
    for path in ("", "/user.slice", "/user.slice/job", "/user.slice/job/step"):
        files |= group(top + path, 3 * GIB if path == tight else "max", GIB)
    files |= group(top + "/user.slice/neighbour", GIB, GIB)
    assert default_host_limit(machine(files)) == 2 * GIB


def test_the_smallest_remaining_counts_not_the_smallest_limit(machine):
    files = {"proc/self/cgroup": "0::/a/b\n"}
    files |= group("sys/fs/cgroup/a", 6 * GIB, 5 * GIB)  # 1 GiB left
    files |= group("sys/fs/cgroup/a/b", 4 * GIB, 2 * GIB)  # 2 GiB left
    assert default_host_limit(machine(files)) == GIB


def test_version_1(machine):
    files = {"proc/self/cgroup": "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/x\n"}
    files |= group_1("sys/fs/cgroup/memory", 9223372036854771712, 20 * GIB)
    files |= group_1("sys/fs/cgroup/memory/docker/abc", 5 * GIB, 2 * GIB)
    assert default_host_limit(machine(files)) == 3 * GIB


def test_both_versions_at_once(machine):
    files = {"proc/self/cgroup": "4:memory:/job\n0::/job\n"}
    files |= group_1("sys/fs/cgroup/memory/job", 5 * GIB, 2 * GIB)
    files |= group("sys/fs/cgroup/unified/job", 3 * GIB, 2 * GIB)
    assert default_host_limit(machine(files)) == GIB


def test_a_container_sees_its_own_group_at_the_top(machine):
    files = {"proc/self/cgroup": "0::/../../kubepods/pod1/abc\n"}
    files |= group("sys/fs/cgroup", 2 * GIB, GIB)
    assert default_host_limit(machine(files)) == GIB


@pytest.mark.parametrize("version", [1, 2])
def test_idle_file_cache_is_room(machine, version):
    make = group if version == 2 else group_1
    line, path = ("0::/job\n", "sys/fs/cgroup/job") if version == 2 else ("3:memory:/job\n", "sys/fs/cgroup/memory/job")
    files = {"proc/self/cgroup": line, **make(path, 4 * GIB, 4 * GIB, cached=3 * GIB)}
    assert default_host_limit(machine(files)) == 3 * GIB


def test_a_group_over_its_limit_leaves_nothing(machine):
    files = {"proc/self/cgroup": "0::/job\n", **group("sys/fs/cgroup/job", GIB, 2 * GIB)}
    assert default_host_limit(machine(files)) == 0


def checked(spill_dir: Path | None, host_limit: int | None, device: str = "cuda"):
    return check_options(
        torch.nn.Linear(1, 1),
        torch.device(device),
        memory_limit=None,
        max_slowdown=None,
        n_tensors=-1,
        lb=None,
        min_tensor_bytes=1,
        exclude=(),
        host_limit=host_limit,
        spill_dir=spill_dir,
    )


@pytest.mark.parametrize("with_disk", [False, True])
def test_nothing_left_is_said(monkeypatch, tmp_path, with_disk):
    monkeypatch.setattr(options, "default_host_limit", lambda: 0)
    spill_dir = tmp_path if with_disk else None
    with pytest.raises(ValueError, match=r'leave 0 bytes of host memory .* write .*host_limit="1GiB"'):
        checked(spill_dir, None)
    with pytest.raises(ValueError, match=r"you gave 4096 bytes .*at least 65536 are needed"):
        checked(spill_dir, 4096)
    assert checked(spill_dir, MIB).host_limit == MIB


def test_on_the_cpu_no_memory_is_pinned(monkeypatch, tmp_path):
    monkeypatch.setattr(options, "default_host_limit", lambda: 0)
    assert checked(tmp_path, None, device="cpu").host_limit == 0


@pytest.mark.parametrize("with_disk", [False, True])
def test_the_least_is_enough_for_a_store(tmp_path, with_disk):
    from offload import _core

    lanes = _core.HostDriver()
    store = _core.SwapStore.slab(lanes, lanes, options.HOST_LIMIT_MIN, str(tmp_path) if with_disk else "")
    assert store.stats()["pool_max_bytes"] == options.HOST_LIMIT_MIN
