"""Keras 3 with its torch backend: a callback for `model.fit`.

`fit` calls `train_function` for every batch; the callback wraps that function.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
from torch import nn

from offload.diagnostics.metrics import FIGURES
from offload.handle import Session
from offload.integrations.switch import CallWrapper, Switched, nothing_around
from offload.options import check_optimizer_state
from offload.runtime.weak import call_when_dead
from offload.session import remark

STATE_REMARK = "optimizer_state={!r} has no effect: the state of Keras's own optimizers stays in memory"


class OffloadCallback(Switched, keras.callbacks.Callback):  # type: ignore[misc]
    """Enables offload during `model.fit`. The model is restored when `fit` ends or raises an exception.

    Parameters
    ----------
    log
        Whether to add figures to the logs of each epoch, under the names of `Session.log_to`. They are then in the
        history, in the progress bar, and in the logs of the callbacks after this one, such as TensorBoard. Figures that
        are not known yet are nan. Default: no figures are added.
    **options
        The arguments of `offload.enable`: `preset`, `memory_limit`, `max_slowdown`, `n_tensors`, `lb`,
        `min_tensor_bytes`, `exclude`, `host_limit`, `spill_dir`, `recompute`, `parameters`.

    Raises
    ------
    RuntimeError
        Keras runs on another backend than torch.
    TypeError
        An option is not an argument of `offload.enable`.
    ValueError
        `step_in_backward` or `gradients` is True, or `optimizer_state` is not "auto", True or False.

    Notes
    -----
    An exception in a step, in a validation or in another callback disables offload at once. After an exception in a
    data set, or in another callback's `on_train_begin`, offload stays enabled until the next `fit` with this callback,
    or until the frame of `fit` is freed and the model or offload is called. A notebook keeps the last exception and its
    frames alive; call `offload.recover()` to free them.

    Examples
    --------
    >>> import os
    >>> os.environ["KERAS_BACKEND"] = "torch"
    >>> import keras, numpy
    >>> from offload.integrations.keras import OffloadCallback
    >>> model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> callback = OffloadCallback(n_tensors=-1, min_tensor_bytes="1KiB")
    >>> _ = model.fit(numpy.ones((64, 8)), numpy.ones((64, 1)), verbose=0, callbacks=[callback])
    >>> callback.report().swapped.tensors > 0
    True
    """

    def __init__(self, *, log: bool = False, **options: Any) -> None:
        super().__init__()
        self._logs = log
        if keras.backend.backend() != "torch":
            raise RuntimeError(
                f"offload works with PyTorch, and Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=torch in "
                "the environment before keras is imported"
            )
        if options.get("step_in_backward"):
            raise ValueError(
                "step_in_backward=True cannot be used with Keras, whose own optimizers apply all gradients together: "
                "leave it out"
            )
        if options.get("gradients"):
            raise ValueError(
                "gradients=True cannot be used with Keras, whose own optimizers' state stays in memory: leave it out"
            )
        self._optimizer_state = options.pop("optimizer_state", False)
        check_optimizer_state(self._optimizer_state)
        self._begin(f"a Keras {type(self).__name__}", options)
        self._fit: Callable[[], Any] = _nothing

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Enable offload and wrap `model.train_function`."""
        model = self.model
        fit = sys._getframe(1).f_locals.get("self")  # the list of callbacks lives as long as `fit` runs
        current = getattr(model.train_function, "callback", None)
        if current is not None:
            is_of_this_fit = current._fit() is fit
            current.undo()  # an earlier `fit` failed outside its steps, or this one fails with the error below
            if is_of_this_fit:
                raise ValueError("the callbacks of this fit hold OffloadCallback twice; keep one of them")
        self.undo()
        handle = self._switch.turn_on(_as_module(model))
        if self._optimizer_state:
            remark(handle, STATE_REMARK.format(self._optimizer_state))
        step = CallWrapper(model, "train_function", lambda data: handle.step(*data), self.undo)
        step.callback = self  # type: ignore[attr-defined]
        self._wrappers.append(step)
        if isinstance(fit, keras.callbacks.CallbackList):
            for name in ("on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"):
                self._wrappers.append(CallWrapper(fit, name, nothing_around, self.undo))
            self._wrappers.append(CallWrapper(model, "evaluate", nothing_around, self.undo))
            self._fit = weakref.ref(fit)
            call_when_dead(fit, partial(_undo_if_alive, weakref.ref(self), weakref.ref(handle)))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the figures to the epoch's logs."""
        if self._logs and logs is not None:
            logs |= dict.fromkeys(FIGURES, math.nan) | self._switch.metrics()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Disable offload."""
        self.undo()


def _nothing() -> None:
    """Return None, like a dead weak reference."""


def _as_module(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"offload needs a Keras model of the torch backend, not {type(model).__name__}")
    return model


def _undo_if_alive(callback: weakref.ref[OffloadCallback], handle: weakref.ref[Session]) -> None:
    found = callback()
    if found is not None and found._switch.is_on and found.handle is handle():
        found.undo()
