"""Settings of torch that choose the kernel of an operator, and so the bits of its result.

Recipes run in backward with the settings with which their operators ran in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

__all__ = ["Settings", "in_force", "restored"]

Settings = tuple[Any, ...]
_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]

# Names in torch's C interface: `_get_NAME` and `_set_NAME`. They choose the library, also for activation functions.
_NAMES = (
    "mkldnn_enabled",
    "mkldnn_deterministic",
    "nnpack_enabled",
    "cudnn_enabled",
    "cudnn_benchmark",
    "cudnn_deterministic",
)
_PRECISIONS = [("generic", "all")] + [
    (backend, operator) for backend in ("mkldnn", "cuda") for operator in ("matmul", "conv", "rnn")
]


def _for_all() -> list[_Setting]:
    named = [(getattr(torch._C, f"_get_{name}", None), getattr(torch._C, f"_set_{name}", None)) for name in _NAMES]
    found: list[_Setting] = [(get, set_) for get, set_ in named if get is not None and set_ is not None]
    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),  # also distinguishes warnings
        *found,
    ]


def _for_heavy() -> list[_Setting]:
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    write = getattr(torch._C, "_set_fp32_precision_setter", None)
    if read is not None and write is not None:
        return [(partial(read, *each), partial(write, *each)) for each in _PRECISIONS]
    return [(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)]


_ALL = _for_all()
_SETTINGS = _ALL + _for_heavy()
_READ_ALL = [read for read, _ in _ALL]
_READ = [read for read, _ in _SETTINGS]


def in_force(*, is_heavy: bool) -> Settings:
    """Return the current settings that affect an operator; heavy operators, such as matrix products, depend on more."""
    return tuple([read() for read in (_READ if is_heavy else _READ_ALL)])


def _apply(wanted: Settings) -> None:
    for (read, write), value in zip(_SETTINGS, wanted, strict=False):
        if read() != value:
            write(value)


@contextmanager
def restored() -> Iterator[Callable[[Settings], None]]:
    """Yield a function that applies settings; restore the current ones afterwards."""
    before = in_force(is_heavy=True)
    try:
        yield _apply
    finally:
        _apply(before)
