"""A child process that trains one contestant, a step for each line it is sent.

    python bench/step_worker.py JSON      {"setting": {…}, "contestant": NAME, "cap_bytes": …, "settle": STEPS,
                                           "watch": …}

Writes one JSON object a line: "ready", "step", "figures", or "inapplicable" with the reason. Sent "step" it trains a
step, sent "finish" it tells its figures and ends. It ends by itself, with exit status 3, as soon as the resident
set has grown by more than `cap_bytes`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

import contestants
import torch
from training import Setting, Trainer, same_bits, warm_up

from offload.demo.memory import resident_bytes

EXIT_OVER_CAP = 3
SAMPLE_SECONDS = 0.002


def tell(event: str, **content: Any) -> None:
    """Write one line."""
    print(json.dumps({"event": event, **content}), flush=True)


def watch(limit_bytes: int) -> None:
    """End this process once its resident set is over the limit."""
    ended = threading.Event()
    while not ended.wait(SAMPLE_SECONDS):
        if resident_bytes() > limit_bytes:
            os._exit(EXIT_OVER_CAP)


def end_with(parent: int) -> None:
    """End this process once the one that started it is gone: nobody reads what it finds."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def run(task: dict[str, Any]) -> None:
    """Train as told."""
    setting = Setting(**task["setting"])
    contestant = contestants.by_name(task["contestant"])
    try:
        warm_up(setting, contestant)
        trainer = Trainer(setting, contestant, watch=task.get("watch", False))
    except contestants.Inapplicable as reason:
        tell("inapplicable", reason=str(reason))
        return
    if task.get("cap_bytes") is not None:
        limit = trainer.baseline_bytes + int(task["cap_bytes"])
        threading.Thread(target=watch, args=(limit,), daemon=True).start()
    tell("ready", settling=[asdict(step) for step in trainer.settle(task["settle"])], threads=torch.get_num_threads())
    for line in sys.stdin:
        if line.strip() == "finish":
            break
        tell("step", **asdict(trainer.step()))
    tell("figures", **trainer.figures())
    trainer.close()


def main() -> int:
    """Run the task that the command line holds."""
    task = json.loads(sys.argv[1])
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    with same_bits(task["setting"].get("device", "cpu")):
        run(task)
    return 0


if __name__ == "__main__":
    sys.exit(main())
