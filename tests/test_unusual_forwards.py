"""Gradients, transforms and nested tensors in forward, optimizers in backward: the same bits as plain training."""

import warnings
from copy import deepcopy
from threading import Thread

import pytest
import torch
from forked_python import run_python
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload.control.signature import signature_of
from offload.plan.trace import SavedTensor
from offload.profiling import allocations
from offload.profiling.allocations import NO_NODE, footprint
from offload.recomputation import recorder
from offload.torch_compat.backward_pass import OUTSIDE
from offload.torch_compat.dispatch import mode_count

STEPS = 6
MIB = 1 << 20


def inner_gradient(net, x):
    """The gradient of an energy, as of forces or a gradient penalty."""
    (gradient,) = torch.autograd.grad(torch.tanh(net.inner(x)).square().sum(), x, create_graph=True)
    return torch.tanh(x + gradient)


def detached_gradient(net, x):
    """The gradient of another graph, as in an inner loop."""
    own = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.tanh(net.inner(own)).square().sum(), own)
    return torch.tanh(x + gradient)


def mapped(net, x):
    return torch.vmap(lambda row: torch.tanh(net.inner(row)) * row)(x)


def derived(net, x):
    return x * torch.func.jvp(lambda each: (net.inner(each) * each).sin(), (x,), (x,))[1]


def nested(net, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: nested tensors are a prototype
        parts = torch.nested.as_nested_tensor([x[:50], 2 * x[50:]])
    return torch.cat([each.cumsum(0) for each in parts.unbind()])


def without_gradient(net, x):
    """Torch makes nested tensors itself."""
    padding = torch.zeros(8, 64, dtype=torch.bool)
    padding[:, 50:] = True
    with torch.no_grad():
        target = net.teacher(x.detach().view(8, 64, 64), src_key_padding_mask=padding)
    return x.view(8, 64, 64)[:, : target.shape[1]] - target


FORWARDS = inner_gradient, detached_gradient, mapped, derived, nested, without_gradient


class Net(nn.Module):
    """Layers, one of the forwards above, and layers."""

    def __init__(self, forward):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.inner = nn.Linear(64, 64)
        teacher = nn.TransformerEncoderLayer(64, 4, batch_first=True)
        self.teacher = nn.TransformerEncoder(teacher, 1).requires_grad_(False).eval()
        self.unusual = forward

    def forward(self, x):
        for layer in self.layers[:4]:
            x = torch.tanh(layer(x))
        x = self.unusual(self, x)
        for layer in self.layers[4:]:
            x = torch.tanh(layer(x))
        return x.square().mean()


def compare(forward, **goal):
    """Train a few steps beside a plain copy, and assert that all gradients are equal. Return the report."""
    torch.manual_seed(0)
    model = Net(forward)
    plain = deepcopy(model)
    with offload.enable(model, min_tensor_bytes=1 << 12, **goal) as handle:
        for _ in range(STEPS):
            x = torch.randn(512, 64)
            for each in (model, plain):
                each.zero_grad()
                each(x).backward()
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert own.grad is other.grad is None or torch.equal(own.grad, other.grad)
        return handle.report()


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("goal", [{"preset": "smallest"}, {"max_slowdown": 10.0}, {"n_tensors": -1, "lb": "auto"}])
def test_gradients_are_those_of_plain_training(forward, goal, monkeypatch):
    monkeypatch.setenv("OFFLOAD_THROTTLE", "100MB/s")  # so slow that a trial of recomputation follows
    report = compare(forward, **goal)
    assert report.swapped.tensors > 0
    assert report.verdict.kind != "nothing to swap" or goal == {"max_slowdown": 10.0}
    assert (report.trial_steps > 0) == (report.verdict.kind == "planned")
    assert mode_count() == 0
    assert torch.equal(torch.ones(2) + 1, torch.tensor([2.0, 2.0]))


def in_a_thread(run):
    """A thread of its own: without the guard, torch can fail in it from then on."""
    thread = Thread(target=run)
    thread.start()
    thread.join()


class Recorder(recorder.OperatorRecorder):
    """Only runs each operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


TRANSFORMS = {
    "jvp": lambda x: torch.func.jvp(lambda each: (each * each).sin(), (x,), (x,))[1],
    "vmap": lambda x: torch.vmap(lambda row: (row * row).sin())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("begins_on", [True, False])
def test_modes_change_only_outside_transforms(transform, begins_on, monkeypatch):
    found = []

    def run():
        own = Recorder(0, lambda _: False)

        def pack(tensor):
            (own.suspend if begins_on else own.resume)()
            return tensor

        x = torch.randn(4, 4, requires_grad=True)
        if begins_on:
            own.resume()
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                TRANSFORMS[transform](x)
        except RuntimeError as error:
            found.append(error)
            return
        is_on = torch._C._dispatch_tls_is_dispatch_key_included("Python")
        found.append((own.is_on, mode_count() > 0, is_on))

    for is_guarded in (True, False):
        if not is_guarded:
            monkeypatch.setattr(recorder, "restores_keys", lambda: False)  # a mutant
        in_a_thread(run)
        assert (found.pop() == (begins_on,) * 3) == is_guarded


@pytest.mark.parametrize("begins_on", [True, False])
def test_modes_change_only_outside_backward_passes(begins_on, monkeypatch):
    """The gradient that a forward computes packs tensors too, inside nodes of its backward pass."""
    found = []

    def run():
        own = Recorder(0, lambda _: False)
        inside = []

        def pack(tensor):
            if torch._C._current_graph_task_id() >= 0:
                inside.append(tensor)
                (own.suspend if begins_on else own.resume)()
            return tensor

        x = torch.randn(4, 4, requires_grad=True)
        if begins_on:
            own.resume()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            torch.autograd.grad((x * x).sin().sum(), x, create_graph=True)
        assert inside
        found.append((own.is_on, mode_count() > 0))

    for is_guarded in (True, False):
        if not is_guarded:
            monkeypatch.setattr(recorder, "current_backward", lambda: OUTSIDE)  # a mutant
        in_a_thread(run)
        assert (found.pop() == (begins_on,) * 2) == is_guarded


def test_torchs_profiler_ends_though_optimizers_step_inside_backward():
    """They step in hooks after each gradient."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
    for each in optimizers:
        each.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    with offload.enable(model, min_tensor_bytes=1 << 12, preset="smallest") as handle:
        for _ in range(STEPS):
            model(torch.randn(512, 64)).square().mean().backward()
        assert handle.report().profiled_steps > 0
        assert not torch.autograd._profiler_enabled()


def test_a_recording_is_not_stopped_inside_backward():
    """Torch would turn its profiler on again when the running node ends."""
    memory, stopped = allocations.StepAllocations(torch.device("cpu")), []
    memory.begin()
    x = torch.ones(4, requires_grad=True)
    x.register_hook(lambda _: stopped.append(memory.stop()))
    x.sum().backward()
    assert stopped == [False]
    assert torch.autograd._profiler_enabled()
    assert memory.stop()
    assert not torch.autograd._profiler_enabled()


def test_what_is_allocated_between_a_backward_pass_and_a_node_belongs_to_its_last_node():
    """The saved tensor 7 and 3 MiB more, by a forward that goes on or by another backward pass; not by an optimizer."""
    row = SavedTensor(7, MIB, 3, 3, 3, 4, 4)
    pause = ("node", NO_NODE, 0)
    events = [
        ("node", 0, 0), ("node", 1, 0), ("node", 2, 0), pause,
        ("alloc", 1000, MIB), ("alloc", 2000, 3 * MIB), ("free", 2000, 3 * MIB), ("node", 3, 0), ("saved", 7, 0),
        ("node", 4, 0), pause, ("alloc", 3000, 9 * MIB),
    ]  # fmt: skip
    found = footprint(events, [row], {7: 1000}, set(), 5)
    assert found.produced == {7: 2}
    assert found.others == [0, 0, 3 * MIB, 0, 0]
    step = [("apart", 1, 0), ("alloc", 2000, 5 * MIB), ("alloc", 4000, MIB), ("free", 2000, 5 * MIB), ("apart", 0, 0)]
    with_optimizer = footprint([*events[:4], *step, *events[4:]], [row], {7: 1000}, set(), 5)
    assert with_optimizer.others == [0, 0, 3 * MIB, 0, 0]


@pytest.mark.filterwarnings("error")
def test_results_of_operators_as_parameters():
    """Torch warns if their gradient is read, which neither a step nor the report may do."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())])
    x = torch.randn(256, 64)

    def train():
        found = []
        for step in range(STEPS):
            scaled = {name: parameter * (1 + step) for name, parameter in model.named_parameters()}
            torch.func.functional_call(model, scaled, (x,)).square().mean().backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
        return found

    expected = train()
    with offload.enable(model, memory_limit="1GiB", min_tensor_bytes=1 << 10) as handle:
        assert all(map(torch.equal, train(), expected))
        handle.report()


INSIDE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import offload

def train(model):
    made, found = torch.Generator().manual_seed(0), []
    for _ in range(8):
        x = torch.randn(256, 64, generator=made).requires_grad_()
        checkpoint(model, x, use_reentrant=True).square().mean().backward()
        found += [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
    return found

torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())])
expected = train(model)
handle = offload.enable(model, "smallest", min_tensor_bytes="4KiB", spill_dir=FOLDER)
found = train(model)
assert len(found) == len(expected) and all(map(torch.equal, found, expected))
assert handle.plan.swaps
assert "inside a backward pass" in str(handle.report())
"""


def test_a_whole_model_inside_a_reentrant_checkpoint(tmp_path):
    """Its forward runs inside a backward pass. With torch's profiler on there, the process crashed in the end."""
    ran = run_python("-c", INSIDE.replace("FOLDER", repr(str(tmp_path))), timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")


SCHEDULED = """
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
import offload

def train(model, profiler=None):
    made, found = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        model(torch.randn(64, 64, generator=made)).square().mean().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if profiler is not None:
            profiler.step()
    return found

torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())])
start = {name: value.clone() for name, value in model.state_dict().items()}
expected = train(model)
model.load_state_dict(start)
traces = []
offload.enable(model, "smallest", min_tensor_bytes="1KiB", spill_dir=FOLDER)
with profile(
    activities=[ProfilerActivity.CPU],
    profile_memory=True,
    schedule=schedule(wait=1, warmup=1, active=2),
    on_trace_ready=lambda profiler: traces.append(len(profiler.events())),
) as profiler:
    found = train(model, profiler)
assert len(found) == len(expected) and all(map(torch.equal, found, expected))
assert len(traces) == 3 and min(traces) > 10, traces
"""


def test_a_training_beside_torchs_profiler_with_a_schedule(tmp_path):
    """While it warmed up, the trial step used torch's profiler too: most such processes crashed."""
    ran = run_python("-c", SCHEDULED.replace("FOLDER", repr(str(tmp_path))), timeout=120, OFFLOAD_THROTTLE="20MB/s")
    assert ran.returncode == 0, ran.stderr


def test_the_profiler_does_not_start_inside_a_backward_pass():
    profile, started = allocations.AllocationProfile(torch.device("cpu")), []
    x = torch.ones(4, requires_grad=True)
    x.register_hook(lambda _: started.append(profile.start()))
    x.sum().backward()
    assert started == [False]
    assert not allocations.AllocationProfile.is_recording()


def jagged_batches(layout):
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        lengths = torch.randint(60, 100, (3,), generator=generator).tolist()
        rows = [torch.randn(length, 64, generator=generator) for length in lengths]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: nested tensors are a prototype
            yield torch.nested.nested_tensor(rows, layout=layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
@pytest.mark.parametrize("goal", [{}, {"memory_limit": "64MiB"}, {"n_tensors": -1}, {"n_tensors": -1, "lb": "auto"}])
def test_nested_inputs_of_changing_lengths(layout, goal):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    plain = deepcopy(model)
    with offload.enable(model, min_tensor_bytes=1 << 10, **goal) as handle:
        for x in jagged_batches(layout):
            for each in (model, plain):
                each.zero_grad()
                sum(part.square().sum() for part in each(x).unbind()).backward()
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(own.grad, other.grad)
        assert goal == {"n_tensors": -1} or 0 < handle.report().profiled_steps < 12


def test_nested_inputs_of_the_same_lengths_are_one_kind_of_step():
    first, second = (
        torch.nested.nested_tensor([torch.ones(rows, 4) for rows in (3, 5)], layout=torch.jagged) for _ in range(2)
    )
    longer = torch.nested.nested_tensor([torch.ones(rows, 4) for rows in (3, 6)], layout=torch.jagged)
    signatures = [signature_of((each,), {}, "cpu")[0] for each in (first, second, longer)]
    assert signatures[0] == signatures[1] != signatures[2]
    uneven = torch.nested.nested_tensor([torch.ones(rows, 4) for rows in (1, 7)], layout=torch.jagged)
    assert signature_of((uneven,), {}, "cpu")[0] != signatures[0], "padded, it needs more memory"
    assert signatures[0].is_within(signatures[2])
    assert not signatures[2].is_within(signatures[0])


def test_nested_inputs_with_more_components_are_another_kind():
    two, three = ([torch.ones(3, 4)] * count for count in (2, 3))
    fewer, more = (signature_of((torch.nested.nested_tensor(rows),), {}, "cpu")[0] for rows in (two, three))
    assert not fewer.is_within(more)
    assert not more.is_within(fewer)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_inputs_made_in_inference_mode_are_read(layout):
    with torch.inference_mode():
        x = torch.nested.nested_tensor([torch.ones(rows, 4) for rows in (3, 5)], layout=layout)
    with Reads() as reads:
        signature, _ = signature_of((x,), {}, "cpu")
    assert signature.shapes[0] == ((3, 4) if layout == torch.strided else (8, 4))
    assert not {"detach", "unbind", "values"} & set(reads.names), "the program's mode sees no work on its components"


class Reads(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
