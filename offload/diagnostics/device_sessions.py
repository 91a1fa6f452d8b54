"""Makes what belongs to one model on one device, with all that explains it. The session and a moved model use it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from offload.control import registry
from offload.control.device_session import DeviceSession
from offload.control.limits import LIMITS
from offload.control.trial import make_trial
from offload.diagnostics import oom
from offload.options import Options
from offload.profiling.calibration import measure_link
from offload.runtime.engine import Engine
from offload.runtime.schedule import StepOrder

__all__ = ["make_device_session"]


def make_device_session(
    model: nn.Module,
    device: torch.device,
    options: Options,
    engine: Engine,
    on_recorded: Callable[[StepOrder], None],
) -> DeviceSession:
    """Return the session of a model on a device; see `DeviceSession`."""
    link, listener = partial(measure_link, device, options), registry.profile_listener()
    return DeviceSession(model, device, options, engine, link, on_recorded, make_trial, listener, _explain, LIMITS)


def _explain(error: BaseException, at: DeviceSession, path: str | os.PathLike[str] | None) -> None:
    about = (*at.counts.in_step(), at.counts.dropped_in_step())
    oom.tell(error, oom.Subject(at.model, at.engine, at.options, *about), path)
