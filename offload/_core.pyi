"""Types of the native data plane; what each call orders and throws stands in csrc/*.h."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage, device, nn
from typing_extensions import Buffer

class DriverError(RuntimeError):
    """A driver entry point failed, is missing, or was called in a forked child."""

    call: str
    code: int

class PinningFailed(DriverError):
    """Host memory cannot be pinned; the device itself is well."""

class PoolExhausted(MemoryError):
    """The slab pool cannot serve a request within `host_limit`."""

    asked_bytes: int
    free_bytes: int
    max_bytes: int

class SpillError(OSError):
    """Spill file I/O failed: errno, filename and the offset in the file."""

    offset: int

class Driver:
    @property
    def name(self) -> str: ...
    def device_memory(self) -> tuple[int, int]: ...
    def require_not_capturing(self, stream: int) -> None: ...

class HostDriver(Driver):
    def __init__(self, schedule: str = "threads", seed: int = 0, niceness: int = 0, bandwidth: float = 0.0) -> None: ...

def cuda_driver(device: int, library: str = "libcuda.so.1") -> Driver: ...
def cuda_device_count(library: str = "libcuda.so.1") -> int: ...
def cuda_symbols(library: str = "libcuda.so.1") -> list[tuple[str, bool, bool]]: ...  # name, required, found

class HostBlock:
    def __init__(self, bytes: int, alignment_bytes: int = 4096, residue: int = 0) -> None: ...
    @property
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Ticket:
    @property
    def id(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def failure(self) -> str: ...
    def out_done(self) -> bool: ...
    def wait_out(self, compute: int) -> None: ...
    def cancel(self) -> bool: ...
    def prefetch(self, target: int, compute: int, owner: HostBlock | None = None) -> None: ...
    def in_done(self) -> bool: ...
    def swap_in(self, compute: int) -> None: ...
    def settle(self) -> None: ...
    def release(self) -> None: ...

class SwapStore:
    @staticmethod
    def direct(
        lanes: HostDriver, spill_directory: str, slice_bytes: int = 33554432, checks_every_byte: bool = False
    ) -> SwapStore: ...
    @staticmethod
    def slab(
        device: Driver,
        lanes: HostDriver,
        host_bytes_max: int,
        spill_directory: str = "",
        slab_bytes: int = 268435456,
        slice_bytes: int = 33554432,
        checks_every_byte: bool = False,
    ) -> SwapStore: ...
    @property
    def alignment_bytes(self) -> int: ...
    def swap_out(
        self,
        source: int,
        bytes: int,
        compute: int,
        need: int = 0,
    ) -> Ticket: ...
    def quiesce(self) -> None: ...
    def trim(self) -> int: ...
    def trim_pool(self, keep_bytes: int) -> int: ...
    def restart_high_water(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def defer_copy_outs(self, defers: bool) -> None: ...
    def record_copies(self, limit: int) -> None: ...
    def take_copies(self) -> list[tuple[str, int, int, float, float]]: ...

class Count:
    """So many tensors, of so many bytes in all."""

    tensors: int
    nbytes: int
    def __init__(self, tensors: int = 0, nbytes: int = 0) -> None: ...
    def copy(self) -> Count: ...
    def in_step(self) -> Count: ...
    def to_dict(self) -> dict[str, int]: ...

class CountList:
    def add(self, count: Count) -> None: ...
    def begin_step(self) -> None: ...

class StateWatch:
    def look(self, model: nn.Module) -> tuple[bool, bool]: ...
    def same_leaves(self, value: object) -> bool: ...

class OperatorScript:
    """The operators of a template; see csrc/operator_script.h."""

    def __init__(self, lines: tuple[Any, ...], readers: tuple[Callable[[], Any], ...], /) -> None: ...

class OperatorFollower:
    """Follows a script in a dispatch mode; see csrc/operator_follower.h."""

    script: OperatorScript | None
    values: dict[int, Any]
    thread: int
    follows: bool
    _saved: dict[int, Any]
    _bound: list[Any]
    _position: int
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, /
    ) -> Any: ...

def pass_operator(func: object, /) -> None: ...

class CallWhenFreed:
    """Calls a function when this object is freed, in the thread that frees it.

    Its exception is written to standard error and lost, so the function should not be Python code, which a signal's
    handler can interrupt.
    """

    def __init__(self, call: Callable[[], object], /) -> None: ...
    def cancel(self) -> None:
        """Make no call."""

class StorageWatch:
    """Tells when a storage has been freed. Reserves its identity, not its bytes, until it is closed or freed."""

    def __init__(self, storage: UntypedStorage, /) -> None: ...
    @property
    def is_alive(self) -> bool:
        """Whether other code still holds the storage."""

    def storage(self) -> UntypedStorage | None:
        """Return the storage; None if it has been freed, or if the watch is closed."""

    def expired(self) -> bool:
        """Whether the storage has been freed. If it has, the watch is closed."""

    def close(self) -> None:
        """The identity may be used again."""

class Value:
    """One version of one storage. Compared by identity.

    Attributes
    ----------
    call, place
        What made it: the number of a result, or (position, number) of an argument that the call wrote.
    nbytes
        Of the storage.
    version
        Of the tensors that show it.
    watch
        Whether somebody still holds the storage.
    index, slot, probe, held
        Where else its bytes are: number of the pack that saved it (-1: none), its slot (a weak reference), or a tensor
        that stays; `probe` is of what has a slot.
    """

    index: int
    slot: Any
    probe: Any
    held: Any
    def __init__(
        self,
        nbytes: int,
        version: int,
        watch: StorageWatch | None = None,
        call: Any = None,
        place: int | tuple[int | str, int] = 0,
        /,
    ) -> None: ...
    @property
    def call(self) -> Any: ...
    @property
    def place(self) -> int | tuple[int | str, int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def watch(self) -> StorageWatch | None: ...

def first_tensor(model: nn.Module) -> Tensor | None: ...

class Gauge:
    """A number and its maximum so far."""

    now: int
    @property
    def peak(self) -> int: ...
    def add(self, more: int) -> None: ...
    def share(self, more: int) -> GaugeShare:
        """Count more until the result is closed or freed."""

class GaugeShare:
    """A number that a gauge includes while this object exists."""

    def close(self) -> None:
        """Count it no longer; may be called again."""

class PackTable:
    """A schedule compiled to rows by pack index."""

    waits_for_prefetches: bool
    def keep(self, index: int, nbytes: int) -> None: ...
    def keep_again(self, index: int) -> None: ...
    def begin_node(self, index: int, node: int) -> None: ...
    def weigh(self, index: int, node: int) -> None: ...
    def watch(self, index: int, node: int) -> None: ...
    def swap(self, index: int) -> None: ...
    def swap_out(self, index: int, nbytes: int, need: int) -> None: ...
    def record(self, index: int) -> None: ...
    def show_again(self, index: int, first: int) -> None: ...
    def release(self, node: int, index: int) -> None: ...
    def prefetch(self, node: int, use: int, index: int) -> None: ...

class NodeClock:
    """When nodes begin and how long hooks hold them up."""

    is_listening: bool
    def begin(self) -> None: ...
    def arrive(self, node: int) -> None: ...
    def pass_by(self, node: int) -> None: ...
    def end(self, pack_index: int | None) -> None: ...
    def finish(self) -> bool: ...
    def measure(
        self, node_count: int
    ) -> tuple[tuple[float, ...], tuple[float, ...], dict[int, float], float, float] | None:
        """Starts and durations of nodes, waits by pack index, seconds in hooks and of the step; None until its end."""
    @property
    def hook_seconds(self) -> float: ...

class HostClock(NodeClock):
    """Reads the host's clock."""

    def __init__(self) -> None: ...

class EventPool:
    """Events of a device, which clocks use again."""

    def __init__(self, driver: Driver) -> None: ...

class DeviceClock(NodeClock):
    """Records events on a compute stream."""

    def __init__(self, events: EventPool, stream: int) -> None: ...
    def move_to(self, stream: int) -> None: ...

class NodeBytes:
    """Bytes by node of a schedule."""

    def __init__(self, by_node: Sequence[int]) -> None: ...

class ActivationMeter:
    """Activations in memory while a step runs."""

    stayed_bytes: int
    def __init__(self, kept: NodeBytes, resident: Gauge, steps: Gauge, is_on: bool) -> None: ...
    def weigh(self, node: int, more_bytes: int = 0) -> None: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def is_on(self) -> bool: ...

class ScheduleCursor:
    """Where a step is in its schedule."""

    node: int
    next_due: int
    is_on_schedule: bool
    def __init__(
        self, table: PackTable, clock: NodeClock | None = None, meter: ActivationMeter | None = None
    ) -> None: ...
    def watches(self, pack_index: int) -> bool: ...
    def arrive(self, node: int) -> bool: ...
    def has_used(self, pack_index: int) -> bool: ...
    def ask(self, pack_index: int) -> int: ...
    def forget_uses(self) -> None: ...

class StepCopies:
    """The copies of a step that follows a schedule."""

    caps_in_flight: bool
    finds_held: bool
    @property
    def missed(self) -> set[int]: ...
    def __init__(self, cursor: ScheduleCursor, prefetched: Gauge, without_memory: Gauge) -> None: ...
    def add(self, pack_index: int, storage: SwappedStorage, source: UntypedStorage) -> None: ...
    def find_held(self) -> set[int]: ...
    def find(self, pack_index: int) -> SwappedStorage | None: ...
    def act(self, node: int) -> None: ...
    def call_at(self, calls: Sequence[tuple[int, bool]], callback: Callable[[int], object]) -> None: ...
    def rewind(self, node: int) -> None: ...
    def miss(self, pack_index: int) -> None: ...

class KeptTensor:
    """What a graph node holds in the place of a tensor that stays."""

    @property
    def tensor(self) -> Tensor: ...
    @property
    def version(self) -> int: ...
    @property
    def index(self) -> int: ...

class HookCore:
    """Pack and unpack of tensors that stay; see csrc/hook_core.h."""

    def __init__(self, min_nbytes: int, counts: Mapping[str, Count], engine: object) -> None: ...
    def pack(self, tensor: Tensor, /) -> Any: ...
    def unpack(self, packed: Any, /) -> Tensor: ...
    def checked(self, kept: KeptTensor, /) -> Tensor: ...
    def count(self, counted: Count, nbytes: int, /) -> None: ...
    def keep(self, tensor: Tensor, index: int, reason: str, nbytes: int, /) -> KeptTensor: ...

def follow(
    core: HookCore,
    observer: object,
    cursor: ScheduleCursor | None,
    reason: str,
    copies: StepCopies | None = None,
    held: object = None,
) -> None: ...
def version_owner(tensor: Tensor, /) -> Tensor: ...
def set_tensor_interface(**found: Any) -> None: ...
def set_dlpack(capsule: object) -> bool: ...

# Identity of the tensor that owns the version counter, its version, first byte, bytes, identity of the storage.
_StorageKey = tuple[int, int, int, int, int]

class SwappedStorage:
    """The bytes of one storage (or of one span of it) at one version, out of the device; see csrc/swapped_storage.h."""

    @property
    def ticket(self) -> Ticket: ...
    @property
    def key(self) -> _StorageKey: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def views(self) -> int: ...
    @property
    def is_swapped_out(self) -> bool:
        """Whether neither the source nor a reloaded copy is on the device."""

    def add_view(self) -> None:
        """One more asks for the bytes."""

    def remove_view(self) -> None:
        """One less asks for the bytes; they are freed again where no other view is in use."""

    def prefetch(self) -> bool:
        """Start the copy-in to fresh device memory. False where the bytes are there or a copy-in is under way."""

    def swap_in(self) -> tuple[UntypedStorage, int]:
        """The bytes on the device, ready for the current stream: a storage and where in it, in bytes, they begin.

        One view is served per call. Raises OSError where the bytes could not be read back; a later call tries again.
        """

    def wait_copied_out(self) -> None:
        """Wait until the copy-out has ended. The bytes stay where it fails, or where some views are in use again."""

class SwappedView:
    """What a graph node holds in the place of a tensor whose bytes are out; see csrc/swapped_view.h."""

    @property
    def index(self) -> int: ...
    @property
    def ticket_id(self) -> int:
        """Which copies of the store's log are those of these bytes; -1: none."""

    def restore(self) -> Tensor:
        """The tensor as it was saved: same bytes, size, stride, offset and lazy bits.

        Raises RuntimeError where it was changed in place after it was saved, OSError where its bytes could not be read
        back; calling again tries again.
        """

def view_of(tensor: Tensor, saved: object, index: int, /) -> SwappedView: ...

class EngineCore:
    """What every swapped tensor passes of an engine; see csrc/engine_core.h."""

    in_flight_bytes_max: int
    # Makes the memory of a copy-in: takes its bytes, and its address modulo the store's alignment. None: host blocks.
    new_storage: Callable[[int, int], UntypedStorage] | None
    def __init__(
        self,
        store: SwapStore,
        device: device,
        resident: Gauge,
        unswapped: Gauge,
        in_flight_bytes_max: int,
        current_stream: Callable[[], int] | None,
        record_use: Callable[[Tensor], None] | None,
        new_storage: Callable[[int, int], UntypedStorage] | None,
        warn: Callable[[str, str], None],
    ) -> None: ...
    @property
    def misses(self) -> int: ...
    @property
    def failed(self) -> int:
        """Copy-outs that failed."""

    @property
    def failed_bytes(self) -> int: ...
    @property
    def failure(self) -> str: ...
    @property
    def live_records(self) -> int:
        """Storages whose graph is alive."""

    @property
    def sources_held(self) -> int: ...
    @property
    def targets_held(self) -> int: ...
    @property
    def in_flight_bytes(self) -> int: ...
    def look(self, tensor: Tensor, nbytes: int, /) -> tuple[_StorageKey, SwappedStorage | None] | tuple[None, None]:
        """Which bytes to move, and what has them where they have been swapped out already.

        That is all of the storage, or the span of a view that covers less than half of it. There is no key where bytes
        may change unseen while they are copied: views share the version counter of their base, but parts that autograd
        does not know as views (`unsafe_chunk`, `.data`) have their own, and a write through one is unknown to the rest.
        """

    def swap_out(self, tensor: Tensor, key: _StorageKey, need: int, /) -> SwappedStorage:
        """Start the copy-out. The slot is freed when nobody holds the storage any more.

        Ordering: the copy starts after what the current stream has queued. The source is held until it has ended.
        Raises MemoryError, OSError or RuntimeError where the store cannot take the bytes; nothing was begun.
        """

    def collect(self) -> None:
        """Free every source and target that no copy touches any more. Waits for nothing."""

    def limit_in_flight(self) -> None:
        """Wait until the sources that are still held for their copy are few enough."""

    def drain(self) -> None:
        """Wait for the copies whose memory this engine holds, and free this memory.

        An abandoned copy-in from disk holds its memory itself, and frees it when it ends.
        """

    def live_storages(self) -> list[SwappedStorage]: ...

class Extent:
    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class SpillFile:
    def __init__(self, directory: str) -> None: ...
    @property
    def alignment_bytes(self) -> int: ...
    def allocate(self, bytes: int) -> Extent: ...
    def release(self, extent: Extent) -> None: ...
    def write(self, extent: Extent, data: Buffer) -> int: ...
    def read(self, extent: Extent, data: Buffer) -> int: ...

def crc32c(data: bytes, crc: int = 0) -> int: ...
def crc32c_of_blocks(data: bytes, offset: int, crc: int = 0) -> int: ...
def crc32c_portable(data: bytes, crc: int = 0) -> int: ...
def numa_node_of_pci(bus_id: str, sysfs: str = "/sys") -> int: ...
def pages_near(bytes: int, node: int) -> bytes: ...

class Placer:
    def __init__(
        self,
        bytes: Sequence[int],
        packed: Sequence[int],
        release_min: Sequence[int],
        first_backward: Sequence[int],
        out_seconds: Sequence[float],
        in_seconds: Sequence[float],
        overhead_seconds: Sequence[float],
        copy_in_rank: Sequence[int],
        seconds: Sequence[float],
        unswapped_bytes: NDArray[np.int64],
    ) -> None: ...
    def headroom(self, indices: Sequence[int], limit_bytes: int) -> NDArray[np.int64]: ...
    def place(
        self,
        indices: Sequence[int],
        limit_bytes: int,
        cutoff_seconds: float,
        safety_factor: float,
        not_before: Mapping[int, int],
    ) -> tuple[float, tuple[int, ...], tuple[int, ...], tuple[int, ...], list[tuple[float, int, int, bool]]] | None: ...
    def releases(self, indices: Sequence[int], limit_bytes: int) -> list[int]: ...
