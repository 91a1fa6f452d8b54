"""Runs a script and counts its memory from outside: `python unmodified_run.py [--line CODE] SCRIPT [ARGUMENT …]`.

`--line` is added to the script behind the line that makes its model, or the one that begins with `--behind`. Prints the
most bytes of tensors in the last two steps, optimizer included, as JSON; or what `InfeasibleLimitError` says.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from live_bytes import Peak, tell_blocks_of_all
from torch.optim.optimizer import register_optimizer_step_post_hook

import offload
from offload.runtime.engine import Engine

FIRST_WATCHED = 3  # before it, a step is profiled and one tries recipes

parser = argparse.ArgumentParser()
parser.add_argument("--line")
parser.add_argument("--behind", default="model = ")
parser.add_argument("script")
args, words = parser.parse_known_args()
peak, steps, held = Peak(), 0, 0
watch = peak.watch()


def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    global steps, held
    steps += 1
    if steps == FIRST_WATCHED:
        for engine in engines:
            engine.drain()
            engine.collect()
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        rows = dict.values(optimizer.state)  # what has moved stays where it is, and has one element in memory
        state = [value for row in rows for value in row.values() if isinstance(value, torch.Tensor)]
        held = sum(each.untyped_storage().nbytes() for each in [*parameters, *state])  # gradients are made anew
        watch.__enter__()
    if steps == FIRST_WATCHED + 2:
        watch.__exit__(None, None, None)


def noting(self: Engine, *words: object, **options: object) -> None:
    told(self, *words, **options)
    engines.append(self)


tell_blocks_of_all()
told, Engine.__init__ = Engine.__init__, noting  # type: ignore[method-assign]
source = Path(args.script).read_text()
if args.line:
    made = next(line for line in source.splitlines() if line.startswith(args.behind) and line.endswith(")"))
    source = source.replace(made, f"{made}\n{args.line}", 1)
sys.argv = [args.script, *words]
found: dict[str, object] = {}
engines: list[Engine] = []
register_optimizer_step_post_hook(stepped)  # after those of offload, which are called for one optimizer
try:
    exec(compile(source, args.script, "exec"), {"__name__": "__main__"})
except offload.InfeasibleLimitError as error:
    found["least_bytes"] = error.least_limit_bytes
else:
    assert steps >= FIRST_WATCHED + 2
    found["peak_bytes"] = held + peak.nbytes
print(json.dumps(found))
