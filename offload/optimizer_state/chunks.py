"""One optimizer step as several: the optimizer's own step, unchanged, for a few parameters at a time.

The step function is called with a stand-in: an object of the optimizer's class whose groups list only those parameters.
`StateMover` brings state in before each chunk. `separable` tries whether an optimizer that is not torch's allows this.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.parameters.updating import updating
from offload.torch_compat.optimizers import runs_foreach

__all__ = ["ChunkedStep", "is_known", "split", "stepping_nothing"]

# LBFGS evaluates its closure several times and keeps one state for all parameters.
_KNOWN = frozenset(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, torch.optim.LBFGS)
)

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Attributes that are not counters of a step. If a `ChunkedStep` kept the hooks, there would be a reference cycle,
# because a hook may hold the `ChunkedStep`.
_NO_COUNTERS = frozenset(
    {
        "param_groups",
        "state",
        *_STEP_HOOKS,
        *(f"_optimizer_{call}_{when}_hooks" for call in ("state_dict", "load_state_dict") for when in ("pre", "post")),
    }
)


def is_known(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's that update each parameter only from its own gradient and state."""
    return type(optimizer) in _KNOWN


def split(params: Iterable[Tensor], nbytes_of: Callable[[Tensor], int], nbytes_max: int) -> Iterator[list[Tensor]]:
    """Yield the parameters in order, in chunks of at most `nbytes_max` bytes of state, or of one parameter."""
    chunk: list[Tensor] = []
    chunk_nbytes = 0
    for param in params:
        nbytes = nbytes_of(param)
        if chunk and chunk_nbytes + nbytes > nbytes_max:
            yield chunk
            chunk, chunk_nbytes = [], 0
        chunk.append(param)
        chunk_nbytes += nbytes
    if chunk:
        yield chunk


def stepping_nothing(optimizer: Optimizer, *, has_state: bool = True) -> Optimizer:
    """Return a stand-in without parameters: its step calls the closure and does nothing else.

    `has_state`: it shares the optimizer's state. Otherwise nothing but the optimizer holds its state while the closure
    runs, so that a plan made there can let it leave memory.
    """
    made = _stand_in(optimizer, [])
    if not has_state:
        made.state = defaultdict(dict)
    return made


def _stand_in(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(vars(optimizer))
    made.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the optimizer itself
    for hooks in _STEP_HOOKS:  # a step may call its base class's step, which runs hooks
        setattr(made, hooks, OrderedDict())
    made.param_groups = groups
    return made


class ChunkedStep:
    """One step of an optimizer, chunk by chunk. It does not keep the optimizer alive.

    A step may change counters in a group or in the optimizer itself. In chunks it would change them once per chunk.
    Therefore each chunk begins with the counters before the step, and `end` stores those of the last chunk.

    Parameters
    ----------
    step
        The optimizer's own function, without hooks and wrappers.
    params
        The parameters that the step updates. Default: all that have a gradient.

    Attributes
    ----------
    params
        The parameters that the step updates.
    unscales_gradients
        Whether an update divides gradients in place by the scale of a `GradScaler`. Their version counters do not show
        it.
    keeps_gradients
        Whether the optimizer may hold gradients, or views of them, after the step.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any], params: Sequence[Tensor] | None = None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._step = step
        self._all_groups = not is_known(optimizer)  # may have counters in a group without gradients
        self._options = [_with_foreach(group) for group in optimizer.param_groups]
        self._group_of = {param: n for n, group in enumerate(optimizer.param_groups) for param in group["params"]}
        self.params = [param for param in self._group_of if param.grad is not None] if params is None else params
        self.unscales_gradients = getattr(optimizer, "grad_scale", None) is not None
        self.keeps_gradients = not is_known(optimizer)
        self._own = _counters(optimizer)
        self._counted: dict[int, dict[str, Any]] = {}  # by group
        self._counted_self: dict[str, Any] = {}

    def group_of(self, param: Tensor) -> int | None:
        """Return the number of a parameter's group when this object was made; None if the parameter was in no group."""
        return self._group_of.get(param)

    def run(self, chunk: Sequence[Tensor]) -> None:
        """Update these parameters."""
        of_group: dict[int, list[Tensor]] = {n: [] for n in range(len(self._options))} if self._all_groups else {}
        for param in chunk:
            of_group.setdefault(self._group_of[param], []).append(param)
        groups = {n: {**self._options[n], "params": params} for n, params in of_group.items()}
        stand_in = _stand_in(self._alive, list(groups.values()))
        try:
            with updating(chunk):
                self._step(stand_in)
        finally:
            for n, group in groups.items():
                self._counted[n] = _changed({k: v for k, v in group.items() if k != "params"}, self._options[n])
            self._counted_self = _changed(_counters(stand_in), self._own)

    def end(self) -> None:
        """Store the counters of the last chunk in the optimizer."""
        optimizer = self._alive
        for n, counted in self._counted.items():
            optimizer.param_groups[n].update(counted)
        vars(optimizer).update(self._counted_self)

    @property
    def _alive(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # its step is running
        return optimizer


def _counters(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _NO_COUNTERS}


def _changed(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if name not in before or value is not before[name]}


def _with_foreach(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's options, with ``foreach=False`` if torch would choose no foreach kernels for the whole group.

    If torch would choose foreach kernels for the group, it also does for each chunk, because every parameter is of a
    suitable kind.
    """
    options = dict(group)
    if options.get("foreach", False) is None and not options.get("fused"):
        params = [param for param in group["params"] if param.grad is not None]
        if not runs_foreach(params, differentiable=bool(options.get("differentiable"))):
            options["foreach"] = False
    return options
