"""The hand-written declarations of csrc/cuda_api.h against the vendor's own cuda.h.

A generated source includes both and lets the compiler compare every prototype and every constant.
The header comes from the nvidia-cuda-runtime package (in the ``test`` extra) or from an installed
toolkit.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"

# Exported under this name by every driver that has them; newer headers also offer a _v2, which an older driver lacks.
UNSUFFIXED_ON_PURPOSE = {"cuEventElapsedTime", "cuMemcpyBatchAsync"}

PREAMBLE = r"""
#include "cuda_api.h"
#include <cuda.h>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace api = offload::cuda;

template <typename T> struct Vendor { using type = T; };
template <typename T> struct Vendor<T*> { using type = typename Vendor<T>::type*; };
template <typename T> struct Vendor<const T> { using type = const typename Vendor<T>::type; };
template <typename R, typename... P> struct Vendor<R(P...)> {
  using type = typename Vendor<R>::type(typename Vendor<P>::type...);
};
template <> struct Vendor<api::Result> { using type = CUresult; };
template <> struct Vendor<api::CaptureState> { using type = CUstreamCaptureStatus; };
template <> struct Vendor<api::ContextTag> { using type = std::remove_pointer_t<CUcontext>; };
template <> struct Vendor<api::StreamTag> { using type = std::remove_pointer_t<CUstream>; };
template <> struct Vendor<api::EventTag> { using type = std::remove_pointer_t<CUevent>; };
template <> struct Vendor<api::CopyAttributes> { using type = CUmemcpyAttributes; };
static_assert(sizeof(api::CopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(api::CopyAttributes, source_hint) == offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(api::CopyAttributes, target_hint) == offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(api::CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(sizeof(api::Result) == sizeof(CUresult));
static_assert(sizeof(api::CaptureState) == sizeof(CUstreamCaptureStatus));

#define NAME_OF(symbol) #symbol
#define EXPANDED_NAME_OF(symbol) NAME_OF(symbol)
#define REQUIRE_UNMAPPED(symbol, name) \
  static_assert(std::string_view(EXPANDED_NAME_OF(symbol)) == name, name " needs a version suffix")
"""

# With __CUDA_API_VERSION_INTERNAL cuda.h declares every exported name as the library spells it.
PROTOTYPES = (
    "#define __CUDA_API_VERSION_INTERNAL\n"
    + PREAMBLE
    + r"""
namespace offload::cuda {
#define DECLARE(symbol, parameters) using type_of_##symbol = Result parameters;
OFFLOAD_CUDA_REQUIRED(DECLARE)
OFFLOAD_CUDA_OPTIONAL(DECLARE)
}
#define COMPARE(symbol, parameters) \
  static_assert(std::is_same_v<Vendor<api::type_of_##symbol>::type, decltype(::symbol)>, \
                "prototype of " #symbol);
OFFLOAD_CUDA_REQUIRED(COMPARE)
OFFLOAD_CUDA_OPTIONAL(COMPARE)
"""
)

# CU_STREAM_LEGACY casts an integer to CUstream; with that name redefined it is a constant.
CONSTANTS = (
    PREAMBLE
    + r"""
#define CUstream intptr_t
#define COMPARE(name, vendor_name, value) \
  static_assert((intptr_t)api::name == (intptr_t)vendor_name, "value of " #vendor_name);
OFFLOAD_CUDA_RESULTS(COMPARE)
OFFLOAD_CUDA_CAPTURE_STATES(COMPARE)
OFFLOAD_CUDA_FLAGS(COMPARE)
"""
)


def find_headers() -> list[Path]:
    """Every cuda.h on this machine, the package's first."""
    include_dirs: list[Path] = []
    nvidia = importlib.util.find_spec("nvidia")
    for location in nvidia.submodule_search_locations or [] if nvidia else []:
        include_dirs += sorted(Path(location).glob("*/include"))
    include_dirs += [Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    nvcc = shutil.which("nvcc")
    if nvcc:
        include_dirs.append(Path(nvcc).resolve().parents[1] / "include")
    include_dirs += sorted(Path("/usr/local").glob("cuda*/include"))
    headers = {(d / "cuda.h").resolve(): None for d in include_dirs if (d / "cuda.h").is_file()}
    return list(headers)


HEADERS = find_headers()


@pytest.fixture(params=HEADERS or [None], ids=lambda h: "_".join(h.parts[-4:-2]) if h else "none")
def include_dir(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        reason = "no cuda.h found; pip install nvidia-cuda-runtime (it is in the test extra)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return request.param.parent


def compile_errors(source: str, include_dir: Path, cuda_api_dir: Path, tmp_path: Path) -> str:
    """What the compiler says about `source`; empty when it accepts it."""
    unit = tmp_path / "signatures.cpp"
    unit.write_text(source)
    command = [
        *("g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"),
        f"-I{cuda_api_dir}",
        f"-isystem{include_dir}",
        str(unit),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return run.stderr if run.returncode else ""


def declared_names() -> list[str]:
    return re.findall(r"^  X\((cu\w+), \(", (CSRC / "cuda_api.h").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("source", [PROTOTYPES, CONSTANTS], ids=["prototypes", "constants"])
def test_declarations_equal_the_vendors(source: str, include_dir: Path, tmp_path: Path) -> None:
    assert compile_errors(source, include_dir, CSRC, tmp_path) == ""


def test_names_carry_their_version_suffix(include_dir: Path, tmp_path: Path) -> None:
    """Where cuda.h maps a plain name to a newer version, libcuda's plain one is the old call."""
    names = declared_names()
    assert len(names) > 20
    plain = [n for n in names if not re.search(r"_v\d+$", n) and n not in UNSUFFIXED_ON_PURPOSE]
    checks = "".join(f'REQUIRE_UNMAPPED({name}, "{name}");\n' for name in plain)
    assert compile_errors(PREAMBLE + checks, include_dir, CSRC, tmp_path) == ""
    old = 'REQUIRE_UNMAPPED(cuCtxPushCurrent, "cuCtxPushCurrent");\n'
    expected = "cuCtxPushCurrent needs a version suffix"
    assert expected in compile_errors(PREAMBLE + old, include_dir, CSRC, tmp_path)


MUTANTS = {
    "narrower integer": (
        "cuMemHostRegister_v2, (void* host, size_t bytes",
        "size_t bytes",
        "unsigned bytes",
    ),
    "swapped handles": (
        "cuEventRecord, (EventHandle event, StreamHandle stream)",
        "EventHandle event, StreamHandle stream",
        "StreamHandle stream, EventHandle event",
    ),
    "missing argument": (
        "cuStreamCreate, (StreamHandle * stream, unsigned flags)",
        ", unsigned flags",
        "",
    ),
    "extra argument": (
        "cuEventQuery, (EventHandle event)",
        "EventHandle event",
        "EventHandle event, int more",
    ),
    "swapped directions": (
        "cuMemcpyHtoDAsync_v2, (DeviceAddress device, const void* host,",
        "DeviceAddress device, const void* host",
        "const void* host, DeviceAddress device",
    ),
    "lost const": ("cuGetErrorName, (Result result, const char** text)", "const char**", "char**"),
    "lost suffix": ("X(cuMemGetInfo_v2, ", "cuMemGetInfo_v2", "cuMemGetInfo"),
    "wrong signedness": (
        "cuDeviceGet, (Device * device, int ordinal)",
        "int ordinal",
        "unsigned ordinal",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_prototype_is_caught(mutant: str, include_dir: Path, tmp_path: Path) -> None:
    line, old, new = MUTANTS[mutant]
    text = (CSRC / "cuda_api.h").read_text()
    assert text.count(line) == 1, "the mutant no longer applies: cuda_api.h has changed"
    (tmp_path / "cuda_api.h").write_text(text.replace(line, line.replace(old, new)))
    symbol = re.search(r"cu\w+", line.replace(old, new))
    assert symbol
    assert f"prototype of {symbol[0]}" in compile_errors(PROTOTYPES, include_dir, tmp_path, tmp_path)


def test_wrong_constants_are_caught(include_dir: Path, tmp_path: Path) -> None:
    text = (CSRC / "cuda_api.h").read_text()
    constants = re.findall(r"^  X\(k\w+, (\w+), \d+\)", text, flags=re.MULTILINE)
    assert "CU_STREAM_LEGACY" in constants
    wrong = re.sub(r"^(  X\(k\w+, \w+, )(\d+)\)", r"\g<1>\g<2> + 7)", text, flags=re.MULTILINE)
    (tmp_path / "cuda_api.h").write_text(wrong)
    errors = compile_errors(CONSTANTS, include_dir, tmp_path, tmp_path)
    assert [c for c in constants if f"value of {c}" not in errors] == []
