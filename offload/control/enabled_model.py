"""Wraps the forward of an enabled model: each training step runs with saved-tensor hooks, as its session decides.

Every call of the model's forward goes through `EnabledModel`. If the model is moved to another device, it gets a new
`DeviceSession` there.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from offload import _core
from offload.control.device_session import DeviceSession
from offload.control.signature import signature_of
from offload.options import Options, check_options
from offload.parameters.mover import ParameterMover
from offload.profiling.profiler import Profiler
from offload.runtime.engine import Engine
from offload.runtime.executor import ScheduleExecutor
from offload.runtime.forward_wrapper import ForwardWrapper
from offload.runtime.hooks import HookContext, Policy, StepHooks, innermost_step_hooks
from offload.runtime.refusals import (
    HOOKS_AROUND,
    check_devices,
    check_hooks,
    devices_of,
    first_device,
    name_of_others,
    named,
    raise_if_forbidden,
)
from offload.runtime.schedule import StepOrder
from offload.runtime.stores import engines, make_engine
from offload.runtime.weak import run_pending_callbacks, weak_callback
from offload.torch_compat import compiled
from offload.torch_compat.autograd import checkpoint_is_innermost, innermost_hooks, is_tracing

__all__ = ["EnabledModel", "StepRecorder"]

log = logging.getLogger("offload")

# Makes the session of one model on one device. Arguments: model, device, options, engine, and a callback that gets
# every recorded step.
MakeDeviceSession = Callable[[nn.Module, torch.device, Options, Engine, Callable[[StepOrder], None]], DeviceSession]


class StepRecorder(Protocol):
    """Records single steps for a timeline."""

    def step_hooks(self, policy: Policy) -> StepHooks | None:
        """Return hooks that record the step; None if the recording is over."""

    def finish(self) -> None:
        """End the recording."""


class EnabledModel:
    """Wraps a model's forward, and holds the `DeviceSession` of the model's device.

    Parameters
    ----------
    asked
        The arguments of `offload.enable`, to be checked again if the model is moved.
    make_device_session
        Called for the model's first device, and for every device that it is moved to.
    is_unused
        Returns whether no enabled model uses a store any more. Then the memory and disk space that the store keeps for
        reuse are freed.
    always
        Whether to wrap the model even with `n_tensors=0`.

    Attributes
    ----------
    step_listeners
        Called with this `EnabledModel` whenever a step has begun.
    calls_parts
        Whether steps, begun by `step`, call parts of the model and not the model: they begin before its first call.
    hooks_around
        Name of the program's own saved-tensor hooks around a step; empty if there were none.
    parameters
        Swaps parameters; None if they stay in memory.
    misplaced, moved
        Messages for the report; empty if there is nothing to say. `misplaced` says that the model is on other devices
        than the engine. `moved` describes the latest move to another device for which a new session was created.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        options: Options,
        engine: Engine,
        asked: Mapping[str, Any],
        owner: object,
        make_device_session: MakeDeviceSession,
        is_unused: Callable[[_core.SwapStore], bool],
        *,
        always: bool,
    ) -> None:
        self._owner = weakref.ref(owner)
        self.is_enabled = True
        self.step_listeners: list[Callable[[EnabledModel], None]] = []
        self.misplaced = ""
        self.moved = ""
        self.compiled_demand: compiled.Demand | None = None
        self.fallbacks = compiled.Fallbacks()
        self.left_to_checkpoint = False
        self.calls_parts = False
        self.hooks_around = ""
        self.recording: StepRecorder | None = None
        self.parameters: ParameterMover | None = None
        self._model = weakref.ref(model)
        self._asked = {**asked, "exclude": options.exclude}
        self._make_device_session = make_device_session
        self._is_unused = is_unused
        self._refused: torch.device | None = None  # the model's device, if no engine could be created there
        self._local = threading.local()
        self.on_device = self._session_on(model, device, options, engine)
        self._wrappers: list[weakref.ref[ForwardWrapper]] = []  # the modules hold them
        self.wraps = options.n_tensors != 0 or always
        self._unwrapped_owner = None if self.wraps else owner  # without wrappers, no module keeps the owner alive
        if self.wraps:  # with n_tensors=0 nothing is wrapped, unless `always` is set
            wrapper = ForwardWrapper(model, self._around_forward)
            self._keep(wrapper, owner)
            for outer in compiled.untraceable_wrappers(model):
                self._keep(ForwardWrapper(outer, partial(self._around_compiled, wrapper)), owner)
            modules = dict(model.named_modules())
            for name in options.exclude:
                self._keep(ForwardWrapper(modules[name], self._around_excluded), owner)

    def _keep(self, wrapper: ForwardWrapper, owner: object) -> None:
        wrapper.owner = owner  # the module holds the wrapper, this object does not: there is no reference cycle
        self._wrappers.append(weakref.ref(wrapper))

    @property
    def owner(self) -> object:
        """The object given as `owner` (the session handle), which lives as long as the model; None after `disable`."""
        return self._owner() if self.is_enabled else None

    @property
    def model(self) -> nn.Module | None:
        """The model, as long as it is alive."""
        return self._model()

    def disable(self) -> None:
        """Remove the wrappers and wait for copies in flight. Existing graphs can still run backward."""
        self.is_enabled = False
        for reference in reversed(self._wrappers):
            wrapper = reference()
            if wrapper is not None:
                wrapper.undo()
        self._wrappers.clear()
        if self.recording is not None:
            self.recording.finish()
        self.on_device.close(trim=self._is_unused(self.on_device.engine.store))

    def _session_on(self, model: nn.Module, device: torch.device, options: Options, engine: Engine) -> DeviceSession:
        # A weak callback: a reference cycle would keep a disabled session and its store alive until the garbage
        # collector runs.
        return self._make_device_session(model, device, options, engine, weak_callback(self._note_compiled))

    def applies(self) -> bool:
        """Return whether offload applies to a forward pass that starts now: only training steps are swapped."""
        model = self.model
        if not (self.is_enabled and self.wraps and model is not None and model.training and torch.is_grad_enabled()):
            return False
        if is_tracing() or self.on_device.is_transformed(needs_hooks=self.parameters is not None):
            return False
        return self._is_in_place(model)

    def _is_in_place(self, model: nn.Module) -> bool:
        """Return whether the engine's device holds the model, or a part of it.

        If the whole model was moved to another device, a new session is created there first.
        """
        device = self.on_device.device
        if not self.misplaced and first_device(model) in (device, None):
            return True
        devices = devices_of(model) or {device}
        if len(devices) == 1 and device not in devices:
            return self._follow(model, *devices)
        self._tell_where(devices)
        return device in devices

    def _tell_where(self, devices: set[torch.device]) -> None:
        """Log, once, that the model is on other devices than the engine's."""
        device, words = self.on_device.device, ""
        if devices != {device}:
            what = f"tensors not on {device} are not swapped" if device in devices else "NOTHING IS SWAPPED"
            words = f"{what}: the model was on {device} and is spread over {named(devices)} now; move it to one device"
        self._refused = None
        self._warn_misplaced(words)

    def _warn_misplaced(self, words: str) -> None:
        if words and words != self.misplaced:
            log.warning("%s", words)
        self.misplaced = words

    def _follow(self, model: nn.Module, device: torch.device) -> bool:
        """Create an engine and a session on the model's new device, and use them from now on.

        Returns False if offload cannot be enabled on that device; the reason is logged once.
        """
        if device == self._refused:
            return False
        before = self.on_device
        try:
            options = check_options(model, check_devices({device}), **self._asked)
            engine = make_engine(device, options)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            self._refused = device
            self._warn_misplaced(
                f"NOTHING IS SWAPPED since the model was moved from {before.device} to {device}: {error}"
            )
            return False
        self.on_device = self._session_on(model, device, options, engine)
        self.compiled_demand = None
        self._refused = None
        self._warn_misplaced("")
        self.moved = (
            f"the model was moved from {before.device} to {device} after {before.counts.steps} steps on "
            f"{before.device}; all figures count from this move"
        )
        log.info("%s", self.moved)
        if self.recording is not None:
            self.recording.finish()
        before.close(trim=self._is_unused(before.engine.store))
        return True

    def note_hooks_around(self) -> None:
        """Store the name of the program's saved-tensor hooks that those of a step replace, and warn of it once."""
        name = self.hooks_around or name_of_others(innermost_hooks())
        if name and not self.hooks_around:
            self.hooks_around = name
            log.warning("%s", HOOKS_AROUND.format(name))

    def current_hooks(self) -> StepHooks | None:
        """Return the innermost hooks of this thread if they belong to this model; else None."""
        current = innermost_step_hooks()
        return current if current is not None and current.policy is self.on_device else None

    def is_removed(self) -> bool:
        """Return whether this thread's innermost hooks of this model were removed before their step ended."""
        reference: weakref.ref[HookContext] | None = getattr(self._local, "hooks", None)
        hooks = reference() if reference is not None else None
        return hooks is not None and hooks.is_removed

    @contextmanager
    def step(self) -> Iterator[StepHooks]:
        """Run one forward pass in a `with` block with the hooks installed. Backward may run after the block."""
        forward = HookedForward(self)
        try:
            with forward as current:
                yield current
                if not current.attached and self.on_device.counts.lacks_step:
                    self.calls_parts = True
        finally:
            forward.__exit__()  # an interrupt may arrive before the `with` block has called `__exit__`

    def _around_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[object]:
        run_pending_callbacks()
        if not self.applies():
            self.on_device.controller.end_finished_profiles()
            self.on_device.rest()
            return nullcontext()
        if self.is_removed():
            return nullcontext()
        if checkpoint_is_innermost():
            self.left_to_checkpoint = True
            return nullcontext()
        current = self.current_hooks()
        if current is None:
            return HookedForward(self, (args, kwargs))
        self.calls_parts = False
        if not current.attached:  # the first forward within `step`
            self.attach(current, args, kwargs)
        return nullcontext()

    @contextmanager
    def _around_compiled(
        self, wrapper: ForwardWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Run around torch.compile's result, without the wrapper of `forward`: the graph is that of the plain model."""
        around = self._around_forward(args, kwargs)
        try:
            with around, wrapper.lifted():
                yield
        finally:
            around.__exit__(None, None, None)  # as in `step`

    def _around_excluded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        return self.on_device.excluded()

    def attach(self, current: StepHooks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a step: choose its schedule by the shapes of the inputs, and attach the observer to its hooks."""
        here, model = self.on_device, self._model()
        here.engine.collect()
        for engine in engines():  # engines share stores: another engine may hold memory that this one needs
            if engine is not here.engine:
                engine.collect()
        here.counts.begun.add(1)
        assert model is not None  # its forward is running
        here.state.expire()
        signature, input_bytes = signature_of(args, kwargs, here.device_type)
        try:
            observer = here.observer(signature, model)
        except BaseException:  # a limit is refused, or an interrupt
            here.counts.begun.add(-1)
            raise
        if isinstance(observer, Profiler):
            observer.note_inputs(input_bytes)
        prefetches = isinstance(observer, ScheduleExecutor) and not observer.schedule.is_serial
        here.counts.attribute_misses(here.engine.misses, prefetches)
        current.attach(observer)
        here.is_bare = type(current) is StepHooks and not here.controller.needs_hooks(signature)  # else it is recorded
        if here.is_bare:
            hooks = current.hooks() if current.hooks is not None else None
            assert hooks is not None  # they are installed: the forward that begins runs under them
            hooks.remove()
            here.counts.bare_steps += 1
        else:
            here.state.look()
            if len(here.state.devices) > 1:
                self._tell_where(set(here.state.devices))
        for tell in tuple(self.step_listeners):  # one may remove itself
            tell(self)

    def _note_compiled(self, order: StepOrder) -> None:
        uses = [(entry.first_backward, entry.nbytes) for entry in order.entries.values()]
        demand = compiled.largest_demand(uses, order.compiled_nodes)
        if demand is not None and demand.is_most:
            if self.compiled_demand is None:
                log.warning("%s", demand)
            self.compiled_demand = demand


class HookedForward(HookContext):
    """One forward pass of a model with the hooks installed. Backward may run after it.

    Parameters
    ----------
    inputs
        The positional and keyword arguments of the forward that begins. If None, those of the first forward inside the
        context are used.
    """

    def __init__(self, enabled: EnabledModel, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> None:
        self._here = enabled.on_device
        made = enabled.recording.step_hooks(self._here) if enabled.recording is not None else None
        hooks, parameters = made if made is not None else StepHooks(self._here), enabled.parameters
        super().__init__(hooks, parameters.hooks_before if parameters is not None else None)
        self._enabled = enabled
        self._inputs = inputs
        self._around: weakref.ref[HookContext] | None = getattr(enabled._local, "hooks", None)
        self._is_over = False

    def __enter__(self) -> StepHooks:  # type: ignore[override]
        enabled = self._enabled
        enabled.fallbacks.step_begins()
        self._here.begin_step()
        try:
            enabled._local.hooks = self._hooks.hooks = weakref.ref(self)
            check_hooks()
            enabled.note_hooks_around()
            super().__enter__()
            if self._inputs is not None:
                enabled.attach(self._hooks, *self._inputs)
        except BaseException as error:  # also an interrupt
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self._hooks

    def __exit__(self, *args: object) -> None:
        """Remove the hooks. May be called again after an interrupt; does nothing once the hooks are removed."""
        if self._is_over:
            return
        try:
            self._leave()
        except BaseException:  # an interrupt
            self._leave()
            raise
        error = args[1] if args else None
        if isinstance(error, MemoryError | RuntimeError):
            self._here.explain(error)
            raise_if_forbidden(error)

    def _leave(self) -> None:
        super().__exit__()
        self._enabled._local.hooks = self._around
        self._enabled.fallbacks.step_ends()
        self._is_over = True
