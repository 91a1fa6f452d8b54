"""One rank of the runs that test_optimizer_state.py compares; started by torchrun, two gloo processes on the CPU.

Argument: a folder for results. Each rank leaves RESULTS/RANK.
"""

import copy
import faulthandler
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from live_bytes import Peak
from optimizer_state.state_rig import assert_equal
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch_rig import batch, make_blocks

import offload
from offload.optimizer_state import mover

STEPS = 20
ON = {"n_tensors": 0, "min_tensor_bytes": 256, "optimizer_state": True}


LEAST = {"min_tensor_bytes": 1, "recompute": False}  # with the least limit, the plan has to move state


def sharded_blocks():
    model = make_blocks()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(rank, run, is_moved):
    if run == "fsdp2":
        model = inner = sharded_blocks()
    else:
        inner = make_blocks()
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


def train_within(rank, limit_bytes):
    """Return what training comes to, the handle, and the least limit if this rank has no plan within `limit_bytes`.

    A rank without a plan trains on as plain torch does: the other one waits for it in FSDP's collectives.
    """
    model = sharded_blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = offload.enable(model, memory_limit=limit_bytes, **LEAST) if limit_bytes else None
    least_bytes = 0
    for step in range(STEPS):
        inputs = batch(100 * rank + step)
        try:
            loss = model(inputs).square().mean()
        except offload.InfeasibleLimitError as error:  # raised before anything has run
            least_bytes = error.least_limit_bytes
            handle.disable()
            loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [[local(p).detach().clone() for p in model.parameters()], states(optimizer)], handle, least_bytes


def auto(rank):
    """A limit that plans can only keep by moving state, with everything else left to the default."""
    plain, _, _ = train_within(rank, 0)
    limit_bytes = 4096 if rank == 0 else 1 << 30  # one rank has no plan where the other has one
    for _ in range(6):  # the least limit is known only after the first update, and varies with what was measured
        moved, handle, least_bytes = train_within(rank, limit_bytes)
        least = torch.tensor(least_bytes)
        dist.all_reduce(least, dist.ReduceOp.MAX)
        if not least:
            break
        assert is_same(moved, plain)
        limit_bytes = int(least)
    assert not least, f"no plan within {limit_bytes} bytes"
    row = str(handle.report().optimizer_state[0])
    found = {"is_equal": is_same(moved, plain), "moves": bool(handle.plan.state.moved), "row": row}
    handle.disable()
    return found


def loaded(rank):
    """A checkpoint in float64, which has to be converted."""
    model = fully_shard(torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(20))))
    plain, moved = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    model(batch(rank)).square().mean().backward()
    plain.step()
    checkpoint = plain.state_dict()
    expected = copy.deepcopy(checkpoint["state"])
    for state in checkpoint["state"].values():
        state.update({name: value.to(torch.float64) for name, value in state.items() if name != "step"})
    handle = offload.enable(model, optimizer=moved, **ON)
    seen = {}

    def look(_, state_dict):
        value = next(iter(state_dict["state"].values()))["exp_avg"]
        whole, doubled = value.full_tensor(), value * 2
        seen["is_whole"] = whole.shape == (64, 64) and torch.equal(whole * 2, doubled.full_tensor())
        seen["sharded"] = [str(value.placements), type(doubled).__name__, value.to_local().shape[0]]

    peak = Peak()
    with peak.watch():
        moved.load_state_dict(checkpoint)
    kinds = {type(value).__name__ for state in dict.values(moved.state) for value in state.values()}
    found = {
        "is_equal": is_same(moved.state_dict()["state"], expected),
        "moves": moved.state.away_nbytes > 0,
        "kinds": sorted(kinds),
        "peak_bytes": peak.nbytes,
        "bytes": moved.state.nbytes,
    }
    moved.register_load_state_dict_pre_hook(look)
    moved.load_state_dict(checkpoint)
    found |= seen
    handle.disable()
    return found


def is_same(first, second):
    try:
        assert_equal(first, second)
    except AssertionError:
        return False
    return True


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def states(optimizer):
    return [[local(value).clone() for value in each.values()] for each in optimizer.state_dict()["state"].values()]


def main():
    faulthandler.dump_traceback_later(240, exit=True)  # a rank that waits for another says where
    torch.set_num_threads(1)
    mover.CHUNK_BYTES, mover.AHEAD_BYTES, mover.BEHIND_BYTES = 16 << 10, 32 << 10, 16 << 10
    dist.init_process_group("gloo")
    found = {}
    for run in ("model", "wrapper", "no_sync", "fsdp2"):
        *plain, _ = train(dist.get_rank(), run, False)
        *moved, handle = train(dist.get_rank(), run, True)
        [counts] = handle.report().optimizer_state
        found[run] = {"is_equal": is_same(moved, plain), "moves": counts.in_bytes > 0, "row": str(counts)}
        handle.disable()
        dist.barrier()
    os.environ["OFFLOAD_THROTTLE"] = "8MB/s"  # without waiting for copies-out, all state would still be in memory
    found |= {"loaded": loaded(dist.get_rank()), "auto": auto(dist.get_rank())}
    (Path(sys.argv[1]) / str(dist.get_rank())).write_text(json.dumps(found))
    dist.destroy_process_group()
    # fully_shard keeps gloo's threads beyond the group: one at work while the interpreter ends would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
