"""What a recipe has to know of an operator: what it writes, whether it draws random numbers, whether to trust it.

It is looked up once for each operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload._core import pass_operator

__all__ = ["Operator", "operator_of"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HEAVY = _names(
    """
    mm addmm bmm baddbmm addbmm mv addmv dot addr linear convolution _convolution mkldnn_rnn_layer lstm gru
    _grouped_mm _scaled_mm _flash_attention_forward _efficient_attention_forward cdist
    """
)
HEAVY_BEGINNINGS = ("_scaled_dot_product", "_cudnn_", "cudnn_conv", "mkldnn_", "miopen_conv", "miopen_rnn", "linalg_")
BLANK = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])
# Kernels whose order of summation varies on some device, or that change what a storage is.
REFUSED = _names(
    """
    index_add index_add_ index_reduce index_reduce_ index_put index_put_ _index_put_impl_ put put_ scatter_add
    scatter_add_ scatter_reduce scatter_reduce_ bincount kthvalue _ctc_loss _cudnn_ctc_loss
    nll_loss2d_forward set_ resize_ resize_as_ _resize_output_ _efficientzerotensor
    """
)
# Position of the running statistics, and of the flag that says whether they are only written.
# Positions of arguments that are added, which autograd does not save.
ADDED = {
    "addmm": (0,),
    "addbmm": (0,),
    "baddbmm": (0,),
    "addmv": (0,),
    "convolution": (2,),
    "_convolution": (2,),
    "linear": (2,),
    "mkldnn_convolution": (2,),
}
STATISTICS = {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
    "_native_batch_norm_legit": ((3, 4), 5),
}


@dataclass(frozen=True)
class Operator:
    """Facts about one overload.

    Attributes
    ----------
    writes
        Positions, or names, of the arguments that it changes.
    passes
        Whether it is not recorded: a view, or a higher-order operator.
    is_blank
        Whether it allocates without writing.
    writes_lists
        Whether some of those are lists. Their versions do not move while a mode is on.
    writes_all
        Whether it may write to any argument, whatever its schema says.
    added
        Positions of arguments that autograd does not save, though it saves the others.
    statistics, training
        Running statistics that it updates beside its result, and where the flag stands that says so.
    refusal
        Why no recipe goes through it; empty: one may.
    """

    name: str
    writes: tuple[int | str, ...] = ()
    passes: bool = False
    is_seeded: bool = False
    is_heavy: bool = False
    is_blank: bool = False
    writes_lists: bool = False
    writes_all: bool = False
    added: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    training: int = -1
    refusal: str = ""


_known: dict[Any, Operator] = {}


def operator_of(func: Any) -> Operator:
    """What is known of an overload."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = _look(func)
        if found.passes:
            pass_operator(func)
    return found


def _look(func: Any) -> Operator:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Operator(str(func), passes=True)
    namespace, _, name = schema.name.partition("::")
    writes = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    is_view = not writes and any(result.alias_info is not None for result in schema.returns)
    refusal = ""
    if namespace not in ("aten", "prims"):
        refusal = f"made by {namespace}::{name}, which is not torch's own"
    elif name in REFUSED:
        refusal = f"made by {name}, which may not repeat itself"
    statistics, training = STATISTICS.get(name, ((), -1))
    return Operator(
        name=str(func),
        writes=writes,
        passes=is_view and not refusal,
        is_seeded=torch.Tag.nondeterministic_seeded in func.tags,
        is_heavy=name in HEAVY or name.startswith(HEAVY_BEGINNINGS),
        is_blank=name in BLANK,
        writes_lists=any(
            argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(argument.type, torch.ListType)
            for argument in schema.arguments
        ),
        writes_all="c10d" in namespace,
        added=ADDED.get(name, ()),
        statistics=statistics,
        training=training,
        refusal=refusal,
    )
