"""Peak memory of the GPT of `moved_state.py` under DeepSpeed ZeRO-Offload, on the CPU.

    pip install deepspeed && python bench/deepspeed_state.py [--tokens N] [--steps N] [--quick]

DeepSpeed is no requirement of this project: its package builds its Adam when it is first used. On the CPU, the host
memory to which it moves state is the memory that training uses, so this is no comparison of methods: it shows what
such a training needs where there is no other memory. ZeRO stage 2, `offload_optimizer` to the CPU, float32, one
process. Memory is the largest resident set minus that after the imports, as in `moved_state.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence

from moved_state import SIZES, status_bytes


def train(tokens: int, steps: int, size: str) -> dict[str, float]:
    """Return the peak in bytes and the median seconds of a step."""
    import deepspeed
    import torch
    from torch.nn import functional

    from offload.demo.model import VOCABULARY, ByteGPT, Shape

    imported = status_bytes("VmRSS")
    torch.manual_seed(0)
    shape = Shape(**SIZES[size], batch=max(1, tokens // SIZES[size]["length"]))
    options = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    model = ByteGPT(shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)
    generator = torch.Generator().manual_seed(1)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        drawn = torch.randint(VOCABULARY, (shape.batch, shape.length + 1), generator=generator)
        loss = functional.cross_entropy(engine(drawn[:, :-1]).flatten(0, 1), drawn[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - begin)
    return {"peak_bytes": status_bytes("VmHWM") - imported, "seconds": statistics.median(seconds)}


def main(argv: Sequence[str] | None = None) -> int:
    """Train and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="per step (default: 256)")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="a tiny network: whether it works")
    args = parser.parse_args(argv)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    os.environ.update({name: value for name, value in alone.items() if name not in os.environ})
    os.environ["DS_ACCELERATOR"] = "cpu"
    found = train(args.tokens, args.steps, "quick" if args.quick else "full")
    print(json.dumps({"tokens": args.tokens, "steps": args.steps, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
