"""What a profiled step leaves alone, and that it leaves nothing behind."""

import gc
import json
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from forked_python import run_python
from planned_rig import batch, enabled, known_link, make, train  # noqa: F401  (a fixture)
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

import offload
from offload.control.limits import LIMITS
from offload.profiling import profiler
from offload.torch_compat.backward_pass import current_node

TWO_THREADS = """
import sys, threading
sys.path.insert(0, {tests!r})
from offload import handle
from planned_rig import LINK, enabled, make, train
handle.measure_link = lambda *_: LINK
done = []
def work():
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir={spill!r}) as handle:
        train(model, optimizer, [256] * 4)
        done.append(handle.plan is not None)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert done == [True] * 3, done
"""


def loss_of(model, seed, rows=256):
    x, y = batch(rows, seed)
    return nn.functional.cross_entropy(model(x), y)


def watchers():
    """What a profiled step puts in place for its time."""
    return (
        len(modules._global_forward_hooks),
        len(modules._global_forward_pre_hooks),
        max(len(optimizers._global_optimizer_pre_hooks) - 1, 0),  # one is for good
        torch.autograd._profiler_enabled(),
    )


def test_two_threads_profile_at_once(tmp_path, request):
    """Torch ends in a segmentation fault where two threads profile at a time: hence a process of their own."""
    done = run_python("-c", TWO_THREADS.format(tests=str(request.path.parent), spill=str(tmp_path)))
    assert done.returncode == 0, done.stderr


def apart(name, request, tmp_path):
    """Run a function of this file in a process of its own: torch's profiler keeps state as long as a process lives."""
    call = f"import pathlib, test_profiler; test_profiler.{name}(pathlib.Path({str(tmp_path)!r}))"
    done = run_python("-c", f"import sys; sys.path.insert(0, {str(request.path.parent)!r}); {call}")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_profiler_of_the_user_after_the_profiled_step(request, tmp_path):
    apart("profile_after_the_profiled_step", request, tmp_path)


def profile_after_the_profiled_step(tmp_path):
    model, _ = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path):
        loss_of(model, 0).backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
            loss_of(model, 1).backward()
        assert {"aten::linear", "aten::layer_norm"} <= {event.name for event in watched.events()}
        assert not torch.autograd._profiler_enabled()


@pytest.mark.long
def test_a_profiler_of_the_user_around_the_profiled_backward(request, tmp_path):
    apart("profile_around_the_profiled_backward", request, tmp_path)


def profile_around_the_profiled_backward(tmp_path):
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        loss = loss_of(model, 0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
            loss.backward()
        assert "aten::mm" in {event.name for event in watched.events()}
        assert any("temporaries are unknown" in note for note in handle.report().notes)
        train(model, optimizer, [256] * 3)
        assert handle.plan is not None
        assert handle._on_device.latest().profile.knows_temporaries, "it was profiled again"


class OneObject:
    """Stands for whichever autograd node runs: torch 2.10 reuses the address of the object that stood for the last."""

    def of_the_running_node(self):
        self.node = current_node()
        return None if self.node is None else self

    def name(self):
        return self.node.name()

    def _sequence_nr(self):
        return self.node._sequence_nr()


class Sines(nn.Module):
    def forward(self, x):
        return x.sin().sin().sin().sin()


@pytest.mark.parametrize("objects_are_reused", [False, True])
def test_nodes_of_the_same_kind_in_a_row_are_told_apart(objects_are_reused, tmp_path, monkeypatch):
    if objects_are_reused:
        monkeypatch.setattr(profiler, "current_node", OneObject().of_the_running_node)
    model = Sines()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        model(torch.ones(64, 64, requires_grad=True)).sum().backward()
        uses = [tensor.first_backward for tensor in handle.trace().tensors]
    assert len(uses) == 3, "all but the input, which the program holds"
    assert uses == sorted(set(uses), reverse=True), "each in a node of its own"


def test_a_model_dropped_after_a_forward_leaves_nothing(tmp_path):
    gc.collect()
    before = watchers()
    model, _ = make()
    handle = enabled(model, max_slowdown=10.0, spill_dir=tmp_path)
    loss = loss_of(model, 0)
    assert watchers() != before
    del model, handle, loss
    gc.collect()
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()  # what comes next clears up: nothing can meanwhile
    assert watchers() == before


@pytest.mark.parametrize("then", ["train", "eval", "no_grad"])
def test_a_step_without_backward_is_recorded_until_the_next_forward(then, tmp_path):
    """As in an evaluation whose author forgot `no_grad`: no optimizer steps."""
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        loss_of(model, 0)
        assert torch.autograd._profiler_enabled()
        with torch.set_grad_enabled(then != "no_grad"):
            loss_of(model.train(then != "eval"), 1)
        assert not torch.autograd._profiler_enabled()
        train(model.train(), optimizer, [256] * 4)
        assert handle.plan is not None
        assert handle._on_device.latest().profile.knows_temporaries


def test_a_step_whose_backward_may_still_run_is_recorded_to_its_end(tmp_path):
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        losses = [loss_of(model, number) for number in range(2)]
        assert torch.autograd._profiler_enabled()
        sum(losses).backward()
        optimizer.step()
        train(model, optimizer, [256])
        assert handle.report().profiled_steps == 1
        assert handle._on_device.latest().profile.knows_temporaries


def test_an_exception_in_the_profiled_forward_leaves_nothing_behind_disable(tmp_path):
    before = watchers()
    model, optimizer = make()
    model.append(nn.Linear(5, 5))  # does not fit
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            loss_of(model, 0)
        del model[-1]
        train(model, optimizer, [256] * 6)
        assert handle.plan is not None
        gc.collect()
        assert handle._engine.live_records == 0
    assert watchers() == before


def test_a_backward_in_another_thread_is_not_watched_and_said(tmp_path):
    model, optimizer = make()
    expected, expected_optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        for number in range(3):
            thread = threading.Thread(target=loss_of(model, number).backward)
            thread.start()
            thread.join()
            loss_of(expected, number).backward()
            for a, b in zip(model.parameters(), expected.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)
            optimizer.step()
            expected_optimizer.step()
        assert any("temporaries are unknown" in note for note in handle.report().notes)


def test_state_in_lists_counts(tmp_path):
    """LBFGS keeps lists of tensors."""
    model, _ = make(blocks=2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        for number in range(2):

            def closure(number=number):
                optimizer.zero_grad()
                loss = loss_of(model, number)
                loss.backward()
                return loss

            optimizer.step(closure)
        (state,) = optimizer.state.values()
        history = sum(tensor.nbytes for tensor in [*state["old_dirs"], *state["old_stps"]])
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        assert history > 0
        assert handle._on_device.held.look().state >= parameters + history


def test_the_report_counts_the_training_s_copies_alone(tmp_path, monkeypatch):
    """Not those of the link's calibration."""
    monkeypatch.undo()  # the link is measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    alone = nullcontext(lambda: 0.0)  # whatever else runs here
    monkeypatch.setattr("offload.profiling.calibration.used_by_others", lambda: alone)
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, [256] * 3)
        about = handle.report().to_dict()
        assert list(tmp_path.glob("offload/link-*.json"))
        assert 0 < about["copy_out"]["bytes"] <= about["swapped"]["bytes"]


@pytest.mark.long
def test_a_script_ends_well_after_its_first_step():
    """Torch ends in a segmentation fault where its profiler is still on."""
    script = (
        "import torch, offload\n"
        "model = torch.nn.Linear(64, 64)\n"
        "handle = offload.enable(model, min_tensor_bytes=1)\n"
        "model(torch.ones(16, 64)).square().mean().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_plan_of_a_script_that_disables_its_model(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, offload\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))\n"
        "with offload.enable(model, min_tensor_bytes='4KiB'):\n"
        "    model(torch.randn(512, 64)).square().mean().backward()\n"
    )
    command = [sys.executable, "-m", "offload", "plan", "--json", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["options"]


def test_two_models_of_one_step_know_their_temporaries(tmp_path):
    """Torch profiles once at a time: the second model is profiled again, when the first is done."""
    generator, _ = make(blocks=2)
    generator[-1] = nn.Linear(32, 32)
    model, _ = make(blocks=2)
    everything = torch.optim.Adam([*generator.parameters(), *model.parameters()])
    with (
        enabled(generator, max_slowdown=10.0, spill_dir=tmp_path) as first,
        enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as second,
    ):
        for number in range(4):
            x, y = batch(256, number)
            nn.functional.cross_entropy(model(generator(x)), y).backward()
            everything.step()
            everything.zero_grad()
        for handle, profiles in (first, 1), (second, 2):
            assert handle._on_device.latest().profile.knows_temporaries
            assert handle.report().profiled_steps == profiles
            assert handle.plan is not None


def test_profiles_without_temporaries_are_few(tmp_path):
    model, optimizer = make(blocks=2)
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        with torch.autograd.profiler.profile(use_cpu=True):
            train(model, optimizer, [256] * 6)
        assert handle.report().profiled_steps == LIMITS.incomplete_profiles
        assert handle.plan is not None


def test_a_flag_chooses_the_branch(tmp_path):
    """The same shapes with another flag are another kind of step, and each is profiled once."""

    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, _ = make(blocks=3)

        def forward(self, x, long=False):
            return self.inner(x) if long else self.inner[2:](x)

    torch.manual_seed(0)
    model = Switched()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        for number in range(8):
            x, y = batch(256, number)
            nn.functional.cross_entropy(model(x, long=number % 2 == 0), y).backward()
            model.zero_grad()
        assert handle.report().profiled_steps == 2


def test_a_disabled_session_is_freed_without_a_collection(tmp_path):
    """And with it its store: the spill file is closed."""
    model, optimizer = make(blocks=1)
    handle = enabled(model, max_slowdown=10.0, spill_dir=tmp_path)
    train(model, optimizer, [256] * 3)
    assert handle.plan is not None
    handle.disable()
    alive = weakref.ref(handle)
    gc.disable()
    try:
        del handle
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("", 0, marks=pytest.mark.long),
        pytest.param("raise SystemExit(7)", 7, marks=pytest.mark.full),
        ("raise KeyboardInterrupt", -2),
    ],
)
def test_a_script_that_ends_within_the_profiled_step_ends_as_others_do(end, status):
    script = f"""
import torch, offload
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256))
handle = offload.enable(model, min_tensor_bytes=1)
loss = model(torch.randn(8, 256)).sum()
{end}
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == status, ran.stderr


def test_models_that_are_gone_are_no_matter_to_optimizers():
    """Torch iterates over its hooks while an optimizer steps: none may go then."""
    kept = []
    for _ in range(3):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        kept.append((model, offload.enable(model, min_tensor_bytes=1)))
    own = nn.Linear(4, 4)
    own(torch.ones(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    optimizer.step()
    model = None
    kept.clear()
    gc.collect()
    optimizer.step()


def test_what_runs_after_backward_is_none_of_the_step():
    """Another network's step between two of this one, as an adversary's: it leaves nothing, and needs no plan."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 64)) for _ in "ab"]
    found = []
    for other in (None, layers[1]):
        torch.manual_seed(1)
        with offload.enable(layers[0], memory_limit="1KiB", min_tensor_bytes="64KiB"):
            layers[0](torch.randn(512, 64)).square().mean().backward()
            if other is not None:
                other(torch.randn(8192, 64)).square().mean().backward()
            with pytest.raises(offload.InfeasibleLimitError) as raised:
                layers[0](torch.randn(512, 64))
        found.append(raised.value.least_limit_bytes)
        layers[0].zero_grad()
    assert found[1] == found[0]
