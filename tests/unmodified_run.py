"""Runs a script and counts its memory from outside: `python unmodified_run.py [--line CODE] SCRIPT [ARGUMENT …]`.

`--line` is added to the script behind the line that makes its model. Prints the most bytes of tensors in the last two
steps, optimizer included, as JSON; or what `InfeasibleLimitError` says.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from live_bytes import Peak, tell_blocks_of_all
from torch.optim.optimizer import register_optimizer_step_post_hook

import offload

FIRST_WATCHED = 3  # before it, a step is profiled and one tries recipes

parser = argparse.ArgumentParser()
parser.add_argument("--line")
parser.add_argument("script")
args, words = parser.parse_known_args()
peak, steps, held = Peak(), 0, 0
watch = peak.watch()


def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    global steps, held
    steps += 1
    if steps == FIRST_WATCHED:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        state = [value for row in optimizer.state.values() for value in row.values() if isinstance(value, torch.Tensor)]
        held = sum(each.nbytes for each in [*parameters, *state])  # gradients are made anew
        watch.__enter__()
    if steps == FIRST_WATCHED + 2:
        watch.__exit__(None, None, None)


register_optimizer_step_post_hook(stepped)
tell_blocks_of_all()
source = Path(args.script).read_text()
if args.line:
    made = next(line for line in source.splitlines() if line.startswith("model = ") and line.endswith(")"))
    source = source.replace(made, f"{made}\n{args.line}", 1)
sys.argv = [args.script, *words]
found: dict[str, object] = {}
try:
    exec(compile(source, args.script, "exec"), {"__name__": "__main__"})
except offload.InfeasibleLimitError as error:
    found["least_bytes"] = error.least_limit_bytes
else:
    assert steps >= FIRST_WATCHED + 2
    found["peak_bytes"] = held + peak.nbytes
print(json.dumps(found))
