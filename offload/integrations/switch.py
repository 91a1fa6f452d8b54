"""Enables offload at the start of a training run and disables it at the end, even if the run fails.

The callbacks of all frameworks use it to call `offload.enable`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from offload.diagnostics.metrics import StepMetrics
from offload.diagnostics.report import Report
from offload.handle import Session
from offload.runtime.weak import run_pending_callbacks
from offload.session import enable, session_of
from offload.torch_compat.optimizers import has_own_hooks

log = logging.getLogger("offload")

KNOBS = tuple(name for name in inspect.signature(enable).parameters if name != "model")


class Switch:
    """Enables and disables offload for one model. The report remains available after the run.

    Parameters
    ----------
    owner
        Name of the object that uses the switch, for messages.
    options
        Arguments of `offload.enable`.
    """

    def __init__(self, owner: str, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in KNOBS:
                raise TypeError(f"{owner} takes the knobs of offload.enable ({', '.join(KNOBS)}), not {name!r}")
        self.owner = owner
        self.options = dict(options)
        self._handle: Session | None = None
        self._metrics = StepMetrics()
        self.is_on = False

    @property
    def handle(self) -> Session:
        """The session of the current run, or of the last one."""
        if self._handle is None:
            raise RuntimeError(f"{self.owner} has no session yet: it begins with training")
        return self._handle

    @property
    def steps_in_backward(self) -> bool:
        """Whether optimizers update their parameters in backward."""
        return self.options.get("step_in_backward") is True

    def report(self) -> Report:
        """Return the report of the current run, or of the last one."""
        return self.handle.report()

    def refuse_what_needs_all_gradients(self, used: Mapping[str, object]) -> None:
        """Check that a framework uses no gradients between backward and the optimizer's step.

        Parameters
        ----------
        used
            What the framework is asked to do with them, in the user's words, and whether it is.

        Raises
        ------
        ValueError
            It is asked to, and parameters are updated in backward.
        """
        found = [name for name, is_used in used.items() if is_used]
        if self.steps_in_backward and found:
            raise ValueError(
                f"{self.owner} with step_in_backward=True: {', '.join(found)} needs all gradients after backward, but "
                "backward updates each parameter and then frees its gradient; switch that off, or leave "
                "step_in_backward out"
            )

    def metrics(self) -> dict[str, float]:
        """Return figures of the latest step by name, for the framework's logging; empty before a step is over."""
        return self._metrics.read(self.handle._enabled) if self.is_on else {}

    def turn_on(self, model: nn.Module, optimizers: Sequence[Any] = ()) -> Session:
        """Enable offload.

        Parameters
        ----------
        optimizers
            The framework's optimizers, or accelerate's wrappers of them. Used with `optimizer_state=True` and
            `step_in_backward`.

        Raises
        ------
        ValueError
            Offload is already enabled on this model, or an option is wrong.
        """
        if session_of(model) is not None:
            raise ValueError(
                f"offload is already enabled on this model, so {self.owner} cannot enable it again: keep one of the "
                "two. Remove the other callback, or the call of offload.enable (offload.disable(model) undoes it)"
            )
        options = self.options
        if optimizers and (options.get("optimizer_state") is True or self.steps_in_backward):
            options = {"optimizer": [_unwrapped(each) for each in optimizers], **options}
        self._handle = enable(model, **options)
        self._metrics = StepMetrics()
        self.is_on = True
        return self._handle

    def turn_off(self) -> None:
        """Disable offload if this switch has enabled it."""
        if self.is_on:
            self.is_on = False
            self.handle.disable()

    def __getstate__(self) -> dict[str, Any]:
        # Frameworks copy and pickle callbacks; a session stays with its model.
        return {**self.__dict__, "_handle": None, "is_on": False}


def _unwrapped(optimizer: Any) -> Any:
    return optimizer if has_own_hooks(optimizer) else getattr(optimizer, "optimizer", optimizer)


class CallWrapper:
    """Replaces a method, or a function attribute, of one object until `undo` is called.

    If a call raises an exception, `on_error` is called: frameworks do not report every exception to their callbacks.
    """

    def __init__(
        self,
        target: Any,
        name: str,
        around: Callable[[tuple[Any, ...]], AbstractContextManager[None]],
        on_error: Callable[[], None],
    ) -> None:
        self._target = weakref.ref(target)
        self._name = name
        self._around = around
        self._on_error = on_error
        self._was_own = name in vars(target)
        self._inner = getattr(target, name) if self._was_own else getattr(type(target), name)
        functools.update_wrapper(self, self._inner)
        setattr(target, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._around(args):
                return self._inner(*args, **kwargs) if self._was_own else self._inner(self._target(), *args, **kwargs)
        except BaseException as error:
            self._on_error()
            log.info("offloading ends here: %s raised %s", self._name, type(error).__name__)
            raise

    def undo(self) -> None:
        """Restore the original, unless other code has replaced this wrapper meanwhile."""
        target = self._target()
        if target is None or vars(target).get(self._name) is not self:
            return
        if self._was_own:
            setattr(target, self._name, self._inner)
        else:
            delattr(target, self._name)


class CallSkipper(CallWrapper):
    """Replaces a method of one object by nothing, until `undo` is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return None."""


def nothing_around(args: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Return an empty context, for calls that are wrapped only to notice their exceptions."""
    return nullcontext()


class Switched:
    """The part that the callbacks of all frameworks share: session, report, and undo.

    Put it before the framework's class in the list of bases.
    """

    _switch: Switch
    _wrappers: list[CallWrapper]

    def _begin(self, owner: str, options: Mapping[str, Any]) -> None:
        self._switch = Switch(owner, options)
        self._wrappers = []

    @property
    def handle(self) -> Session:
        """The session of the current run, or of the last one."""
        return self._switch.handle

    def report(self) -> Report:
        """Return the report of the current run, or of the last one."""
        run_pending_callbacks()
        return self._switch.report()

    def undo(self) -> None:
        """Remove all wrappers and disable offload. A second call does nothing."""
        for wrapper in self._wrappers:
            wrapper.undo()
        self._wrappers.clear()
        self._switch.turn_off()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wrappers": []}
