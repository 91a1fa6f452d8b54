"""A GPT over bytes learns the Python standard library's source text, offloaded, and writes some of its own.

python examples/char_gpt.py [--quick] [--plain]
"""

import argparse
import sys
from contextlib import nullcontext

import numpy
import torch

import offload
from offload.demo.model import ByteGPT, Shape
from offload.demo.worker import batches, build, loss_of, read_corpus


def write(model: ByteGPT, beginning: bytes, count: int, length: int) -> str:
    """What the model goes on with, `count` bytes drawn one by one."""
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor(list(beginning))
    with torch.no_grad():
        for _ in range(count):
            likely = model(text[None, -length:])[0, -1].softmax(0)
            text = torch.cat([text, torch.multinomial(likely, 1, generator=generator)])
    return bytes(text.tolist()).decode(errors="replace")


def main() -> int:
    """Train, show the report, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, few steps: some seconds")
    parser.add_argument("--plain", action="store_true", help="without the engine, to compare")
    args = parser.parse_args()
    shape = Shape(2, 64, 4, 8, 64) if args.quick else Shape(4, 128, 4, 16, 128)
    steps = 20 if args.quick else 250
    text = torch.from_numpy(numpy.frombuffer(bytearray(read_corpus(1 << 20 if args.quick else 4 << 20)), numpy.uint8))
    model, optimizer = build(shape, seed=0, device="cpu")
    handle = None if args.plain else offload.enable(model, n_tensors=-1, min_tensor_bytes="64KiB")
    for step, (x, y) in enumerate(batches(text, shape, steps=steps, seed=0, device="cpu")):
        with nullcontext() if handle is None else handle.step():
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(steps // 20, 1) == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.6f}", flush=True)
    if handle is not None:
        print(handle.report())
        handle.disable()
    print(write(model.eval(), b"import ", 40 if args.quick else 400, shape.length))
    return 0


if __name__ == "__main__":
    sys.exit(main())
