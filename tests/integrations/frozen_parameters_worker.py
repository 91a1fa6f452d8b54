"""Two ranks on gloo train with frozen parameters, or all, in the store, and compare with plain training."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parameters.frozen_rig import everything, loss_of, make_model, trained
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload

ON = {"n_tensors": -1, "min_tensor_bytes": 256}
STEPS = 6


def run(kind, is_moved, rank, which):
    model = make_model() if which == "frozen" else make_model().requires_grad_(True)
    on = {**ON, "parameters": which}
    handle = None
    if kind == "FSDP2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if is_moved and kind != "DDP, enabled after":
        handle = offload.enable(model, **on)
    outer = model if kind == "FSDP2" else DistributedDataParallel(model)
    if is_moved and handle is None:
        handle = offload.enable(outer, **on)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    torch.manual_seed(rank)
    losses = []
    for number in range(STEPS):
        loss = loss_of(outer, 2 * number + rank)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    held = [each.to_local() if hasattr(each, "to_local") else each for each in everything(model)]
    if handle is None:
        return losses + held, (0, ())
    report = handle.report()
    return losses + held, (report.moved_parameters.in_bytes, report.notes)


def work(rank, kind, folder, which="frozen"):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    plain, _ = run(kind, False, rank, which)
    moved, (in_bytes, notes) = run(kind, True, rank, which)
    found = (len(plain) == len(moved) and all(map(torch.equal, plain, moved)), in_bytes, notes)
    everyone = [None, None]
    dist.all_gather_object(everyone, found)
    if rank == 0:
        equal, in_bytes, notes = zip(*everyone, strict=True)
        print(json.dumps({"equal": equal, "in_bytes": in_bytes, "notes": notes}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.spawn(work, args=tuple(sys.argv[1:]), nprocs=2)
