"""The public interface: enable a model, read what its handle reports, disable it.

A session connects the engine, the controller and the report of one model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from offload.control import registry
from offload.control.controller import PlanController
from offload.control.device_session import DeviceSession
from offload.control.enabled_model import EnabledModel
from offload.control.manual import ManualController
from offload.devices.memory import peak_bytes, record_out_of_memory
from offload.diagnostics.assessment import wish
from offload.diagnostics.device_sessions import make_device_session
from offload.diagnostics.report import Feed, Report
from offload.diagnostics.session_report import make_report, make_verdict, recorded_trace, tier
from offload.diagnostics.step_recording import StepRecording
from offload.optimizer_state.movers import StateMovers
from offload.options import Options, check_optimizers, check_options
from offload.plan import Plan
from offload.plan.trace import Trace
from offload.runtime.counters import Counts
from offload.runtime.engine import Engine
from offload.runtime.refusals import check_model
from offload.runtime.stores import make_engine
from offload.runtime.weak import run_pending_callbacks
from offload.torch_compat import compiled
from offload.units import format_bytes, format_seconds

log = logging.getLogger("offload")

_NO_PLAN_YET = (
    "handle.plan is None: the first training step of a shape is profiled, and its plan is made when the second begins"
)
_NO_PLAN = 'handle.plan is None: n_tensors is the manual mode; for a plan, enable without it, or with lb="auto"'


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
    ) -> None:
        self._feeds: list[Feed] = []
        self._remarks: list[str] = []
        self._told_of_plan = False
        self._recording: StepRecording | None = None
        self._states = states
        self._enabled = EnabledModel(
            model,
            device,
            options,
            engine,
            asked,
            self,
            make_device_session,
            registry.is_unused,
            always=registry.profile_listener() is not None,
        )
        if (held := self._on_device.held) is not None:
            held.count_moving(states.bytes_in_memory_max)

    # -- public -------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device whose memory is saved: that of the model at its latest training forward."""
        return self._enabled.on_device.device

    @contextmanager
    def step(self, *inputs: Any) -> Iterator[None]:
        """Cover everything that autograd saves inside, the loss as well as the model's forward.

        Parameters
        ----------
        *inputs
            The batch. Give it if the step calls parts of the model and not the model itself: the schedule is then
            chosen by the shapes of these tensors. Otherwise the first forward inside the block determines it.

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
            if inputs:
                enabled.attach(current, inputs, {})
            yield

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
        return recorded_trace(self._controller)

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

    @contextmanager
    def explain_oom(self, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
        """If the code inside runs out of memory, explain why: in a note on the exception and on a page.

        `step`, the model's forward, and a load in backward add the note without this. This method also covers the rest
        of backward and the optimizer. Before Python 3.11 exceptions have no notes; the note is logged instead.

        Parameters
        ----------
        path
            Where to write the page, self-contained HTML. Default: none.

        Examples
        --------
        >>> import torch, offload
        >>> model = torch.nn.Linear(4, 1)
        >>> with offload.enable(model) as handle, handle.explain_oom("oom.html"):
        ...     model(torch.ones(2, 4)).sum().backward()
        """
        record_out_of_memory()
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            self._on_device.explain(error, path)
            raise

    def timeline(self, path: str | os.PathLike[str]) -> StepRecording:
        """Record a step and write a timeline: when compute ran and waited, and when bytes were copied.

        In a `with` block the recording ends with the block, so put one training step inside. Otherwise the next step is
        recorded, until the second forward pass from now on begins, or until `disable`. Recording slows the step down.

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
            The path has another ending, or a recording is under way.
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
        model = self._model()
        if not self._enabled.is_enabled or model is None:
            raise ValueError("timeline: offload is disabled on this model; call offload.enable first")
        if self._recording is not None and self._recording.is_on:
            raise ValueError(f"timeline: {self._recording.path} is being recorded already; let that step end first")
        here = self._on_device
        self._recording = self._enabled.recording = StepRecording(model, here.engine, here.device, tier(here), path)
        return self._recording

    def disable(self) -> None:
        """Undo `enable` and bring optimizer state back. Backward still works for graphs that were created before."""
        try:
            self._states.close()
        finally:
            if self._enabled.is_enabled:
                self._enabled.disable()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise TypeError("a session belongs to one model; copy the model and call offload.enable on the copy")

    def __repr__(self) -> str:
        model = self._model()
        name = type(model).__name__ if model is not None else "a freed model"
        state, asked = make_verdict(self._enabled).state(), wish(self._options)
        return f"<offload.Session of {name} on {self.device}{'' if asked in state else f', {asked}'}: {state}>"

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


def enable(
    model: nn.Module,
    *,
    memory_limit: int | float | str | None = None,
    max_slowdown: float | None = None,
    n_tensors: int | None = None,
    lb: int | str | None = None,
    min_tensor_bytes: int | str = "1MiB",
    exclude: Iterable[str] = (),
    host_limit: int | str | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    recompute: Literal["auto", "cheap", False] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    optimizer_state: Literal["auto", True, False] = "auto",
) -> Session:
    """Swap the tensors that `model` saves for backward out of device memory during training.

    Parameters
    ----------
    model
        On one device, ``cpu`` or ``cuda``. It may be moved later. Its parameters and buffers are never swapped.
    memory_limit
        Limit on the memory of the device: bytes, a string such as ``"12GiB"``, or a float as a fraction of the device.
        The fastest plan within it is used. All tensors on the device count: parameters, gradients, optimizer state,
        inputs, temporaries, saved tensors.
    max_slowdown
        Limit on the slowdown of steps, as a fraction. The plan that needs the least memory within it is used. Default:
        0.05 without `memory_limit` and `n_tensors`. With `memory_limit`, both conditions must hold.
    n_tensors
        Manual mode: number of storages to swap per step, longest-lived first. −1 swaps all, 0 disables offload.
    lb
        With `n_tensors`: a copy-in starts this many (at least 1) backward nodes before the tensor is used; 4 if not
        given. ``"auto"``: the first step is profiled, and each copy-in starts as late as possible without a stall;
        tensors that are needed before they could be swapped out are kept. A warning is issued if the peak would exceed
        the device's memory.
    min_tensor_bytes
        Smaller storages are not swapped. Bytes, or a string such as ``"1MiB"``.
    exclude
        Names of submodules, as in ``model.named_modules()``, whose saved tensors are neither swapped nor recomputed.
    host_limit
        Maximum host memory that this process pins (GPU only), in bytes or as a string. Default: half of the available
        RAM or, if less, the unused part of the control group's limit, divided by the number of this job's processes on
        this machine.
    spill_dir
        Folder of the spill file. Default: a folder for temporary files on the CPU; no file on a GPU.
    recompute
        ``"auto"``, the default without `n_tensors`: tensors are dropped and recomputed in backward if that is better
        than swapping them and a trial step has shown that the result has the same bits. ``"cheap"``: the same, but
        matrix products, convolutions and attention are never recomputed. ``False``: swapping only.
    optimizer
        The optimizer of the model, or a list of them. Needed by `optimizer_state`.
    optimizer_state
        ``True``: the state of `optimizer` is in the swap store between its steps; each step brings it back for a few
        parameters at a time. ``False`` and ``"auto"``: it stays in memory.

    Returns
    -------
    Session
        The handle: ``step``, ``report``, ``disable``.

    Raises
    ------
    ValueError, OSError
        An argument is wrong, conflicts with another one or does not fit the machine; nothing is enabled then. If no
        plan stays within `memory_limit`, the model's second forward raises an `InfeasibleLimitError`.
    RuntimeError
        A call of the CUDA driver failed.

    Examples
    --------
    >>> import torch, offload
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    >>> with offload.enable(model, n_tensors=-1, lb=2, min_tensor_bytes="4KiB") as handle:
    ...     model(torch.ones(32, 64)).sum().backward()
    >>> handle.report().swapped.tensors
    2
    """
    asked: dict[str, Any] = {
        "memory_limit": memory_limit,
        "max_slowdown": max_slowdown,
        "n_tensors": n_tensors,
        "lb": lb,
        "min_tensor_bytes": min_tensor_bytes,
        "exclude": exclude,
        "host_limit": host_limit,
        "spill_dir": spill_dir,
        "recompute": recompute,
    }
    optimizers = check_optimizers(model, optimizer, optimizer_state)
    device = check_model(model, [found for each in registry.enabled_models() if (found := each.model) is not None])
    options = check_options(model, device, **asked)
    record_out_of_memory()
    engine = make_engine(device, options)
    states = StateMovers(model, optimizers, partial(make_engine, device, options), options.min_tensor_bytes)
    try:
        session = compiled.untraced(Session, model, device, options, engine, asked, states)
        registry.register(session._enabled)
    except BaseException:
        states.close()
        raise
    return session


def session_of(model: nn.Module) -> Session | None:
    """Return the session of an enabled model; None if it is not enabled."""
    enabled = registry.find(model)
    owner = enabled.owner if enabled is not None else None
    return owner if isinstance(owner, Session) else None


def watch(session: Session, feed: Feed) -> None:
    """Add a loader's counts to the session's report."""
    session._feeds.append(feed)


def remark(session: Session, text: str) -> None:
    """Add a note to the session's report, once."""
    if text not in session._remarks:
        session._remarks.append(text)


def disable(model: nn.Module) -> None:
    """Undo `enable` on this model. Does nothing if it is not enabled."""
    session = session_of(model)
    if session is not None:
        session.disable()
