"""The public interface: enable a model, read what its handle reports, disable it.

A session connects the engine, the controller and the report of one model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from offload.control import registry
from offload.control.controller import PlanController
from offload.control.device_session import DeviceSession
from offload.control.enabled_model import EnabledModel
from offload.control.limits import LIMITS
from offload.control.manual import ManualController
from offload.control.trial import make_trial
from offload.devices.memory import peak_bytes, watch_refusals
from offload.diagnostics import oom
from offload.diagnostics.assessment import wish
from offload.diagnostics.report import Feed, Report
from offload.diagnostics.session_report import make_report, make_verdict, tier
from offload.diagnostics.step_recording import StepRecording
from offload.options import Options, check_options
from offload.plan import Link, Plan
from offload.plan.trace import Trace
from offload.profiling.calibration import measure_link
from offload.runtime.counters import Counts
from offload.runtime.engine import Engine
from offload.runtime.refusals import check_model
from offload.runtime.schedule import StepOrder
from offload.runtime.stores import make_engine
from offload.runtime.weak import run_pending_callbacks
from offload.torch_compat import compiled
from offload.units import format_bytes, format_seconds

log = logging.getLogger("offload")

_NO_PLAN_YET = (
    "handle.plan is None: the first training step of a shape is profiled, and its plan is made when the second begins"
)
_NO_PLAN = 'handle.plan is None: n_tensors is by hand; enable without it, or with lb="auto", for a plan'


class Session:
    """The handle that `offload.enable` returns. Also a context manager: disabled on leaving."""

    def __init__(
        self, model: nn.Module, device: torch.device, options: Options, engine: Engine, asked: Mapping[str, Any]
    ) -> None:
        self._feeds: list[Feed] = []
        self._remarks: list[str] = []
        self._told_of_plan = False
        self._recording: StepRecording | None = None
        self._enabled = EnabledModel(
            model,
            device,
            options,
            engine,
            asked,
            self,
            _session_on,
            registry.is_unused,
            always=registry.profile_listener() is not None,
        )

    # -- what the user calls ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that is swapped from: where the model was at its latest training forward."""
        return self._enabled.on_device.device

    @contextmanager
    def step(self, *inputs: Any) -> Iterator[None]:
        """Cover everything that autograd saves inside, the loss as well as the model's forward.

        Parameters
        ----------
        *inputs
            The batch, for a step that calls parts of the model and not the model itself: the shapes of its tensors
            tell then which schedule applies. Otherwise the first forward inside tells.

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
        """What has been moved since `enable`, what has not and why."""
        run_pending_callbacks()
        return make_report(self._enabled, self._feeds, self._remarks)

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest signature; None, and said in the log once, before its second step and by hand."""
        planned = self._on_device.latest()
        plan = planned.plan if planned is not None else None
        if plan is None and not self._told_of_plan:
            self._told_of_plan = True
            log.warning("%s", _NO_PLAN_YET if isinstance(self._controller, PlanController) else _NO_PLAN)
        return plan

    def trace(self) -> Trace:
        """The latest signature's step as it was profiled, with the durations and the link measured since.

        Raises
        ------
        RuntimeError
            No step has been profiled: none is over yet, or the engine works by hand.
        """
        if not isinstance(self._controller, PlanController):
            raise RuntimeError("n_tensors is by hand and profiles nothing; enable without it for a trace")
        planned = self._controller.latest()
        if planned is None:
            raise RuntimeError(
                "no step has been profiled yet: run one forward and backward pass in training mode first"
            )
        found = planned.link
        return replace(planned.trace(), link=Link(found.out_bandwidth, found.in_bandwidth, found.latency))

    def postfix(self) -> dict[str, str]:
        """What a progress bar may show: peak memory so far, bytes swapped out and seconds stalled since `enable`.

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
        """Explain what is inside, should it run out of memory: in a note on the exception and on a page.

        `step`, the model's forward, and backward where it brings a tensor back add the note by themselves; this covers
        all of backward and the optimizer too. Before Python 3.11, whose exceptions take no notes, the note is logged.

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
        watch_refusals()
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            self._on_device.explain(error, path)
            raise

    def timeline(self, path: str | os.PathLike[str]) -> StepRecording:
        """Record what happens from now on and write it as a timeline: when compute ran and waited, when bytes moved.

        In a `with` block the recording ends with the block, so put one training step inside. Without one it covers the
        next step: it ends when the second forward pass from now on begins, or at `disable`. A recorded step is slower;
        it computes the same.

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
            The path ends in something else, or a recording is under way already.
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
        """Undo `enable`. Graphs made while it was on can still be differentiated."""
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
        name = type(model).__name__ if model is not None else "a model that is gone"
        state, asked = make_verdict(self._enabled).state(), wish(self._options)
        return f"<offload.Session of {name} on {self.device}{'' if asked in state else f', {asked}'}: {state}>"

    # -- what the package asks ----------------------------------------------------------------------------------------

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


def _session_on(
    model: nn.Module,
    device: torch.device,
    options: Options,
    engine: Engine,
    on_recorded: Callable[[StepOrder], None],
) -> DeviceSession:
    link, listener = partial(measure_link, device, options), registry.profile_listener()
    return DeviceSession(model, device, options, engine, link, on_recorded, make_trial, listener, _explain, LIMITS)


def _explain(error: BaseException, at: DeviceSession, path: str | os.PathLike[str] | None) -> None:
    about = (*at.counts.in_step(), at.counts.dropped_in_step())
    oom.tell(error, oom.Subject(at.model, at.engine, at.options, *about), path)


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
) -> Session:
    """Swap the tensors that `model` saves for backward out of device memory while it trains.

    Parameters
    ----------
    model
        On one device, ``cpu`` or ``cuda``; where it is moved later, the engine follows. Its parameters and buffers are
        never moved.
    memory_limit
        The fastest step that fits: bytes, a string such as ``"12GiB"``, or, as a float, a fraction of the device. Hard.
        It counts the tensors on the device: parameters, gradients, optimizer state, inputs, temporaries, what is saved.
    max_slowdown
        The least memory within this slowdown of the unswapped step, as a fraction. The default, with 0.05, where
        nothing is asked for. Beside `memory_limit`: the least memory within both.
    n_tensors
        By hand: storages to swap per step, longest-lived first: −1 all, 0 none (nothing is wrapped at all).
    lb
        Lead: backward nodes between the start of a copy-in and its use, at least 1; 4 if not given. ``"auto"``: the
        first step is profiled, and each tensor starts as late as it can without a stall; one that would be used again
        before it has left stays. A peak above the device's memory is a warning.
    min_tensor_bytes
        Smaller storages stay. Bytes, or a string such as ``"1MiB"``.
    exclude
        Names of submodules, as in ``model.named_modules()``, whose saved tensors stay, and are not recomputed either.
    host_limit
        Most host memory that this process pins (CUDA), in bytes or as a string. Default: the smaller of half of the
        available RAM and what the control group leaves, divided by the processes of this run on this machine.
    spill_dir
        Folder of the spill file. Default: the folder for temporary files on the CPU, no disk tier on CUDA.
    recompute
        ``"auto"``, the default where a plan is made: also drop tensors and recompute them in backward, where that is
        faster than swapping them and a trial step has shown that it gives the same bits. ``"cheap"``: the same without
        matrix products, convolutions and attention. ``False``: swap alone.

    Returns
    -------
    Session
        The handle: ``step``, ``report``, ``disable``.

    Raises
    ------
    ValueError, OSError
        An argument is wrong, contradicts another or does not fit the machine; nothing is enabled then. A
        `memory_limit` that no plan keeps is refused by the model's second forward: an `InfeasibleLimitError`.
    RuntimeError
        The CUDA driver refuses.

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
    device = check_model(model, [found for each in registry.enabled_models() if (found := each.model) is not None])
    options = check_options(model, device, **asked)
    watch_refusals()
    session = compiled.untraced(Session, model, device, options, make_engine(device, options), asked)
    registry.register(session._enabled)
    return session


def session_of(model: nn.Module) -> Session | None:
    """The session of a model on which `enable` is in force; None where it is not."""
    enabled = registry.find(model)
    owner = enabled.owner if enabled is not None else None
    return owner if isinstance(owner, Session) else None


def watch(session: Session, feed: Feed) -> None:
    """Show in the session's report what a loader counts."""
    session._feeds.append(feed)


def remark(session: Session, text: str) -> None:
    """Show a note in the session's report, once."""
    if text not in session._remarks:
        session._remarks.append(text)


def disable(model: nn.Module) -> None:
    """Undo `enable` on this model; nothing happens where it is not enabled."""
    session = session_of(model)
    if session is not None:
        session.disable()
