"""The first call of MKL's vector math in a process. `enable` makes it."""

from __future__ import annotations

import torch

__all__ = ["choose_kernels"]


def choose_kernels() -> None:
    """Let MKL choose the kernels of its vector math (square roots, logarithms and others) while no other thread calls.

    torch divides such an operator on the CPU among its threads. In torch's builds with MKL 2024, a thread that calls
    while another one makes the process's first call may compute its part with only about half of the significant bits
    correct (torch's issue 188792). Without this call, AdamW's first update was wrong in about one of ten processes that
    trained a language model with offload, and in none of 25 without.
    """
    torch.ones(1, dtype=torch.float32, device="cpu").sqrt()  # whatever the default type and device are: they use no MKL
