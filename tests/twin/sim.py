"""The simulated accelerator as a torch backend: `torch.device("sim")`, and what `torch.cuda` has, as `torch.sim`.

Importing this builds and registers it, for good: a process has one such backend, and `torch.accelerator` is then it.
"""

from __future__ import annotations

import ctypes
import gc
import types
from collections.abc import Callable
from typing import Any

import torch
from twin.build import TORCH_VERSION, build_backend

if torch.__version__.split("+")[0] != TORCH_VERSION:
    raise ImportError(
        f"the simulated accelerator is written for torch {TORCH_VERSION}, and this is {torch.__version__}"
    )

_FOLDER = build_backend()
LIBRARY = str(_FOLDER / "libsim.so")  # what the engine opens in place of libcuda.so.1
DEVICES = 2

_machine = ctypes.CDLL(LIBRARY)
_machine.sim_limit_memory.argtypes = (ctypes.c_int, ctypes.c_size_t)
_machine.sim_limit_pinned.argtypes = (ctypes.c_size_t,)
_machine.sim_pinned_bytes.restype = ctypes.c_size_t
_machine.sim_set_capturing.argtypes = (ctypes.c_void_p, ctypes.c_int)
_machine.sim_failure.restype = ctypes.c_char_p
_machine.sim_default_stream.restype = ctypes.c_void_p
_machine.sim_touch_host.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p)
_backend = ctypes.CDLL(str(_FOLDER / "libtorch_sim.so"))

DEVICE_BYTES = 8 << 30
_FILE = b"a file"  # the machine keeps its address
CYCLES_PER_MICROSECOND = 1500  # a GPU's, for `_sleep`

torch.utils.rename_privateuse1_backend("sim")


# -- what tests do to it ------------------------------------------------------------------------------------------


def schedule(seed: int, delay_us_max: int) -> None:
    """Work on streams begins late now and then, by so much at most: every stream has its own luck."""
    _machine.sim_schedule(seed, delay_us_max)


def watch_order(watches: bool = True) -> None:
    """From now on, accesses to the same bytes that nothing orders are violations, whenever they run."""
    _machine.sim_watch_order(int(watches))


def violations() -> list[str]:
    """Every rule of CUDA's that was broken, and every pair of accesses that nothing orders."""
    found: list[str] = []
    text = ctypes.create_string_buffer(1000)
    while _machine.sim_violation(len(found), text, len(text)):
        found.append(text.value.decode())
    return found


def forget_violations() -> None:
    """Nobody has done anything wrong so far."""
    _machine.sim_forget_violations()


def fail_at(name: str, nth: int, code: int = 2) -> None:
    """The `nth` call of a driver's entry point from now on fails with `code`."""
    _machine.sim_fail_at(name.encode(), nth, code)


def calls(name: str) -> int:
    """How often an entry point was called; "file write" and "file read": how many transfers of a file have begun."""
    return int(_machine.sim_calls(name.encode()))


def await_calls(name: str, more_than: int, other: str, other_more_than: int) -> None:
    """Return once one of two has been called more often than that."""
    _machine.sim_await_calls(name.encode(), more_than, other.encode(), other_more_than)


def fail_allocation(nth: int, device: int = 0) -> None:
    """The `nth` allocation on a device from now on finds no memory."""
    _backend.sim_fail_allocation(device, nth)


def limit_memory(nbytes: int, device: int = 0) -> None:
    """A device has so many bytes."""
    _machine.sim_limit_memory(device, nbytes)


def limit_pinned(nbytes: int) -> None:
    """So much host memory can be pinned, by torch and by the engine together."""
    _machine.sim_limit_pinned(nbytes)


def pinned_bytes() -> int:
    """How much of it is."""
    return int(_machine.sim_pinned_bytes())


def set_capturing(stream: torch.Stream, capturing: bool) -> None:
    """A stream counts as being captured into a graph, or no longer does."""
    _machine.sim_set_capturing(stream.native_handle or _machine.sim_default_stream(stream.device_index), int(capturing))


def touch_host(address: int, nbytes: int, *, is_write: bool) -> None:
    """A file reads or writes these bytes now."""
    _machine.sim_touch_host(address, nbytes, int(is_write), _FILE)


def hold_streams(held: bool) -> None:
    """While held, what is queued stays queued."""
    if held:
        gc.collect()  # a store of an earlier test would wait for its streams when it dies, which stand still then
    _machine.sim_hold_streams(int(held))


def failure() -> str:
    """What work on a stream has failed with; empty where none has."""
    found = _machine.sim_failure()
    return found.decode() if found else ""


def forget_failure() -> None:
    """No work has failed so far."""
    _machine.sim_forget_failure()


def reset() -> None:
    """As after a restart: no faults, limits, delays, failures or violations. What is allocated stays."""
    hold_streams(False)
    _machine.sim_forget_faults()
    forget_failure()
    for device in range(DEVICES):
        limit_memory(DEVICE_BYTES, device)
        fail_allocation(0, device)
    limit_pinned(ctypes.c_size_t(-1).value)
    schedule(0, 0)
    watch_order(False)
    forget_violations()


def counts() -> dict[str, int]:
    """How many operators were launched; for how many a meta kernel was asked, and for how many the host waited."""
    found = (ctypes.c_long * 3)()
    _backend.sim_counts(found)
    return dict(zip(("launched", "by_meta", "waited"), found, strict=True))


# -- as torch.cuda ------------------------------------------------------------------------------------------


class stream:
    """`with torch.sim.stream(s):`."""

    def __init__(self, wanted: torch.Stream | None) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        if self._wanted is not None:
            self._before = torch.accelerator.current_stream(self._wanted.device)
            torch._C._accelerator_setStream(self._wanted)

    def __exit__(self, *error: object) -> None:
        if self._wanted is not None:
            torch._C._accelerator_setStream(self._before)


class Stream(torch.Stream):
    """torch.cuda.Stream's like."""

    def __new__(cls, device: Any = None, **kwargs: Any) -> Stream:
        if "stream_id" not in kwargs:
            kwargs["device"] = _as_device(device)
        return super().__new__(cls, **kwargs)

    @classmethod
    def of(cls, stream: torch.Stream) -> Stream:
        """The same stream, as one of this class."""
        return cls(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    @property
    def sim_stream(self) -> int:
        """The driver's handle."""
        return int(self.native_handle or 0)


def Event(enable_timing: bool = False, **kwargs: Any) -> torch.Event:
    """torch.cuda.Event's like. No class of its own: `elapsed_time` takes torch.Event itself alone."""
    return torch.Event(device="sim", enable_timing=enable_timing)


def _index_of(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return torch.accelerator.current_device_index() if index is None else index


def _as_device(device: Any = None) -> torch.device:
    return torch.device("sim", _index_of(device))


def _stream_of(handle: int, device: Any = None) -> Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1
    return Stream(stream_id=handle, device_index=_index_of(device), device_type=int(kind))


def _manual_seed(seed: int, device: Any = None) -> None:
    _backend.sim_seed(_index_of(device), ctypes.c_uint64(seed))


def _manual_seed_all(seed: int) -> None:
    for device in range(DEVICES):
        _manual_seed(seed, device)


def _random_state(device: Any = None) -> torch.Tensor:
    words = (ctypes.c_uint64 * 2)()
    _backend.sim_random_state(_index_of(device), words)
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)


def _set_random_state(state: torch.Tensor, device: Any = None) -> None:
    _backend.sim_set_random_state(_index_of(device), (ctypes.c_uint64 * 2).from_buffer_copy(state.numpy().tobytes()))


def _properties(device: Any = None) -> types.SimpleNamespace:
    total = torch.accelerator.get_memory_info(_index_of(device))[1]
    return types.SimpleNamespace(name="simulated accelerator", total_memory=total, uuid=f"sim-{_index_of(device)}")


def _forget_peaks(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index_of(device))


def _on_device(ask: Callable[[int], int]) -> Callable[..., int]:
    return lambda device=None: ask(_index_of(device))


def _make_module() -> types.ModuleType:
    made: Any = types.ModuleType("torch.sim")
    accelerator = torch.accelerator
    made.is_available = made.is_initialized = lambda: True
    made._is_in_bad_fork = lambda: False
    made.device_count = lambda: DEVICES
    made.current_device = accelerator.current_device_index
    made.set_device = lambda device: accelerator.set_device_index(_index_of(device))
    made.device = lambda device: accelerator.device_index(_index_of(device))
    made.get_device_name = lambda device=None: "simulated accelerator"
    made.get_device_properties = _properties
    made.is_bf16_supported = lambda: True
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    made.Stream, made.Event, made.stream = Stream, Event, stream
    made.current_stream = lambda device=None: Stream.of(accelerator.current_stream(_as_device(device)))
    made.default_stream = lambda device=None: _stream_of(0, device)
    made.ExternalStream = lambda handle, device=None: _stream_of(handle, device)
    made.set_stream = torch._C._accelerator_setStream
    made.synchronize = lambda device=None: accelerator.synchronize(_index_of(device))
    made.is_current_stream_capturing = lambda: bool(_machine.sim_stream_capturing(_handle(made.current_stream())))
    made.manual_seed, made.manual_seed_all = _manual_seed, _manual_seed_all
    made.get_rng_state, made.set_rng_state = _random_state, _set_random_state
    made.memory_stats = lambda device=None: accelerator.memory_stats(_index_of(device))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(made, name, _on_device(getattr(accelerator, name)))
    made.mem_get_info = lambda device=None: accelerator.get_memory_info(_index_of(device))
    made.reset_peak_memory_stats = _forget_peaks
    made.empty_cache = accelerator.empty_cache
    made._sleep = lambda cycles: _backend.sim_sleep(int(cycles / CYCLES_PER_MICROSECOND))
    return made


def _handle(of: torch.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(of.native_handle or _machine.sim_default_stream(of.device_index))


module: Any = _make_module()
torch._register_device_module("sim", module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
