"""Chooses, with `parameters="auto"`, which parameters of a model leave memory while no module uses them."""

from __future__ import annotations

import logging
from typing import Literal

from torch import nn

from offload.runtime.engine import has_storage, storage_bytes
from offload.torch_compat.modules import state_tensors
from offload.units import format_bytes

__all__ = ["which_move"]

log = logging.getLogger("offload")


def which_move(
    model: nn.Module,
    parameters: Literal["auto", "all", "frozen", False],
    limit_bytes: int | None,
    *,
    min_nbytes: int,
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
    min_nbytes
        Smaller parameters stay.
    keeps_gradients
        Whether all gradients are in memory at the end of backward.

    Returns
    -------
    str or False
        For "auto": "frozen" if the model has frozen parameters that can move and its tensors alone exceed the limit.
        Otherwise False. These tensors are its parameters and buffers and, with `keeps_gradients`, the gradients of its
        trained parameters. Shards of FSDP are neither added to them nor moved.
    """
    if parameters != "auto":
        return parameters
    if limit_bytes is None:
        return False
    own, buffers = state_tensors(model)
    plain = [each for each in own if has_storage(each)]
    if not any(each.nbytes >= min_nbytes and not each.requires_grad for each in plain):
        return False
    held_bytes = sum(storage_bytes([*own, *buffers]).values())
    held_bytes += sum(each.nbytes for each in plain if each.requires_grad and keeps_gradients)
    if held_bytes <= limit_bytes:
        return False
    log.info(
        'parameters="auto": parameters, buffers and gradients take %s, more than memory_limit; frozen parameters are '
        "swapped out while no module uses them",
        format_bytes(held_bytes),
    )
    return "frozen"
