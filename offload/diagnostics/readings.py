"""The part of a session that only reads: the report, the plan, the trace, and figures for progress bars and loggers.

`offload.Session`, the handle, derives from it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from html import escape
from typing import Any

import torch
from torch import nn

from offload.control.controller import PlanController
from offload.control.device_session import DeviceSession
from offload.control.enabled_model import EnabledModel
from offload.control.manual import ManualController
from offload.devices.memory import peak_bytes
from offload.diagnostics.assessment import wish
from offload.diagnostics.metrics import StepLogger
from offload.diagnostics.report import Feed, Report
from offload.diagnostics.session_report import make_report, make_verdict
from offload.optimizer_state.movers import StateMovers
from offload.options import Options
from offload.plan import Link, Plan
from offload.plan.trace import Trace
from offload.runtime.counters import Counts
from offload.runtime.engine import Engine
from offload.runtime.weak import run_pending_callbacks
from offload.units import format_bytes, format_seconds

__all__ = ["Readings"]

log = logging.getLogger("offload")

_NO_PLAN_YET = (
    "handle.plan is None: the first training step of a shape is profiled, and its plan is made when the second begins"
)
_NO_PLAN = 'handle.plan is None: n_tensors is the manual mode; for a plan, enable without it, or with lb="auto"'


class Readings:
    """What a handle tells of its model's steps."""

    _enabled: EnabledModel
    _feeds: list[Feed]
    _remarks: list[str]
    _told_of_plan: bool
    _states: StateMovers

    @property
    def device(self) -> torch.device:
        """The device whose memory is saved: that of the model at its latest training forward."""
        return self._enabled.on_device.device

    def report(self) -> Report:
        """Return what has been swapped since `enable`, and what has not and why."""
        run_pending_callbacks()
        self._states.look()
        return make_report(self._enabled, self._feeds, self._remarks, self._states.counts)

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest signature. None before its second step and with `n_tensors`; logged once."""
        planned = self._on_device.latest()
        plan = planned.plan if planned is not None else None
        if plan is None and not self._told_of_plan:
            self._told_of_plan = True
            log.warning("%s", _NO_PLAN_YET if isinstance(self._controller, PlanController) else _NO_PLAN)
        return plan

    def trace(self) -> Trace:
        """Return the profiled step of the latest signature, with the durations and the link measured since.

        Raises
        ------
        RuntimeError
            No step has been profiled: the first one is not over, or `n_tensors` is given.
        """
        if not isinstance(self._controller, PlanController):
            raise RuntimeError("n_tensors is the manual mode and profiles nothing; for a trace, enable without it")
        planned = self._controller.latest()
        if planned is None:
            raise RuntimeError(
                "no step has been profiled yet: run one forward and backward pass in training mode first"
            )
        found = planned.link
        return replace(planned.trace(), link=Link(found.out_bandwidth, found.in_bandwidth, found.latency))

    def postfix(self) -> dict[str, str]:
        """Return values for a progress bar: peak memory so far, bytes swapped out and seconds stalled since `enable`.

        Examples
        --------
        >>> import torch, offload
        >>> handle = offload.enable(torch.nn.Linear(4, 1))
        >>> sorted(handle.postfix())  # for tqdm: bar.set_postfix(handle.postfix())
        ['peak', 'stalled', 'swapped']
        """
        return {
            "peak": format_bytes(peak_bytes(self._on_device.device)),
            "swapped": format_bytes(self._on_device.counts.swapped.nbytes),
            "stalled": format_seconds(self._on_device.engine.store.stats()["stall_seconds"]),
        }

    def log_to(self, target: Any, *, commit: bool = False) -> None:
        """Log figures of each step from now on: memory at the peak, memory saved, time stalled, slowdown.

        They are logged when the next step begins, as ``offload/peak_mib``, ``offload/saved_mib``,
        ``offload/stalled_ms`` and ``offload/slowdown_percent``.

        Parameters
        ----------
        target
            A ``SummaryWriter`` of TensorBoard, a run of W&B, or a function that is called with the figures by name and
            the number of the step.
        commit
            W&B: False: the figures go with your loop's next ``run.log``. True: they are sent on their own; use it if
            your loop logs nothing.

        Raises
        ------
        TypeError
            `target` is none of these.

        Examples
        --------
        >>> import torch, offload
        >>> model = torch.nn.Linear(4, 1)
        >>> with offload.enable(model) as handle:
        ...     handle.log_to(lambda figures, step: print(step, sorted(figures)))
        ...     for _ in range(2):
        ...         model(torch.ones(2, 4)).sum().backward()
        1 ['offload/peak_mib', 'offload/stalled_ms']
        """
        self._enabled.step_listeners.append(StepLogger(target, commit=commit))

    def __repr__(self) -> str:
        model = self._model()
        name = type(model).__name__ if model is not None else "a freed model"
        state, asked = make_verdict(self._enabled).state(), wish(self._options)
        return f"<offload.Session of {name} on {self.device}{'' if asked in state else f', {asked}'}: {state}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: what the handle is of, and its report."""
        return f"<div><code>{escape(repr(self))}</code>{self.report()._repr_html_()}</div>"

    # -- used inside the package --------------------------------------------------------------------------------------

    def _model(self) -> nn.Module | None:
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
