"""One enabled model on one device: its engine, the rules for which tensors may be swapped, and its controller.

The saved-tensor hooks ask it which tensors may be swapped. If the model is moved to another device, it gets a new
session.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from offload.control.controller import PlanController
from offload.control.limits import Limits
from offload.control.manual import ManualController
from offload.control.planned_step import PlannedStep
from offload.control.profile_listener import ProfileListener
from offload.control.regions import CompiledRegions
from offload.control.state_plan import StatePlanner
from offload.control.trial import MakeTrial
from offload.optimizer_state.movers import StateMovers
from offload.options import Options
from offload.plan import Link
from offload.profiling.model_state import HeldMemory, ModelState
from offload.runtime.counters import Count, Counts
from offload.runtime.engine import Engine
from offload.runtime.executor import StepObserver
from offload.runtime.hooks import innermost_step_hooks
from offload.runtime.refusals import check_hooks
from offload.runtime.schedule import StepOrder
from offload.torch_compat import late_writes
from offload.torch_compat.allocation_profile import prepare
from offload.torch_compat.compiled import has_compiled_parts
from offload.torch_compat.dispatch import is_transformed
from offload.torch_compat.tensors import has_own_bytes

__all__ = ["TRANSFORMED", "DeviceSession"]

log = logging.getLogger("offload")

TRANSFORMED = (
    "NOTHING IS SWAPPED in a forward pass that a transform of torch.func (vmap, jvp, grad, …) runs, and memory_limit "
    "does not apply to it; handle.step() around a vmap or jvp swaps there too"
)


class DeviceSession:
    """Implements `hooks.Policy` for the steps that begin while the model is on this device.

    Parameters
    ----------
    device
        The device of the model.
    link
        Measures the link for the first plans.
    on_recorded
        Called with every step that has been recorded.
    make_trial
        Begins a trial step, which tests how tensors can be recomputed, or returns the reason why none can run.
    on_profile
        Called with every profile before its plan is made. If given, every model is profiled, even with `n_tensors`.
    explain
        Adds an explanation to an out-of-memory error. If a path is given, it also writes the explanation to this page.
    limits
        Bounds and tolerances of the controller.
    states
        Swaps the state of the model's optimizers; None if all state stays in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        options: Options,
        engine: Engine,
        link: Callable[[int], Link],
        on_recorded: Callable[[StepOrder], None],
        make_trial: MakeTrial,
        on_profile: ProfileListener | None,
        explain: Callable[[BaseException, DeviceSession, str | os.PathLike[str] | None], None],
        limits: Limits,
        states: StateMovers | None = None,
    ) -> None:
        self.device = device
        self.device_type = device.type  # stored: torch builds this string at each access
        self.options = options
        self.engine = engine
        self.counts = Counts()
        self.controller: ManualController | PlanController
        self.held: HeldMemory | None = None
        self.state = ModelState(model)
        self.is_bare = False  # whether the latest step runs without hooks, because its plan swaps nothing
        self._explain = explain
        self._states = states
        self._pid = os.getpid()
        self._model = weakref.ref(model)
        self._local = threading.local()
        self._warned: set[type] = set()
        self._warned_of_transforms = False
        self._watches = late_writes.watch(model) if options.n_tensors != 0 else []
        fixed = options.n_tensors == 0 or (options.n_tensors is not None and options.lookahead_nodes is not None)
        if fixed and on_profile is None:
            self.controller = ManualController(options, engine, self.counts, on_recorded, limits)
        else:
            prepare()
            self.held = HeldMemory(self.state, engine)
            regions = CompiledRegions(options, engine, limits, partial(_is_in_step, weakref.ref(self)))
            look, plan_state = self.held.look, None
            if states is not None:
                latest = partial(_latest, weakref.ref(self))
                plan_state = StatePlanner(states, options, limits, self.counts, latest, self.held)
                if options.memory_limit is not None:
                    self.held.on_found(states.found)
            about = (options, engine, self.counts, on_recorded, link, look, make_trial, regions, on_profile, limits)
            self.controller = PlanController(*about, plan_state)
            controller = self.controller
            self.held.on_optimizer_step(controller.end_profiles, controller.end_finished_profiles)
            if states is not None:
                in_backward = partial(getattr, states, "steps_in_backward")  # an optimizer may be added later
                self.held.count_moving(states.away_bytes, states.bytes_in_memory_max, in_backward=in_backward)

    def latest(self) -> PlannedStep | None:
        """Read all complete measurements; return the planned step used last. None for a `ManualController`."""
        if isinstance(self.controller, PlanController):
            return self.controller.latest()
        self.controller.read_measurements()
        return None

    @property
    def swapped(self) -> Count:
        """Storages swapped out so far, without those whose write failed: `counts` counts them at their packs."""
        counted, engine = self.counts.swapped, self.engine
        return Count(counted.tensors - engine.failed, counted.nbytes - engine.failed_bytes)

    def observer(self, signature: object, model: nn.Module) -> StepObserver:
        """Begin a step: return its observer, and let optimizer state be in memory as the step's plan allows."""
        if self._states is None:
            return self.controller.observer(signature, model)
        self._states.in_passes.prepare()  # before the controller measures the memory in use
        observer = self.controller.observer(signature, model)
        self._states.in_passes.begin()
        return observer

    def rest(self) -> None:
        """Free memory before a forward pass that is not trained, such as an evaluation."""
        self.engine.collect()
        if self._states is not None:
            self._states.in_passes.end()

    def close(self, *, trim: bool) -> None:
        """Stop profiling, and wait for copies in flight. Existing graphs can still run backward.

        Parameters
        ----------
        trim
            Whether to free the memory and disk space that the store keeps for reuse. No other session may use the
            store then.
        """
        for watch in self._watches:
            watch.remove()
        if self.held is not None:
            self.held.close()
        self.controller.end_profiles()
        if isinstance(self.controller, PlanController):
            self.controller.close()
            self.controller.regions.close()
        if os.getpid() != self._pid:
            return  # in a forked child: copies and store belong to the parent process
        self.engine.drain()
        if trim:
            self.engine.store.quiesce()
            self.engine.store.trim()

    @property
    def model(self) -> nn.Module | None:
        """The model, as long as it is alive."""
        return self._model()

    # -- called by hooks (`Policy`) -----------------------------------------------------------------------------------

    def supports(self, tensor: Tensor) -> bool:
        """Return whether the engine can swap tensors of this kind."""
        return tensor.device == self.engine.device and not tensor.is_quantized and has_own_bytes(tensor)

    def why_held(self, tensor: Tensor, storage_id: int) -> str | None:
        """Return why a storage is kept whatever the plan is; None if it may be swapped.

        "parameter" (or buffer, or a view of one) and "leaf": the model or the program holds it too, so that swapping
        would free nothing. "written later": the operator that saves it writes into it afterwards.
        """
        if storage_id in self.state.storages:
            return "parameter"
        if tensor.requires_grad:
            return "leaf" if tensor.is_leaf else None  # the program reads a leaf's gradient, so it holds the leaf
        if tensor.grad_fn is None:  # perhaps a frozen parameter or a buffer added since the last `look`
            if self.state.holds_now(storage_id):
                return "parameter"
            if late_writes.is_writing():
                return "written later"
        return None

    def holds_state(self, storage_id: int) -> bool:
        """Return whether a storage belongs to a parameter or a buffer of the model; always False for FSDP models."""
        return storage_id in self.state.storages and not self.state.is_sharded

    def has_compiled_parts(self) -> bool:
        """Return whether a part of the model is compiled; it may have been compiled since the last step."""
        model = self._model()
        return model is not None and has_compiled_parts(model)

    def asks_modules(self) -> bool:
        """Return whether it also depends on the running module which tensors may be swapped."""
        return bool(self.options.exclude or self._watches)

    def is_excluded(self) -> bool:
        """Return whether the module now running in this thread is one of `exclude`."""
        return getattr(self._local, "excluded", 0) > 0

    def warn_once(self, error: Exception) -> None:
        """Log, once per kind of error, that a tensor stays because it could not be stored."""
        if type(error) not in self._warned:
            self._warned.add(type(error))
            log.warning("a tensor stays on the device: %s", str(error))  # not `error`: its traceback keeps graphs alive

    def explain(self, error: BaseException, path: str | os.PathLike[str] | None = None) -> None:
        """Add an explanation to an out-of-memory `error` as a note; if `path` is given, also write it as a page."""
        self._explain(error, self, path)

    # -- called by the enabled model ----------------------------------------------------------------------------------

    def is_transformed(self, *, needs_hooks: bool) -> bool:
        """Return whether a transform of torch.func runs in this thread, in which nothing is swapped, and log this once.

        The shapes that the model sees there are not those of its tensors in memory, its parameters may be wrapped, and
        some transforms forbid saved-tensor hooks.

        Raises
        ------
        RuntimeError
            The transform forbids hooks, and `needs_hooks` is True, because parameters move.
        """
        if not is_transformed():
            return False
        if needs_hooks:
            check_hooks()
        if not (self._warned_of_transforms or _is_in_step(weakref.ref(self))):
            self._warned_of_transforms = True
            log.warning("%s", TRANSFORMED)
        return True

    def begin_step(self) -> None:
        """Begin a forward pass in this thread, outside of excluded modules.

        Raises
        ------
        DriverError
            The step is captured into a graph. Detected before anything that would invalidate the capture.
        """
        self.engine.require_not_capturing()
        self._local.excluded = 0
        late_writes.begin_forward()
        self.counts.begin_step()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Mark a block in which a module of `exclude` runs, in this thread."""
        self._local.excluded = getattr(self._local, "excluded", 0) + 1
        try:
            yield
        finally:
            self._local.excluded -= 1


def _latest(session: weakref.ref[DeviceSession]) -> PlannedStep | None:
    found = session()
    return found.latest() if found is not None else None


def _is_in_step(session: weakref.ref[DeviceSession]) -> bool:
    """Return whether the innermost saved-tensor hooks of this thread are those of a step of the session."""
    current = innermost_step_hooks()
    return current is not None and current.policy is session()
