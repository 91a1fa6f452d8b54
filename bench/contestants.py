"""The contestants of the benchmarks: offload with several settings, and its alternatives, used as they document.

A contestant is plain data; `prepare` applies it to a model.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import offload
from offload.plan import InfeasibleLimitError
from offload.units import parse_bytes

NEEDS_CUDA = "needs CUDA"
DISK_ELEMENTS_MIN = 1000  # the tutorial's own threshold
LEAST_TRIES = 4  # the first gives the least limit; more are needed if a step needs more than was profiled
LEAST_MARGIN = 0.005


class Inapplicable(Exception):
    """A contestant cannot run here; the message says why."""


@dataclass(frozen=True)
class Contestant:
    """One way to train the same model.

    `kind` is a key of `KINDS`, `options` are its arguments. `cuda_only`: why it cannot be measured without a GPU.
    `slow`: it is not part of quick runs. `equal`: False if it uses other kernels, so that bits may differ.
    """

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cuda_only: str = ""
    slow: bool = False
    equal: bool = True

    @property
    def is_ours(self) -> bool:
        """Whether it uses offload."""
        return self.kind == "offload"

    @property
    def is_planned(self) -> bool:
        """Whether offload plans; it may plan again after each of the first steps."""
        return self.is_ours and not {"n_tensors", "share"} & set(self.options)


@dataclass
class Prepared:
    """A prepared model: what to call instead, and a context for each forward and loss."""

    model: nn.Module
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    handle: Any = None  # from offload.enable
    disk: TutorialFiles | None = None


class TutorialFiles:
    """The hooks of PyTorch's tutorial on saved tensors: one file for every tensor above a size."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.live_bytes = 0
        self.peak_bytes = 0

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | TutorialFile:
        if tensor.numel() < DISK_ELEMENTS_MIN:
            return tensor
        return TutorialFile(self, Path(self._folder.name, uuid.uuid4().hex), tensor)

    @staticmethod
    def _unpack(packed: Tensor | TutorialFile) -> Tensor:
        return packed if isinstance(packed, Tensor) else torch.load(packed.path)


class TutorialFile:
    """One saved tensor on disk; the file is deleted with the object."""

    def __init__(self, files: TutorialFiles, path: Path, tensor: Tensor) -> None:
        self.path = path
        self._files = files
        torch.save(tensor, path)
        self._nbytes = path.stat().st_size
        files.live_bytes += self._nbytes
        files.peak_bytes = max(files.peak_bytes, files.live_bytes)

    def __del__(self) -> None:
        self._files.live_bytes -= self._nbytes
        self.path.unlink(missing_ok=True)


def plain(model: nn.Module, _device: str, _probe: Callable[[], None]) -> Prepared:
    """Change nothing."""
    return Prepared(model)


def offloaded(model: nn.Module, _device: str, probe: Callable[[], None], **options: Any) -> Prepared:
    """Enable offload.

    Two options are not arguments of `offload.enable`. `share`: `n_tensors` as a share of the storages, whose number an
    additional step finds. `least`: the smallest memory limit that the planner finds feasible.
    """
    share = options.pop("share", None)
    if options.pop("least", False):
        handle = enable_least(model, probe, **options)
        return Prepared(model, handle.step, handle)
    if share is not None:
        least = {name: value for name, value in options.items() if name == "min_tensor_bytes"}
        with offload.enable(model, n_tensors=-1, **least) as handle, handle.step():
            probe()
        options["n_tensors"] = max(round(share * handle.report().swapped.tensors), 1)
    handle = offload.enable(model, **options)
    return Prepared(model, handle.step, handle)


def enable_least(model: nn.Module, probe: Callable[[], None], **options: Any) -> Any:
    """Enable offload with the smallest memory limit, which the error for a smaller limit contains.

    Raises
    ------
    InfeasibleLimitError
        The smallest limit increased with every try.
    """
    limit_bytes = parse_bytes(options.get("min_tensor_bytes", "1MiB"))  # a smaller limit is rejected as a typing error
    for _ in range(LEAST_TRIES):
        handle = offload.enable(model, memory_limit=limit_bytes, **options)
        try:
            for _ in range(2):  # the first one is profiled, under any limit; the second one is planned
                with handle.step():
                    probe()
        except InfeasibleLimitError as error:
            handle.disable()
            refused = error
            limit_bytes = int(error.least_limit_bytes * (1 + LEAST_MARGIN))
        else:
            return handle
    raise refused


def saved_on_cpu(model: nn.Module, device: str, _probe: Callable[[], None]) -> Prepared:
    """Enter torch's own context manager around the forward pass."""
    return Prepared(model, lambda: save_on_cpu(pin_memory=device == "cuda"))


def wrap_blocks(model: nn.Module, run: Callable[..., Any]) -> None:
    """Replace every block's forward by `run(forward, *inputs)`."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = functools.partial(run, block.forward)


def checkpointed(model: nn.Module, _device: str, _probe: Callable[[], None]) -> Prepared:
    """Recompute every block in backward."""
    wrap_blocks(model, functools.partial(checkpoint, use_reentrant=False))
    return Prepared(model)


def selectively(model: nn.Module, _device: str, _probe: Callable[[], None]) -> Prepared:
    """Recompute every block, except its expensive operators, whose results are saved."""
    aten = torch.ops.aten
    costly = [
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]
    contexts = functools.partial(create_selective_checkpoint_contexts, costly)
    wrap_blocks(model, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))
    return Prepared(model)


def tutorial(model: nn.Module, _device: str, _probe: Callable[[], None]) -> Prepared:
    """Write every saved tensor to a file, and read it when backward needs it."""
    files = TutorialFiles()
    return Prepared(model, files.hooks, disk=files)


def installed(name: str) -> None:
    """Check that a package is installed.

    Raises
    ------
    Inapplicable
        The package is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise Inapplicable(f"{name} is not installed here")


def trl(model: nn.Module, _device: str, _probe: Callable[[], None]) -> Prepared:
    """TRL's context manager with its defaults, without the output layer, as in TRL."""
    installed("trl")
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    manager = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    return Prepared(model, lambda: manager)


def torchtune(model: nn.Module, _device: str, _probe: Callable[[], None]) -> Prepared:
    """torchtune's context manager with its defaults."""
    installed("torchtune")
    from torchtune.training import OffloadActivations

    manager = OffloadActivations()
    return Prepared(model, lambda: manager)


def transformers_offload(model: nn.Module, device: str, _probe: Callable[[], None]) -> Prepared:
    """The same as `offload=True` of transformers: every block is checkpointed, with its inputs in pinned memory.

    transformers takes its own model classes only, so the same two context managers are entered here.
    """

    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        with save_on_cpu(pin_memory=device == "cuda"):
            return checkpoint(function, *inputs, use_reentrant=False)

    wrap_blocks(model, run)
    return Prepared(model)


def compiled(model: nn.Module, _device: str, _probe: Callable[[], None], *, budget: float) -> Prepared:
    """Compile the whole model and let the partitioner recompute until the budget is met."""
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = budget
    return Prepared(torch.compile(model))  # type: ignore[arg-type]


KINDS: dict[str, Callable[..., Prepared]] = {
    "plain": plain,
    "offload": offloaded,
    "save_on_cpu": saved_on_cpu,
    "checkpoint": checkpointed,
    "selective": selectively,
    "tutorial": tutorial,
    "trl": trl,
    "torchtune": torchtune,
    "transformers": transformers_offload,
    "compile": compiled,
}

PLAIN = Contestant("plain", "plain")
LEAST = Contestant("offload, least memory", "offload", {"least": True})
SLOWDOWNS = tuple(
    Contestant(f"offload, max_slowdown {percent} %", "offload", {"max_slowdown": percent / 100})
    for percent in (0, 2, 5, 10, 25)
)
BY_HAND = (
    Contestant("offload, n_tensors −1, lb 1", "offload", {"n_tensors": -1, "lb": 1}),
    Contestant("offload, n_tensors −1, lb 4", "offload", {"n_tensors": -1, "lb": 4}),
    Contestant("offload, half of the tensors, lb 4", "offload", {"share": 0.5, "lb": 4}),
)
CHECKPOINT = Contestant("checkpoint per block", "checkpoint")
SELECTIVE = Contestant("selective checkpointing", "selective")
SAVE_ON_CPU = Contestant("save_on_cpu", "save_on_cpu")
TUTORIAL = Contestant("tutorial's disk hooks", "tutorial")
TRANSFORMERS = Contestant("transformers offload", "transformers")
ACCELERATOR_ONLY = (
    Contestant("TRL OffloadActivations", "trl", cuda_only="it moves tensors of an accelerator only"),
    Contestant("torchtune OffloadActivations", "torchtune", cuda_only="it moves tensors of a GPU only"),
)
COMPILED = (
    Contestant("torch.compile, budget 0.5", "compile", {"budget": 0.5}, slow=True, equal=False),
    Contestant("torch.compile, budget 0.2", "compile", {"budget": 0.2}, slow=True, equal=False),
)
PEERS = (CHECKPOINT, SELECTIVE, SAVE_ON_CPU, TUTORIAL, TRANSFORMERS, *ACCELERATOR_ONLY, *COMPILED)
EVERY = (PLAIN, *SLOWDOWNS, LEAST, *BY_HAND, *PEERS)
# On the CPU, the most important first: the others are compared with the memory of plain.
WIDE_FIELD = (PLAIN, SLOWDOWNS[2], LEAST, CHECKPOINT, SLOWDOWNS[0], SLOWDOWNS[4], TUTORIAL, SELECTIVE, SLOWDOWNS[1],
              SLOWDOWNS[3], BY_HAND[1], SAVE_ON_CPU, TRANSFORMERS, *ACCELERATOR_ONLY, *COMPILED)  # fmt: skip
FIELD = (PLAIN, SLOWDOWNS[2], LEAST, CHECKPOINT, SLOWDOWNS[0], SLOWDOWNS[4], TUTORIAL, SELECTIVE, SAVE_ON_CPU)


def by_name(name: str) -> Contestant:
    """Find a contestant.

    Raises
    ------
    ValueError
        There is no contestant of this name; the message lists all names.
    """
    for contestant in EVERY:
        if contestant.name == name:
            return contestant
    raise ValueError(f"no contestant {name!r}; there are {', '.join(each.name for each in EVERY)}")


def prepare(
    contestant: Contestant, model: nn.Module, *, device: str, probe: Callable[[], None], defaults: Mapping[str, Any]
) -> Prepared:
    """Prepare a model to be trained by a contestant.

    Parameters
    ----------
    contestant
        The contestant.
    model
        Has `blocks`, a sequence of modules that checkpointing wraps.
    device
        "cpu" or "cuda".
    probe
        Runs one forward and backward pass, for contestants that need one first.
    defaults
        Further arguments of `offload.enable`, such as a small model's `min_tensor_bytes`.

    Raises
    ------
    Inapplicable
        It cannot run here.
    """
    check_device(contestant, device)
    options = {**defaults, **contestant.options} if contestant.is_ours else contestant.options
    return KINDS[contestant.kind](model, device, probe, **options)


def check_device(contestant: Contestant, device: str) -> None:
    """Check that a contestant can be measured on this device.

    Raises
    ------
    Inapplicable
        It cannot.
    """
    if contestant.cuda_only and device == "cpu":
        raise Inapplicable(f"{NEEDS_CUDA}: {contestant.cuda_only}")


def field_of(family: str) -> tuple[Contestant, ...]:
    """Return the contestants for this network on the CPU; for the GPT, all of them."""
    return WIDE_FIELD if family == "gpt" else FIELD
