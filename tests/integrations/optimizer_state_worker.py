"""One rank of the runs that test_optimizer_state.py compares; started by torchrun, two gloo processes on the CPU.

Argument: a folder for results. Each rank leaves RESULTS/RANK.
"""

import copy
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from optimizer_state.state_rig import assert_equal
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch_rig import batch, make_blocks

import offload
from offload.optimizer_state import mover

STEPS = 20
ON = {"n_tensors": 0, "min_tensor_bytes": 256, "optimizer_state": True}


def train(rank, run, is_moved):
    inner = make_blocks()
    if run == "fsdp2":
        for block in inner.blocks:
            fully_shard(block)
        model = fully_shard(inner)
    else:
        model = DistributedDataParallel(inner, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    enabled = inner if run == "model" else model
    handle = offload.enable(enabled, optimizer=optimizer, **ON) if is_moved else None
    saved = held = None
    for step in range(STEPS):
        if step == 4 and run == "fsdp2":
            state = next(iter(optimizer.state.values()))
            with torch.no_grad():  # without a graph it is the local tensor itself
                held = state["exp_avg"].to_local(), state["exp_avg_sq"].detach().to_local()
            del state
        if step == 6 and run == "fsdp2":  # their memory has stayed
            assert not any(each.isnan().any() for each in held)
            held = None
        if step == STEPS // 2:
            saved = optimizer.state_dict() if is_moved else copy.deepcopy(optimizer.state_dict())
        if step == STEPS // 2 + 2:  # what was saved is as it was two steps ago, and of the same kind
            optimizer.load_state_dict(saved)
            del saved
            [momentum] = {type(each["exp_avg"]) for each in dict.values(optimizer.state)}
            assert (momentum is DTensor) == (run == "fsdp2")
        for part in (0, 1):
            first_of_two = run == "no_sync" and part == 0
            with model.no_sync() if first_of_two else nullcontext():
                model(batch(100 * rank + 2 * step + part)).square().mean().backward()
            if not first_of_two:
                optimizer.step()
                optimizer.zero_grad()
    return [local(p).detach().clone() for p in inner.parameters()], states(optimizer), handle


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def states(optimizer):
    return [[local(value).clone() for value in each.values()] for each in optimizer.state_dict()["state"].values()]


def main():
    torch.set_num_threads(1)
    mover.CHUNK_BYTES, mover.AHEAD_BYTES, mover.BEHIND_BYTES = 16 << 10, 32 << 10, 16 << 10
    dist.init_process_group("gloo")
    found = {}
    for run in ("model", "wrapper", "no_sync", "fsdp2"):
        *plain, _ = train(dist.get_rank(), run, False)
        *moved, handle = train(dist.get_rank(), run, True)
        try:
            assert_equal(moved, plain)
            is_equal = True
        except AssertionError:
            is_equal = False
        [counts] = handle.report().optimizer_state
        found[run] = {"is_equal": is_equal, "moves": counts.in_bytes > 0, "row": str(counts)}
        handle.disable()
        dist.barrier()
    (Path(sys.argv[1]) / str(dist.get_rank())).write_text(json.dumps(found))
    dist.destroy_process_group()
    # fully_shard keeps gloo's threads beyond the group: one at work while the interpreter ends would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
