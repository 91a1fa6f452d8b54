"""One enabled model: what may move, what it has moved, and how to undo it.

On the data path: the model's forward passes through here; each becomes a round of hooks.
"""

from __future__ import annotations

import atexit
import functools
import logging
import operator
import os
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from offload import _core, allocator
from offload.engine import LANE_NICENESS, Engine
from offload.hooks import Round
from offload.options import Options, check_options, is_in_memory
from offload.profiler import Recorder, Schedule
from offload.report import Counts, Report

log = logging.getLogger("offload")

SIGNATURES_MAX = 64

_sessions: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()


class ForwardWrapper:
    """Stands in for a module's `forward` while it is enabled; copies and pickles of the module get the plain one."""

    def __init__(
        self, module: nn.Module, around: Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
    ) -> None:
        self._module = weakref.ref(module)
        self._around = around
        own = module.__dict__.get("forward")
        if isinstance(own, types.MethodType) and own.__self__ is module and own.__func__ is type(module).forward:
            del module.__dict__["forward"]  # what a copy of an enabled module carries: the plain one
        self._was_own = "forward" in module.__dict__
        self._inner = module.__dict__.get("forward") or type(module).forward
        functools.update_wrapper(self, module.forward)
        self.__wrapped__: Callable[..., Any] = (
            self._inner if self._was_own else functools.partial(type(module).forward, weakref.proxy(module))
        )
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._around(args, kwargs):
            if self._was_own:
                return self._inner(*args, **kwargs)
            return self._inner(self._module(), *args, **kwargs)

    def undo(self) -> None:
        """Give the module its own `forward` back."""
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        if self._was_own:
            module.__dict__["forward"] = self._inner
        else:
            del module.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._was_own:
            return self._inner
        module = self._module()
        assert module is not None
        copied: nn.Module = memo.get(id(module), module)
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        if self._was_own:
            return operator.itemgetter(0), ((self._inner,),)
        return getattr, (self._module(), "forward")


class Session:
    """The handle that `offload.enable` returns. Also a context manager: disabled on leaving."""

    def __init__(self, model: nn.Module, device: torch.device, options: Options, engine: Engine) -> None:
        self.options = options
        self.engine = engine
        self.counts = Counts()
        self._model = weakref.ref(model)
        self._device = device
        self._local = threading.local()
        self._parameters: set[int] = set()
        self._schedules: OrderedDict[object, Schedule] = OrderedDict()
        self._recorders: OrderedDict[object, Recorder] = OrderedDict()
        self._warned: set[type] = set()
        self._wrappers: list[ForwardWrapper] = []
        self._enabled = True
        if options.n_tensors != 0:  # 0 is a true no-op: nothing is wrapped
            self._wrappers.append(ForwardWrapper(model, self._around_forward))
            modules = dict(model.named_modules())
            for name in options.exclude:
                self._wrappers.append(ForwardWrapper(modules[name], self._around_excluded))

    # -- what the user calls ------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Cover everything that autograd saves inside, the loss as well as the model's forward.

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
        if not self._applies() or self._current_round() is not None:
            yield
            return
        with self._round():
            yield

    def report(self) -> Report:
        """What has been moved since `enable`, what has not and why."""
        self.engine.collect()
        kept = {reason: replace(count) for reason, count in self.counts.items() if count.tensors}
        return Report(
            steps=self.counts.steps,
            device=str(self._device),
            tier=self._tier(),
            allocator=allocator.describe() if self._device.type == "cpu" else "torch's caching allocator",
            swapped=replace(self.counts.swapped),
            kept=kept,
            deduplicated=replace(self.counts.duplicates),
            peak_saved_bytes=self.engine.resident.peak,
            peak_saved_bytes_unswapped=self.engine.unswapped.peak,
            store=self.engine.store.stats(),
            misses=self.engine.misses,
            prefetched=self.counts.prefetched,
            notes=tuple(self._notes()),
        )

    def disable(self) -> None:
        """Undo `enable`. Graphs made while it was on can still be differentiated."""
        if not self._enabled:
            return
        self._enabled = False
        for wrapper in reversed(self._wrappers):
            wrapper.undo()
        self._wrappers.clear()
        model = self._model()
        if model is not None:
            _sessions.pop(model, None)
        self.engine.drain()
        self.engine.store.trim()

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
        base = tensor._base
        storage_id = Engine.identity(tensor)
        if storage_id in self._parameters or isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter):
            return "parameter"
        if tensor.requires_grad:
            return "leaf" if tensor.is_leaf else None  # somebody wants its gradient, so somebody holds it
        if tensor.grad_fn is None:  # maybe a frozen parameter or a buffer that was put in place meanwhile
            self._refresh_parameters()
            return "parameter" if storage_id in self._parameters else None
        return None

    def is_excluded(self) -> bool:
        """Whether the module now running in this thread is one of `exclude`."""
        return getattr(self._local, "excluded", 0) > 0

    def forget_schedule(self, signature: object) -> None:
        """This signature behaves otherwise than recorded: record it anew at its next step."""
        self._schedules.pop(signature, None)

    def warn_once(self, error: Exception) -> None:
        """Say, once per kind of error, that a tensor stays because the store cannot take it."""
        if type(error) not in self._warned:
            self._warned.add(type(error))
            log.warning("a tensor stays on the device: %s", str(error))  # not its frames, which hold graphs

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _applies(self) -> bool:
        model = self._model()
        return (
            self._enabled
            and self.options.n_tensors != 0
            and model is not None
            and model.training
            and torch.is_grad_enabled()
        )

    def _current_round(self) -> Round | None:
        """The round whose hooks are on top in this thread, where it is one of ours."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        current = getattr(top[0], "__self__", None) if top is not None else None
        return current if isinstance(current, Round) and current.policy is self else None

    @contextmanager
    def _round(self) -> Iterator[Round]:
        current = Round(self)
        self._local.excluded = 0
        with saved_tensors_hooks(current.pack, current.unpack):
            yield current

    def _around_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        if not self._applies() or _checkpoint_is_innermost():
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
        self._refresh_parameters()
        self.counts.steps += 1
        signature = self._signature(args, kwargs)
        recorder = self._recorders.get(signature)
        if recorder is not None and recorder.uses:
            del self._recorders[signature]
            self._schedules[signature] = recorder.schedule(self.options.n_tensors, self.options.lookahead_nodes)
        schedule = self._schedules.get(signature)
        if schedule is not None:
            self._schedules.move_to_end(signature)
            current.attach(signature, schedule, None)
        else:
            recorder = Recorder()
            self._recorders[signature] = recorder
            current.attach(signature, None, recorder)
        for table in (self._schedules, self._recorders):
            while len(table) > SIGNATURES_MAX:
                table.popitem(last=False)

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        leaves = tree_leaves((args, kwargs))
        shapes = tuple((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor))
        return shapes, torch.is_autocast_enabled(self._device.type)

    def _refresh_parameters(self) -> None:
        model = self._model()
        if model is None:
            return
        held = [*model.parameters(), *model.buffers()]
        self._parameters = {Engine.identity(tensor) for tensor in held if _has_storage(tensor)}

    # -- words --------------------------------------------------------------------------------------------------------

    def _tier(self) -> str:
        if self._device.type == "cpu":
            return f"disk ({self.options.spill_dir})"
        return "pinned RAM" + (f", then disk ({self.options.spill_dir})" if self.options.spill_dir else "")

    def _notes(self) -> Iterator[str]:
        counts = self.counts
        if self.options.n_tensors == 0:
            yield "NOTHING IS SWAPPED: n_tensors=0 turns the engine off"
        elif counts.steps == 0:
            yield "NOTHING WAS SWAPPED: no training step has run yet (eval() and no_grad() are left alone)"
        elif counts.swapped.tensors == 0:
            reasons = sorted(counts.items(), key=lambda item: -item[1].nbytes)
            largest = ", ".join(f"{count.tensors} {reason}" for reason, count in reasons[:3] if count.tensors)
            yield f"NOTHING WAS SWAPPED: every saved tensor was kept ({largest or 'none was saved'})"
        if self.engine.failed:
            yield f"{self.engine.failed} tensors stayed because writing them failed: {self.engine.failure}"
        if counts.prefetches_without_memory:
            yield f"{counts.prefetches_without_memory} prefetches found no device memory and were left to demand"
        if self.options.spill_dir and is_in_memory(self.options.spill_dir):
            yield f"{self.options.spill_dir} is in RAM (tmpfs): swapping there frees no memory; give spill_dir"


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def _checkpoint_is_innermost() -> bool:
    """Whether non-reentrant checkpointing listens already; hooks of ours inside would undo it."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def _device_of(model: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if not devices:
        return torch.device("cpu")
    if len(devices) > 1:
        named = ", ".join(sorted(str(device) for device in devices))
        raise ValueError(f"the model is spread over {named}; move it to one device before offload.enable")
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"offload knows cpu and cuda devices, and the model is on {device}; move it with model.to()")
    return device


def _make_engine(device: torch.device, options: Options) -> Engine:
    lanes = _core.HostDriver(niceness=LANE_NICENESS)
    if device.type == "cpu":
        store = _core.SwapStore.direct(lanes, options.spill_dir)
    else:
        driver = _core.cuda_driver(device.index or 0)
        store = _core.SwapStore.slab(driver, lanes, options.host_limit, options.spill_dir)
    engine = Engine(store, device)
    _engines.add(engine)
    return engine


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _quiesce_at_exit() -> None:
    """No copy may read a tensor that interpreter shutdown is about to free."""
    for engine in list(_engines):
        engine.store.quiesce()


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
    memory_limit, max_slowdown
        Automatic planning; not there yet.
    n_tensors
        Storages to swap per step, longest-lived first: −1 all, 0 none (nothing is wrapped at all). Default: all but
        those that backward wants at once.
    lb
        Lead: backward nodes between the start of a copy-in and its use, at least 1, or ``"auto"``.
    min_tensor_bytes
        Smaller storages stay. Bytes, or a string such as ``"1MiB"``.
    exclude
        Names of submodules, as in ``model.named_modules()``, whose saved tensors stay.
    host_limit
        Most host memory to pin (CUDA), in bytes or as a string. Default: the smaller of half of the available RAM and
        what the control group leaves.
    spill_dir
        Folder of the spill file. Default: the folder for temporary files on the CPU, no disk tier on CUDA.

    Returns
    -------
    Session
        The handle: ``step``, ``report``, ``disable``.

    Raises
    ------
    ValueError, OSError
        An argument is wrong, contradicts another or does not fit the machine; nothing is enabled then.
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
    if not isinstance(model, nn.Module):
        raise ValueError(f"offload.enable takes a torch.nn.Module, not {type(model).__name__}")
    if model in _sessions:
        raise ValueError("offload is already enabled on this model; call offload.disable(model) first")
    device = _device_of(model)
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
    session = Session(model, device, options, _make_engine(device, options))
    _sessions[model] = session
    return session


def disable(model: nn.Module) -> None:
    """Undo `enable` on this model; nothing happens where it is not enabled."""
    session = _sessions.get(model)
    if session is not None:
        session.disable()
