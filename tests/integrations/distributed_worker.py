"""One rank of the runs that test_torch_distributed.py compares; started by torchrun, two processes on the CPU.

Arguments: a folder for results, a folder for spill files, what to run ("all" or "kill"). Each rank leaves RESULTS/RANK.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch_rig import KNOBS, Block, Blocks, batch, make_blocks

import offload
from offload.options import default_host_limit

STEPS, ACCUMULATED = 3, 2


class KeepsWeight(torch.autograd.Function):
    """Saves a detached alias of a weight, as fused kernels do: nothing tells autograd whose memory it is."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight.detach().t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, transposed = ctx.saved_tensors
        return grad @ transposed.t(), grad.t() @ x


class AliasBlock(Block):
    def forward(self, x):
        return x + self.narrow(KeepsWeight.apply(self.norm(x), self.widen.weight).sin())


def make_aliasing():
    torch.manual_seed(0)
    model = Blocks()
    for number in range(len(model.blocks)):
        model.blocks[number] = AliasBlock()
    return model


def train(model, rank, around):
    """Losses and gradients of STEPS optimizer steps of ACCUMULATED batches; `around(last)` is a batch's context."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(STEPS):
        for part in range(ACCUMULATED):
            with around(part + 1 == ACCUMULATED):
                loss = model(batch(100 * rank + ACCUMULATED * step + part)).square().mean() / ACCUMULATED
                loss.backward()
            results.append([loss.detach().clone()])
        results.append(
            [local(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]
        )
        assert len(results[-1]) > 0
        optimizer.step()
        optimizer.zero_grad()
    return results


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same(found, expected):
    return len(found) == len(expected) and all(
        len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
        for ours, theirs in zip(found, expected, strict=True)
    )


def outcome(found, expected, handle):
    about = handle.report()
    handle.disable()
    return {
        "bit_equal": same(found, expected),
        "steps": about.steps,
        "swapped": about.swapped.tensors,
        "parameters_kept": about.kept.get("parameter").tensors,
        "failed": about.to_dict()["failed"],
        "records_left": handle._engine.live_records,
    }


def run_ddp(rank, spill_dir, on):
    """DDP with no_sync; the first batches of a step do not communicate."""

    def trained(model):
        return train(model, rank, lambda last: nullcontext() if last else model.no_sync())

    # Small buckets, so that gradients are reduced while backward runs.
    expected = trained(DistributedDataParallel(make_blocks(), bucket_cap_mb=0.01))
    inner = make_blocks()
    if on == "inner, before it is wrapped":
        handle = offload.enable(inner, spill_dir=spill_dir, **KNOBS)
    model = DistributedDataParallel(inner, bucket_cap_mb=0.01)
    if on != "inner, before it is wrapped":
        handle = offload.enable(model if on == "wrapper" else inner, spill_dir=spill_dir, **KNOBS)
    return outcome(trained(model), expected, handle)


def shard(model, **how):
    for block in model.blocks:
        fully_shard(block, **how)
    return fully_shard(model, **how)


def fsdp_parameters(model):
    for module in model.modules():
        group = getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_fsdp_param_group", None)
        yield from group.fsdp_params if group is not None else ()


def run_fsdp(rank, spill_dir, make=make_blocks, enable_first=False, **how):
    """FSDP2; counts what of the gathered weights went through the engine, and looks whether it frees them."""

    def trained(model):
        @contextmanager
        def around(last):
            model.set_requires_gradient_sync(last)
            yield

        return train(model, rank, around)

    expected = trained(shard(make(), **how))
    model = make()
    handle = offload.enable(model, spill_dir=spill_dir, **KNOBS) if enable_first else None
    shard(model, **how)
    handle = handle or offload.enable(model, spill_dir=spill_dir, **KNOBS)
    sharded = {p.untyped_storage().data_ptr() for p in (local(each) for each in model.parameters())}
    seen = {"weights_swapped": 0, "weights_gathered": 0}
    swap_out = handle._engine.swap_out

    def watched(tensor, *rest):
        gathered = {
            p._unsharded_param.untyped_storage()._cdata
            for p in fsdp_parameters(model)
            if hasattr(p, "_unsharded_param")
        }
        seen["weights_gathered"] = max(seen["weights_gathered"], len(gathered))
        storage = tensor.untyped_storage()
        seen["weights_swapped"] += storage._cdata in gathered or storage.data_ptr() in sharded
        return swap_out(tensor, *rest)

    handle._engine.swap_out = watched
    found = trained(model)
    loss = model(batch(7)).sum()
    seen["gathered_bytes_after_forward"] = sum(
        p._unsharded_param.untyped_storage().size() for block in model.blocks for p in fsdp_parameters(block)
    )
    loss.backward()
    del handle._engine.swap_out, loss
    return outcome(found, expected, handle) | seen


def run_pipeline(rank, spill_dir):
    """A stage's own part of the model, enabled: all micro-batches go forward before the first comes back."""

    def trained(enabled):
        torch.manual_seed(rank)
        part = nn.Sequential(Block(), Block())
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda out, wanted: (out - wanted).square().mean())
        if enabled:
            try:
                offload.enable(stage)
            except ValueError as error:
                seen["refused"] = str(error)
        handle = offload.enable(part, spill_dir=spill_dir, **KNOBS) if enabled else None
        results = []
        for step in range(STEPS):
            part.zero_grad()
            x = batch(step)
            schedule.step(x) if rank == 0 else schedule.step(target=x)
            results.append([parameter.grad.clone() for parameter in part.parameters()])
        return results, handle

    seen = {}
    expected, _ = trained(False)
    found, handle = trained(True)
    return outcome(found, expected, handle) | seen


RUNS = {
    "ddp inner": lambda rank, folder: run_ddp(rank, folder, "inner"),
    "ddp inner, before it is wrapped": lambda rank, folder: run_ddp(rank, folder, "inner, before it is wrapped"),
    "ddp wrapper": lambda rank, folder: run_ddp(rank, folder, "wrapper"),
    "fsdp2": run_fsdp,
    "fsdp2 kept after forward": lambda rank, folder: run_fsdp(rank, folder, reshard_after_forward=False),
    "fsdp2 in bfloat16": lambda rank, folder: run_fsdp(
        rank, folder, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "fsdp2 with detached weights": lambda rank, folder: run_fsdp(rank, folder, make=make_aliasing),
    "fsdp2 with detached weights kept after forward": lambda rank, folder: run_fsdp(
        rank, folder, make=make_aliasing, reshard_after_forward=False
    ),
    "fsdp2, enabled before it is sharded": lambda rank, folder: run_fsdp(rank, folder, enable_first=True),
    "pipeline": run_pipeline,
}


def die_in_the_middle(rank, folder, results):
    """Rank 1 is killed between forward and backward of its second step, with bytes in the spill file."""
    model = DistributedDataParallel(make_blocks())
    handle = offload.enable(model, spill_dir=folder, **KNOBS)
    for step in range(10_000):
        loss = model(batch(step)).square().mean()
        handle._engine.drain()
        if step == 1:
            used = handle._engine.store.stats()["spill_used_bytes"]
            (results / str(rank)).write_text(json.dumps({"pid": os.getpid(), "spill_used_bytes": used}))
            while len(list(results.iterdir())) < 2:
                time.sleep(0.01)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()


def main():
    results, folder, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    faulthandler.dump_traceback_later(480, exit=True)  # a rank that waits for another says where
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if what == "kill":
        die_in_the_middle(rank, folder, results)
    found = {}
    for name, run in RUNS.items():
        found[name] = run(rank, folder)
        dist.barrier()
    found["machine"] = {
        "host_limit": default_host_limit(),
        "cuda_initialized": torch.cuda.is_initialized(),
        "files_in_spill_dir": [path.name for path in Path(folder).iterdir()],
    }
    (results / str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()
    # fully_shard keeps gloo's threads beyond the group: one at work while the interpreter ends would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
