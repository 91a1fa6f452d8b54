"""Part of the GPU suite: which device, driver and versions, and whether torch and the engine agree.

python bench/gpu_driver.py --json FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import machine
import torch
from result_file import EXIT_SKIPPED, ResultFile

import offload
from offload import _core


def main() -> int:
    """Compare what torch sees with what the engine's driver sees; 1 where they differ, 77 without."""
    parser = argparse.ArgumentParser(prog="gpu_driver.py")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="changes nothing here")
    results = ResultFile(parser.parse_args().json)
    results.set("machine", machine.describe())
    results.set("offload", {"version": offload.__version__})
    seen = {"torch": torch.cuda.device_count(), "offload": _core.cuda_device_count()}
    results.set("device_count", seen)
    if seen["torch"] != seen["offload"]:
        print(f"torch sees {seen['torch']} CUDA devices, offload._core {seen['offload']}")
        return 1
    if not seen["torch"]:
        results.set("device", None)
        print("no device")
        return EXIT_SKIPPED
    torch.zeros(1, device="cuda")  # the primary context, as torch makes it
    driver = _core.cuda_driver(0)
    ours, theirs = driver.device_memory(), torch.cuda.mem_get_info(0)
    results.set("device_memory_bytes", {"torch": theirs, "offload": ours})
    print(f"{torch.cuda.get_device_name(0)}: {ours[0]} of {ours[1]} bytes free")
    return 0 if ours[1] == theirs[1] else 1


if __name__ == "__main__":
    sys.exit(main())
