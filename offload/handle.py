"""The handle of an enabled model, `offload.Session`: the public methods for plan, report, optimizers and disabling."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from html import escape
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offload.control import registry
from offload.control.controller import PlanController
from offload.control.device_session import DeviceSession
from offload.control.enabled_model import EnabledModel
from offload.control.limits import LIMITS
from offload.control.manual import ManualController
from offload.control.trial import make_trial
from offload.devices.memory import record_out_of_memory
from offload.diagnostics import oom
from offload.diagnostics.assessment import wish
from offload.diagnostics.live import LivePublisher
from offload.diagnostics.metrics import StepLogger, StepMetrics, in_words
from offload.diagnostics.report import Feed, Report
from offload.diagnostics.session_report import make_report, make_verdict, recorded_trace, tier
from offload.diagnostics.step_recording import StepRecording
from offload.optimizer_state.freed_gradient import StepInBackwardError
from offload.optimizer_state.movers import StateMovers
from offload.options import Options, check_optimizers
from offload.parameters.mover import ParameterMover
from offload.plan import Plan
from offload.plan.trace import Trace
from offload.profiling.calibration import measure_link
from offload.runtime.counters import Counts
from offload.runtime.engine import Engine
from offload.runtime.schedule import StepOrder
from offload.runtime.weak import run_pending_callbacks
from offload.torch_compat.compiled import untraced

__all__ = ["Session"]

log = logging.getLogger("offload")

_NO_PLAN_YET = (
    "handle.plan is None: the first training step of each input shape is profiled; its plan is made before the second"
)
_NO_PLAN = 'handle.plan is None: with n_tensors (manual mode) no plan is made; remove n_tensors, or add lb="auto"'


class Session:
    """The handle that `offload.enable` returns. As a context manager it disables offload at the end of the block."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        options: Options,
        engine: Engine,
        asked: Mapping[str, Any],
        states: StateMovers,
        parameters: ParameterMover | None,
    ) -> None:
        self._feeds: list[Feed] = []
        self._remarks: list[str] = []
        self._told_of_plan = False
        self._progress = StepMetrics()
        self._recording: StepRecording | None = None
        self._states = states
        self._enabled = EnabledModel(
            model,
            device,
            options,
            engine,
            asked,
            self,
            partial(_session_on, states, parameters),
            registry.is_unused,
            always=registry.profile_listener() is not None,
        )
        self._enabled.parameters = parameters
        if parameters is not None:
            parameters.wrap()
        self._enabled.step_listeners.append(LivePublisher())

    # -- public -------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the model at its latest training forward."""
        return self._enabled.on_device.device

    def report(self) -> Report:
        """Return a report: the tensors swapped since `enable`, and the tensors kept, with the reasons."""
        run_pending_callbacks()
        self._states.look()
        moved = (self._states.counts, self._states.backward_counts, self._states.gradient_counts)
        return make_report(self._enabled, self._feeds, self._remarks, *moved)

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest input shape. Shapes whose steps follow a larger shape's plan do not count.

        None before a shape's second step (a warning is logged once), and always with `n_tensors`, unless ``lb="auto"``.
        """
        planned = self._on_device.latest()
        plan = planned.plan if planned is not None else None
        if plan is None and not self._told_of_plan:
            self._told_of_plan = True
            log.warning("%s", _NO_PLAN_YET if isinstance(self._controller, PlanController) else _NO_PLAN)
        return plan

    def trace(self) -> Trace:
        """Return the profiled step of the latest input shape, with the latest measured durations and copy speeds.

        Raises
        ------
        RuntimeError
            No step has been profiled: the first one is not over, or `n_tensors` is given without ``lb="auto"``.
        """
        return recorded_trace(self._controller)

    def postfix(self) -> dict[str, str]:
        """Return values for a progress bar: peak memory so far, swapped bytes and stall of the latest step, slowdown.

        If several steps have run since the last call, swapped bytes and stall are means. Unknown slowdown is left out.

        Examples
        --------
        >>> import torch, offload
        >>> handle = offload.enable(torch.nn.Linear(4, 1))
        >>> sorted(handle.postfix())  # for tqdm: bar.set_postfix(handle.postfix())
        ['peak', 'stalled', 'swapped']
        """
        return in_words(self._progress.read(self._enabled))

    def log_to(self, target: Any, *, commit: bool = False) -> None:
        """Log figures of each step from now on: peak memory, bytes swapped, time stalled, memory saved, slowdown.

        A step is logged when the next one begins. The names are ``peak_mib``, ``swapped_mib``, ``stalled_ms``,
        ``saved_mib`` and ``slowdown_percent``, with the prefix ``offload/``. Figures not known yet are left out. If
        `target` raises an exception, the step that has just begun raises it, and `target` is not called again.

        Parameters
        ----------
        target
            TensorBoard's ``SummaryWriter``, a run of W&B, or a function of a dict of figures and the step's number.
        commit
            W&B only. True sends the figures at once. False leaves them to your loop's next ``run.log``.

        Raises
        ------
        TypeError
            `target` is not one of these.
        ValueError
            Offload is disabled on this model.

        Examples
        --------
        >>> import torch, offload
        >>> model = torch.nn.Linear(4, 1)
        >>> with offload.enable(model) as handle:
        ...     handle.log_to(lambda figures, step: print(step, sorted(figures)))
        ...     for _ in range(2):
        ...         model(torch.ones(2, 4)).sum().backward()
        1 ['offload/peak_mib', 'offload/stalled_ms', 'offload/swapped_mib']
        """
        logger = StepLogger(target, commit=commit)
        self._enabled_model("log_to")
        self._enabled.step_listeners.append(logger)

    @contextmanager
    def step(self, *inputs: Any) -> Iterator[None]:
        """Apply offload to all that autograd saves in a `with` block: in the loss as well as in the model's forward.

        Parameters
        ----------
        *inputs
            The batch, whose shapes choose the plan; by default the inputs of the model's first call in the block. Give
            it if the block calls only parts of the model and batches vary in shape.

        Examples
        --------
        >>> import torch, offload
        >>> model = torch.nn.Linear(4, 1)
        >>> handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)
        >>> with handle.step():
        ...     loss = model(torch.ones(2, 4)).square().mean()
        >>> loss.backward()
        >>> handle.disable()
        """
        enabled = self._enabled
        if not enabled.applies() or enabled.current_hooks() is not None or enabled.is_removed():
            yield
            return
        with enabled.step() as current:
            if inputs or enabled.calls_parts:
                enabled.attach(current, inputs, {})
            yield

    def add_optimizer(
        self, optimizer: Optimizer, *, optimizer_state: bool = True, step_in_backward: bool = False,
        gradients: bool = False,
    ) -> None:  # fmt: skip
        """For an optimizer created after `enable` or `materialize`: move its state, or step it in backward, or both.

        Call it between two steps. From then on, plans no longer choose which state moves: not for this optimizer,
        and for the model's other optimizers the choice of the last plan remains. `optimizer_state` is True or False.

        Raises
        ------
        ValueError
            Disabled; or the optimizer has no parameter of this model, was passed before, or cannot step in backward.
        """
        model = self._enabled_model("add_optimizer")
        if optimizer_state not in (True, False):
            raise ValueError(f"add_optimizer: optimizer_state must be True or False, not {optimizer_state!r}")
        check_optimizers(model, optimizer, optimizer_state, step_in_backward, gradients)
        untraced(self._states.add, (optimizer,), optimizer_state, step_in_backward, gradients)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> torch.Tensor:
        """Clip the norm of all gradients of the model with `torch.nn.utils.clip_grad_norm_`.

        Parameters
        ----------
        max_norm, norm_type
            The largest norm after clipping; the order of the norm, such as 2.
        **options
            `error_if_nonfinite` and `foreach` of torch's function. With `gradients=True` on an accelerator, `foreach`
            is False by default, so that not all gradients are in memory at once; the norm's last bits may then differ.

        Returns
        -------
        torch.Tensor
            The norm before clipping, of shape [].

        Raises
        ------
        StepInBackwardError
            With `step_in_backward=True`: gradients are used and freed before their norm is known.
        """
        model = self._enabled.model
        if self._states.steps_in_backward:
            raise StepInBackwardError(
                "clip_grad_norm_ needs all gradients at once, but with step_in_backward=True each is used and freed in "
                "backward: call enable without step_in_backward, or clip each gradient by itself in a hook of its "
                "parameter, parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))"
            )
        parameters = list(model.parameters()) if model is not None else []
        if self._states.gradient_counts and self._engine.is_accelerator:
            options.setdefault("foreach", False)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, **options)

    @contextmanager
    def explain_oom(self, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
        """Explain an out-of-memory error that a `with` block raises: in a note on the exception, and on a page.

        Even without `explain_oom`, an error in `step`, in the model's forward, or in a swap-in or recomputation in
        backward gets the note. This method also covers the rest of backward and the optimizer.

        Parameters
        ----------
        path
            File to which the page, self-contained HTML, is written. Default: no page is written.

        Examples
        --------
        >>> import torch, offload
        >>> model = torch.nn.Linear(4, 1)
        >>> with offload.enable(model) as handle, handle.explain_oom("oom.html"):
        ...     model(torch.ones(2, 4)).sum().backward()
        """
        record_out_of_memory(self._on_device.device)
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            self._on_device.explain(error, path)
            raise

    def timeline(self, path: str | os.PathLike[str]) -> StepRecording:
        """Record a step and write a timeline: when compute ran and waited, and when bytes were copied.

        In a `with` block the recording ends with the block, so put one training step inside. Otherwise the next step is
        recorded: the recording ends when the second forward pass after this call begins, or at `disable`. Recording
        slows the step down.

        Parameters
        ----------
        path
            ``"step.html"``: a self-contained page. ``"step.json"``: trace events for ui.perfetto.dev.

        Returns
        -------
        StepRecording
            A context manager.

        Raises
        ------
        ValueError
            The path has another ending, or a step is being recorded already.
        OSError
            The file cannot be written.

        Examples
        --------
        >>> import pathlib, tempfile, torch, offload
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)
        >>> with handle.timeline(pathlib.Path(tempfile.mkdtemp()) / "step.html"):
        ...     model(torch.ones(32, 64)).sum().backward()
        >>> handle.disable()
        """
        model = self._enabled_model("timeline")
        if self._recording is not None and self._recording.is_on:
            raise ValueError(f"timeline: {self._recording.path} is being recorded already; let that step end first")
        here = self._on_device
        self._recording = self._enabled.recording = StepRecording(model, here.engine, here.device, tier(here), path)
        return self._recording

    def disable(self) -> None:
        """Undo `enable`; bring parameters, gradients and optimizer state back. Existing graphs still run backward."""
        try:
            self._states.close()
        finally:
            try:
                if self._enabled.parameters is not None:
                    self._enabled.parameters.close()
            finally:
                if self._enabled.is_enabled:
                    self._enabled.disable()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    def __reduce_ex__(self, _protocol: Any) -> Any:  # for copy and pickle
        raise TypeError("a session cannot be copied or saved: keep it out of modules, and enable the copied model")

    def __repr__(self) -> str:
        model = self._enabled.model
        name = type(model).__name__ if model is not None else "a freed model"
        state, asked = make_verdict(self._enabled).state(), wish(self._options)
        return f"<offload.Session of {name} on {self.device}{'' if asked in state else f', {asked}'}: {state}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the repr of the handle, and its report."""
        report = self.report()._repr_html_()  # first: it reads new measurements, which the repr shows too
        return f"<div><code>{escape(repr(self))}</code>{report}</div>"

    # -- used inside the package --------------------------------------------------------------------------------------

    def _enabled_model(self, method: str) -> nn.Module:
        if self._enabled.model is None or not self._enabled.is_enabled:
            raise ValueError(f"{method}: offload is disabled on this model; call offload.enable first")
        return self._enabled.model

    @property
    def _on_device(self) -> DeviceSession:
        return self._enabled.on_device

    @property
    def _options(self) -> Options:
        return self._on_device.options

    @property
    def _engine(self) -> Engine:
        return self._on_device.engine

    @property
    def _counts(self) -> Counts:
        return self._on_device.counts

    @property
    def _controller(self) -> ManualController | PlanController:
        return self._on_device.controller


def _session_on(
    states: StateMovers,
    parameters: ParameterMover | None,
    model: nn.Module,
    device: torch.device,
    options: Options,
    engine: Engine,
    on_recorded: Callable[[StepOrder], None],
) -> DeviceSession:
    link, listener = partial(measure_link, device, options), registry.profile_listener()
    told = partial(oom.tell_at, states, parameters)
    made = DeviceSession(model, device, options, engine, link, on_recorded, make_trial, listener, told, LIMITS, states)
    if parameters is not None and made.held is not None:
        made.held.count_parameters(parameters.bytes_in_memory_max, parameters.bytes_copied_max)
    return made
