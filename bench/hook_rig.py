"""Measures the cost of saving a tensor, with a model that saves given tensors for backward and computes nothing.

Autograd calls the engine's hooks, as in a training step. The time of the copies is not included, but their effect on
caches and processors is. How large that effect is shows the contestant "copies": it has no hooks, and copies the same
bytes. Its copy-outs are queued before forward, the engine's at each pack. The copy-ins of both are queued in backward,
before the first swapped tensor is used, and are over when it is.

The figures are taken under a malloc that reuses freed memory, as `offload run` preloads it. Plain glibc gives the
memory of a step back to the kernel: every step then faults some 5,000 pages, and a swapped tensor takes 70 to 90 µs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from contest import alternate, medians
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import offload
from offload import _core
from offload.control.limits import LIMITS
from offload.devices import allocator

CONTESTANTS = ("none", "plain", "offload")  # no hooks, hooks that do nothing, the engine's
COPIES = "copies"  # no hooks, and the copies of a swapped tensor
SWAPPED_BYTES = 1 << 20
NO_LIMIT_BYTES = 1 << 40
KINDS = ("kept small", "kept parameter", "kept", "swapped", "duplicate", "view")


class Save(torch.autograd.Function):
    """The identity, which saves another tensor for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        """Hand `x` on; `saved` goes into the graph."""
        ctx.save_for_backward(saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Hand the gradient on, once the saved tensor has been asked for."""
        _ = ctx.saved_tensors
        return grad, None


class Pause(torch.autograd.Function):
    """The identity, whose backward calls something: a place to wait that is left out of the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        """Hand `x` on."""
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Call, and hand the gradient on."""
        ctx.call()
        return grad, None


class Saver(nn.Module):
    """Saves what it is given, in order; in backward a small tensor first, then a pause, then they."""

    def __init__(self, pause: Callable[[], None], parameter_bytes: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(max(parameter_bytes // 4, 1)))
        self.tensors: Sequence[Tensor] = ()
        self._small = torch.zeros(1)
        self._pause = pause

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` behind as many graph nodes as there are tensors, and two more."""
        for tensor in self.tensors:
            x = Save.apply(x, tensor)  # type: ignore[no-untyped-call]
        # What backward meets first asks for all of them ahead; the pause lets them arrive.
        x = Pause.apply(x, self._pause)  # type: ignore[no-untyped-call]
        return Save.apply(x, self._small)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Cost:
    """Seconds per saved tensor; waiting for copies is left out of both."""

    pack: float
    unpack: float
    processor_seconds: float  # of the calling thread, both together; on a GPU without backward, whose thread is another

    @property
    def total(self) -> float:
        """Both together."""
        return self.pack + self.unpack


class Lap:
    """Seconds between two moments, on the wall and of the calling thread's processor.

    The wall's clock is read innermost: the processor's takes a system call, at whose end the kernel may run a copy's
    thread first (250 µs were seen).
    """

    def __init__(self) -> None:
        self.processor_seconds = -time.thread_time()
        self.seconds = -time.perf_counter()

    def stop(self) -> None:
        """The second moment is now."""
        self.seconds += time.perf_counter()
        self.processor_seconds += time.thread_time()


class HookRig:
    """One kind of saved tensor under the engine's hooks, under hooks that do nothing, and under none.

    Parameters
    ----------
    kind : str
        One of `KINDS`. "duplicate" saves one tensor again and again, "view" different views of one
        storage.
    count : int
        Tensors saved a step.
    device : str
        "cpu" or "cuda".
    spill_dir : str, optional
        As in `offload.enable`.
    measured : bool
        Whether every step is timed and weighed, as with a plan on the CPU; by default none is.
    planned : bool
        Whether a plan decides, as by default; "kept" is then kept by a plan without swaps, whose hooks a memory limit
        keeps on.
    """

    def __init__(
        self,
        kind: str,
        *,
        count: int,
        device: str = "cpu",
        spill_dir: str | None = None,
        measured: bool = False,
        planned: bool = False,
    ) -> None:
        self.kind = kind
        self.count = count
        self._device = device
        self._pauses: list[Lap] = []
        self.contestants = (*CONTESTANTS, COPIES) if kind == "swapped" else CONTESTANTS
        pauses = {COPIES: self._copy_in}
        self._models = {
            name: Saver(pauses.get(name, self._pause), SWAPPED_BYTES).to(device) for name in self.contestants
        }
        for model in self._models.values():
            model.tensors = self._tensors(model)
        self._tickets: list[_core.Ticket] = []
        self._x = torch.zeros(1, device=device, requires_grad=True)
        self.handle = offload.enable(
            self._models["offload"],
            **self._knobs(planned),
            min_tensor_bytes=SWAPPED_BYTES // 2,
            spill_dir=spill_dir,
        )
        copied = self._models[COPIES].tensors if kind == "swapped" else []
        self._targets = [self._target(each) for each in copied]
        steps = sys.maxsize if measured else 0
        # Replanned never: nodes that compute nothing are never as long as planned.
        limits = replace(LIMITS, manual_measured_steps=steps, recheck_steps=sys.maxsize, replans=0)
        self.handle._controller._limits = limits

    def _knobs(self, planned: bool) -> dict[str, Any]:
        if not planned:
            return {"n_tensors": 1 if self.kind == "kept" else -1, "lb": self.count + 2}
        if self.kind.startswith("kept"):
            return {"memory_limit": NO_LIMIT_BYTES}
        return {"n_tensors": -1, "lb": "auto"}

    def step(self, contestant: str) -> Cost:
        """Measure one forward and one backward pass."""
        model = self._models[contestant]
        hooks = (
            saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
            if contestant == "plain"
            else contextlib.nullcontext()
        )
        self._x.grad = None
        if contestant == COPIES:
            self._copy_out(model.tensors)
        forward = Lap()
        with hooks:
            y = model(self._x)
        forward.stop()
        self._drain()
        self._pauses = []
        backward = Lap()
        y.backward()
        backward.stop()
        self._drain()
        paused = sum(lap.seconds for lap in self._pauses)
        processor = forward.processor_seconds + backward.processor_seconds
        processor -= sum(lap.processor_seconds for lap in self._pauses)
        return Cost(forward.seconds / self.count, (backward.seconds - paused) / self.count, processor / self.count)

    def steps(self) -> dict[str, Callable[[], Cost]]:
        """Every contestant's step, for `contest.alternate`.

        Each is the second of two, so that caches hold what this contestant left there. After another contestant's step,
        a step without hooks takes 3 µs more per tensor.
        """
        return {name: partial(self._second_step, name) for name in self.contestants}

    def _second_step(self, contestant: str) -> Cost:
        self.step(contestant)
        return self.step(contestant)

    def close(self) -> None:
        """Disable the engine and let the tensors go."""
        self.handle.disable()
        self._models.clear()

    def _tensors(self, model: Saver) -> list[Tensor]:
        count, numel = self.count, SWAPPED_BYTES // 4
        if self.kind == "kept small":
            return [torch.zeros(256, device=self._device) for _ in range(count)]
        if self.kind == "kept parameter":
            return [model.weight] * count
        if self.kind in ("kept", "swapped"):
            return [torch.zeros(numel, device=self._device) for _ in range(count)]
        base = torch.zeros(1024, numel // 1024, device=self._device)
        if self.kind == "duplicate":
            return [base] * count
        if self.kind == "view":
            return [base.t() if number % 2 else base[number % 8 :] for number in range(count)]
        raise ValueError(f"kind {kind_names()}, not {self.kind!r}")

    def _target(self, source: Tensor) -> Tensor:
        """Return memory for a copy-in. The direct tier needs the source's address modulo its alignment."""
        alignment = self.handle._engine.store.alignment_bytes
        if alignment == 1:
            return torch.zeros_like(source)
        block = _core.HostBlock(source.nbytes, alignment, source.data_ptr() % alignment)
        return torch.frombuffer(block, dtype=source.dtype).view(source.shape)

    def _copy_out(self, tensors: Sequence[Tensor]) -> None:
        store, stream = self.handle._engine.store, self._stream()
        self._tickets = [store.swap_out(tensor.data_ptr(), tensor.nbytes, stream) for tensor in tensors]

    def _copy_in(self) -> None:
        lap = Lap()
        for ticket, target in zip(self._tickets, self._targets, strict=True):
            ticket.prefetch(target.data_ptr(), self._stream())
        self._drain()
        for ticket in self._tickets:
            ticket.release()
        self._tickets = []
        lap.stop()
        self._pauses.append(lap)

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self._device == "cuda" else 0

    def _pause(self) -> None:
        lap = Lap()
        self._drain()
        lap.stop()
        self._pauses.append(lap)

    def _drain(self) -> None:
        """Wait until no copy is under way, and let go of what it held."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        for ticket in self._tickets:
            ticket.wait_out(self._stream())  # else `quiesce` cancels what has not begun
        self.handle._engine.drain()
        self.handle._engine.store.quiesce()
        self.handle._engine.collect()


def microseconds(rig: HookRig, *, rounds: int) -> dict[str, float]:
    """Costs per tensor over no hooks at all, in microseconds: medians of alternating rounds.

    Returns
    -------
    dict
        ``plain_us`` of hooks that do nothing, ``offload_us`` of the engine's, and ``offload_processor_us``: what of
        these the calling thread computed, rather than waited while a copy's thread had its processor. For swapped
        tensors also ``copies_us`` and ``copies_processor_us``: without hooks, while the same bytes are copied.
    """
    costs = alternate(rig.steps(), rounds=rounds, warmups=3)
    total = medians({name: [cost.total for cost in taken] for name, taken in costs.items()})
    processor = medians({name: [cost.processor_seconds for cost in taken] for name, taken in costs.items()})
    others = [name for name in rig.contestants if name != "none"]
    found = {f"{name}_us": 1e6 * (total[name] - total["none"]) for name in others}
    measured = [name for name in others if name != "plain"]
    return found | {f"{name}_processor_us": 1e6 * (processor[name] - processor["none"]) for name in measured}


def microseconds_under_preload(kind: str, *, rounds: int, **how: Any) -> dict[str, float]:
    """What `microseconds` finds, in a process of its own, with the recommended malloc where one is installed."""
    command = [sys.executable, __file__, json.dumps({"kind": kind, "rounds": rounds, **how})]
    environment = allocator.preload_environment()
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def mean_of_steady_steps(untimed: float, timed: float) -> float:
    """Return the mean of a figure over the steps after the search for a plan, of which one in 16 is timed."""
    return untimed + (timed - untimed) / LIMITS.steady_measured_every


def kind_names() -> str:
    """The kinds, for a message."""
    return "must be one of " + ", ".join(KINDS)


def main(task: str) -> None:
    """Print what one rig costs, as JSON."""
    how = json.loads(task)
    rounds = how.pop("rounds")
    with contextlib.closing(HookRig(how.pop("kind"), **how)) as rig:
        print(json.dumps(microseconds(rig, rounds=rounds)))


if __name__ == "__main__":
    main(sys.argv[1])
