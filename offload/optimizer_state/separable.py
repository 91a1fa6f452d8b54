"""Tries whether an optimizer that is not one of torch's gives the same bits if it steps a few parameters at a time.

`StateMover` does this at its first step; with `step_in_backward=True` it is done when the optimizer is given. A tiny
copy of the optimizer is stepped as a whole and in chunks.
"""

from __future__ import annotations

import logging
import signal
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.optimizer_state.chunks import ChunkedStep, stepping_nothing
from offload.optimizer_state.plain_values import copied, is_equal, is_plain
from offload.optimizer_state.surroundings import Surroundings
from offload.runtime.random_numbers import RandomNumbers

__all__ = ["is_separable"]

log = logging.getLogger("offload")

PARAMS_MAX = 3  # for each group and each number of dimensions
LENGTH_MAX = 12  # of each dimension
# Tiny and large gradients: if an optimizer compares the norm of all gradients with a bound, both branches are tried.
SCALES = (1.0, 1e-4, 1e4, 1.0, 1e-8, 1e2)

Step = Callable[..., Any]

# Attributes that every optimizer has.
_COMMON = frozenset({"defaults", "param_groups", "state", "step"})


def is_separable(optimizer: Optimizer, step: Step, *, in_any_order: bool = False) -> bool:
    """Return whether a tiny copy of the optimizer gives the same bits in chunks. False if it cannot be tried.

    Also False if a step changes anything outside of the optimizer, or might do so: in chunks it would do so several
    times, and in the trial too.

    Parameters
    ----------
    in_any_order
        Whether the bits must also be the same if the parameters are updated in reverse order, as in backward. The
        bits differ, for example, if each update draws random numbers.
    """
    kind = type(optimizer).__name__
    try:
        around = Surroundings(optimizer, step)
        if around.unknown:
            log.info("%s is not tried on a small copy: its step may use %s", kind, ", ".join(around.unknown))
            return False
        try:
            orders = (False, True) if in_any_order else (False,)
            return all(_is_equal_in_chunks(optimizer, step, around, is_reversed=each) for each in orders)
        finally:
            around.restore()
    except Exception as error:  # a step that is not torch's may raise anything
        if _is_of_a_signal(error):
            raise
        log.info("%s cannot be tried on a small copy: %s", kind, error)
        return False


def _is_of_a_signal(error: BaseException) -> bool:
    """Return whether a signal handler, which may interrupt any code, has raised this error."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(each, "__func__", each), "__code__", None) for each in handlers} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_equal_in_chunks(optimizer: Optimizer, step: Step, around: Surroundings, *, is_reversed: bool) -> bool:
    whole, chunked = _tiny(optimizer), _tiny(optimizer)
    if whole is None or chunked is None:
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    for number, scale in enumerate(SCALES):
        _set_gradients(whole, chunked, generator, scale, without_last=number == 3)
        after = _stepped(whole, step)
        after_chunks = _stepped(chunked, partial(_step_chunked, step=step, is_reversed=is_reversed))
        # As many random numbers: else an optimizer that seldom acts on one would have the same bits here only.
        if around.has_changed() or not after.is_same(after_chunks) or not _same(whole, chunked):
            return False
    return True


def _stepped(optimizer: Optimizer, step: Step) -> RandomNumbers:
    """Step, with the program's next random numbers. The program and the other run draw the same ones afterwards."""
    devices = {param.device for group in optimizer.param_groups for param in group["params"]}
    before = RandomNumbers(devices)
    try:
        step(optimizer)
        return RandomNumbers(devices)
    finally:
        before.restore()


def _step_chunked(optimizer: Optimizer, *, step: Step, is_reversed: bool) -> None:
    grad_mode = torch.is_grad_enabled()

    def closure() -> None:
        with torch.set_grad_enabled(grad_mode):
            chunked = ChunkedStep(optimizer, step)
            for param in reversed(chunked.params) if is_reversed else chunked.params:
                chunked.run([param])
            chunked.end()

    step(stepping_nothing(optimizer), closure=closure)


def _tiny(optimizer: Optimizer) -> Optimizer | None:
    """Return a copy with tiny parameters of its own; None if the optimizer has attributes that are not plain values."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _COMMON and name[0] != "_"}
    private = {name: value for name, value in vars(optimizer).items() if name[0] == "_" and is_plain(value)}
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups
    ]
    if not (is_plain(own) and is_plain(groups) and is_plain(optimizer.defaults)):
        return None
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(copied({**own, **private}), defaults=copied(optimizer.defaults), state=defaultdict(dict))
    generator = torch.Generator("cpu").manual_seed(1)
    made.param_groups = [
        {**copied(options), "params": [_tiny_param(each, generator) for each in _varied(group["params"])]}
        for options, group in zip(groups, optimizer.param_groups, strict=True)
    ]
    return made if any(group["params"] for group in made.param_groups) else None


def _varied(params: list[Tensor]) -> list[Tensor]:
    """Return a few of a group's parameters for each number of dimensions."""
    of_ndim: defaultdict[int, list[Tensor]] = defaultdict(list)
    for param in params:
        of_ndim[param.ndim].append(param)
    return [param for alike in of_ndim.values() for param in alike[:PARAMS_MAX]]


def _tiny_param(param: Tensor, generator: torch.Generator) -> nn.Parameter:
    shape = [min(length, LENGTH_MAX) for length in param.shape]
    return nn.Parameter(torch.randn(shape, generator=generator, device="cpu").to(param.device, param.dtype))


def _set_gradients(
    whole: Optimizer, chunked: Optimizer, generator: torch.Generator, scale: float, *, without_last: bool
) -> None:
    for one, other in zip(whole.param_groups, chunked.param_groups, strict=True):
        for n, (a, b) in enumerate(zip(one["params"], other["params"], strict=True)):
            gradient = (scale * torch.randn(a.shape, generator=generator, device="cpu")).to(a.device, a.dtype)
            is_left_out = without_last and n == len(one["params"]) - 1
            a.grad, b.grad = (None, None) if is_left_out else (gradient, gradient.clone())


def _same(whole: Optimizer, chunked: Optimizer) -> bool:
    return is_equal(_everything(whole), _everything(chunked))


def _everything(optimizer: Optimizer) -> list[Any]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = {name: value for name, value in vars(optimizer).items() if name not in _COMMON and is_plain(value)}
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    other = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    states = [optimizer.state.get(param) for param in params]
    values = [value for state in states for value in (state or {}).values()]
    # For each value, the first index of the same object: shows whether one tensor is in two places.
    which = [next(n for n, each in enumerate(values) if each is value) for value in values]
    return [params, states, which, other, options, own]
