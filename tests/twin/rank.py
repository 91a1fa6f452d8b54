"""One rank of two, each with a simulated device of its own; torchrun starts it.

Argument: a folder. It trains plain, and then offloaded.
"""

import os
import sys
from pathlib import Path

import accelerator  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.nn.parallel import DistributedDataParallel

import offload


class ThroughTheHost(dist.ProcessGroup):
    """Gloo, which knows no such device: tensors go by way of the host's memory."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _call(self, call, tensors, options):
        there = [each.cpu() for each in tensors]
        call(there, options).wait()
        for each, found in zip(tensors, there, strict=True):
            each.copy_(found)
        done = torch.futures.Future()
        done.set_result(tensors)
        return _create_work_from_future(done)

    def allreduce(self, tensors, options=None):
        return self._call(self.gloo.allreduce, tensors, options or dist.AllreduceOptions())

    def broadcast(self, tensors, options=None):
        return self._call(self.gloo.broadcast, tensors, options or dist.BroadcastOptions())

    def allgather(self, gathered, tensors, options=None):
        there = [[each.cpu() for each in row] for row in gathered]
        self.gloo.allgather(there, [each.cpu() for each in tensors]).wait()
        for row, found in zip(gathered, there, strict=True):
            for each, one in zip(row, found, strict=True):
                each.copy_(one)
        done = torch.futures.Future()
        done.set_result(gathered)
        return _create_work_from_future(done)


def main():
    rank = int(os.environ["RANK"])
    dist.Backend.register_backend("host", ThroughTheHost, devices=["sim"])
    dist.init_process_group("host")
    torch.sim.set_device(rank)
    for kind in ("plain", "offloaded"):
        torch.save(train(rank, kind == "offloaded"), Path(sys.argv[1]) / f"{kind}-{rank}.pt")
    dist.destroy_process_group()


def train(rank, offloaded):
    """The parameters after three steps."""
    torch.manual_seed(rank)  # the first rank's weights are everybody's
    net = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(64, 64), nn.GELU()))).to(f"sim:{rank}")
    model = DistributedDataParallel(net)
    handle = offload.enable(model, n_tensors=-1, lb=2, min_tensor_bytes=1) if offloaded else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + rank)).to(f"sim:{rank}")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if handle is not None:
        assert handle.report().swapped.tensors > 0
        handle.disable()
    return [each.detach().cpu() for each in net.parameters()]


if __name__ == "__main__":
    main()
