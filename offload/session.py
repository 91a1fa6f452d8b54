"""The public interface: enable a model, read what its handle reports, disable it.

A session connects the engine, the controller and the report of one model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from offload.control import registry
from offload.control.device_session import DeviceSession
from offload.control.enabled_model import EnabledModel
from offload.control.limits import LIMITS
from offload.control.trial import make_trial
from offload.devices.memory import record_out_of_memory
from offload.diagnostics import oom
from offload.diagnostics.live import LivePublisher
from offload.diagnostics.readings import Readings
from offload.diagnostics.report import Feed
from offload.diagnostics.session_report import tier
from offload.diagnostics.step_recording import StepRecording
from offload.optimizer_state.movers import StateMovers
from offload.options import Options, check_optimizers, check_options
from offload.profiling.calibration import measure_link
from offload.runtime.engine import Engine
from offload.runtime.refusals import check_model
from offload.runtime.schedule import StepOrder
from offload.runtime.stores import make_engine
from offload.torch_compat import compiled

log = logging.getLogger("offload")


class Session(Readings):
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
            _session_on,
            registry.is_unused,
            always=registry.profile_listener() is not None,
        )
        self._enabled.step_listeners.append(LivePublisher())
        if (held := self._on_device.held) is not None:
            held.count_moving(states.bytes_in_memory_max)

    # -- public -------------------------------------------------------------------------------------------------------

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
    preset: Literal["smallest", "balanced", "fast"] | None = None,
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
    preset
        The goal in a word, instead of a number. ``"smallest"``: the least memory, at any slowdown. ``"balanced"``: as
        much memory saved as possible for about 5 % slower steps, the default. ``"fast"``: the fastest step that fits
        into 90 % of the device's memory. Not with `memory_limit`, `max_slowdown` or `n_tensors`.
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
    asked = {k: v for k, v in locals().items() if k not in ("model", "optimizer", "optimizer_state")}
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
