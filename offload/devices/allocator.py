"""Finds which malloc this process uses, and gives a child process a malloc that reuses freed memory.

Without a GPU the engine frees the blocks that it has written to disk, and the process's malloc decides whether their
memory is reused. Imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

__all__ = [
    "INSTALL",
    "INSTALL_OF",
    "MALLOCS",
    "LargeBlocks",
    "bytes_in_use",
    "current",
    "describe",
    "find_recycling_allocator",
    "preload_environment",
    "recycles",
    "release_free_memory",
    "remedy",
]

INSTALL = "pip install cmeel-mimalloc"
INSTALL_OF = {
    "tcmalloc": "install Debian's libtcmalloc-minimal4 or your system's gperftools",
    "jemalloc": "install Debian's libjemalloc2 or your system's jemalloc",
    "mimalloc": INSTALL,
}
MALLOCS = tuple(INSTALL_OF)  # They reuse freed memory.

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it at its first allocation on the CPU
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES = 1 << 20  # the default of min_tensor_bytes: smaller tensors stay
_USUAL_BYTES = 32 << 20  # glibc moves its threshold up to this, whenever a larger block than before is freed
_SONAMES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libjemalloc.so.2")
_WHEEL, _WHEEL_LIBRARY = "cmeel-mimalloc", "libmimalloc.so"
# Settings with which free memory is returned to the system ("purged") only by `release_free_memory`, because purging
# causes page faults in every step. With a delay of -1, mimalloc would not purge even then; this one is 11 days, in ms.
_PURGE_WHEN_ASKED = {
    "jemalloc": ("MALLOC_CONF", "dirty_decay_ms:-1,muzzy_decay_ms:-1"),
    "mimalloc": ("MIMALLOC_PURGE_DELAY", "1000000000"),
}
_PURGE_ALL_ARENAS = b"arena.4096.purge"  # 4096: MALLCTL_ARENAS_ALL of jemalloc.h
_FOLDERS = (
    "/usr/lib/{machine}-linux-gnu",
    "/lib/{machine}-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)
_RECYCLES = "freed blocks are used again without page faults, so memory falls as tensors are swapped out"
_COSTS = {
    "tcmalloc": _RECYCLES,
    **{
        name: f"{_RECYCLES}, with {'='.join(setting)}; with its usual setting, every step has page faults"
        for name, setting in _PURGE_WHEN_ASKED.items()
    },
    "glibc, large blocks returned": "returns blocks of 1 MiB or more to the system when they are freed, so memory "
    "falls as tensors are swapped out; new blocks cause page faults. For faster steps, start with "
    f"`offload run -- python train.py` ({INSTALL})",
    "glibc": "keeps part of the freed memory, so the resident set falls by less than the bytes swapped; "
    "reusing the rest causes page faults. Start with `offload run -- python train.py` "
    f"({INSTALL})",
    "musl": "not measured with offload; the resident set may fall by less than the bytes swapped",
    "system": "not measured with offload; the resident set may fall by less than the bytes swapped",
}


def current() -> str:
    """Return the name of the malloc that this process uses.

    Returns
    -------
    str
        "tcmalloc", "jemalloc", "mimalloc", "glibc" or "musl" under Linux; "system" elsewhere.
    """
    try:
        return _read_name()
    except OSError:
        return "system"


@cache  # a process never changes its malloc, and its mappings may be thousands of lines
def _read_name() -> str:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return _name_in_maps(maps, _malloc_address())


def recycles(name: str) -> bool:
    """Return whether the allocator of this name reuses freed memory without page faults."""
    return name in MALLOCS


def describe() -> str:
    """Describe the malloc that this process uses and its effect on swapping.

    Returns
    -------
    str
        The name of `current`, a colon, and one sentence.

    Examples
    --------
    >>> describe().split(":")[0] == current()
    True
    """
    name = current()
    return f"{name}: {_COSTS[f'{name}, large blocks returned' if _is_returning() else name]}"


def remedy(name: str) -> str:
    """Explain how the resident set follows the tensors with this allocator, and how to start the program instead."""
    start = "tart with `offload run -- python train.py`."
    if "ipykernel" in sys.modules:  # a kernel inherits the malloc of the server that starts it
        start = "tart the notebook server with `offload run -- jupyter lab`."
    if name == "glibc" and _is_returning():
        return f"glibc malloc returns large blocks when they are freed; new ones take time. For faster steps, s{start}"
    if name == "glibc":
        return f"glibc malloc keeps part of the freed memory. S{start}"
    return f"{name} malloc may keep freed memory; it was not measured with offload. S{start}"


def release_free_memory() -> None:
    """Make malloc return free memory to the system: glibc's, tcmalloc, jemalloc and mimalloc.

    Nothing happens with other allocators, or with mimalloc if MIMALLOC_PURGE_DELAY is negative.
    """
    process = ctypes.CDLL(None)
    name = current()
    if name == "glibc":
        process.malloc_trim(0)
    elif name == "tcmalloc":
        process.MallocExtension_ReleaseFreeMemory()
    elif name == "jemalloc":
        process.mallctl(_PURGE_ALL_ARENAS, None, None, None, ctypes.c_size_t(0))
    elif name == "mimalloc":
        process.mi_collect(ctypes.c_bool(True))


class LargeBlocks:
    """Makes glibc's malloc return blocks of 1 MiB or more to the system as soon as they are freed.

    The resident set then falls with the tensors that are swapped out. Each new block causes page faults, so this is for
    goals that limit memory, not for those that limit the slowdown alone. Nothing happens with other allocators, or if
    the environment sets the threshold itself. Each session has one object. The setting is that of the process: it is on
    while at least one object wants it.
    """

    def return_at_once(self, *, wanted: bool) -> None:
        """Say whether this object's session wants blocks returned."""
        chosen = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
        mine = weakref.ref(self)
        if wanted == (mine in _asked) or chosen or current() != "glibc":
            return
        with _lock:
            (_asked.add if wanted else _asked.discard)(mine)
            libc = ctypes.CDLL(None)
            libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES if _is_returning() else _USUAL_BYTES)
            if wanted:
                libc.malloc_trim(0)  # return what malloc has kept so far


_asked: set[weakref.ref[LargeBlocks]] = set()  # the objects that want it; some may have been freed
_lock = threading.Lock()


def _is_returning() -> bool:
    return any(reference() is not None for reference in _asked)


def find_recycling_allocator(name: str = "") -> Path | None:
    """Find an installed tcmalloc, jemalloc or (as a Python package) mimalloc for this interpreter's architecture.

    Parameters
    ----------
    name : str, default ""
        One of `MALLOCS`; if empty, the first of them that is installed.

    Returns
    -------
    Path or None
        The shared library to preload; None if no such library is installed, or outside Linux.

    Raises
    ------
    ValueError
        No malloc of this name is known.
    """
    if name not in ("", *MALLOCS):
        raise ValueError(f"no malloc {name!r}; write {', '.join(map(repr, MALLOCS))}")
    if not sys.platform.startswith("linux"):
        return None
    machine = platform.machine()
    folders = [Path(folder.format(machine=machine)) for folder in _FOLDERS]
    folders.append(Path(sys.prefix) / "lib")
    linker_cache = _linker_cache()
    for soname in (each for each in _SONAMES if name in each):
        candidates: list[Path] = [
            *linker_cache.get(soname, ()),
            *(folder / soname for folder in folders),
        ]
        found = [path for path in candidates if _same_architecture(path)]
        if found:
            return found[0]
    return _mimalloc_wheel() if name in _WHEEL_LIBRARY else None


def preload_environment(environment: Mapping[str, str] | None = None, name: str = "") -> dict[str, str]:
    """Return a copy of an environment in which a child process uses huge pages and a malloc that reuses freed memory.

    If `name` is empty and LD_PRELOAD names a known allocator, or if it names only `name`, that one is used, with its
    own settings. Otherwise the result of `find_recycling_allocator` replaces known allocators in LD_PRELOAD; jemalloc
    and mimalloc then purge only if `release_free_memory` asks them to, unless MALLOC_CONF or MIMALLOC_PURGE_DELAY is
    set. With either allocator, THP_MEM_ALLOC_ENABLE=1 is set unless the variable has a value: torch then asks the
    kernel for huge pages for tensors of 2 MiB and more. Direct I/O pins memory page by page, so huge pages make it
    faster.

    Parameters
    ----------
    environment : mapping of str to str, optional
        The variables to start from; by default those of this process.
    name : str, default ""
        Which allocator, as in `find_recycling_allocator`.

    Returns
    -------
    dict of str to str
        The copy; unchanged if LD_PRELOAD names no known allocator and `find_recycling_allocator` finds none.

    Raises
    ------
    ValueError
        No malloc of this name is known.
    """
    child = dict(os.environ if environment is None else environment)
    preloaded = re.split("[ :]+", child.get("LD_PRELOAD", ""))
    known = {path: each for path in preloaded for each in MALLOCS if each in Path(path).name}
    is_chosen = set(known.values()) == {name} if name else bool(known)
    library = None if is_chosen else find_recycling_allocator(name)
    if is_chosen or library is not None:
        child.setdefault(_HUGE_PAGES, "1")
    if library is None:
        return child
    # Two of them do not work together: one may own what `strdup` returns, the other one `free`.
    others = [path for path in preloaded if path and path not in known]
    child["LD_PRELOAD"] = ":".join([str(library), *others])
    for purging, (variable, value) in _PURGE_WHEN_ASKED.items():
        if purging in library.name:
            child.setdefault(variable, value)
    return child


def bytes_in_use() -> int | None:
    """Return the bytes that are currently allocated on this process's heap.

    Returns
    -------
    int or None
        The count of tcmalloc or jemalloc, read in tens of microseconds; None with another malloc, and with builds of
        these two that do not count.
    """
    ask = {"tcmalloc": _in_use_by_tcmalloc, "jemalloc": _in_use_by_jemalloc}.get(current())
    try:
        return ask(ctypes.CDLL(None)) if ask is not None else None
    except (AttributeError, OSError):
        return None


def _in_use_by_tcmalloc(process: ctypes.CDLL) -> int | None:
    counted = ctypes.c_size_t()
    is_known = process.MallocExtension_GetNumericProperty(b"generic.current_allocated_bytes", ctypes.byref(counted))
    return counted.value if is_known else None


def _in_use_by_jemalloc(process: ctypes.CDLL) -> int | None:
    epoch, counted = ctypes.c_uint64(1), ctypes.c_size_t()
    # jemalloc adds up its counts when this is written, whatever the value.
    process.mallctl(b"epoch", None, None, ctypes.byref(epoch), ctypes.c_size_t(ctypes.sizeof(epoch)))
    size = ctypes.c_size_t(ctypes.sizeof(counted))
    failed = process.mallctl(b"stats.allocated", ctypes.byref(counted), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else counted.value


def _malloc_address() -> int:
    """Return the address of the function `malloc` as the dynamic linker resolves it; 0 if unknown."""
    try:
        return ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


def _name_in_maps(maps: str, malloc_address: int) -> str:
    """Return the allocator whose mapping contains `malloc_address`; otherwise a known one that is mapped, or libc's."""
    libraries: list[str] = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6:
            continue
        library = Path(fields[5]).name
        first, last = (int(bound, 16) for bound in fields[0].split("-"))
        if first <= malloc_address < last:
            owner = next((name for name in MALLOCS if name in library), None)
            if owner is None and re.match(r"libc[.-]", library):
                owner = "glibc"
            if owner is not None:
                return owner
        libraries.append(library)
    mapped = (name for library in libraries for name in MALLOCS if name in library)
    fallback = "musl" if any(library.startswith("ld-musl") for library in libraries) else "glibc"
    return next(mapped, fallback)


def _mimalloc_wheel() -> Path | None:
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(each.locate())) for each in files if each.name == _WHEEL_LIBRARY]
    return next((path for path in found if _same_architecture(path)), None)


def _linker_cache() -> dict[str, list[Path]]:
    """Read the dynamic linker's cache, soname → paths; empty if ldconfig is missing or fails."""
    folders = os.environ.get("PATH", os.defpath) + os.pathsep + os.pathsep.join(("/sbin", "/usr/sbin"))
    ldconfig = shutil.which("ldconfig", path=folders)
    if ldconfig is None:
        return {}
    try:
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    cache: dict[str, list[Path]] = {}
    for match in re.finditer(r"^\s+(\S+) \(.*\) => (/.*)$", listing, flags=re.MULTILINE):
        cache.setdefault(match[1], []).append(Path(match[2]))
    return cache


def _same_architecture(library: Path) -> bool:
    """Return whether `library` can be preloaded: an ELF file with this interpreter's word size and machine."""
    try:
        with library.open("rb") as candidate, Path(sys.executable).open("rb") as interpreter:
            theirs, ours = candidate.read(20), interpreter.read(20)
    except OSError:
        return False
    return len(theirs) == 20 and theirs[:6] == ours[:6] and theirs[18:20] == ours[18:20]
