"""Which malloc runs, where a recycling one is, and what a child process is given."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from offload.devices import allocator

ROOT = Path(__file__).parents[1]

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MAPS = """\
5581a000-5582b000 r-xp 00000000 fe:00 131 /usr/bin/python3.11
7f10a000-7f10b000 r-xp 00000000 fe:00 132 /usr/lib/x86_64-linux-gnu/libjemalloc.so.2
7f20a000-7f20b000 r-xp 00000000 fe:00 133 /usr/lib/x86_64-linux-gnu/libc.so.6
7f30a000-7f30b000 rw-p 00000000 00:00 0
7f40a000-7f40b000 rw-p 00000000 00:00 0 [stack]
"""


def test_the_allocator_that_owns_malloc_is_named() -> None:
    assert allocator._name_in_maps(MAPS, 0x7F10A010) == "jemalloc"
    assert allocator._name_in_maps(MAPS, 0x7F20A010) == "glibc"


def test_an_unknown_owner_falls_back_on_what_is_mapped() -> None:
    assert allocator._name_in_maps(MAPS, 0x5581A010) == "jemalloc"
    assert allocator._name_in_maps(MAPS, 0) == "jemalloc"
    assert allocator._name_in_maps(MAPS.replace("jemalloc", "z"), 0) == "glibc"
    assert allocator._name_in_maps("7f-80 r-xp 0 0:0 1 /lib/ld-musl-x86_64.so.1\n", 0) == "musl"


def test_describe_names_the_allocator_in_use_and_one_sentence() -> None:
    name, sentence = allocator.describe().split(": ", maxsplit=1)
    assert name == allocator.current()
    assert len(sentence) > 20


def test_glibc_is_described_with_the_remedy() -> None:
    assert allocator.INSTALL in allocator._COSTS["glibc"]
    assert "offload run -- python" in allocator._COSTS["glibc"]


def test_the_remedy_is_what_a_script_or_a_notebook_is_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(allocator, "_asked", set())  # models of other tests may be enabled still
    for name in ("glibc", "musl"):
        assert allocator.remedy(name).endswith("Start with `offload run -- python train.py`.")
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    for name in ("glibc", "musl"):
        assert allocator.remedy(name).endswith("Start the notebook server with `offload run -- jupyter lab`.")


def with_allocator(name: str) -> dict[str, str]:
    """The environment of a child process with this malloc."""
    environment = allocator.preload_environment({"PATH": "/usr/bin:/bin"}, name)
    if "LD_PRELOAD" not in environment:
        assert name != "mimalloc", "pip has installed it"
        pytest.skip(f"{name} is not installed")
    assert name in environment["LD_PRELOAD"]
    return environment


def name_in_a_child(environment: dict[str, str]) -> str:
    """Which malloc serves a process with this environment."""
    command = [sys.executable, "-c", "from offload.devices import allocator as a; print(a.current())"]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=ROOT)
    return run.stdout.strip()


COUNTED = """
import ctypes
from offload.devices import allocator
process = ctypes.CDLL(None)
process.malloc.restype = ctypes.c_void_p
process.malloc.argtypes = (ctypes.c_size_t,)
before = allocator.bytes_in_use()
block = process.malloc(64 << 20)
after = allocator.bytes_in_use()
print(allocator.current(), allocator.recycles(allocator.current()), "none" if before is None else after - before)
"""


@needs_linux
@pytest.mark.parametrize("name", allocator.MALLOCS)
def test_a_child_runs_on_the_preloaded_allocator(name: str) -> None:
    environment = with_allocator(name)
    command = [sys.executable, "-c", COUNTED]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=ROOT)
    found, recycles, counted = run.stdout.split()
    assert (found, recycles) == (name, "True")
    if name == "mimalloc":
        assert counted == "none"
    else:
        assert abs(int(counted) - (64 << 20)) < 1 << 20


@needs_linux
def test_of_several_tcmalloc_is_preloaded_unless_another_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/somewhere")
    monkeypatch.setattr(allocator, "_same_architecture", lambda path: path.parent == folder)
    monkeypatch.setattr(allocator, "_WHEEL", "no-such-package")
    cache = {name: [folder / name] for name in ("libjemalloc.so.2", "libtcmalloc.so.4", "libtcmalloc_minimal.so.4")}
    monkeypatch.setattr(allocator, "_linker_cache", cache.copy)
    assert allocator.find_recycling_allocator() == folder / "libtcmalloc_minimal.so.4"
    assert allocator.find_recycling_allocator("jemalloc") == folder / "libjemalloc.so.2"
    assert allocator.find_recycling_allocator("mimalloc") is None
    del cache["libtcmalloc_minimal.so.4"]
    assert allocator.find_recycling_allocator() == folder / "libtcmalloc.so.4"
    del cache["libtcmalloc.so.4"]
    assert allocator.find_recycling_allocator() == folder / "libjemalloc.so.2"
    assert allocator.find_recycling_allocator("tcmalloc") is None


def test_other_preloaded_libraries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Path("/opt/libtcmalloc.so.4")
    monkeypatch.setattr(allocator, "find_recycling_allocator", lambda name: library)
    child = allocator.preload_environment({"LD_PRELOAD": "/lib/other.so", "HOME": "/root"})
    assert child == {
        "LD_PRELOAD": "/opt/libtcmalloc.so.4:/lib/other.so",
        "HOME": "/root",
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def test_an_allocator_that_is_preloaded_already_stays_in_charge() -> None:
    chosen = {"LD_PRELOAD": "/opt/libmimalloc.so"}
    assert allocator.preload_environment(chosen) == {**chosen, "THP_MEM_ALLOC_ENABLE": "1"}
    refused = {**chosen, "THP_MEM_ALLOC_ENABLE": "0"}
    assert allocator.preload_environment(refused) == refused


def test_a_named_one_takes_the_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two, a program may crash: one owns what `strdup` returns, the other one `free`."""
    monkeypatch.setattr(allocator, "find_recycling_allocator", lambda name: Path(f"/opt/lib{name}.so"))
    before = {"LD_PRELOAD": "/opt/libmimalloc.so /lib/other.so:libtcmalloc.so.4"}
    child = allocator.preload_environment(before, "jemalloc")
    assert child["LD_PRELOAD"] == "/opt/libjemalloc.so:/lib/other.so"
    own = {"LD_PRELOAD": "/home/me/libjemalloc.so:/lib/other.so"}
    assert allocator.preload_environment(own, "jemalloc") == {**own, "THP_MEM_ALLOC_ENABLE": "1"}


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no malloc 'malloc'; write 'tcmalloc', 'jemalloc', 'mimalloc'"):
        allocator.preload_environment({}, "malloc")


@pytest.mark.parametrize("name", ["jemalloc", "tcmalloc"])
def test_a_build_that_does_not_count_is_no_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "current", lambda: name)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: ModuleType("a library without these functions"))
    assert allocator.bytes_in_use() is None


def test_jemalloc_is_told_to_purge_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Path("/usr/lib/libjemalloc.so.2")
    monkeypatch.setattr(allocator, "find_recycling_allocator", lambda name: library)
    child = allocator.preload_environment({})
    assert child["MALLOC_CONF"] == "dirty_decay_ms:-1,muzzy_decay_ms:-1"
    assert allocator.preload_environment({"MALLOC_CONF": "x:1"})["MALLOC_CONF"] == "x:1"


def test_mimalloc_of_a_wheel_is_told_to_purge_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_SONAMES", ())
    library = allocator.find_recycling_allocator()
    assert library == allocator.find_recycling_allocator("mimalloc")
    assert library is not None
    assert library.name == "libmimalloc.so"
    child = allocator.preload_environment({"PATH": "/usr/bin:/bin"})
    assert child["LD_PRELOAD"] == str(library)
    assert int(child["MIMALLOC_PURGE_DELAY"]) > 7 * 24 * 3600 * 1000  # a week
    assert allocator.preload_environment({"MIMALLOC_PURGE_DELAY": "10"})["MIMALLOC_PURGE_DELAY"] == "10"
    assert name_in_a_child(child) == "mimalloc"


def test_no_wheel_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_SONAMES", ())
    monkeypatch.setattr(allocator, "_WHEEL", "no-such-package")
    assert allocator.find_recycling_allocator() is None


def test_without_one_installed_the_environment_is_a_plain_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocator, "find_recycling_allocator", lambda name: None)
    given = {"A": "1"}
    child = allocator.preload_environment(given)
    assert child == given
    assert child is not given


def test_a_library_of_another_architecture_is_passed_over(tmp_path: Path) -> None:
    own = Path(sys.executable).read_bytes()[:64]
    same, other, text = tmp_path / "same", tmp_path / "other", tmp_path / "text"
    same.write_bytes(own)
    other.write_bytes(own[:18] + bytes(byte ^ 0xFF for byte in own[18:20]) + own[20:])
    text.write_bytes(b"/* GNU ld script */")
    assert allocator._same_architecture(same)
    assert not allocator._same_architecture(other)
    assert not allocator._same_architecture(text)
    assert not allocator._same_architecture(tmp_path / "missing")


def test_it_needs_no_torch_of_its_own() -> None:
    program = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", program, str(allocator.__file__)]
    assert subprocess.run(command, check=False).returncode == 0


FREED = """
import ctypes
from pathlib import Path
from offload.devices import allocator

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

process = ctypes.CDLL(None)
process.malloc.restype = ctypes.c_void_p
process.malloc.argtypes = (ctypes.c_size_t,)
process.free.argtypes = (ctypes.c_void_p,)
before = resident()
blocks = [process.malloc(64 << 10) for _ in range(1600)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
last = process.malloc(64)
for block in blocks:
    process.free(block)
kept = resident() - before
allocator.release_free_memory()
print(allocator.current(), kept, resident() - before)
"""


@needs_linux
@pytest.mark.parametrize("name", ["glibc", *allocator.MALLOCS])
def test_free_memory_goes_back_to_the_system(name: str) -> None:
    environment = {"PATH": "/usr/bin:/bin"} if name == "glibc" else with_allocator(name)
    command = [sys.executable, "-c", FREED]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=ROOT)
    found, kept, left = run.stdout.split()
    assert found == name
    assert int(kept) > 90 << 20  # malloc keeps it
    assert int(left) < 10 << 20


MOVED = """
from pathlib import Path
import torch
import offload
from offload.devices import allocator
from torch import nn

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

model = nn.Sequential(*(nn.Linear(512, 512, bias=False).requires_grad_(False) for _ in range(64)))
trained = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(8)))
optimizer = torch.optim.AdamW(trained.parameters())
sum(each(torch.ones(1, 1024)).sum() for each in trained).backward()
optimizer.step()
optimizer.zero_grad()
print(allocator.current())
before = resident()
offload.enable(model, n_tensors=0, parameters="frozen", min_tensor_bytes="1MiB")
enabled = resident()
print(before - enabled)
offload.enable(trained, n_tensors=0, optimizer=optimizer, optimizer_state=True)
print(enabled - resident())
"""


@needs_linux
@pytest.mark.parametrize("name", allocator.MALLOCS)
def test_what_leaves_at_enable_goes_back_to_the_system(name: str) -> None:
    environment = with_allocator(name)
    run = subprocess.run(
        [sys.executable, "-c", MOVED], env=environment, check=True, capture_output=True, text=True, cwd=ROOT
    )
    found, parameters, state = run.stdout.split()
    assert found == name
    assert int(parameters) > 50 << 20  # of 64 MiB
    assert int(state) > 50 << 20  # of 128 MiB, of which 64 MiB are still being written
