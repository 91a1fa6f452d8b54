"""The report's first lines, as a user's script sees them: each kind in a fresh process, beside counts of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
from page_check import check_page

from offload.devices import allocator
from offload.units import parse_bytes

MIB = 1 << 20
TENSOR_BYTES = 8 * MIB  # each activation of the script's model

# Counts on its own what is alive: the outputs of layers by their storages, and the blocks that came back.
SCRIPT = """
import json, sys, weakref
import torch, offload
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
sys.path.insert(0, {tests!r})
from live_bytes import Peak, end_copies_at_once, tell_blocks, told_blocks

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())))
optimizer = torch.optim.AdamW(model.parameters())
blocks, outputs, most = [0], [], [0]

def told(nbytes):
    blocks[0] += nbytes

def count(*_):
    outputs[:] = [row for row in outputs if not row[0].expired()]
    most[0] = max(most[0], blocks[0] + sum(nbytes for _, nbytes in outputs))

def came(module, inputs, output):
    outputs.append((StorageWeakRef(output.untyped_storage()), output.nbytes))
    count()
    output.register_hook(count)

def step(peak=None):
    x = torch.randn(8192, 256)
    with handle.step():
        loss = model(x).square().mean()
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

handle = offload.enable(model, {knobs})
if {is_manual}:
    end_copies_at_once(handle._engine)
result = dict(before=repr(handle))
try:
    for _ in range(7):
        step()
except offload.InfeasibleLimitError as error:
    result.update(error=str(error), least=error.least_limit_bytes, notes=getattr(error, "__notes__", []))
    result["is_out_of_memory"] = isinstance(error, MemoryError) or hasattr(error, "offload_explanation")
else:
    engine = handle._engine
    for _ in range(8):  # until both counts are of one plan: measured steps may have replaced it
        plan = handle.plan
        engine.new_storage = told_blocks(engine.store.alignment_bytes, told)
        hooks = [layer.register_forward_hook(came) for layer in model]
        step()
        for hook in hooks:
            hook.remove()
        result["activations"], most[0] = most[0], 0
        tell_blocks(engine)
        peak, x = Peak(), torch.randn(8192, 256)
        with peak.watch():
            with handle.step():
                loss = model(x).square().mean()
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        engine.new_storage = None
        state = [value for row in optimizer.state.values() for value in row.values()]
        result["whole"] = peak.nbytes + sum(tensor.nbytes for tensor in [*model.parameters(), *state, x])
        if handle.plan is plan:
            break
report = handle.report()
result.update(text=str(report), html=report._repr_html_(), told=repr(handle), about=report.to_dict())
print(json.dumps(result))
"""

KINDS = {
    "planned": 'memory_limit="80MiB"',
    "nothing to swap": 'memory_limit="100GiB"',
    "by hand": "n_tensors=6, lb=2",
    "refused": 'memory_limit="20MiB"',
    "glibc": 'memory_limit="80MiB"',
}


BY_DEFAULT = ("refused",)


@pytest.fixture(
    scope="module",
    params=[
        each
        if each in BY_DEFAULT
        else pytest.param(each, marks=pytest.mark.long if each == "planned" else pytest.mark.full)
        for each in KINDS
    ],
)
def told(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """What a script says that trains with these knobs."""
    kind = request.param
    environment = allocator.preload_environment()
    if kind == "glibc":
        environment = {**environment, "LD_PRELOAD": ""}
    program = SCRIPT.replace("{knobs}", KINDS[kind]).replace("{tests!r}", repr(str(Path(__file__).parent)))
    program = program.replace("{is_manual}", str(kind == "by hand"))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    assert "out of memory" not in done.stderr
    return kind, json.loads(done.stdout.splitlines()[-1])


def test_a_report_begins_with_three_lines(told: tuple[str, dict[str, Any]]) -> None:
    kind, said = told
    memory, time, state, fourth, *_ = said["text"].splitlines()
    words = {
        "planned": r"activations \d+ MiB at peak instead of 128 MiB \(-\d+ %\); whole step \d+ MiB \(predicted\) "
        r"instead of 174 MiB",
        "nothing to swap": "activations 128 MiB at peak, as without offload; whole step 174 MiB, as without offload",
        "by hand": r"activations \d+ MiB at peak instead of 128 MiB \(-\d+ %\)",
        "refused": "activations 128 MiB at peak without offload; whole step 174 MiB without offload; at least 54 MiB "
        "even with all possible swaps",
    }
    words["glibc"] = words["planned"]
    assert re.fullmatch(f"memory +{words[kind]}", memory), memory
    amount, change = r"[\d.]+ m?s", r" \([+±-]\d+ %\)"
    words = {
        "by hand": rf"step {amount}, without offload about {amount}{change}",
        "refused": rf"without offload about {amount}",
    }
    planned = rf"step {amount}, predicted {amount}, without offload about {amount}{change}"
    assert re.fullmatch(f"time +{words.get(kind, planned)}", time), time
    planned = r"(on|off) plan: \d+ of 16 tensors swapped, (\d+ recomputed in .* a step, )?(none|\d+) late.*"
    words = {
        "nothing to swap": "nothing to swap: all 16 tensors stay, since the step fits within memory_limit with them",
        "by hand": r"by hand \(n_tensors=6, lb=2\): 6 of 17 tensors swapped, (none|\d+) late.*",
        "refused": r'refused: no plan keeps 20\.00 MiB; write memory_limit="54\.1MiB" or more',
    }
    assert re.fullmatch(f"state +{words.get(kind, planned)}", state), state
    units = re.findall(r"[\d.]+ (\w?i?B)\b", memory), re.findall(r"\d (m?s)\b", time)
    assert all(len(set(each)) <= 1 for each in units), "one unit in each line"
    process = (
        r"process +resident set \d+ MiB now, \d+ MiB at most: glibc malloc returns large blocks when "
        r"they are freed; new ones take time\. For faster steps, start with `offload run -- python train\.py`\."
    )
    if kind == "glibc":
        assert re.fullmatch(process, fourth), fourth
    elif allocator.find_recycling_allocator() is not None:
        assert fourth == "", "where freed memory is used again, there is nothing to explain"


def test_the_figures_are_those_counted_outside(told: tuple[str, dict[str, Any]]) -> None:
    kind, said = told
    verdict = said["about"]["verdict"]
    assert verdict["activation_bytes_unswapped"] == 16 * TENSOR_BYTES
    if kind == "refused":
        return
    measured, counted = verdict["activation_bytes"], said["activations"]
    if kind == "by hand":
        assert abs(measured - counted) <= 2 * TENSOR_BYTES, "the most of five steps, and one: copies are never as fast"
        assert measured >= 10 * TENSOR_BYTES, "what n_tensors keeps is in memory"
        return
    planned = verdict["activation_bytes_planned"]
    assert counted <= planned
    assert measured <= planned
    assert min(measured, counted) >= planned - TENSOR_BYTES
    beside = 4096  # where tensors are recomputed, a bias's gradient is there one node earlier than recorded
    assert verdict["step_bytes_planned"] - TENSOR_BYTES <= said["whole"] <= verdict["step_bytes_planned"] + beside
    if kind == "nothing to swap":
        assert measured == counted == 16 * TENSOR_BYTES


def test_the_same_as_html(told: tuple[str, dict[str, Any]]) -> None:
    kind, said = told
    page = said["html"]
    check_page(page)
    rows = [re.split(" {2,}", line, maxsplit=1) for line in said["text"].splitlines()[:3]]
    for name, words in rows:
        assert f"<tr><th>{name}</th><td>{escape(words)}</td></tr>" in page
    curves = page.count("Memory over the step")
    assert curves == (kind not in ("refused", "by hand")), "the plan's memory, where there is a plan"
    assert page.count('<table class="bars"') == (kind != "refused"), (
        "two bars for each figure that is known with and without"
    )
    assert "script" not in page
    assert "url(" not in page


def test_a_handle_says_what_it_is(told: tuple[str, dict[str, Any]]) -> None:
    kind, said = told
    wish = KINDS[kind]
    assert said["before"] == f"<offload.Session of Sequential on cpu, {wish}: no training step has run yet>"
    state = {"planned": "(on|off) plan: ", "glibc": "(on|off) plan: ", "by hand": r"by hand \("}.get(kind, kind)
    assert re.match(rf"<offload\.Session of Sequential on cpu(, {re.escape(wish)})?: {state}", said["told"]), said[
        "told"
    ]


def test_a_refused_limit_is_no_lack_of_memory(told: tuple[str, dict[str, Any]]) -> None:
    kind, said = told
    if kind != "refused":
        assert "error" not in said
        return
    assert said["notes"] == []
    assert not said["is_out_of_memory"]
    found = re.match(
        r"memory_limit: no plan keeps 20\.00 MiB; the least that works for this step is 54\.02 MiB\. Write "
        r'memory_limit="([\d.]+MiB)" or more, or make the batch smaller\. In the way: \d',
        said["error"],
    )
    assert found, said["error"]
    assert said["least"] <= parse_bytes(found[1]) <= 1.01 * said["least"]
