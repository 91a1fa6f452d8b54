"""One enabled model: what may move, what it has moved, and how to undo it.

On the data path: the model's forward passes through here; each becomes a round of hooks.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from offload import allocator, compiled, planning
from offload.answers import Answers
from offload.assessment import weigh_process
from offload.calibration import calibrate
from offload.course import Course
from offload.device_memory import watch_refusals
from offload.engine import Engine, has_storage
from offload.forward_wrapper import ForwardWrapper
from offload.held import HeldMemory
from offload.hooks import Round, RoundHooks
from offload.options import Options, check_options, is_in_memory
from offload.plan import Link, Plan
from offload.planning import ByHand, ByPlan, Pursuit, Signature
from offload.refusals import check_model, hooks_allowed
from offload.report import Counts, Feed, Report
from offload.schedule import StepOrder
from offload.stores import make_engine, make_store
from offload.trace import Trace
from offload.weak import weakly

log = logging.getLogger("offload")

UNHELD_MAX = 4096

_kept: list[tuple[nn.Module, Session]] = []  # whose one profiled step is to be looked at after its script has ended
_sessions: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()


class Session(Answers):
    """The handle that `offload.enable` returns. Also a context manager: disabled on leaving."""

    def __init__(self, model: nn.Module, device: torch.device, options: Options, engine: Engine) -> None:
        self.options = options
        self.engine = engine
        self.counts = Counts()
        self._model = weakref.ref(model)
        self._device = device
        self._local = threading.local()
        self._parameters: set[int] = set()
        # Looked for among all of the model's in vain: a step must not do that once for each of its masks. A storage
        # that became a parameter since is seen at the next forward.
        self._unheld: set[int] = set()
        self._held: HeldMemory | None = None
        self._planning: ByHand | ByPlan
        # Weakly: in a circle with it, a disabled session would keep its store until a collection.
        fixed = options.n_tensors == 0 or (options.n_tensors is not None and options.lookahead_nodes is not None)
        if fixed and planning.on_profile is None:
            self._planning = ByHand(options, engine, self.counts, weakly(self._note_compiled))
        else:
            self._held = HeldMemory(model, engine)
            self._planning = ByPlan(
                options,
                engine,
                self.counts,
                weakly(self._note_compiled),
                partial(_measure_link, device, options),
                self._held.look,
            )
            self._held.on_optimizer_step(self._planning.stop)
        self._warned: set[type] = set()
        self._compiled_demand: compiled.Demand | None = None
        self._left_to_checkpoint = False
        self._wrappers: list[ForwardWrapper] = []
        self._feeds: list[Feed] = []
        self._remarks: list[str] = []
        self._problems: list[str] = []
        self._enabled = True
        self._wraps = options.n_tensors != 0 or planning.on_profile is not None
        if self._wraps:  # 0 is a true no-op: nothing is wrapped
            self._wrappers.append(ForwardWrapper(model, self._around_forward))
            modules = dict(model.named_modules())
            for name in options.exclude:
                self._wrappers.append(ForwardWrapper(modules[name], self._around_excluded))

    # -- what the user calls ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that the model was on when it was enabled."""
        return self._device

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
        if not self._applies() or self._current_round() is not None or self._is_bare():
            yield
            return
        with self._round() as current:
            if inputs:
                self._attach(current, inputs, {})
            yield

    def watch(self, feed: Feed) -> None:
        """Show in the report what a loader counts."""
        self._feeds.append(feed)

    def remark(self, text: str) -> None:
        """Show a note in the report, once."""
        if text not in self._remarks:
            self._remarks.append(text)

    def problem(self, text: str) -> None:
        """Say in the report's verdict that something is wrong, once."""
        if text not in self._problems:
            self._problems.append(text)

    def report(self) -> Report:
        """What has been moved since `enable`, what has not and why."""
        self.engine.collect()
        kept = {reason: replace(count) for reason, count in self.counts.items() if count.tensors}
        self._planning.settle()
        self.counts.attribute_misses(self.engine.misses)
        return Report(
            verdict=weigh_process(self._verdict()),
            steps=self.counts.steps,
            device=str(self._device),
            tier=self._tier(),
            allocator=allocator.describe() if self._device.type == "cpu" else "torch's caching allocator",
            swapped=replace(self.counts.swapped),
            kept=kept,
            deduplicated=replace(self.counts.duplicates),
            store=self.engine.store_stats(),
            misses=self.engine.misses,
            prefetched=self.counts.prefetched,
            loaded_late=self.counts.loaded_late,
            prefetched_late=self.counts.prefetched_late,
            unmeasured_steps=self.counts.unmeasured_steps,
            profiled_steps=self.counts.profiled_steps,
            borrowed_steps=self.counts.borrowed_steps,
            bare_steps=self.counts.bare_steps,
            steps_measured=tuple(self.counts.steps_measured),
            notes=tuple(self._notes()),
            feed=Feed.total(self._feeds),
        )

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest signature; None before its second step, and by hand."""
        pursuit = self.settle()
        return pursuit.plan if pursuit is not None else None

    def settle(self) -> Pursuit | None:
        """Read what the last steps have measured; the pursuit of the latest signature, None by hand."""
        return self._planning.settle() if isinstance(self._planning, ByPlan) else None

    def trace(self) -> Trace:
        """The latest signature's step as it was profiled, with the durations measured since.

        Raises
        ------
        RuntimeError
            No step has been profiled: none is over yet, or the engine works by hand.
        """
        if not isinstance(self._planning, ByPlan):
            raise RuntimeError("n_tensors is by hand and profiles nothing; enable without it for a trace")
        pursuit = self._planning.settle()
        if pursuit is None:
            raise RuntimeError(
                "no step has been profiled yet: run one forward and backward pass in training mode first"
            )
        return self._planning.trace(pursuit)

    def disable(self) -> None:
        """Undo `enable`. Graphs made while it was on can still be differentiated."""
        if not self._enabled:
            return
        self._enabled = False
        for wrapper in reversed(self._wrappers):
            wrapper.undo()
        self._wrappers.clear()
        if self._held is not None:
            self._held.close()
        self._planning.stop()
        model = self._model()
        if model is not None:
            _sessions.pop(model, None)
        if self._recording is not None:
            self._recording.finish()
        self.engine.drain()
        store = self.engine.store
        if not any(session.engine.store is store for session in list(_sessions.values())):
            store.quiesce()
            store.trim()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise TypeError("a session belongs to one model; copy the model and call offload.enable on the copy")

    # -- what hooks ask -----------------------------------------------------------------------------------------------

    def supports(self, tensor: Tensor) -> bool:
        """Whether the engine can move tensors of this kind."""
        return (
            tensor.device == self._device
            and not tensor.is_quantized
            and not tensor._is_zerotensor()
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        )

    def why_held(self, tensor: Tensor) -> str | None:
        """Who holds this storage anyway: "parameter" (or buffer, or a view of one, as they are now) or "leaf"."""
        storage_id = Engine.identity(tensor)
        if storage_id in self._parameters:
            return "parameter"
        if tensor.requires_grad:
            return "leaf" if tensor.is_leaf else None  # somebody wants its gradient, so somebody holds it
        if tensor.grad_fn is None:  # maybe a frozen parameter or a buffer that was put in place meanwhile
            if storage_id in self._unheld:
                return None
            self._refresh_parameters()
            if storage_id in self._parameters:
                return "parameter"
            if len(self._unheld) >= UNHELD_MAX:
                self._unheld.clear()
            self._unheld.add(storage_id)
        return None

    def is_excluded(self) -> bool:
        """Whether the module now running in this thread is one of `exclude`."""
        return getattr(self._local, "excluded", 0) > 0

    def warn_once(self, error: Exception) -> None:
        """Say, once per kind of error, that a tensor stays because the store cannot take it."""
        if type(error) not in self._warned:
            self._warned.add(type(error))
            log.warning("a tensor stays on the device: %s", str(error))  # not its frames, which hold graphs

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _applies(self) -> bool:
        model = self._model()
        return self._enabled and self._wraps and model is not None and model.training and torch.is_grad_enabled()

    def _current_round(self) -> Round | None:
        """The round whose hooks are on top in this thread, where it is one of ours."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        current = getattr(top[0], "__self__", None) if top is not None else None
        return current if isinstance(current, Round) and current.policy is self else None

    def _is_bare(self) -> bool:
        """Whether the innermost round of this thread has taken its hooks off."""
        reference: weakref.ref[RoundHooks] | None = getattr(self._local, "hooks", None)
        hooks = reference() if reference is not None else None
        return hooks is not None and hooks.is_bare

    @contextmanager
    def _round(self) -> Iterator[Round]:
        current = self._make_round(self)
        self._local.excluded = 0
        self.counts.begin_round()
        hooks = RoundHooks(current)
        around = getattr(self._local, "hooks", None)
        self._local.hooks = current.hooks = weakref.ref(hooks)
        try:
            with hooks_allowed(), hooks:
                yield current
        except (MemoryError, RuntimeError) as error:
            self.explain(error)
            raise
        finally:
            self._local.hooks = around

    def _around_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        if not self._applies():
            self._planning.pause()
            return nullcontext()
        if self._is_bare():
            return nullcontext()
        if _checkpoint_is_innermost():
            self._left_to_checkpoint = True
            return nullcontext()
        current = self._current_round()
        if current is None:
            return self._own_round(args, kwargs)
        if not current.attached:  # the first forward within `step`
            self._attach(current, args, kwargs)
        return nullcontext()

    @contextmanager
    def _own_round(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        with self._round() as current:
            self._attach(current, args, kwargs)
            yield

    @contextmanager
    def _around_excluded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        self._local.excluded = getattr(self._local, "excluded", 0) + 1
        try:
            yield
        finally:
            self._local.excluded -= 1

    def _attach(self, current: Round, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.engine.collect()
        self.counts.steps += 1
        model = self._model()
        assert model is not None  # its forward is running
        signature = self._signature(args, kwargs)
        follower = self._planning.follower(signature, model)
        self.counts.attribute_misses(self.engine.misses, isinstance(follower, Course))
        current.attach(follower)
        if type(current) is Round and not self._planning.needs_hooks(signature):  # a watched one shows the step anyway
            hooks = current.hooks() if current.hooks is not None else None
            assert hooks is not None  # they are on: the forward that begins runs within them
            hooks.take_off()
            self.counts.bare_steps += 1
        else:
            self._refresh_parameters()

    def _note_compiled(self, order: StepOrder) -> None:
        uses = [(entry.first_use, entry.nbytes) for entry in order.entries.values()]
        demand = compiled.largest_demand(uses, order.compiled_nodes)
        if demand is not None and demand.is_most:
            if self._compiled_demand is None:
                log.warning("%s", demand)
            self._compiled_demand = demand

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        # Of what is no tensor, what chooses a branch and comes in few values.
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor | bool | None)]
        leaves = [leaf for leaf in given if isinstance(leaf, Tensor)]
        kinds = tuple((leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in given)
        return Signature(
            shapes=tuple(tuple(leaf.shape) for leaf in leaves),
            kinds=(*kinds, torch.is_autocast_enabled(self._device.type)),
            input_bytes=sum(leaf.nbytes for leaf in leaves if has_storage(leaf)),
        )

    def _refresh_parameters(self) -> None:
        model = self._model()
        if model is None:
            return
        held = [*model.parameters(), *model.buffers()]
        self._parameters = {Engine.identity(tensor) for tensor in held if has_storage(tensor)}

    # -- words --------------------------------------------------------------------------------------------------------

    def _tier(self) -> str:
        if self._device.type == "cpu":
            return f"disk ({self.options.spill_dir})"
        return "pinned RAM" + (f", then disk ({self.options.spill_dir})" if self.options.spill_dir else "")

    def _notes(self) -> Iterator[str]:
        counts = self.counts
        if self.options.n_tensors == 0:
            yield "NOTHING IS SWAPPED: n_tensors=0 turns the engine off"
        elif counts.steps == 0 and self._left_to_checkpoint:
            yield (
                "NOTHING WAS SWAPPED: the whole model runs inside torch.utils.checkpoint, which saves its input alone; "
                "checkpoint blocks inside the model instead, or none"
            )
        elif counts.steps == 0:
            yield (
                "NOTHING WAS SWAPPED: no training step has run yet (eval() and no_grad() are left alone, and so is a "
                "compiled wrapper that is called from inside another compiled function: enable the inner model then)"
            )
        elif counts.swapped.tensors == 0:
            reasons = sorted(counts.items(), key=lambda item: -item[1].nbytes)
            largest = ", ".join(f"{count.tensors} {reason}" for reason, count in reasons[:3] if count.tensors)
            yield f"NOTHING WAS SWAPPED: every saved tensor was kept ({largest or 'none was saved'})"
        if counts.bare_steps:
            bare = f"{counts.bare_steps} of {counts.steps} steps ran without them"
            yield f"the plan swaps nothing: hooks are off ({bare})"
        if self._compiled_demand is not None:
            yield str(self._compiled_demand)
        if isinstance(self._planning, ByPlan) and not self._planning.knows_temporaries:
            yield (
                "a step was profiled while another profiler ran, or left before its backward had ended: its "
                "temporaries are unknown to the plan, and memory_limit does not count them"
            )
        if self.engine.failed:
            yield f"{self.engine.failed} tensors stayed because writing them failed: {self.engine.failure}"
        if counts.prefetches_without_memory:
            yield f"{counts.prefetches_without_memory} prefetches found no device memory and were left to demand"
        if self.options.spill_dir and is_in_memory(self.options.spill_dir):
            yield f"{self.options.spill_dir} is in RAM (tmpfs): swapping there frees no memory; give spill_dir"
        for feed in self._feeds:
            yield from feed.notes()
        yield from self._remarks


def _measure_link(device: torch.device, options: Options) -> Link:
    # A store of its own: nothing else uses it, and the report tells of the training's copies alone.
    # Copies of a GPU's memory take no processor that computes.
    slows = device.type == "cpu" and torch.get_num_threads() >= len(os.sched_getaffinity(0))
    return calibrate(make_store(device, options), device, options.spill_dir).link(slows=slows)


def _checkpoint_is_innermost() -> bool:
    """Whether non-reentrant checkpointing listens already; hooks of ours inside would undo it."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


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
) -> Session:
    """Swap the tensors that `model` saves for backward out of device memory while it trains.

    Parameters
    ----------
    model
        On one device, ``cpu`` or ``cuda``. Its parameters and buffers are never moved.
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
        Names of submodules, as in ``model.named_modules()``, whose saved tensors stay.
    host_limit
        Most host memory that this process pins (CUDA), in bytes or as a string. Default: the smaller of half of the
        available RAM and what the control group leaves, divided by the processes of this run on this machine.
    spill_dir
        Folder of the spill file. Default: the folder for temporary files on the CPU, no disk tier on CUDA.

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
    device = check_model(model, _sessions.keys())
    options = check_options(
        model,
        device,
        memory_limit=memory_limit,
        max_slowdown=max_slowdown,
        n_tensors=n_tensors,
        lb=lb,
        min_tensor_bytes=min_tensor_bytes,
        exclude=exclude,
        host_limit=host_limit,
        spill_dir=spill_dir,
    )
    watch_refusals()
    session = compiled.untraced(Session, model, device, options, make_engine(device, options))
    _sessions[model] = session
    if planning.on_profile is not None:
        _kept.append((model, session))
    return session


def session_of(model: nn.Module) -> Session | None:
    """The session of a model on which `enable` is in force; None where it is not."""
    return _sessions.get(model)


def settle_all() -> None:
    """Read what the last step of every model has measured that was enabled while `planning.on_profile` was set."""
    while _kept:
        _kept.pop()[1].settle()  # disabled or not


def disable(model: nn.Module) -> None:
    """Undo `enable` on this model; nothing happens where it is not enabled."""
    session = _sessions.get(model)
    if session is not None:
        session.disable()
