"""Which parameters of a model are to leave memory while no module uses them, if the caller leaves the choice."""

from __future__ import annotations

import logging
from typing import Literal

from torch import nn

from offload.runtime.engine import storage_bytes
from offload.torch_compat.modules import state_tensors
from offload.units import format_bytes

__all__ = ["which_move"]

log = logging.getLogger("offload")


def which_move(
    model: nn.Module,
    parameters: Literal["auto", "all", "frozen", False],
    limit_bytes: int | None,
    *,
    keeps_gradients: bool,
) -> Literal["all", "frozen", False]:
    """Return which parameters move; for "auto", those that must.

    Parameters
    ----------
    model
        May be on the meta device.
    parameters
        The caller's argument.
    limit_bytes
        The memory limit in bytes; None if there is none.
    keeps_gradients
        Whether all gradients are in memory at the end of backward.

    Returns
    -------
    str or False
        For "auto": "frozen" if parameters, buffers and gradients alone exceed the limit, so that no plan could keep it
        otherwise, and parameters are frozen. Else False.
    """
    if parameters != "auto":
        return parameters
    if limit_bytes is None:
        return False
    own, buffers = state_tensors(model)
    if all(each.requires_grad for each in own):
        return False
    held_bytes = sum(storage_bytes([*own, *buffers]).values())
    held_bytes += sum(each.nbytes for each in own if each.requires_grad and keeps_gradients)
    if held_bytes <= limit_bytes:
        return False
    log.info(
        'parameters="auto": parameters, buffers and gradients take %s, more than memory_limit; frozen parameters are '
        "swapped out while no module uses them",
        format_bytes(held_bytes),
    )
    return "frozen"
