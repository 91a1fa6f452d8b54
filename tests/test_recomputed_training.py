"""Recomputation as a user meets it: a fresh process, a slow link, `offload.enable(model, memory_limit=…)`."""

import json
import textwrap

import pytest
from forked_python import run_python
from page_check import charts_of

SCRIPT = """
import json, sys
import torch
from torch import nn
import offload

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))

def make():
    torch.manual_seed(0)
    return nn.Sequential(*[Block(64) for _ in range(4)], nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))

def train(model, steps, rows=256):
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters())
    results = []
    for _ in range(steps):
        x, y = torch.randn(rows, 64), torch.randint(4, (rows,))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        results += [buffer.clone() for buffer in model.buffers()]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, torch.get_rng_state()]

def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))

KNOBS = {"min_tensor_bytes": "4KiB"}

def limit(fraction):
    with offload.enable(make_and_train_two(), max_slowdown=0, recompute=False, **KNOBS) as handle:
        train(handle._enabled.model, 2)
        trace = handle.plan.trace
    from offload.plan import least_feasible_limit, unswapped_bytes
    least, peak = least_feasible_limit(trace), max(unswapped_bytes(trace))
    return int(least + fraction * (peak - least))

kept = []
def make_and_train_two():
    kept.append(make())
    return kept[-1]
"""


def run(body, link="20MB/s"):
    script = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    ran = run_python("-c", script, timeout=280, OFFLOAD_THROTTLE=link)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the training over a slow link leaves the timelines of two steps."""
    return tmp_path_factory.mktemp("timelines")


@pytest.fixture(scope="module")
def spared(folder):
    """A training over a slow link; after its steps it records two of them, and runs out of memory in a third."""
    return run(f"""
    memory_limit = limit(0.2)
    expected = train(make(), 6)
    model = make()
    with offload.enable(model, memory_limit=memory_limit, **KNOBS) as handle:
        results = train(model, 6)
        plan, report, words = handle.plan, handle.report(), str(handle.report())
        trace = handle.trace()
        trace.save("/dev/null")
        found = {{
            "same": same(results, expected),
            "recomputes": len(plan.recomputes),
            "peak": plan.peak_bytes, "limit": memory_limit,
            "trials": report.trial_steps,
            "recomputed": report.to_dict()["recomputed"],
            "words": words,
            "explained": plan.explain(),
            "dict": plan.to_dict()["recomputes"],
            "activations": [report.verdict.activation_bytes, report.verdict.activation_bytes_planned],
            "recipes": sum(tensor.recompute is not None for tensor in trace.tensors),
            "ids": [tensor.id for tensor in trace.tensors],
            "modules": list(sys.modules),
        }}
        for name in ("step.json", "step.html"):
            with handle.timeline("{folder}/" + name):
                train(model, 1)
        model[-1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("Tried to allocate 1 GiB")))
        try:
            train(model, 1)
        except MemoryError as error:
            found["notes"] = "\\n".join(getattr(error, "__notes__", []))
    print(json.dumps(found))
    """)


@pytest.mark.long
def test_a_slow_link_is_spared_and_the_bits_are_the_same(spared):
    found = spared
    assert found["same"]
    assert found["recomputes"] > 0
    assert found["peak"] <= found["limit"]
    assert found["trials"] == 1
    assert found["recomputed"]["tensors"] > 0
    assert found["recomputed"]["bytes"] > 0
    assert found["recomputed"]["seconds"] > 0
    assert " recomputed" in found["words"]
    assert len(found["dict"]) == found["recomputes"]
    assert found["recipes"] >= found["recomputes"]
    assert all(f"(tensor {i})" in found["explained"] for i in found["ids"])
    measured, planned = found["activations"]
    assert measured <= 1.05 * planned + (1 << 20)


@pytest.mark.long
def test_the_hooks_of_a_dropped_tensor_are_planned_as_those_of_a_swapped_one():
    """The first joint plan: each recipe takes what the trial measured, and what the hooks of a tensor take."""
    found = run("""
    memory_limit = limit(0.2)
    model = make()
    with offload.enable(model, memory_limit=memory_limit, **KNOBS) as handle:
        train(model, 3)
        (planned,) = [state.planned for state in handle._controller.states.values()]
        plan, tried = planned.plan, planned.recipes.recompute
        planned_seconds = {x.id: x.recompute.seconds for x in plan.trace.tensors if x.recompute}
        measured = [executor.measured(len(plan.trace.nodes)) for executor in planned.executors]
        planned.read_measurements(handle._controller._counts)
        hooks = [m.hook_seconds - planned.recompute_seconds[0] for m in measured]
        moved = len(plan.swaps) + len(plan.recomputes)
        print(json.dumps({
            "recomputes": len(plan.recomputes),
            "hooks": plan.link.swap_seconds,
            "planned": [planned_seconds[i] for i in sorted(tried)],
            "tried": [tried[i].seconds for i in sorted(tried)],
            "found": list(planned.swap_seconds), "expected": [seconds / moved for seconds in hooks],
        }))
    """)
    assert found["recomputes"] > 0
    assert found["hooks"] > 0
    assert found["planned"] == [seconds + found["hooks"] for seconds in found["tried"]]
    assert found["found"] == found["expected"] != []


@pytest.mark.long
def test_swapping_alone_is_what_it_was():
    found = run("""
    memory_limit = limit(0.2)
    expected = train(make(), 4)
    model = make()
    with offload.enable(model, memory_limit=memory_limit, recompute=False, **KNOBS) as handle:
        results = train(model, 4)
        report = handle.report()
        print(json.dumps({
            "same": same(results, expected),
            "recomputes": len(handle.plan.recomputes),
            "trials": report.trial_steps,
            "modules": [name for name in sys.modules if name.startswith("torch._dynamo")],
            "words": str(report),
        }))
    """)
    assert found["same"]
    assert (found["recomputes"], found["trials"]) == (0, 0)
    assert "recompute" not in found["words"]


@pytest.mark.long
def test_tensors_of_excluded_modules_are_neither_swapped_nor_recomputed():
    found = run("""
    memory_limit = limit(0.8)
    expected = train(make(), 5)
    model = make()
    with offload.enable(model, memory_limit=memory_limit, exclude=("0", "1"), **KNOBS) as handle:
        results = train(model, 5)
        plan = handle.plan
        named = {tensor.id: plan.trace.nodes[tensor.produced].name for tensor in plan.trace.tensors}
        print(json.dumps({
            "same": same(results, expected),
            "recomputed": [named[row.id] for row in plan.recomputes],
            "kept": handle.report().kept["excluded"].tensors,
        }))
    """)
    assert found["same"]
    assert found["kept"] > 0
    assert not [name for name in found["recomputed"] if name.split(".")[0] in ("0", "1") and "norm" not in name]


@pytest.mark.long
def test_the_default_wish_finds_less_memory():
    found = run(
        """
    rows = 4096  # a step so long that 5 % of it is more than a hook takes
    expected = train(make(), 5, rows)
    peaks, equal = [], []
    for recompute in (False, "cheap", "auto"):
        model = make()
        with offload.enable(model, recompute=recompute, **KNOBS) as handle:
            equal.append(same(train(model, 5, rows), expected))
            peaks.append(handle.plan.peak_bytes)
    print(json.dumps({"same": all(equal), "peaks": peaks}))
    """,
        link="10MB/s",  # so slow that 5 % of a step is far from enough for a swap, however noisy its times are
    )
    assert found["same"]
    swap, *joint = found["peaks"]
    assert max(joint) < swap


def test_plans_are_made_without_modules_that_take_much_memory(spared):
    assert spared["recomputes"] > 0
    assert not {"numpy.ma", "scipy", "highspy"}.intersection(spared["modules"])


def test_a_timeline_of_a_step_has_recomputation_on_a_lane_of_its_own(spared, folder):
    events = json.loads((folder / "step.json").read_text())["traceEvents"]
    assert [event for event in events if event.get("cat") == "recompute"]
    page = (folder / "step.html").read_text()
    assert "recompute" in [name for name, _ in charts_of(page)[0]["lanes"]]
    assert ["recomputed", "pink"] in charts_of(page)[0]["kinds"]
    assert "Recomputed: " in page


def test_running_out_of_memory_tells_of_what_was_dropped(spared):
    assert "dropped" in spared["notes"]
    assert "recomputed in backward" in spared["notes"]
