"""Gradient accumulation: one optimizer step for several small batches.

It wraps an optimizer and does not use the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from offload.units import whole_number


class GradAccumulator(Optimizer):
    """Wraps an optimizer and steps it only at every N-th call of `step`.

    N batches form a group. The gradient of a group is that of the mean over all its items, even if its batches differ
    in size: four batches of 16 give the same gradient as one batch of 64, within float rounding. Layers that use batch
    statistics, such as BatchNorm, are an exception.

    Parameters
    ----------
    optimizer
        Any optimizer that needs no closure. Its state and state_dict do not change.
    steps
        Number of batches in a group, at least 1.
    max_norm
        Clip the gradient of the whole group to this norm right before the optimizer's step. None: no clipping.
    scaler
        A `torch.amp.GradScaler`. This object calls it to scale, step and update; do not call it yourself.

    Raises
    ------
    ValueError
        `steps` is less than 1, `max_norm` is not positive, or `optimizer` is not an optimizer.

    Notes
    -----
    Create a learning rate scheduler with this object or the optimizer, and step it only if `stepped` is true. With
    DistributedDataParallel, run forward and backward in ``model.no_sync()`` for all batches of a group but the last
    (`is_last`); items are then counted per process.

    Examples
    --------
    >>> import torch, offload
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    >>> acted = []
    >>> for x in torch.ones(70, 3).split(16):
    ...     loss = optimizer.scale(model(x).square().mean(), items=len(x))
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     acted.append(optimizer.stepped)
    >>> acted, optimizer.flush()
    ([False, False, False, True, False], True)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        steps: int,
        max_norm: float | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        # Does not call Optimizer.__init__, because parameters and state belong to the wrapped optimizer. Optimizer is a
        # base class only because learning rate schedulers check for it.
        if isinstance(optimizer, GradAccumulator):
            raise ValueError("the optimizer is a GradAccumulator already; wrap the optimizer once, with steps=N")
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"GradAccumulator takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        count = whole_number(steps, 1)
        if count is None:
            raise ValueError(f"steps must be a count of batches, at least 1, not {steps!r}; 1 accumulates nothing")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, not {max_norm!r}; leave it out to clip nothing")
        self.optimizer = optimizer
        self.steps = count
        self.max_norm = max_norm
        self.scaler = scaler
        self.grad_norm: Tensor | None = None
        self._stepped = False
        self._calls = 0  # calls of `step` in this group
        self._items = 0
        self._items_expected = 0  # items of the group if all its batches had the size of the first one
        self._is_scaled = False

    # -- for the training loop ----------------------------------------------------------------------------------------

    def scale(self, loss: Tensor, items: int) -> Tensor:
        """Return the loss to call backward on: multiplied by the share of this batch in its group.

        Parameters
        ----------
        loss
            The mean over the items of the batch.
        items
            Number of items: rows, or tokens if the mean is over tokens. At least 1.

        Raises
        ------
        ValueError, RuntimeError
            `items` is not a positive integer, or `scale` was already called before this `step`.
        """
        count = whole_number(items, 1)
        if count is None:
            raise ValueError(
                f"items must be the number of items that the loss is the mean of, at least 1, not {items!r}"
            )
        if self._is_scaled:
            raise RuntimeError(
                "scale() twice before step(): add the losses of one batch and scale their sum; after a batch "
                "that failed call reset()"
            )
        if not self._items:
            self._items_expected = count * self.steps
        self._items += count
        self._is_scaled = True
        share = loss * (count / self._items_expected)
        return share if self.scaler is None else self.scaler.scale(share)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Count one batch. After the last one of a group, correct and clip the gradients and step the optimizer.

        Raises
        ------
        RuntimeError
            `scale` was not called for this batch.
        ValueError
            A closure is given.
        """
        if closure is not None:
            raise ValueError("GradAccumulator.step takes no closure: it cannot run several batches again")
        if not self._is_scaled:
            raise RuntimeError(
                "step() without a loss: write optimizer.scale(loss, items=len(batch)).backward() before it"
            )
        self._is_scaled = False
        self._calls += 1
        self._stepped = False
        if self._calls == self.steps:
            self._act()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients if the group is complete; within a group, do nothing."""
        if self._items == 0:
            self.optimizer.zero_grad(set_to_none)

    def flush(self) -> bool:
        """Step the optimizer for an incomplete last group and clear the gradients. Return whether there was one.

        Raises
        ------
        RuntimeError
            `scale` was called and `step` was not: the gradient of that batch may be incomplete.
        """
        if self._is_scaled:
            raise RuntimeError(
                "flush() between scale() and step(): call step() for that batch first, or reset() if it failed"
            )
        if self._calls == 0:
            return False
        self._act()
        self.zero_grad()
        return True

    def reset(self) -> None:
        """Discard the current group and its gradients, for example after a batch that failed."""
        self._calls = self._items = 0
        self._is_scaled = False
        self.zero_grad()

    @property
    def stepped(self) -> bool:
        """Whether the last `step` or `flush` stepped the optimizer. False if the scaler found an overflow."""
        return self._stepped

    @property
    def is_last(self) -> bool:
        """Whether the next `step` completes its group."""
        return self._calls == self.steps - 1

    def _act(self) -> None:
        correction = self._items_expected / self._items
        self._calls = self._items = 0
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if correction != 1:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(correction)
        if self.max_norm is not None:
            self.grad_norm = clip_grad_norm_(list(self._parameters()), self.max_norm)
        self._stepped = self._step_inner()

    def _step_inner(self) -> bool:
        if self.scaler is None:
            self.optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before  # the scaler lowers its scale if it has skipped a step

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    # -- interface of an optimizer ------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of the wrapped optimizer."""
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the wrapped optimizer. It contains no gradients, so no incomplete group."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of the wrapped optimizer or of this object."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        # Without the `step` that a scheduler has set on this object: it is bound to this object.
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"GradAccumulator(steps={self.steps}, {self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        # Other attributes of an optimizer: torch's dictionaries of hooks, what schedulers set.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)
