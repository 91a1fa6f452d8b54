"""Convolutions on scikit-learn's handwritten digits: the same losses and weights with the engine and without.

    python examples/image_classifier.py [--quick]
    torchrun --nproc_per_node=2 examples/image_classifier.py --quick        two processes, gradients averaged

The scikit-learn package brings the digits along; nothing is downloaded.
"""

import argparse
import os
import sys

import torch
import torch.distributed.nn  # before the process group is made: docs/faq.md, "terminate called …"
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import offload

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Residual(nn.Module):
    """Two convolutions, and what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) → the same."""
        return torch.relu(x + self.body(x))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1500 images of 16 × 16 to train on, 297 to test with."""
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    x, y = functional.interpolate(x, scale_factor=2, mode="bilinear"), torch.from_numpy(labels)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def train(epochs: int, channels: int, batch: int, *, offloaded: bool) -> tuple[list[float], nn.Module, float]:
    """The losses, the trained model and its accuracy on the test images, in percent."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        *(Residual(channels) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )
    wrapped = DistributedDataParallel(model) if PROCESSES > 1 else model
    handle = offload.enable(model, n_tensors=-1, min_tensor_bytes="256KiB") if offloaded else None
    training, test = digits()
    mine = torch.utils.data.Subset(training, range(RANK, len(training), PROCESSES))
    loader = DataLoader(mine, batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(1))
    batches = offload.contrib.Prefetcher(loader, device="cpu", handle=handle)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            loss = functional.cross_entropy(wrapped(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if handle is not None:
        handle.disable()
        if RANK == 0:
            print(handle.report(), end="\n\n")
    model.eval()
    with torch.no_grad():
        x, y = test.tensors
        accuracy = 100 * (model(x).argmax(1) == y).float().mean().item()
    return losses, model, accuracy


def main() -> int:
    """Train twice and compare; 1 where a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller network, one epoch: some seconds")
    quick = parser.parse_args().quick
    if PROCESSES > 1:
        distributed.init_process_group("gloo")
    sizes = {"epochs": 1, "channels": 8, "batch": 128} if quick else {"epochs": 8, "channels": 48, "batch": 256}
    losses, model, accuracy = train(**sizes, offloaded=True)
    expected, plain, _ = train(**sizes, offloaded=False)
    same = losses == expected
    same &= all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    print(f"process {RANK} of {PROCESSES}: loss {losses[0]:.4f} → {losses[-1]:.4f}, accuracy {accuracy:.1f} %")
    print("equal losses and weights" if same else "LOSSES OR WEIGHTS DIFFER")
    if PROCESSES > 1:
        distributed.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
