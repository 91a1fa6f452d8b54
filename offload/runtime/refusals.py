"""Refuses models that cannot be enabled, and steps in which hooks are forbidden. Each error says what to do instead.

`enable` checks the model once; every step checks whether hooks are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from offload import _core
from offload.devices.device import is_known
from offload.torch_compat.autograd import hooks_forbidden_reason

FUNCTION_TRANSFORMS = (
    "torch.func.grad, vjp, jacrev and hessian forbid saved-tensor hooks, which offload needs within a step, and always "
    "if it moves parameters: call offload.disable(model) before them and offload.enable after, or use "
    "torch.autograd.grad (with create_graph=True for higher derivatives)"
)

HOOKS_AROUND = (
    "the saved-tensor hooks that the program has set around the model ({}) are not called in its steps, because "
    "autograd calls only the innermost ones; set them inside the model's forward, or disable offload"
)


def check_model(model: object, enabled: Iterable[nn.Module], *, will_be_on: torch.device | None = None) -> torch.device:
    """Check that a model can be enabled beside the models in `enabled`. Returns the model's device.

    Parameters
    ----------
    will_be_on
        The device on which the model is going to be, if its parameters are on the meta device now.

    Raises
    ------
    ValueError
        The model cannot be enabled; the message says what to do.
    """
    if not isinstance(model, nn.Module):
        stage = getattr(model, "submod", None)
        remedy = ": enable its own part of the model, stage.submod" if isinstance(stage, nn.Module) else ""
        raise ValueError(f"offload.enable takes a torch.nn.Module, not {type(model).__name__}{remedy}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"the model is a {type(model).__name__}, and TorchScript has compiled its forward, which offload would "
            "have to replace: train the module that torch.jit.script or torch.jit.trace was given, "
            "offload.enable(module), and compile it after training"
        )
    _check_alone(model, list(enabled))
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel):
            where = "the model" if name == "" else f"the model's {name!r}"
            raise ValueError(
                f"{where} is a DataParallel, which copies the model to several devices at every step; offload serves "
                "one device per process: use torch.nn.parallel.DistributedDataParallel"
            )
    if will_be_on is not None:
        return check_devices({will_be_on, *(devices_of(model) - {torch.device("meta")})})
    return check_devices(devices_of(model))


def _check_alone(model: nn.Module, enabled: list[nn.Module]) -> None:
    if any(model is other for other in enabled):
        raise ValueError("offload is already enabled on this model; call offload.disable(model) first")
    for name, part in model.named_modules():
        if any(part is other for other in enabled):
            raise ValueError(
                f"offload is already enabled on {name!r}, a part of this model, and one engine serves all of it; "
                "call offload.disable on the part first, or do not enable the whole"
            )
    for other in enabled:
        for name, part in other.named_modules():
            if part is model:
                raise ValueError(
                    f"offload is already enabled on a {type(other).__name__} that this model is a part of ({name!r}), "
                    "and one engine serves all of it; call offload.disable on the whole first, or do not enable the "
                    "part"
                )


def first_device(model: nn.Module) -> torch.device | None:
    """Return the device of one parameter or buffer; None if there is none. A hundred times faster than `devices_of`."""
    first = _core.first_tensor(model)
    return first.device if first is not None else None


def devices_of(model: nn.Module) -> set[torch.device]:
    """Return the devices of all parameters and buffers."""
    return {tensor.device for tensor in chain(model.parameters(), model.buffers())}


def check_devices(devices: set[torch.device]) -> torch.device:
    """Check that an engine can be created on `devices`. Returns their only element, or the CPU if there is none.

    Raises
    ------
    ValueError
        There are several devices, or the device is neither cpu nor cuda; the message says what to do.
    """
    if not devices:
        return torch.device("cpu")
    if len(devices) > 1:
        raise ValueError(f"the model is spread over {named(devices)}; move it to one device before offload.enable")
    (device,) = devices
    if device.type == "meta":
        raise ValueError(
            "the model is on meta, so its parameters have no values; use offload.materialize, or model.to_empty() and "
            "load_state_dict, before offload.enable"
        )
    if not is_known(device):
        raise ValueError(f"offload knows cpu and cuda devices, and the model is on {device}; move it with model.to()")
    return device


def named(devices: set[torch.device]) -> str:
    """Return the names of devices, sorted and separated by commas."""
    return ", ".join(sorted(map(str, devices)))


def name_of_others(hooks: tuple[Callable[..., Any], Callable[..., Any]] | None) -> str:
    """Return the name of the pack hook of a pair, with its module; empty if there is none, or if it is offload's."""
    pack = hooks[0] if hooks is not None else None
    if pack is None:
        return ""
    pack = pack.func if isinstance(pack, partial) else pack
    module = getattr(pack, "__module__", None) or type(getattr(pack, "__self__", pack)).__module__
    is_own = module.partition(".")[0] == __name__.partition(".")[0]
    return "" if is_own else f"{module}.{getattr(pack, '__qualname__', type(pack).__name__)}"


def check_hooks() -> None:
    """Check that torch allows saved-tensor hooks in this thread.

    Raises
    ------
    RuntimeError
        Torch forbids them; the message says what to do.
    """
    forbidden = hooks_forbidden_reason()
    if forbidden is not None:
        raise RuntimeError(_with_remedy(forbidden))


def raise_if_forbidden(error: BaseException) -> None:
    """Raise an error with a remedy if a step failed because torch.func forbids hooks inside it.

    Raises
    ------
    RuntimeError
        `error` says that torch.func does not support saved-tensor hooks.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "torch.func" in text and "yet support saved tensor hooks" in text:
        raise RuntimeError(_with_remedy(text)) from error


def _with_remedy(reason: str) -> str:
    if FUNCTION_TRANSFORMS in reason:
        return reason
    if "torch.func" in reason:
        return FUNCTION_TRANSFORMS
    return (
        f"offload needs saved-tensor hooks, and they are forbidden here ({reason}); call offload.disable(model) first"
    )
