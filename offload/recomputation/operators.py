"""Properties of an operator that recipes need: what it writes, whether it is random, whether it can be repeated.

They are determined once for each operator.
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
# Operators whose order of summation or of writes varies on some device, that write to an argument without declaring it,
# or that replace or resize a storage.
REFUSED = _names(
    """
    index_add index_add_ index_reduce index_reduce_ index_put index_put_ _index_put_impl_ put put_ scatter_add
    scatter_add_ scatter_reduce scatter_reduce_ bincount kthvalue _ctc_loss _cudnn_ctc_loss
    nll_loss2d_forward scatter scatter_ index_copy index_copy_ cumsum cumsum_ histc median nanmedian max_unpool2d
    max_unpool3d rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional set_ resize_ resize_as_ _resize_output_
    _efficientzerotensor
    """
)
# Positions of arguments that are only added, so that autograd does not save them.
ADDED = {
    "addmm": (0,),
    "addbmm": (0,),
    "baddbmm": (0,),
    "addmv": (0,),
    "addr": (0,),
    "convolution": (2,),
    "_convolution": (2,),
    "linear": (2,),
    "mkldnn_convolution": (2,),
}
# Positions of the running statistics, and of the flag `training`: if it is set, the statistics are only updated.
STATISTICS = {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
    "_native_batch_norm_legit": ((3, 4), 5),
}


@dataclass(frozen=True)
class Operator:
    """Properties of one operator overload.

    Attributes
    ----------
    writes
        Positions, or names, of the arguments that it changes.
    passes
        Whether it is not recorded: a view, or a higher-order operator.
    is_seeded
        Whether it draws random numbers.
    is_heavy
        Whether it is a matrix product, a convolution, a recurrent layer, attention, or of linear algebra.
    is_convolution
        Whether it is a convolution.
    saves_factors
        Whether autograd saves each tensor argument that is not in `added`, if another one of them has a history.
    is_blank
        Whether it allocates memory without writing to it.
    writes_lists
        Whether some of the arguments in `writes` are lists. While a mode is on, torch does not increment the versions
        of their tensors.
    writes_all
        Whether it may write to any argument, even if its schema does not declare this.
    added
        Positions of arguments that autograd does not save although it saves the others.
    statistics, training
        Positions of running statistics that it updates, and of the flag that says whether it does.
    refusal
        Why no recipe may contain it; empty if one may.
    """

    name: str
    writes: tuple[int | str, ...] = ()
    passes: bool = False
    is_seeded: bool = False
    is_heavy: bool = False
    is_convolution: bool = False
    saves_factors: bool = False
    is_blank: bool = False
    writes_lists: bool = False
    writes_all: bool = False
    added: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    training: int = -1
    refusal: str = ""


_known: dict[Any, Operator] = {}


def operator_of(func: Any) -> Operator:
    """Return the properties of an overload."""
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
    is_heavy = name in HEAVY or name.startswith(HEAVY_BEGINNINGS)
    statistics, training = STATISTICS.get(name, ((), -1))
    return Operator(
        name=str(func),
        writes=writes,
        passes=is_view and not refusal,
        is_seeded=torch.Tag.nondeterministic_seeded in func.tags,
        is_heavy=is_heavy,
        is_convolution=is_heavy and "conv" in name,
        # Of a linear system autograd saves the matrix and the solution, but not the right side.
        saves_factors=is_heavy and not name.startswith("linalg_"),
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
