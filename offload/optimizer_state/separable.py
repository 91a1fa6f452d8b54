"""Whether an optimizer that is not one of torch's gives the same bits when it steps a few parameters at a time.

`StateMover` asks before its first step. A tiny copy of the optimizer is stepped as a whole and in chunks.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.optimizer_state.chunks import ChunkedStep, stepping_nothing
from offload.torch_compat.optimizers import raw_step

__all__ = ["is_separable"]

log = logging.getLogger("offload")

PARAMS_MAX = 3  # of each group, of each number of dimensions
LENGTH_MAX = 12  # of each dimension
# From tiny to large gradients: a norm over all parameters may be compared with a bound.
SCALES = (1.0, 1e-4, 1e4, 1.0, 1e-8, 1e2)
NUMEL_MAX = 64  # of a tensor among the optimizer's attributes

# What every optimizer has, beside the attributes of its own.
_COMMON = frozenset({"defaults", "param_groups", "state", "step"})


def is_separable(optimizer: Optimizer) -> bool:
    """Whether a tiny copy of the optimizer gives the same bits in chunks. False where it cannot be tried."""
    if hasattr(type(optimizer), "__del__"):  # it would run for each stand-in
        return False
    try:
        return _is_equal_in_chunks(optimizer)
    except Exception as error:  # whatever a step that is not torch's may raise
        log.info("%s cannot be tried on a small copy: %s", type(optimizer).__name__, error)
        return False


def _is_equal_in_chunks(optimizer: Optimizer) -> bool:
    whole, chunked = _tiny(optimizer), _tiny(optimizer)
    if whole is None or chunked is None:
        return False
    device = next(param.device for group in whole.param_groups for param in group["params"])
    generator = torch.Generator("cpu").manual_seed(0)
    for number, scale in enumerate(SCALES):
        _set_gradients(whole, chunked, generator, scale, without_last=number == 3)
        for step, each in ((_step_whole, whole), (_step_chunked, chunked)):
            with _own_random_numbers(device):
                step(each)
        if not _same(whole, chunked):
            return False
    return True


def _own_random_numbers(device: torch.device) -> Any:
    """The next random numbers, which the other run and the program get too."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def _step_whole(optimizer: Optimizer) -> None:
    raw_step(optimizer)(optimizer)


def _step_chunked(optimizer: Optimizer) -> None:
    grad_mode = torch.is_grad_enabled()

    def closure() -> None:
        with torch.set_grad_enabled(grad_mode):
            step = ChunkedStep(optimizer)
            for param in step.params:
                step.run([param])
            step.end()

    raw_step(optimizer)(stepping_nothing(optimizer), closure=closure)


def _tiny(optimizer: Optimizer) -> Optimizer | None:
    """A copy with other, tiny parameters; None where it has attributes that are no plain values."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _COMMON and name[0] != "_"}
    private = {name: value for name, value in vars(optimizer).items() if name[0] == "_" and _is_plain(value)}
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups
    ]
    if not (_is_plain(own) and _is_plain(groups) and _is_plain(optimizer.defaults)):
        return None
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(_copy({**own, **private}), defaults=_copy(optimizer.defaults), state=defaultdict(dict))
    generator = torch.Generator("cpu").manual_seed(1)
    made.param_groups = [
        {**_copy(options), "params": [_tiny_param(each, generator) for each in _varied(group["params"])]}
        for options, group in zip(groups, optimizer.param_groups, strict=True)
    ]
    return made if any(group["params"] for group in made.param_groups) else None


def _varied(params: list[Tensor]) -> list[Tensor]:
    """Some of a group's parameters, of each number of dimensions."""
    of_ndim: defaultdict[int, list[Tensor]] = defaultdict(list)
    for param in params:
        of_ndim[param.ndim].append(param)
    return [param for alike in of_ndim.values() for param in alike[:PARAMS_MAX]]


def _tiny_param(param: Tensor, generator: torch.Generator) -> nn.Parameter:
    shape = [min(length, LENGTH_MAX) for length in param.shape]
    return nn.Parameter(torch.randn(shape, generator=generator, device="cpu").to(param.device, param.dtype))


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.numel() <= NUMEL_MAX
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def _set_gradients(
    whole: Optimizer, chunked: Optimizer, generator: torch.Generator, scale: float, *, without_last: bool
) -> None:
    for one, other in zip(whole.param_groups, chunked.param_groups, strict=True):
        for n, (a, b) in enumerate(zip(one["params"], other["params"], strict=True)):
            gradient = (scale * torch.randn(a.shape, generator=generator, device="cpu")).to(a.device, a.dtype)
            is_left_out = without_last and n == len(one["params"]) - 1
            a.grad, b.grad = (None, None) if is_left_out else (gradient, gradient.clone())


def _same(whole: Optimizer, chunked: Optimizer) -> bool:
    return _equal(_everything(whole), _everything(chunked))


def _everything(optimizer: Optimizer) -> list[Any]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = {name: value for name, value in vars(optimizer).items() if name not in _COMMON and _is_plain(value)}
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    other = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    return [params, [optimizer.state.get(param) for param in params], other, options, own]


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
