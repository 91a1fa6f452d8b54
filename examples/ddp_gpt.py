"""A byte-level GPT trained by several processes on one machine, plain and then offloaded: the same losses, less memory.

    torchrun --nproc_per_node=2 examples/ddp_gpt.py --quick

DistributedDataParallel over gloo on the CPU, or nccl with one GPU per process where there are as many; gradients are
accumulated over two batches, the first without communication (`no_sync`). The text is the Python standard library's.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group is made: docs/faq.md, "terminate called …"
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.demo.model import VOCABULARY, ByteGPT, Shape

QUICK = Shape(layers=2, width=64, heads=2, batch=4, length=64)
FULL = Shape(layers=6, width=256, heads=4, batch=8, length=256)
ACCUMULATED = 2


def read_text() -> torch.Tensor:
    """Some of the standard library's source text, as bytes."""
    names = ("argparse.py", "ast.py", "asyncio/base_events.py", "decimal.py", "doctest.py", "inspect.py", "typing.py")
    text = b"".join((Path(os.__file__).parent / name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(shape: Shape, steps: int, device: torch.device, offloaded: bool) -> tuple[list[float], offload.Report | None]:
    """The losses of this rank, and the report."""
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteGPT(shape).to(device))
    # As in a script of one process: every process has an engine of its own, and by default its share of the machine.
    handle = offload.enable(model, n_tensors=-1, lb=4, min_tensor_bytes="16KiB") if offloaded else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = read_text()
    order = torch.Generator().manual_seed(dist.get_rank())  # every rank reads other places
    losses = []
    for _ in range(steps):
        for part in range(ACCUMULATED):
            starts = torch.randint(len(text) - shape.length - 1, (shape.batch,), generator=order)
            rows = torch.stack([text[start : start + shape.length + 1] for start in starts]).to(device)
            last = part == ACCUMULATED - 1
            with nullcontext() if last else model.no_sync():
                with handle.step() if handle is not None else nullcontext():
                    logits = model(rows[:, :-1])
                    loss = functional.cross_entropy(logits.view(-1, VOCABULARY), rows[:, 1:].reshape(-1))
                (loss / ACCUMULATED).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if handle is None:
        return losses, None
    report = handle.report()
    handle.disable()
    return losses, report


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP training with offload; start it with torchrun")
    parser.add_argument("--quick", action="store_true", help="a smaller model, three steps")
    parser.add_argument("--steps", type=int, help="optimizer steps (default 3 quick, 10 otherwise)")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun --nproc_per_node=2 examples/ddp_gpt.py")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo")
    shape = QUICK if arguments.quick else FULL
    steps = arguments.steps or (3 if arguments.quick else 10)

    plain, _ = train(shape, steps, device, offloaded=False)
    found, report = train(shape, steps, device, offloaded=True)

    everybody: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found == plain)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes on {device.type}, {steps} steps of {ACCUMULATED} batches")
        print(f"loss of rank 0: first {plain[0]:.6f}, last plain {plain[-1]:.6f}, last offloaded {found[-1]:.6f}")
        print(f"all losses equal to the last bit on every rank: {'yes' if all(everybody) else 'NO'}")
        print(report)
    dist.destroy_process_group()
    if not all(everybody):
        raise SystemExit("the offloaded run differs from the plain one")


if __name__ == "__main__":
    main()
