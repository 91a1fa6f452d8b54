"""Ends a process group of gloo in a test's own process."""

import time

import torch

LAST_WORK_SECONDS = 0.2


def destroy_process_group() -> None:
    """End the process group, after gloo's thread has freed its last work.

    That work holds Python objects. If DDP's reducer frees the process group before, it holds the GIL and waits for the
    thread, which waits for the GIL: the process hangs, without offload too (seen once, torch 2.13).
    """
    time.sleep(LAST_WORK_SECONDS)
    torch.distributed.destroy_process_group()
