"""`offload.fit`: whether a training step of a model fits into a limit, from steps at two batch sizes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from offload.capacity.answer import Fit, answer, on_device
from offload.capacity.device import AbsentDevice, matmul_flops, parse_device
from offload.capacity.optimizer_step import SMALLEST_BYTES, OptimizerWatch, watching_optimizers, with_optimizer
from offload.capacity.replay import called, own_loss
from offload.capacity.without_data import CountedOptimizers, count_steps, how_counted
from offload.control.profile_listener import RecordedStep
from offload.control.registry import listen_to_profiles
from offload.handle import Session
from offload.plan import unswapped_bytes
from offload.plan.rescale import in_proportion, on_a_line
from offload.runtime.random_numbers import RandomNumbers
from offload.runtime.refusals import devices_of
from offload.session import enable, session_of
from offload.torch_compat.optimizers import has_own_hooks
from offload.units import parse_bytes, whole_number

__all__ = ["fit"]


def fit(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    *,
    memory: int | str | None = None,
    device: str | None = None,
    batch: int = 8,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Fit:
    """Tell whether a training step of `model` fits into a limit, how, and the largest batch that does.

    The step runs at two batch sizes, `batch` and half of it, each tensor swapped as soon as it is saved. One more step
    tries which tensors can be recomputed. Afterwards the model, its gradients, the optimizer and the random generators
    of torch, Python and NumPy are as they were.

    A model on torch's meta device cannot run. Its memory is counted from the shapes of its tensors, and its times
    follow from its operations and the speed of `device`.

    Parameters
    ----------
    model
        On the device on which the steps are to run; or on the meta device, if it is too large for this machine.
    make_batch
        Called with a batch size: returns the model's input, a tuple of its arguments or a dictionary of them. The
        shape of at least one tensor has to depend on the batch size.
    memory
        The limit, in bytes or as a string such as ``"12GiB"``. Default: the memory of the device.
    device
        Estimate for a GPU that this machine lacks: memory, link and speed, such as ``"12GiB,12GB/s,40TFLOP/s"``. A
        model on the meta device needs it.
    batch
        The batch size that the answer is for. A step of it, with all tensors swapped, has to fit where it runs.
    loss
        Called with the model and what `make_batch` returned; returns the loss. Default: the output's ``loss`` if it has
        one, else the sum of its tensors.
    optimizer
        Its state counts. It is stepped, and restored afterwards.

    Returns
    -------
    Fit
        The answer: ``print`` it.

    Raises
    ------
    ValueError
        An argument is wrong or missing, offload is enabled on the model, or nothing ran backward.

    Examples
    --------
    >>> import torch, offload
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    >>> found = offload.fit(model, lambda n: torch.randn(n, 512), memory="1GiB", batch=1024)
    >>> found.fits, found.line is None
    (True, True)
    """
    if session_of(model) is not None:
        raise ValueError("offload is enabled on this model; call offload.disable(model) before offload.fit")
    batch = _check_batch(batch)
    if optimizer is not None:
        _check_optimizer(optimizer)
    make_batch = _checked(make_batch)
    elsewhere = None if device is None else parse_device(device)
    limit_bytes = None if memory is None else parse_bytes(memory, "memory")
    if any(each.is_meta for each in model.parameters()):
        if elsewhere is None:
            raise ValueError('the model is on the meta device, where it cannot be timed; give device="12GiB,12GB/s,…"')
        counted = CountedOptimizers()
        with contextlib.closing(counted), _as_it_was(model, optimizer):
            steps = count_steps(model, make_batch, (batch, batch // 2), elsewhere, loss, optimizer, counted)
        return _answer(model, steps, batch, limit_bytes, elsewhere, counted, has_optimizer=optimizer is not None)
    with watching_optimizers() as watch, _as_it_was(model, optimizer):
        steps = _measured(model, make_batch, (batch, batch // 2), loss, optimizer, watch)
    return _answer(model, steps, batch, limit_bytes, elsewhere, watch, has_optimizer=optimizer is not None)


def _check_batch(batch: object) -> int:
    items = whole_number(batch, 2)
    if items is None:
        raise ValueError(f"batch must be at least 2, since the step runs at half of it too, not {items!r}")
    return items


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or not has_own_hooks(optimizer):
        inner = " Write optimizer=optimizer.optimizer." if hasattr(optimizer, "optimizer") else ""
        raise ValueError(f"offload.fit takes one torch.optim.Optimizer, not a {type(optimizer).__name__}.{inner}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise ValueError(f"offload.fit steps optimizers without a closure, and {name} needs one: leave optimizer out")


def _checked(make_batch: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return `make_batch` with a check that its batches have the size that it is called with."""
    try:
        inspect.signature(make_batch).bind(1)
    except TypeError:
        raise ValueError(
            "make_batch is called with a batch size and returns the model's input; write make_batch=lambda n: "
            f"torch.randn(n, 512), not {_kind(make_batch)}"
        ) from None
    except ValueError:  # Python knows no signature of some functions that are written in C
        pass
    seen: dict[int, list[torch.Size]] = {}

    def make(items: int) -> Any:
        made = make_batch(items)
        leaves = tree_leaves(made)
        if all(isinstance(each, Tensor | int | float | str | None) for each in leaves):  # others may hold tensors
            seen[items] = [each.shape for each in leaves if isinstance(each, Tensor)]
        for other, shapes in seen.items():
            if other != items and shapes == seen.get(items):
                raise ValueError(
                    f"make_batch returned tensors of the same shapes for the batch sizes {other} and {items}; it has "
                    "to return as many items as it is asked for"
                )
        return made

    return make


def _kind(what: object) -> str:
    return "a function without an argument" if callable(what) else f"a {type(what).__name__}"


def _measured(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    sizes: tuple[int, int],
    loss: Callable[[nn.Module, Any], Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
    watch: OptimizerWatch,
) -> list[RecordedStep]:
    """Run and record the step at each batch size; the first one with recipes."""
    told: list[RecordedStep] = []

    def listen(step: RecordedStep) -> int | None:
        told.append(step)
        is_first = len(told) == 1 and bool(step.trace.tensors)  # the next step is its trial of recomputation
        return min(max(unswapped_bytes(step.trace)), step.device_bytes) if is_first else None

    def record(items: int) -> RecordedStep:
        # In proportion to the batch size, so that both steps swap the same tensors.
        with enable(model, min_tensor_bytes=max(1, SMALLEST_BYTES * items // sizes[0])) as handle:
            watch.listen()
            _step(handle, model, make_batch(items), loss, optimizer)
            handle.trace()  # reads the step, which tells the listener
            if len(told) == 1:
                _step(handle, model, make_batch(items), loss, optimizer)
                handle.trace()
        return told[-1]

    with listen_to_profiles(listen):
        return [record(items) for items in sizes]


def _step(
    handle: Session,
    model: nn.Module,
    inputs: Any,
    loss: Callable[[nn.Module, Any], Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    with handle.step():
        value = own_loss(called(model, inputs)) if loss is None else loss(model, inputs)
    if not isinstance(value, Tensor):
        raise ValueError(f"loss returned a {type(value).__name__}, not a tensor; return what backward is called on")
    value.backward()  # type: ignore[no-untyped-call]
    del value
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)


@contextmanager
def _as_it_was(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Return a context for training steps. At its end, what they changed is restored, from copies in host memory."""
    modes = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # Not by load_state_dict, which casts state to the type of its parameter.
    groups = [] if optimizer is None else [(group, _same(dict(group))) for group in optimizer.param_groups]
    state = [] if optimizer is None else _same(list(optimizer.state.items()))
    found = [*model.parameters(), *model.buffers(), *tree_leaves([[group for _, group in groups], state])]
    held = {id(each): (each, _copied(each)) for each in found if isinstance(each, Tensor) and not each.is_meta}
    random_numbers = RandomNumbers(devices_of(model))
    model.zero_grad(set_to_none=True)
    model.train()
    try:
        with torch.inference_mode(False), torch.enable_grad():  # the caller may have turned gradients off
            yield
    finally:
        for module, was_training, buffers in modes:
            module.training = was_training
            module._buffers.clear()
            module._buffers.update(buffers)
        for group, was in groups:
            group.clear()
            group.update(was)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(state)
        with torch.no_grad():
            for tensor, values in held.values():
                tensor.copy_(values)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random_numbers.restore()


def _same(value: Any) -> Any:
    """Return the same values in containers of their own."""
    return tree_map(lambda each: each, value)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _answer(
    model: nn.Module,
    steps: Sequence[RecordedStep],
    batch: int,
    limit_bytes: int | None,
    elsewhere: AbsentDevice | None,
    watch: OptimizerWatch,
    *,
    has_optimizer: bool,
) -> Fit:
    step, smaller = steps
    line = on_a_line(step.trace, batch, smaller.trace, batch // 2)
    sized = line or in_proportion(step.trace, batch, step.fixed_bytes)
    made, link = with_optimizer(sized, watch.peak_bytes, watch.seconds), step.link
    notes = [f"Measured on {step.device}: steps at batch {batch} and {batch // 2}, swapped as far as possible."]
    if isinstance(watch, CountedOptimizers) and elsewhere is not None:
        notes = [how_counted(elsewhere)]
    elif elsewhere is not None:
        made, note = on_device(made, elsewhere, matmul_flops(torch.device(step.device)))
        link, notes = elsewhere.link, [note]
    if line is not None:
        notes.append("Other batch sizes: each tensor's bytes and each duration are taken as linear, through these two.")
    else:
        notes.append(
            "Other batch sizes are estimated: the two steps save different tensors, so all but parameters, gradients, "
            f"buffers and optimizer state is taken in proportion to batch {batch}."
        )
    notes += watch.notes(link)
    if not has_optimizer:
        notes.append("No optimizer was given, so its state is not counted: Adam's is twice the parameters.")
    if step.no_recipes:
        notes.append(f"Recomputation could not be tried: {step.no_recipes}.")
    limit = limit_bytes or (elsewhere.memory_bytes if elsewhere is not None else step.device_bytes)
    fixed = [*step.fixed_bytes, watch.peak_bytes] if watch.peak_bytes else step.fixed_bytes
    return answer(type(model).__name__, made, link, limit, fixed, notes, watch.moved)
