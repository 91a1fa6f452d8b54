"""What torch.compile makes of a model, with and without the engine: kernels, graph breaks, autograd nodes, gradients.

    python tests/integrations/compile_worker.py [--full]     prints the table; --json reads cases from stdin

Every case is a user's script in a process of its own, without a warm-up: torch's counters are read at its end. The
processes are forked from one that has imported torch and the compiler and has compiled nothing.
"""

import argparse
import hashlib
import json
import os
import sys
import traceback
from pathlib import Path

# In this process: a pool of compilers does not survive a fork.
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import torch
import torch._inductor.compile_fx
from compile_cases import MODES, OPTIONS, ORDERS, Case, differences, every_case, some_cases
from torch import nn
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._inductor import metrics
from torch_rig import Block, Blocks, replace_blocks

import offload

STEPS = 7
PACKAGE = str(Path(offload.__file__).parent)


def make_model(kind: str) -> nn.Module:
    """A model of two equal blocks, as a class of the user's own or as a Sequential."""
    torch.manual_seed(0)
    if kind == "class":
        return Blocks(2)
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(64, 8))


def compile_model(model: nn.Module, way: str, how: dict) -> nn.Module:
    """Compile it as the case says; returns what the training calls."""
    blocks = model.blocks if hasattr(model, "blocks") else model[0]
    if way.startswith("whole, "):
        return torch.compile(model, **how)
    if way == "whole in place":
        model.compile(**how)
    elif way == "block.compile()":
        for block in blocks:
            block.compile(**how)
    else:
        replace_blocks(blocks, **how)
    return model


def run(case: Case) -> dict:
    """Train as the case says; what was compiled and what came out."""
    model = make_model(case.model)
    knobs = MODES[case.mode] if case.mode is not None else None
    handle = None

    def enable(which: nn.Module) -> None:
        nonlocal handle
        if knobs is not None:
            handle = offload.enable(which, min_tensor_bytes=1, **knobs)

    if case.order == ORDERS[0]:
        enable(model)
    call = compile_model(model, case.way, OPTIONS[case.option])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digest, nodes = hashlib.sha256(), []
    for number in range(STEPS):
        if case.order != ORDERS[0] and number == (1 if case.order == ORDERS[2] else 0):
            enable(call if case.way == "whole, the wrapper" else model)
        rows = 24 if case.option == "another batch size" and number == STEPS - 2 else 16
        loss = call(torch.randn(rows, 64, generator=torch.Generator().manual_seed(number))).square().mean()
        nodes.append(node_names(loss))
        loss.backward()
        for tensor in (loss, *(parameter.grad for parameter in model.parameters())):
            digest.update(tensor.detach().numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    about = handle.report() if handle is not None else None
    return {
        "kernels": metrics.generated_kernel_count,
        "breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "fallbacks": counters["frames"]["total"] - counters["frames"]["ok"],
        "nodes": nodes,
        "digest": digest.hexdigest(),
        "traced": [each.co_name for each in get_compilation_metrics() if (each.co_filename or "").startswith(PACKAGE)],
        "notes": list(about.notes) if about is not None else [],
        "swapped": about.swapped.tensors if about is not None else 0,
    }


def node_names(loss: torch.Tensor) -> list[str]:
    """The autograd nodes above a loss, sorted."""
    found, pending = {}, [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            pending += [next_node for next_node, _ in node.next_functions]
    return sorted(found.values())


def run_apart(case: Case) -> dict:
    """Run a case in a forked process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            found = run(case)
        except BaseException:
            found = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(found, pipe)
        sys.stderr.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"error": "the process ended without an answer"}


def main() -> int:
    """Print the table, or one line of JSON per case; 1 where a case differs from the run without the engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the whole matrix")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose names have this in them")
    parser.add_argument("--json", action="store_true", help="answer each line of stdin, a case, with a line")
    args = parser.parse_args()
    if args.json:
        for line in sys.stdin:
            print(json.dumps(run_apart(Case(**json.loads(line)))), flush=True)
        return 0
    known: dict[Case, dict] = {}
    different = 0
    print(f"{'kernels':>13} {'graph breaks':>13}  bit-equal  case")
    for case in every_case() if args.full else some_cases():
        if args.only not in str(case):
            continue
        if case.plain not in known:
            known[case.plain] = run_apart(case.plain)
        plain, found = known[case.plain], run_apart(case)
        wrong = differences(found, plain)
        different += bool(wrong)
        if "error" in found or "error" in plain:
            print(f"{'ERROR':>13} {'':>13}  {'':<9}  {case}", *wrong, sep="\n", flush=True)
            continue
        kernels, breaks = (f"{found[name]} / {plain[name]}" for name in ("kernels", "breaks"))
        equal = "yes" if found["digest"] == plain["digest"] else "NO"
        print(f"{kernels:>13} {breaks:>13}  {equal:<9}  {case}", *(f"  {each[:200]}" for each in wrong), sep="\n")
        sys.stdout.flush()
    print(f"{different} cases differ; with / without the engine")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
