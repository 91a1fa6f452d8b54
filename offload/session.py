"""The public functions: enable offload on a model, and disable it."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from offload.control import registry
from offload.devices.allocator import release_free_memory
from offload.diagnostics.report import Feed
from offload.handle import Session
from offload.optimizer_state.movers import NameOf, StateMovers
from offload.options import Parameters, check_optimizers, check_options, check_parameters
from offload.parameters.choice import which_move
from offload.parameters.materialize import Fill
from offload.parameters.mover import ParameterMover
from offload.runtime.refusals import check_model
from offload.runtime.stores import make_engine
from offload.torch_compat import compiled
from offload.torch_compat.vector_math import choose_kernels

__all__ = ["disable", "enable", "materialize", "remark", "session_of", "watch"]

_OF_OPTIMIZER = {"optimizer", "optimizer_state", "step_in_backward", "gradients"}


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
    step_in_backward: bool = False,
    gradients: bool = False,
    parameters: Literal["auto", "all", "frozen", False] = "auto",
) -> Session:
    """Swap the tensors that `model` saves for backward out of device memory during training.

    Parameters
    ----------
    model
        On one device, ``cpu`` or ``cuda``. It may be moved later. Its buffers always stay in memory.
    preset
        A named goal instead of a number. ``"smallest"``: the least memory, at any slowdown. ``"balanced"``, the default
        goal: as much memory saved as possible for about 5 % slower steps. ``"fast"``: the fastest step that fits into
        90 % of the device's memory. Not with `memory_limit`, `max_slowdown` or `n_tensors`.
    memory_limit
        Limit on the memory of the device: bytes, a string such as ``"12GiB"``, or a float as a fraction of the device.
        The fastest plan within it is used. All tensors on the device count: parameters, gradients, optimizer state,
        inputs, temporaries, saved tensors.
    max_slowdown
        Limit on the slowdown of steps, as a fraction. The plan that needs the least memory within it is used. Default:
        0.05 if no other goal is given. With `memory_limit`, both apply. If no plan meets both, the fastest plan within
        `memory_limit` is used, with a warning.
    n_tensors
        Manual mode: number of storages to swap per step, longest-lived first. −1 swaps all, 0 no saved tensor. The
        first step of each shape swaps all of them, to learn their order.
    lb
        With `n_tensors`: each prefetch starts this many backward nodes (at least 1) before the tensor is used; 4 if not
        given. ``"auto"``: the first step is profiled, and each prefetch starts as late as possible without a stall.
        A tensor that backward needs before its copy-out could end is kept. A warning is issued if the peak would exceed
        the device's memory.
    min_tensor_bytes
        Smaller storages are not swapped. Bytes, or a string such as ``"1MiB"``.
    exclude
        Names of submodules, as in ``model.named_modules()``, whose saved tensors are neither swapped nor recomputed.
    host_limit
        Maximum host memory that this process pins (GPU only), in bytes or as a string. By default, all processes of
        this job on this machine have equal shares of the smaller of two amounts: half of the available RAM, and all of
        the unused part of the control group's limit.
    spill_dir
        Folder of the spill file. On the CPU, tensors are swapped out to this file. On a GPU, they are swapped out to
        pinned host memory, and moved from there to the file when this memory is full. Default: a folder for temporary
        files on the CPU; no file on a GPU.
    recompute
        ``"auto"``, the default without `n_tensors`: tensors are dropped and recomputed in backward if a trial step has
        shown that the result has the same bits, and if recomputing them is better than swapping them. ``"cheap"``: the
        same, but matrix products, convolutions and attention are never recomputed. ``False``: swapping only.

    optimizer
        The optimizer of the model, or a list of them. Needed by ``optimizer_state=True``, `step_in_backward`
        and `gradients`.
    optimizer_state
        ``True``: the state of `optimizer` is swapped out between its steps. Each step swaps it in for a few parameters
        at a time. ``"auto"``, the default: with `memory_limit`, a plan swaps out as much state as the limit requires,
        or more if this makes steps over 1 % faster. If `max_slowdown` is given as well, it never swaps out more than
        the limit requires. ``"auto"`` needs no `optimizer`: it applies to every optimizer that steps parameters of the
        model. Without `memory_limit`, or with `step_in_backward`, all state stays in memory. ``False``: all state stays
        in memory.
    step_in_backward
        Whether `optimizer` updates each parameter in backward, as soon as its gradient is complete; the gradient is
        then freed. Gradient accumulation, clipping by the norm of all gradients and a GradScaler then raise a
        `StepInBackwardError`. If a process group is initialized, `enable` raises a `ValueError`.
    gradients
        ``True``, with ``optimizer_state=True``: each complete gradient is swapped out in backward. It is swapped in for
        the update of its parameter, or when the program uses it. ``False``: gradients stay in memory.
    parameters
        ``"frozen"``: parameters with ``requires_grad=False``, of at least `min_tensor_bytes`, are swapped out while no
        module uses them. They are swapped in before the forward of their module, and again in backward if it needs
        them; they are written to the store only once. ``"all"``: trained parameters too, which are written again after
        each update. With `step_in_backward`, a parameter is updated in backward, while it is in memory. With
        ``optimizer_state=True``, `optimizer.step()` swaps in a few parameters at a time, with their state. With
        neither, each parameter is swapped in when the optimizer uses it. ``"auto"``, the default: ``"frozen"`` if
        `memory_limit` is less than the sum of all parameters, all buffers and the gradients of trained parameters
        (gradients do not count with `step_in_backward` or `gradients`); else ``False``. ``False``: all parameters stay
        in memory.

    Returns
    -------
    Session
        The handle: ``step``, ``report``, ``disable``.

    Raises
    ------
    ValueError, OSError
        An argument is wrong, conflicts with another one or does not fit the machine; nothing is enabled then. If no
        plan stays within `memory_limit`, a forward pass (usually the second) raises an `InfeasibleLimitError`.
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
    given = dict(locals())
    asked = {name: given[name] for name in given.keys() - {"model", "parameters"} - _OF_OPTIMIZER}
    optimizers = check_optimizers(model, optimizer, optimizer_state, step_in_backward, gradients)
    check_parameters(parameters)
    device = check_model(model, _enabled_models())
    return _enable(
        model,
        device,
        asked,
        optimizers,
        None,
        optimizer_state=optimizer_state,
        in_backward=step_in_backward,
        parameters=parameters,
        moves_gradients=gradients,
    )


def materialize(
    model: nn.Module,
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    device: torch.device | str = "cpu",
    parameters: Literal["auto", "all", "frozen", False] = "frozen",
    **options: Any,
) -> Session:
    """Load safetensors files into a model that was built on the meta device, and enable offload on it.

    The files are read one tensor at a time. A parameter that offload moves is swapped out before the next tensor is
    read, so the model can be larger than memory. Freeze parameters before the call.

    Parameters
    ----------
    model
        Tensors on the meta device are replaced by tensors with values; all others stay as they are. The new parameters
        are new objects: create the optimizer after this call. `Session.add_optimizer` moves its state.
    weights
        A file, a folder with files ``*.safetensors``, or a list of files. Values are converted to the model's types.
    device
        The device of the new tensors.
    parameters
        As in `enable`; with ``False`` the whole model is in memory.
    **options
        The other arguments of `enable`, by name, except those about the optimizer: `optimizer`, `optimizer_state`,
        `step_in_backward` and `gradients`. With `memory_limit`, optimizer state is moved as with
        ``optimizer_state="auto"``.

    Returns
    -------
    Session
        The handle, as from `enable`.

    Raises
    ------
    ValueError
        An argument is wrong, or model and files do not have the same tensors; the model is as before.
    OSError
        A file cannot be read.

    Examples
    --------
    >>> import pathlib, tempfile, torch, offload
    >>> from safetensors.torch import save_file
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save_file(torch.nn.Linear(64, 64).state_dict(), path)
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(64, 64).requires_grad_(False)
    >>> handle = offload.materialize(model, path, min_tensor_bytes="4KiB")
    >>> handle.report().moved_parameters.tensors
    1
    """
    known = inspect.signature(enable).parameters
    taken = {"model", "parameters"} | _OF_OPTIMIZER
    if unknown := options.keys() - (known.keys() - taken):
        name = min(unknown)
        if name in _OF_OPTIMIZER:
            raise ValueError(
                f"materialize takes no {name}: create the optimizer after this call, and pass it to "
                "handle.add_optimizer"
            )
        raise ValueError(
            f"materialize has no argument {name}; it takes weights, device, parameters, and the arguments of enable "
            "that are not about the optimizer"
        )
    asked = {name: options.get(name, row.default) for name, row in known.items() if name not in taken}
    check_parameters(parameters)
    there = check_model(model, _enabled_models(), will_be_on=torch.device(device))
    fill = Fill(model, weights, there)
    return _enable(model, there, asked, (), fill, optimizer_state="auto", in_backward=False, parameters=parameters)


def _enabled_models() -> list[nn.Module]:
    return [found for each in registry.enabled_models() if (found := each.model) is not None]


def _enable(
    model: nn.Module,
    device: torch.device,
    asked: dict[str, Any],
    optimizers: Sequence[Optimizer],
    fill: Fill | None,
    *,
    optimizer_state: bool | str,
    in_backward: bool,
    parameters: Parameters | Literal[False],
    moves_gradients: bool = False,
) -> Session:
    options = check_options(model, device, **asked)
    choose_kernels()
    keeps_gradients = not (in_backward or moves_gradients)
    limit, least = options.memory_limit, options.min_tensor_bytes
    moved = which_move(model, parameters, limit, min_nbytes=least, keeps_gradients=keeps_gradients)
    engine = make_engine(device, options)
    # Only `offload plan` and `offload fit` set a profile listener. They run a script, stop it once its first steps have
    # been profiled, and make their own plans from the profile. So with ``"auto"`` the session then moves no state.
    is_asked = optimizer_state == "auto" and not in_backward
    is_planned = is_asked and options.memory_limit is not None and registry.profile_listener() is None
    moves_state = optimizer_state is True or is_planned
    make_own = partial(make_engine, device, options)
    used, min_nbytes = optimizers if moves_state or in_backward else (), options.min_tensor_bytes
    how: dict[str, Any] = {"in_backward": in_backward, "moves_gradients": moves_gradients, "is_planned": is_planned}
    states = StateMovers(model, used, make_own, min_nbytes, moves_state=moves_state, limit_bytes=limit, **how)
    mover = None
    try:
        if moved:
            about = (model, make_own(), min_nbytes, NameOf(weakref.ref(model)), options.memory_limit)
            mover = ParameterMover(*about, also_trained=moved == "all")
        if fill is not None:
            fill.run(mover.leave if mover is not None else None)
        if mover is not None or used:
            release_free_memory()  # of the parameters and the state that have just been swapped out
        session = compiled.untraced(Session, model, device, options, engine, asked, states, mover)
        registry.register(session._enabled)
    except BaseException:  # also after an interrupt
        states.close()
        if fill is not None:
            fill.undo()  # before mover.close, which would bring all parameters into memory
        if mover is not None:
            mover.close()
        raise
    return session


def session_of(model: nn.Module) -> Session | None:
    """Return the session of an enabled model; None if it is not enabled."""
    enabled = registry.find(model)
    owner = enabled.owner if enabled is not None else None
    return owner if isinstance(owner, Session) else None


def watch(session: Session, feed: Feed) -> None:
    """Add the counters of a `contrib.Prefetcher` (batches, waits, copied bytes) to the session's report."""
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
