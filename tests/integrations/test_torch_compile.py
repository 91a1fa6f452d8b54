"""torch.compile beside the engine: whole model and per block, enabled before and after the first compiled call.

Every case gives the gradients of the same compiled run without the engine, and what was swapped is measured; where
swapping cannot help, because one graph takes everything back at once, that is said.
"""

import inspect
import json
import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch_rig import KNOBS, assert_same, batch, make_blocks, replace_blocks, train

import offload
from offload.demo.model import ByteGPT
from offload.torch_compat import compiled

STEPS = 3
ONE_GRAPH = "torch.compile made one graph whose backward asks for"

# How a model is compiled: what to call, and what was compiled of it.
COMPILED = {
    "whole": lambda model, **how: torch.compile(model, **how),
    "whole in place": lambda model, **how: (model.compile(**how), model)[1],
    "per block": lambda model, **how: (replace_blocks(model.blocks, **how), model)[1],
    "per block in place": lambda model, **how: ([block.compile(**how) for block in model.blocks], model)[1],
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # The tracer must never meet the engine's own code: it says so with this warning.
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def plain():
    """The compiled run without the engine, by backend and way."""
    known = {}

    def run(backend, way):
        if (backend, way) not in known:
            torch._dynamo.reset()
            model = make_blocks()
            known[backend, way] = train(COMPILED[way](model, backend=backend), model, 2 * STEPS)
            torch._dynamo.reset()
        return known[backend, way]

    return run


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("way", "on", "backend"),
    [
        pytest.param("whole", "wrapper", "aot_eager", marks=pytest.mark.long),
        pytest.param("whole", "wrapper", "inductor", marks=pytest.mark.full),
        pytest.param("whole", "inner", "aot_eager", marks=pytest.mark.long),
        pytest.param("whole", "inner", "inductor", marks=pytest.mark.full),
        ("whole in place", "inner", "aot_eager"),
        pytest.param("per block", "inner", "aot_eager", marks=pytest.mark.long),
        ("per block in place", "inner", "aot_eager"),
        pytest.param("per block in place", "inner", "inductor", marks=pytest.mark.full),
    ],
)
def test_compiled_training(plain, caplog, backend, way, on, when):
    model = make_blocks()
    call = COMPILED[way](model, backend=backend)
    found = train(call, model, STEPS) if when == "after" else []
    with (
        caplog.at_level(logging.WARNING, logger="offload"),
        offload.enable(call if on == "wrapper" else model, **KNOBS) as handle,
    ):
        found += train(call, model, STEPS, start=len(found))
        about = handle.report()
    assert_same(found, plain(backend, way)[: len(found)])
    assert about.steps == STEPS
    assert about.swapped.tensors >= 4 * STEPS, "measured: the hooks saw what the compiled graphs save"
    assert about.kept["parameter"].tensors >= STEPS
    assert about.to_dict()["failed"] == 0
    in_one_graph = 1 if way.startswith("whole") else 0
    notes = [note for note in about.notes if ONE_GRAPH in note]
    said = [record.getMessage() for record in caplog.records if ONE_GRAPH in record.getMessage()]
    assert (len(notes), len(said)) == (in_one_graph, in_one_graph), "said once, and only where it is so"
    assert all("compile block by block" in each for each in notes + said)


def test_disabled_again_it_runs_as_before(plain):
    model = make_blocks()
    call = torch.compile(model, backend="aot_eager")
    with offload.enable(model, **KNOBS) as handle:
        found = train(call, model, STEPS)
    found += train(call, model, STEPS, start=STEPS)
    assert_same(found, plain("aot_eager", "whole"))
    assert handle.report().steps == STEPS
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("when", ["before", "after"])
def test_disabled_sequential_runs_as_before(when):
    """Torch calls a Sequential from a frame of its own, which must not meet the engine."""

    def steps(call):
        train(call, model, 1)
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], dict(counters["graph_break"])

    torch._dynamo.utils.counters.clear()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = call.forward
    if when == "after":
        steps(call)
    with offload.enable(model, **KNOBS) as handle:
        assert steps(call) == (1, {})
        assert handle.report().steps == 1
        model(torch.ones(16, 64)).sum().backward()
        assert handle.report().steps == 2, "the model itself is still enabled"
    assert "forward" not in model.__dict__
    assert call.forward is before
    assert steps(call) == (1, {})
    assert handle.report().steps == 2


def test_enabled_before_it_is_compiled(plain):
    model = make_blocks()
    with offload.enable(model, **KNOBS) as handle:
        found = train(torch.compile(model, backend="aot_eager"), model, STEPS)
    assert_same(found, plain("aot_eager", "whole")[:STEPS])
    assert handle.report().swapped.tensors >= 4 * STEPS


@pytest.mark.parametrize("on", ["wrapper", "inner"])
def test_one_whole_graph_is_still_whole(on):
    """With fullgraph=True nothing of the engine may break the graph."""
    results = []
    for enabled in (False, True):
        torch._dynamo.reset()
        model = make_blocks()
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
        handle = offload.enable(call if on == "wrapper" else model, **KNOBS) if enabled else None
        results.append(train(call, model, STEPS))
    assert_same(results[1], results[0])
    assert handle.report().steps == STEPS
    assert handle.report().swapped.tensors >= 4 * STEPS
    handle.disable()


def test_one_whole_graph_around_an_enabled_model_says_what_to_do():
    model = make_blocks()
    call = torch.compile(lambda x: model(x).sum(), backend="aot_eager", fullgraph=True)
    with (
        offload.enable(model, **KNOBS),
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"enable what torch\.compile returned, offload\.enable"),
    ):
        train(call, model, 1)


@pytest.mark.parametrize("with_backward", [False, True])
def test_compiled_training_function(with_backward):
    """The graph breaks at the enabled model, and the engine sees it; backward may be inside too."""

    def make_step(model):
        def step(x):
            loss = model(x).square().mean()
            if not with_backward:
                return loss
            loss.backward()
            return loss.detach()

        return torch.compile(step, backend="aot_eager")

    def run(model):
        call = make_step(model)
        results = []
        for _ in range(STEPS):
            model.zero_grad()
            loss = call(torch.linspace(-1, 1, 16 * 64).reshape(16, 64))
            if not with_backward:
                loss.backward()
            results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        return results

    expected = run(make_blocks())
    torch._dynamo.reset()
    model = make_blocks()
    with (
        warnings.catch_warnings(),
        offload.enable(model, **KNOBS) as handle,
    ):
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # torch's own
        found = run(model)
    assert_same(found, expected)
    assert (handle.report().steps, handle.report().swapped.tensors >= 4 * STEPS) == (STEPS, True)
    assert any("offload.enable(torch.compile(model))" in note for note in handle.report().notes)


def test_a_part_that_torch_gives_up_on_is_said():
    """After as many compilations as `recompile_limit` allows, torch runs a function as it is."""

    class Counting(torch.nn.Linear):
        name = ""

        def forward(self, x):
            return super().forward(x) * len(self.name)

    def steps(count):
        for _ in range(count):
            model.name += "x"
            call(torch.ones(16, 64)).sum().backward()
        return [note for note in handle.report().notes if "gave up" in note]

    model = Counting(64, 64)
    call = torch.compile(model, backend="aot_eager")
    with offload.enable(call, min_tensor_bytes=1) as handle:
        assert steps(torch._dynamo.config.recompile_limit) == []
        (note,) = steps(2)
        assert "gave up on 1 of this model's functions" in note
        assert re.search("recompile.limit", note)  # torch 2.10 writes "recompile_limit"
    with offload.enable(call, min_tensor_bytes=1) as handle:
        assert steps(1) == [], "what was before belongs to another session"


@pytest.mark.parametrize("moves", [True, False])
def test_a_compiled_step_of_an_optimizer_is_said(moves, tmp_path):
    """Not where nothing that it updates moves; and the model, which is not compiled, is not blamed."""
    model = make_blocks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    handle = offload.enable(
        model, n_tensors=-1, lb=2, min_tensor_bytes=256, spill_dir=tmp_path, optimizer=optimizer, optimizer_state=moves
    )
    for number in range(3):
        model(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    notes = handle.report().notes
    assert any("a compiled optimizer.step() runs uncompiled" in note for note in notes) == moves
    assert not any("broke its graphs" in note for note in notes)


@pytest.mark.parametrize(
    "way",
    [
        "whole",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("whole in place", "per block")),
        "per block in place",
    ],
)
def test_a_recorded_step_is_compiled_as_any(way, tmp_path):
    """A timeline names what runs without hooks in a graph."""
    graphs = []
    for path in (None, tmp_path / "step.json"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = make_blocks()
        call = COMPILED[way](model, backend="aot_eager")
        with offload.enable(model, **KNOBS) as handle:
            if path is not None:
                handle.timeline(path)
            train(call, model, STEPS)
            counters = torch._dynamo.utils.counters
            graphs.append((counters["stats"]["unique_graphs"], dict(counters["frames"]), dict(counters["graph_break"])))
    assert graphs[1] == graphs[0] != (0, {}, {})
    computed = {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "forward"}
    expected = {"Blocks"} if way.startswith("whole") else {"blocks.0", "blocks.1", "blocks.2", "head"}
    assert expected <= computed


def test_a_profile_names_compiled_blocks():
    model = make_blocks()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with offload.enable(model, min_tensor_bytes=1) as handle:
        train(model, model, 1)
        names = {node.name for node in handle.trace().nodes}
    assert {"blocks.0", "blocks.1", "blocks.2", "head"} <= names


def test_the_tracer_passes_over_all_that_a_step_runs(monkeypatch):
    """Whatever file of the package it is in, but for what calls a step. Models are compiled wherever they are."""
    # As in a fresh process: the rules are made once, and tests before this one may have loaded more since.
    monkeypatch.setattr(compiled._Tracer, "call_untraced", None)
    rules, compile_rules, made = torch._dynamo.trace_rules, torch._dynamo.trace_rules._recompile_re, []
    monkeypatch.setattr(rules, "_recompile_re", lambda: made.append(compile_rules()))
    model = make_blocks()
    call = torch.compile(model, backend="aot_eager")
    with offload.enable(call, min_tensor_bytes=1):
        train(call, model, 3)
    assert len(made) == 1, "they are not compiled for each module"
    passed_over = rules.check
    classes = [
        each
        for name, module in list(sys.modules.items())
        if name.startswith("offload.") and not {"demo", "contrib", "integrations"} & set(name.split("."))
        for each in vars(module).values()
        if inspect.isclass(each) and each.__module__ == name
    ]
    functions = [each for known in classes for each in vars(known).values() if inspect.isfunction(each)]
    own = [each for each in functions if "/offload/" in each.__code__.co_filename]
    assert len(own) > 200
    assert [each.__qualname__ for each in own if not passed_over(each)] == []
    assert not passed_over(ByteGPT.forward)


def test_wrapper_called_from_another_compiled_function_is_said():
    """The tracer looks through the wrapper to the model inside: nothing is swapped, and the report says why."""
    model = make_blocks()
    wrapper = torch.compile(model, backend="aot_eager")
    with offload.enable(wrapper, **KNOBS) as handle:
        train(torch.compile(lambda x: wrapper(x) * 2, backend="aot_eager"), model, 1)
        about = handle.report()
    assert about.swapped.tensors == 0
    assert any("called from inside another compiled function: enable the inner model" in note for note in about.notes)


@pytest.mark.parametrize("on", ["wrapper", "inner"])
def test_excluded_part_of_a_compiled_model(on):
    model = make_blocks()
    call = torch.compile(model, backend="aot_eager")
    expected = train(call, model, STEPS)
    torch._dynamo.reset()
    model = make_blocks()
    call = torch.compile(model, backend="aot_eager")
    prefix = "_orig_mod." if on == "wrapper" else ""
    target = call if on == "wrapper" else model
    with offload.enable(target, exclude=(f"{prefix}blocks.1",), **KNOBS) as handle:
        found = train(call, model, STEPS)
        about = handle.report()
    assert_same(found, expected)
    assert about.kept["excluded"].tensors >= 3 * STEPS
    assert about.swapped.tensors >= 4 * STEPS
    assert any("exclude no module inside a graph" in note for note in about.notes)


def test_changed_shapes_of_a_compiled_model():
    def run(call, model):
        results = []
        for rows in (16, 16, 5, 16, 5):
            model.zero_grad()
            loss = call(torch.linspace(-1, 1, rows * 64).reshape(rows, 64)).square().mean()
            loss.backward()
            results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        return results

    model = make_blocks()
    expected = run(torch.compile(model, backend="aot_eager"), model)
    torch._dynamo.reset()
    model = make_blocks()
    call = torch.compile(model, backend="aot_eager")
    with offload.enable(call, **KNOBS) as handle:
        assert_same(run(call, model), expected)
        assert handle.report().steps == 5


@pytest.mark.long
def test_enabled_before_the_compiler_is_loaded():
    """In a fresh process: enabling loads no compiler, and the tracer, once it comes, still stays out of the engine."""
    code = """
import sys, warnings
warnings.simplefilter("error", UserWarning)
import torch, offload
from torch_rig import KNOBS, make_blocks, replace_blocks, train
model = make_blocks()
handle = offload.enable(model, **KNOBS)
model(torch.ones(16, 64)).sum().backward()
model.zero_grad()
assert "torch._dynamo" not in sys.modules
train(torch.compile(model, backend="aot_eager", fullgraph=True), model, 2)
assert handle.report().steps == 3, handle.report().steps
print("swapped", handle.report().swapped.tensors)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=Path(__file__).parent
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[1]) >= 8
