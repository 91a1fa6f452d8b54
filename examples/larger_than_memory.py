r"""Train a GPT whose weights, gradients and optimizer state together do not fit in memory; save it, and resume.

    python examples/larger_than_memory.py FOLDER [--steps 8] [--stop 4] [--layers 13] [--width 1024] [--plain]

The first run makes random weights in FOLDER, one tensor at a time. Each run goes on from the latest checkpoint there,
to step `--stop` or to the end of the epoch, saves, and prints its peak of memory. The default sizes are 164 million
parameters: weights 0.65 GB, gradients 0.65 GB, AdamW's state 1.3 GB. To bound the memory, with that of torch itself:

    systemd-run --scope -p MemoryMax=1536M -p MemorySwapMax=0 \
        offload run -- python examples/larger_than_memory.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import sys
import time
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import offload
from offload.demo.model import ByteGPT, Shape
from offload.demo.worker import batches, loss_of, read_corpus


def on_meta(shape: Shape) -> ByteGPT:
    """Return the model without memory."""
    with torch.device("meta"):
        return ByteGPT(shape)


def make_weights(shape: Shape, folder: Path) -> None:
    """Write random weights, each parameter to a file of its own."""
    (folder / "weights").mkdir(parents=True)
    model = on_meta(shape)
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        value = torch.ones(parameter.shape) if name in norms else torch.zeros(parameter.shape)
        if parameter.ndim == 2:
            value.normal_(0, 0.02, generator=torch.Generator().manual_seed(number))
        save_file({name: value}, folder / "weights" / f"{name}.safetensors")


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write a checkpoint, one parameter with its state at a time."""
    unfinished = folder.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for part in ("weights", "state"):
        (unfinished / part).mkdir(parents=True)
    for name, parameter in model.named_parameters():
        save_file({name: parameter.detach()}, unfinished / "weights" / f"{name}.safetensors")
        save_file(optimizer.state[parameter], unfinished / "state" / f"{name}.safetensors")
    unfinished.rename(folder)


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read the optimizer's state; what has been read leaves memory again."""
    for name, parameter in model.named_parameters():
        found = load_file(folder / "state" / f"{name}.safetensors")
        optimizer.state[parameter] = {key: value.clone() for key, value in found.items()}


def load_plain(shape: Shape, folder: Path) -> ByteGPT:
    """Read the whole model into memory."""
    model = ByteGPT(shape)
    model.load_state_dict({k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()})
    return model


def main() -> int:
    """Train from the latest checkpoint on, and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="weights, checkpoints, spill file; on a disk")
    parser.add_argument("--steps", type=int, default=8, help="of one epoch")
    parser.add_argument("--stop", type=int, help="end this run after so many of them")
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--plain", action="store_true", help="without offload, to compare")
    args = parser.parse_args()
    shape = Shape(args.layers, args.width, args.heads, args.batch, args.length)
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    args.folder.mkdir(exist_ok=True)
    done = sorted(int(path.name.removeprefix("step-")) for path in args.folder.glob("step-*"))
    if not done:
        make_weights(shape, args.folder / "step-0")
        done = [0]
    latest, stop = args.folder / f"step-{done[-1]}", min(args.stop or args.steps, args.steps)
    handle = None
    if args.plain:
        model = load_plain(shape, latest / "weights")
    else:
        model = on_meta(shape)
        handle = offload.materialize(model, latest / "weights", parameters="all", n_tensors=-1, spill_dir=args.folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if handle is not None:
        handle.add_optimizer(optimizer, step_in_backward=True)
    if (latest / "state").exists():
        load_state(model, optimizer, latest)
    text = torch.from_numpy(numpy.frombuffer(bytearray(read_corpus(1 << 20)), numpy.uint8))
    for step, (x, y) in enumerate(batches(text, shape, steps=args.steps, seed=0, device="cpu")):
        if not done[-1] <= step < stop:
            continue
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        print(f"step {step:3d}  loss {loss.item():.6f}  {time.perf_counter() - begin:.1f} s", flush=True)
    if stop > done[-1]:
        save(model, optimizer, args.folder / f"step-{stop}")
    needed = 4 * sum(math.prod(parameter.shape) for parameter in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = {"step": stop, "weights_mb": needed / 1e6, "all_mb": 4 * needed / 1e6, "imports_mb": begun * 1024 / 1e6}
    print(json.dumps({**figures, "peak_mb": peak * 1024 / 1e6}))
    if handle is not None:
        print(handle.report().moved_parameters)
    return 0


if __name__ == "__main__":
    sys.exit(main())
