"""Settings of torch that choose the kernel of an operator, and so the bits of its result.

Recipes run in backward with the settings with which their operators ran in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

__all__ = ["FILL_BYTE", "Settings", "filling", "in_force", "memory_filled", "readers", "restored"]

FILL_BYTE = 0xFF  # with which torch fills new memory of type uint8, see `memory_filled`

Settings = tuple[Any, ...]
_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]

# Names in torch's C interface: `_get_NAME` and `_set_NAME`. They choose the library, also for activation functions.
_HAS_CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_NAMES = ("mkldnn_enabled", *(("cudnn_enabled",) if _HAS_CUDA else ()))
# Only matrix products, convolutions, attention and recurrent layers depend on these.
_NAMES_FOR_HEAVY = (
    "mkldnn_deterministic",
    "nnpack_enabled",
    "cpu_allow_fp16_reduced_precision_reduction",
    "math_sdp_allow_fp16_bf16_reduction",
    *(
        (
            "cudnn_benchmark",
            "cudnn_deterministic",
            "cublas_allow_fp16_reduced_precision_reduction",
            "cublas_allow_bf16_reduced_precision_reduction",
            "cublas_allow_fp16_accumulation",
            "blas_preferred_backend",
            "linalg_preferred_backend",
        )
        if _HAS_CUDA
        else ()
    ),
)
_PRECISIONS = [("generic", "all")] + [
    (backend, operator)
    for backend in (("mkldnn", "cuda") if _HAS_CUDA else ("mkldnn",))
    for operator in ("matmul", "conv", "rnn")
]


def _named(names: tuple[str, ...]) -> list[_Setting]:
    found = [(getattr(torch._C, f"_get_{name}", None), getattr(torch._C, f"_set_{name}", None)) for name in names]
    return [(get, partial(_set, set_)) for get, set_ in found if get is not None and set_ is not None]


def _set(set_: Callable[..., Any], value: Any) -> None:
    """Call a setter. Of some settings the getter returns a tuple, the arguments of the setter."""
    set_(*value) if isinstance(value, tuple) else set_(value)


_SMALL, _SMALLER, _LARGE = 1e-300, 1e-10, 1e20  # names, so that Python does not compute the product when it compiles


def _scaled_denormal() -> float:
    """Return 0.0 if this thread flushes denormal numbers to zero, which torch sets and does not tell; else 1e-290."""
    return _SMALL * _SMALLER * _LARGE


def _set_flushing(scaled_denormal: float) -> None:
    torch.set_flush_denormal(scaled_denormal == 0.0)


def _warn_only(value: bool) -> None:
    torch._C._set_deterministic_algorithms(torch._C._get_deterministic_algorithms(), warn_only=value)


def _for_all() -> list[_Setting]:
    return [  # the other getters are C functions, which take a tenth of the time of Python functions
        (_scaled_denormal, _set_flushing),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch._C._get_deterministic_algorithms, torch._C._set_deterministic_algorithms),  # resets the next setting
        (torch._C._get_deterministic_algorithms_warn_only, _warn_only),
        *_named(_NAMES),
    ]


def _for_heavy() -> list[_Setting]:
    # oneDNN's recurrent layers have different kernels for training and inference, whose results differ in some bits.
    gradients: _Setting = torch.is_grad_enabled, torch._C._set_grad_enabled
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    precisions = [(partial(read, *each), partial(write, *each)) for each in _PRECISIONS]
    return [gradients, *_named(_NAMES_FOR_HEAVY), *precisions]


_ALL = _for_all()
_SETTINGS = _ALL + _for_heavy()
_READ_ALL = [read for read, _ in _ALL]
_READ = [read for read, _ in _SETTINGS]


def in_force(*, is_heavy: bool) -> Settings:
    """Return the current settings that affect an operator; heavy operators, such as matrix products, depend on more."""
    return tuple([read() for read in (_READ if is_heavy else _READ_ALL)])


def may_choose_otherwise() -> bool:
    """Return whether cuDNN chooses the kernel of a convolution by timing, anew in each thread (`cudnn.benchmark`)."""
    return _HAS_CUDA and torch._C._get_cudnn_benchmark()


def readers() -> tuple[Callable[[], Any], ...]:
    """Return the functions that read the settings, in the order of `in_force`."""
    return tuple(_READ)


def filling(settings: Settings) -> Settings:
    """Return `settings` with deterministic algorithms, with which torch fills new memory (`memory_filled`)."""
    changed = {torch._C._get_deterministic_algorithms: True, torch._C._get_deterministic_algorithms_warn_only: False}
    return tuple(changed.get(read, value) for read, value in zip(_READ, settings, strict=False))


@contextmanager
def memory_filled() -> Iterator[None]:
    """Let torch fill the memory of each new tensor, if algorithms are deterministic: of type uint8 with `FILL_BYTE`."""
    before = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_fill_uninitialized_memory(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(before)


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
