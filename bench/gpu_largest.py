"""Part of the GPU suite: the largest batch of a ResNet-50 that trains in a fixed part of the device's memory.

    python bench/gpu_largest.py --json FILE [--rehearse]

The cap is torch's own limit on what this process may allocate; a try that runs out of memory does not fit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from contestants import BY_HAND, CHECKPOINT, PLAIN, SAVE_ON_CPU, SLOWDOWNS, Contestant, Inapplicable
from gpu_frontier import release
from largest import Try, search, setting_at, summary
from models import Size
from result_file import ResultFile
from training import STEPS_TO_SETTLE, Setting, Trainer, same_bits

GIB = 1 << 30
CAP_BYTES = 8 * GIB
RESNET_50: Size = {"width": 64, "blocks0": 3, "blocks1": 4, "blocks2": 6, "blocks3": 3, "resolution": 224}
FIRST_BATCH = 128
TOLERANCE = 0.1
CHOSEN = (PLAIN, CHECKPOINT, BY_HAND[1], SLOWDOWNS[-1], SAVE_ON_CPU)
SECONDS_RESERVED = 15.0  # a try that begins in time may end late
OutOfMemory = (MemoryError, torch.OutOfMemoryError)


class OutOfTime(Exception):
    """The part's time is up."""


def try_here(setting: Setting, contestant: Contestant, value: int) -> Try:
    """Train the settling steps and one more in this process."""
    trainer = None
    try:
        trainer = Trainer(setting, contestant)
        trainer.settle(STEPS_TO_SETTLE)
        seconds = trainer.step(hashes=False).seconds
        return Try(value, max(int(trainer.figures()["peak_bytes"]), 1), seconds)
    except OutOfMemory:
        return Try(value, None)
    finally:
        if trainer is not None:
            trainer.close()
        del trainer
        release(setting.device)


def measure(contestant: Contestant, first: int, *, rehearse: bool, deadline: float) -> dict[str, Any]:
    """Search for one contestant from the batch `first` on; a row that holds what was tried when the time was up."""
    about = {"what": "resnet:batch", "name": contestant.name, "ours": contestant.is_ours, "cap_bytes": CAP_BYTES}
    tries: list[Try] = []

    def probe(value: int) -> Try:
        if time.monotonic() > deadline or (rehearse and len(tries) >= 2):
            raise OutOfTime
        setting = Setting("resnet", {**RESNET_50, "batch": value}, "cuda", "bfloat16")
        if rehearse:
            setting = setting_at("resnet:batch", "tiny", value)
        tries.append(try_here(setting, contestant, value))
        return tries[-1]

    try:
        search(probe, CAP_BYTES, first, tolerance=TOLERANCE)
    except OutOfTime:
        about["cut_short"] = "ended by the time limit"
    except Inapplicable as reason:
        return {**about, "inapplicable": str(reason)}
    except RuntimeError as error:
        about["error"] = str(error)
    return {**about, **summary(tries)}


def main() -> int:
    """Measure; 1 where a run failed otherwise than for want of memory."""
    parser = argparse.ArgumentParser(prog="gpu_largest.py")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="two tries of a tiny model on the CPU")
    args = parser.parse_args()
    results = ResultFile(args.json)
    device = "cpu" if args.rehearse else "cuda"
    allowed = float(os.environ.get("OFFLOAD_PART_SECONDS", "600")) - SECONDS_RESERVED
    begin = time.monotonic()
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(CAP_BYTES / torch.cuda.get_device_properties(0).total_memory)
    failed, first = False, 2 if args.rehearse else FIRST_BATCH
    with same_bits(device):
        for number, contestant in enumerate(CHOSEN):
            now = time.monotonic()
            share = (begin + allowed - now) / (len(CHOSEN) - number)  # a try may take longer than its share
            row = measure(contestant, first, rehearse=args.rehearse, deadline=now + share)
            results.append("rows", row)
            first = max(first, row.get("largest", 0))
            failed |= "error" in row and (contestant.is_ours or contestant is PLAIN)
            print(f"{contestant.name}: {row.get('largest', row.get('inapplicable'))}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
