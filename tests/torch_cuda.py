"""A double of torch's CUDA streams, events and caching allocator, for what is written against them.

Work that is queued on a stream runs whenever a seeded scheduler likes, as late as a wait allows; freed memory is given
out again at once to its own stream. What lacks an ordering edge reads or overwrites the wrong bytes for some seed.
"""

from __future__ import annotations

import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("cuda", 0)
SLEEP = 40  # turns of the scheduler
GARBAGE = 0x5A
BUSY = None  # what work answers that has begun and needs more turns
QUEUED = (Tensor.sum, Tensor.clone, Tensor.eq, Tensor.__eq__, Tensor.all)
READ_BY_THE_HOST = (Tensor.item, Tensor.cpu, Tensor.__bool__)


@dataclass
class Record:
    """One recording of an event: when it was reached."""

    reached_at: int | None = None


@dataclass(eq=False)
class Stream:
    """Work in its order: each piece says whether it has run, could not run, or is busy; it stays first until it has."""

    device_double: DeviceDouble
    queue: deque[Callable[[], bool | None]] = field(default_factory=deque)

    def wait_event(self, event: Event) -> None:
        record = event.record_now
        self.device_double.enqueue(lambda: record.reached_at is not None, self)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.device_double)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.device_double.run_until(lambda: not self.queue)


@dataclass(eq=False)
class Event:
    """Torch's: a wait is for the recording that was the last one when it was asked for."""

    device_double: DeviceDouble
    record_now: Record = field(default_factory=lambda: Record(0))

    def record(self, stream: Stream | None = None) -> None:
        record = self.record_now = Record()

        def reach() -> bool:
            record.reached_at = self.device_double.now
            return True

        self.device_double.enqueue(reach, stream)

    def query(self) -> bool:
        self.device_double.run_some()
        return self.record_now.reached_at is not None

    def synchronize(self) -> None:
        self.device_double.run_until(lambda: self.record_now.reached_at is not None)

    def elapsed_time(self, end: Event) -> float:
        return float(end.record_now.reached_at - self.record_now.reached_at)


class OnDevice(Tensor):
    """A tensor of the double: its bytes are known to queued work only."""

    @staticmethod
    def __new__(cls, device_double: DeviceDouble, like: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=DEVICE, requires_grad=False
        )
        made.device_double = device_double
        made.used_by = set()
        stream = device_double.stream
        buffer = device_double.take(stream, max(like.numel() * like.element_size(), 1))
        made.memory = (
            buffer[: like.numel() * like.element_size()].view(like.dtype).as_strided(like.shape, like.stride())
        )
        weakref.finalize(made, device_double.give_back, stream, buffer, made.used_by).atexit = False
        return made

    def record_stream(self, stream: Stream) -> None:
        self.used_by.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"the double does not know {func}")


class DeviceDouble(TorchFunctionMode):
    """One device: its streams, its memory and the scheduler; while entered, torch's `cuda` is this."""

    rows = 1 << 8

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.haste = self.random.choice((0.0, 0.2, 0.8))  # how soon queued work begins
        self.fairness = self.random.choice((0.1, 0.5, 1.0))  # how seldom one stream is served before the others
        self.favours_the_last = self.random.random() < 0.5
        self.now = 0
        self.streams: list[Stream] = []
        self.stream = self.new_stream()
        self.free: dict[tuple[Stream, int], list[Tensor]] = defaultdict(list)

    def new_stream(self, device: object = None) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def sleep(self) -> None:
        turns = iter(range(SLEEP))
        self.enqueue(lambda: True if next(turns, None) is None else BUSY)

    def synchronize(self) -> None:
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    # -- the scheduler --

    def enqueue(self, work: Callable[[], bool | None], stream: Stream | None = None) -> None:
        (stream or self.stream).queue.append(work)
        self.run_some()

    def run_some(self) -> None:
        if self.random.random() < self.haste:
            self.run_one()

    def run_one(self) -> bool:
        waiting = [stream for stream in self.streams if stream.queue]
        if self.random.random() < self.fairness:
            self.random.shuffle(waiting)
        elif self.favours_the_last:
            waiting.reverse()
        for stream in waiting:
            outcome = stream.queue[0]()
            if outcome is True:
                stream.queue.popleft()
            if outcome is not False:
                self.now += 1
                return True
        return False

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            assert self.run_one(), "nothing can run: a wait for what is never recorded"

    # -- memory --

    def take(self, stream: Stream, nbytes: int) -> Tensor:
        blocks = self.free[stream, nbytes]
        return blocks.pop() if blocks else torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def give_back(self, stream: Stream, buffer: Tensor, used_by: set[Stream]) -> None:
        blocks = self.free[stream, len(buffer)]
        if not used_by:
            blocks.append(buffer)
            return
        left = set(used_by)

        def pass_by(user: Stream) -> bool:
            left.discard(user)
            if not left:
                blocks.append(buffer)
            return True

        for user in used_by:
            self.enqueue(lambda user=user: pass_by(user), user)

    # -- operators --

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue an operator on the current stream; the host waits for what it reads, and for nothing else."""
        inputs = tree_map(lambda leaf: leaf.memory if isinstance(leaf, OnDevice) else leaf, args)
        if func is Tensor.copy_:
            self.queue_call(lambda: inputs[0].copy_(inputs[1]))
            return args[0]
        if func in READ_BY_THE_HOST:
            self.stream.synchronize()
            return func(*inputs, **kwargs).clone() if func is Tensor.cpu else func(*inputs, **kwargs)
        shapes = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, inputs)
        made = OnDevice(self, func(*shapes, **kwargs))
        target = made.memory  # not the tensor: queued work does not keep its memory from being freed
        self.queue_call(lambda: target.copy_(func(*inputs, **kwargs)))
        return made

    def queue_call(self, call: Callable[[], object]) -> None:
        def work() -> bool:
            call()
            return True

        self.enqueue(work)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.is_pinned_double = True
            return pinned
        if func is Tensor.is_pinned:
            return getattr(args[0], "is_pinned_double", False)
        if isinstance(args[0] if args else None, OnDevice) and func in (*QUEUED, *READ_BY_THE_HOST, Tensor.copy_):
            return self.launch(func, args, kwargs)
        if torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return func(*args, **kwargs)
        value = func(*args, **{**kwargs, "device": "cpu"})
        made = OnDevice(self, value)
        if func is not torch.empty_like:
            target = made.memory
            self.queue_call(lambda: target.copy_(value))
        return made


@contextmanager
def doubled(seed: int) -> Iterator[DeviceDouble]:
    """`torch.cuda` as a double of one device."""
    device_double = DeviceDouble(seed)
    with pytest.MonkeyPatch.context() as patch, device_double:
        patch.setattr(torch.cuda, "Stream", device_double.new_stream)
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(device_double))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: device_double.stream)
        patch.setattr(torch.cuda, "stream", device_double.on)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "synchronize", device_double.synchronize)
        yield device_double
