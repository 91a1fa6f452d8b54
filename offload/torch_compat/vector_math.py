"""The first call of MKL's vector math in a process."""

from __future__ import annotations

import torch

__all__ = ["choose_kernels"]


def choose_kernels() -> None:
    """Let MKL choose the kernels of its vector math (square roots, logarithms and others) while no other thread calls.

    torch divides such an operator on the CPU among its threads. In torch's builds with MKL 2024, a thread that calls
    while another one makes the process's first call can compute its part with half of the bits (torch's issue 188792).
    The copies of a profiled step made that likelier: of 10 first updates of AdamW about one was wrong, of 25 without
    offload none.
    """
    torch.ones(1).sqrt()
