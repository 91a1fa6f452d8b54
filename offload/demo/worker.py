"""One run of `offload demo`: trains a byte-level GPT in its own process.

`offload.demo.command` starts it as a child process. It enables offload as any program does (`offload.enable`), and
prints one JSON object per line: "event" is "step" after every step and "result" at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import statistics
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.demo.memory import MemoryMeter, thin
from offload.demo.model import VOCABULARY, ByteGPT, Shape
from offload.devices import allocator
from offload.devices.device import device_of
from offload.diagnostics.html import plan as plan_page

CORPUS_BYTES = 4 << 20
LEARNING_RATE = 3e-4
CURVE_POINTS_MAX = 1200
SETTLED_STEPS_MIN = 3
SETTLED_STEPS = 8

# The arguments of `offload.enable` of each run that uses offload.
KNOBS: dict[str, dict[str, Any]] = {
    "offloaded": {},
    "state moved": {"n_tensors": 0, "optimizer_state": True},
    "and updated in backward": {"n_tensors": 0, "optimizer_state": True, "step_in_backward": True},
}


def read_corpus(corpus_bytes: int = CORPUS_BYTES) -> bytes:
    """Read the Python standard library's source text, files in sorted order.

    Parameters
    ----------
    corpus_bytes : int
        Number of bytes to read; the last file is cut off there.

    Returns
    -------
    bytes
        Exactly `corpus_bytes` bytes, the same on every call with the same Python installation.

    Raises
    ------
    FileNotFoundError
        This Python does not have the source text of its library, or the text is shorter.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    text = bytearray()
    for path in sorted((path for path in paths if not skipped & set(path.parts)), key=Path.as_posix):
        text += (folder / path).read_bytes()
        if len(text) >= corpus_bytes:
            return bytes(text[:corpus_bytes])
    raise FileNotFoundError(
        f"the demo trains on the standard library's source text: asked {corpus_bytes} bytes, "
        f"found {len(text)} in {folder}; run it with a Python that has its .py files "
        "(Debian: apt install libpython3-stdlib)"
    )


def batches(text: Tensor, shape: Shape, *, steps: int, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the input and target bytes of each step, int64 (batch, length), drawn from uint8 `text`."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(shape.length + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - shape.length, (shape.batch, 1), generator=generator)
        drawn = text[starts + window].long().to(device)
        yield drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def build(shape: Shape, *, seed: int, device: str, checkpointed: bool = False) -> tuple[ByteGPT, torch.optim.AdamW]:
    """Build the model, and AdamW without its state, which the first step makes."""
    torch.manual_seed(seed)
    model = ByteGPT(shape, checkpointed=checkpointed).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def make_state(optimizer: torch.optim.AdamW) -> None:
    """Make AdamW's two moments, so that all memory held between steps exists."""
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    logits = model(x)
    return functional.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1))


def gradient_hash(model: nn.Module) -> str:
    """Return a hexadecimal hash of the bytes of all gradients, in the order of the parameters' names."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        if parameter.grad is not None:
            digest.update(parameter.grad.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def weights_and_state_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, int]:
    """Return a hexadecimal hash of the bytes of all parameters and of the optimizer's state, and the state's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    state_bytes = 0
    for name, parameter in sorted(model.named_parameters()):
        state = optimizer.state[parameter]
        for key, value in (("", parameter.detach()), *sorted(state.items())):
            digest.update(f"{name} {key}".encode())
            digest.update(value.cpu().contiguous().numpy().tobytes())
        state_bytes += sum(value.nbytes for value in state.values())
    return digest.hexdigest(), state_bytes


class SavedBytesCounter:
    """Counts the bytes saved for backward: each storage once, without parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        owned = (*model.parameters(), *model.buffers())
        self._seen = {id(tensor.untyped_storage()) for tensor in owned}

    def counting(self) -> AbstractContextManager[None]:
        """Return a context in which saved tensors are counted.

        The graph keeps the storages until backward, and torch keeps one Python object for each of them. So each storage
        has its own `id()`.
        """
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._seen:
            self._seen.add(id(storage))
            self.total += storage.nbytes()
        return tensor.detach()


class Contestant:
    """One way to train: it may enable offload for the model, and gives the context of a step's forward."""

    def __init__(self, name: str, model: ByteGPT, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self._handle: Any = None
        self._settled_steps = 0
        if name in KNOBS:
            import offload

            self._handle = offload.enable(model, optimizer=optimizer, **KNOBS[name])

    @property
    def searches(self) -> bool:
        """Whether offload searches for a plan: not with `n_tensors`."""
        return self.name in KNOBS and "n_tensors" not in KNOBS[self.name]

    def step(self) -> AbstractContextManager[Any]:
        """Return the context for a step's forward and loss."""
        return contextlib.nullcontext() if self._handle is None else self._handle.step()

    def has_settled(self) -> bool:
        """Return whether the step that has just ended came after the search for a plan. Call it after each step.

        True if there is no search.
        """
        if not self.searches:
            return True
        before, self._settled_steps = self._settled_steps, self._handle.report().settled_steps
        return bool(self._settled_steps > before)

    def report(self) -> dict[str, Any] | None:
        """Return the report; None without offload."""
        if self._handle is None:
            return None
        report = self._handle.report()
        return {**report.to_dict(), "text": str(report)}

    def plan(self) -> str | None:
        """Return the chart of the plan as HTML; None if there is no plan."""
        plan = self._handle.plan if self._handle is not None and self.searches else None
        return None if plan is None else plan_page.figure(plan)


def warm_up(shape: Shape, device: str) -> None:
    """Train a tiny model for one step, so that the code of the kernels is loaded before memory is measured."""
    tiny = Shape(layers=1, width=8 * shape.heads, heads=shape.heads, batch=1, length=8)
    model, optimizer = build(tiny, seed=0, device=device)
    make_state(optimizer)
    x = torch.zeros(1, 8, dtype=torch.int64, device=device)
    loss_of(model, x, x).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def train(
    name: str,
    shape: Shape,
    *,
    steps: int,
    until_settled: bool,
    seed: int,
    device: str,
    of_state: bool,
    tell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Train one run and measure it.

    Parameters
    ----------
    name : str
        "plain", "checkpointed", or one of `KNOBS`.
    shape : Shape
        The model's and the batch's sizes.
    steps : int
        Number of steps; at least 2, because the first one is excluded from the step time.
    until_settled : bool
        Whether to end earlier: `SETTLED_STEPS` steps after the search for a plan.
    seed : int
        Seed of the initial parameters and the batches.
    device : str
        "cpu" or "cuda".
    of_state : bool
        Measure memory from before the model is built, and compare weights and optimizer state at the end. Otherwise
        memory is measured from the first step on, when model and state exist, and the last gradients are compared.
    tell : callable
        Called with an event after every step.

    Returns
    -------
    dict
        The values that `offload.demo.command` compares and shows; JSON can represent them.
    """
    warm_up(shape, device)
    text = torch.from_numpy(numpy.frombuffer(bytearray(read_corpus()), dtype=numpy.uint8))
    meter = MemoryMeter(device)
    if of_state:
        meter.start()
    model, optimizer = build(shape, seed=seed, device=device, checkpointed=name == "checkpointed")
    if not of_state:
        make_state(optimizer)
    contestant = Contestant(name, model, optimizer)
    saved = SavedBytesCounter(model)
    starts: list[float] = []
    seconds: list[float] = []
    losses: list[float] = []
    peaks: list[int] = []
    settled: list[int] = []
    compared: dict[str, Any] = {}
    if not of_state:
        meter.start()
    drawn = batches(text, shape, steps=steps, seed=seed, device=device)
    for step, (x, y) in enumerate(drawn):
        starts.append(meter.seconds())
        counts = name == "plain" and step == 0
        with saved.counting() if counts else contextlib.nullcontext(), contestant.step():
            loss = loss_of(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        del loss
        seconds.append(meter.seconds() - starts[-1])
        if contestant.has_settled() and step > 0:
            settled.append(step)
        is_last = step == steps - 1 or (until_settled and len(settled) == SETTLED_STEPS)
        if is_last and not of_state:
            compared["gradients"] = gradient_hash(model)
        optimizer.zero_grad(set_to_none=True)
        peaks.append(meter.lap())
        tell({"event": "step", "step": step, "loss": losses[-1], "seconds": seconds[-1]})
        if is_last:
            break
    meter.stop()
    if of_state:  # after the measurement: reading state brings it back
        compared["weights_and_state"], compared["state_bytes"] = weights_and_state_hash(model, optimizer)
    counted = settled if len(settled) >= SETTLED_STEPS_MIN or not contestant.searches else list(range(1, len(seconds)))
    return {
        "event": "result",
        "name": name,
        "losses": losses,
        **compared,
        "step_seconds": seconds,
        "step_seconds_median": statistics.median(seconds[step] for step in counted),
        "steps_counted": len(counted),
        "counted_peak_bytes": max(peaks[step] for step in counted)
        - (0 if meter.device != "cpu" else meter.baseline_bytes),
        "steps_settled": len(settled) if contestant.searches else None,
        "steps": len(seconds),
        "seed": seed,
        "batch": shape.batch,
        "length": shape.length,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "saved_bytes": saved.total or None,
        "report": contestant.report(),
        "plan": contestant.plan(),
        **memory_of(meter, starts),
        **machine(device),
    }


def memory_of(meter: MemoryMeter, starts: list[float]) -> dict[str, Any]:
    """Return the meter's figures: on the CPU, bytes above the baseline; on a GPU, all bytes."""
    floor = 0 if meter.device != "cpu" else meter.baseline_bytes
    curve = [(round(at, 4), used - floor) for at, used in meter.samples]
    step_curve = curve
    if meter.heap_samples:
        heap_floor = meter.heap_samples[0][1]
        step_curve = [(round(at, 4), used - heap_floor) for at, used in meter.heap_samples]
    last_step = [sample for sample in step_curve if sample[0] >= starts[-1]]
    return {
        "baseline_bytes": meter.baseline_bytes,
        "peak_bytes": meter.peak_bytes - floor,
        "curve": thin(curve, CURVE_POINTS_MAX),
        "last_step_curve": thin(last_step, CURVE_POINTS_MAX),
        "last_step_is_heap": bool(meter.heap_samples),
    }


def machine(device: str) -> dict[str, Any]:
    """Return a description of the machine and the software."""
    return {
        "device": device_of(torch.device(device)).name() if device != "cpu" else processor_name(),
        "threads": torch.get_num_threads(),
        "gpu": device != "cpu",
        "allocator": allocator.current(),
        "allocator_costs": allocator.describe(),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor_name() -> str:
    """Return the system's name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def run(args: Namespace) -> int:
    """Train the run `args.worker` and print its events as JSON lines. Return the exit status 0."""

    def tell(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=sys.stdout, flush=True)

    torch.set_num_threads(args.threads or torch.get_num_threads())
    if args.device != "cpu":
        torch.use_deterministic_algorithms(True)
    shape = Shape(args.layers, args.width, args.heads, args.batch, args.length)
    run = {
        "steps": args.steps,
        "until_settled": args.until_settled,
        "seed": args.seed,
        "device": args.device,
        "of_state": args.state,
    }
    tell(train(args.worker, shape, **run, tell=tell))
    return 0
