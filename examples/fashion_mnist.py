"""FashionMNIST in a loop of one's own: batches of 64 against four accumulated batches of 16, the latter offloaded.

    python examples/fashion_mnist.py [--data FOLDER] [--quick]

In double precision, so that rounding, which training amplifies over an epoch, stays far below any other difference.
The images are four IDX files, plain or gzipped. Debian has them: apt-get install dataset-fashion-mnist.
"""

import argparse
import gzip
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import offload

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def read_idx(folder: Path, name: str) -> Tensor:
    """One IDX file of bytes: a big-endian header of four bytes, the sizes, the values.

    Raises
    ------
    FileNotFoundError, ValueError
        There is no such file, or it is no IDX file of bytes.
    """
    paths = [folder / name, folder / f"{name}.gz"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"found no {name}[.gz] in {folder}; on Debian: apt-get install dataset-fashion-mnist. Else give the folder "
            "of the four IDX files: --data FOLDER"
        )
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    dimensions = content[3] if len(content) > 3 else 0
    sizes = np.frombuffer(content[4 : 4 + 4 * dimensions], ">u4").astype(int).tolist()
    body = bytearray(content[4 + 4 * dimensions :])
    if content[:3] != b"\0\0\x08" or len(body) != math.prod(sizes):
        raise ValueError(f"{path} is no IDX file of unsigned bytes: {sizes} announced, {len(body)} bytes there")
    return torch.frombuffer(body, dtype=torch.uint8).view(sizes)


def read(folder: Path, part: str, rows: int | None) -> tuple[Tensor, Tensor]:
    """Images between 0 and 1, (rows, 1, height, width), and labels."""
    images = read_idx(folder, f"{part}-images-idx3-ubyte")[:rows]
    return images[:, None].float() / 255, read_idx(folder, f"{part}-labels-idx1-ubyte")[:rows].long()


def make_model() -> nn.Module:
    """Two convolutions and two linear layers; no batch statistics, which would see 16 rows instead of 64."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ).double()


def train_at_once(x: Tensor, y: Tensor, order: Tensor) -> nn.Module:
    """One epoch in batches of 64."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for rows in order.split(64):
        functional.cross_entropy(model(x[rows].double()), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train_accumulated(x: Tensor, y: Tensor, order: Tensor) -> nn.Module:
    """One epoch in four batches of 16 to a step, offloaded."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = offload.contrib.GradAccumulator(inner, steps=4)
    with offload.enable(model, n_tensors=-1, min_tensor_bytes="64KiB") as handle:
        for rows in order.split(16):
            loss = functional.cross_entropy(model(x[rows].double()), y[rows])
            optimizer.scale(loss, items=len(rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()  # a last group of fewer than four
    print(handle.report(), end="\n\n")
    return model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Of the images in question, in percent."""
    with torch.no_grad():
        pairs = zip(x.split(512), y.split(512), strict=True)
        right = [(model(images.double()).argmax(1) == labels).sum().item() for images, labels in pairs]
    return 100 * sum(right) / len(y)


def main() -> int:
    """Train both ways and compare; 1 where they differ by more than rounding does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DEBIAN, help=f"folder of the IDX files (default: {DEBIAN})")
    parser.add_argument("--quick", action="store_true", help="1000 images: some seconds")
    args = parser.parse_args()
    rows = 1000 if args.quick else None
    try:
        x, y = read(args.data, "train", rows)
        test_x, test_y = read(args.data, "t10k", rows)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    accumulated = train_accumulated(x, y, order)
    at_once = train_at_once(x, y, order)
    pairs = zip(accumulated.parameters(), at_once.parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    for name, model in (("batches of 64", at_once), ("4 × 16, offloaded", accumulated)):
        print(f"{name:20}accuracy {accuracy(model, test_x, test_y):.2f} %")
    print(f"largest difference of a weight: {difference:.2e}")
    is_rounding = difference < 1e-9
    print("equal within rounding" if is_rounding else "THEY DIFFER BY MORE THAN ROUNDING")
    return 0 if is_rounding else 1


if __name__ == "__main__":
    sys.exit(main())
