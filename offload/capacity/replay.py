"""Runs a script's model again, with its batch and half of it, to find how each tensor depends on the batch size.

A script has one batch size, and code for its loss that cannot be called separately. But the model's forward can be
called again with part of its input. `offload fit` does so when the script has ended, so the script sees no change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from offload.capacity.optimizer_step import SMALLEST_BYTES
from offload.control.profile_listener import RecordedStep
from offload.control.registry import listen_to_profiles
from offload.plan.rescale import SizedStep, on_the_line_of
from offload.session import disable, enable

__all__ = ["Call", "Held", "called", "own_loss", "replayed", "sized"]

# Errors that a model's own code may raise for an input that it does not expect.
_OF_A_MODEL = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class _Kept:
    """A copy of a tensor, and the device that it is to be on."""

    copy: Tensor
    device: torch.device


@dataclass(frozen=True)
class Call:
    """A call of a model, which can be repeated with fewer items.

    Attributes
    ----------
    model
        The model.
    args, kwargs
        Copies of its arguments.
    autocast
        The types of autocast that were on, by type of device.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Mapping[str, torch.dtype]

    @classmethod
    def of(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], copy: Callable[[Tensor], Tensor]
    ) -> Call:
        """Return the call that is about to be made. `copy` copies a tensor."""
        kinds = {"cpu", *(each.device.type for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))}
        autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}

        def copied(value: Any) -> Any:
            return _Kept(copy(value), value.device) if isinstance(value, Tensor) else value

        return cls(model, tree_map(copied, args), tree_map(copied, kwargs), autocast)

    def why_not(self, batch: int | None) -> str:
        """Return why it cannot be repeated with half of `batch` items; empty if it can."""
        if batch is None or batch < 2:
            return "it cannot be halved"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "other processes would have to run it too"
        others = {type(each).__name__ for each in tree_leaves((self.args, self.kwargs)) if not _is_known(each)}
        return f"the model is called with {', '.join(sorted(others))}, which offload cannot halve" if others else ""

    def at(self, items: int, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the first `items` of `batch` items."""

        def cut(value: Any) -> Any:
            if not isinstance(value, _Kept):
                return value
            whole = value.copy
            part = whole[:items] if whole.dim() and len(whole) == batch else whole
            return part.detach().to(value.device, copy=True).requires_grad_(whole.requires_grad)

        return tree_map(cut, self.args), tree_map(cut, self.kwargs)

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Return a context in which autocast is as it was at the call."""
        with contextlib.ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype))
            yield


class Held(NamedTuple):
    """What a script holds during backward, besides the graph.

    Attributes
    ----------
    output
        Whether it holds what the model returned.
    inputs
        Whether it holds the model's arguments.
    """

    output: bool
    inputs: bool


Run = Callable[[Call, int, int, Held], RecordedStep | None]


def sized(step: RecordedStep, call: Call, run: Run = lambda *args: replayed(*args)) -> SizedStep | str:
    """Return a script's step as a function of its batch size, or why that cannot be told from a replay.

    Parameters
    ----------
    step
        The step, as the script ran it.
    call
        The call of its model.
    run
        Runs and records the call, given the items to run, the whole batch, and what to hold during backward, as some
        scripts do.
    """
    batch = step.batch
    why_not = call.why_not(batch)
    if why_not or batch is None:
        return why_not
    try:
        for output in (True, False):
            held = Held(output, inputs=not step.frees_inputs)
            full = run(call, batch, batch, held)
            smaller = run(call, batch // 2, batch, held)
            if full is not None and smaller is not None:
                fixed = step.fixed_bytes, full.fixed_bytes
                found = on_the_line_of(step.trace, fixed[0], full.trace, fixed[1], smaller.trace, batch, batch // 2)
                if found is not None:
                    return found
    except _OF_A_MODEL as error:  # the model may not accept half of a batch
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return "with half of the batch it saves other tensors"


def replayed(call: Call, items: int, batch: int, held: Held) -> RecordedStep | None:
    """Run a call and backward over what it returns, and return the recorded step."""
    told: list[RecordedStep] = []
    model = call.model
    model.zero_grad(set_to_none=True)
    disable(model)
    args, kwargs = call.at(items, batch)
    with (
        listen_to_profiles(told.append),
        enable(model, min_tensor_bytes=max(1, SMALLEST_BYTES * items // batch)) as handle,
    ):
        with handle.step(), call.as_it_was():
            output = model(*args, **kwargs)
        value = own_loss(output)
        if not held.output:
            del output
        if not held.inputs:
            del args, kwargs
        value.backward()  # type: ignore[no-untyped-call]
        del value
        handle.trace()  # reads the step, which tells the listener
    model.zero_grad(set_to_none=True)
    return told[-1] if told else None


def called(model: nn.Module, inputs: Any) -> Any:
    """Return what a model returns for its input, a tuple of its arguments, or a dictionary of them."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def own_loss(output: Any) -> Tensor:
    """Return the loss that a model returned, or the sum of the tensors that it returned.

    Raises
    ------
    ValueError
        There is nothing to differentiate.
    """
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    found = [each.sum() for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    if not found:
        raise ValueError("the model's output has no tensor to differentiate; give loss=lambda model, batch: …")
    return torch.stack([each.float() for each in found]).sum()


def _is_known(value: Any) -> bool:
    return isinstance(value, (_Kept, type, *_PLAIN))
