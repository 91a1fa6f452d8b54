"""The whole of training on the simulated accelerator, swapped and not: the same bits, under delays, and no finding."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from twin import sim

import offload
from offload import _core
from offload.runtime.engine import Engine

MIB = 1 << 20
WIDTH, ROWS, LAYERS = 64, 32, 6
BY_HAND = [
    {"n_tensors": -1, "lb": 1, "min_tensor_bytes": 1},
    {"n_tensors": -1, "lb": 8, "min_tensor_bytes": 1},
    {"n_tensors": 5, "lb": "auto", "min_tensor_bytes": 1},
]
SEEDS = [0, 1, 2]
SEEDS_OF_ROWS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in SEEDS[1:])]


def mlp(width=WIDTH):
    return nn.Sequential(*(each for _ in range(LAYERS) for each in (nn.Linear(width, width), nn.GELU())))


def batch(step, rows=ROWS, width=WIDTH):
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(step)).to("sim")


def plain_step(model, x):
    model(x).square().mean().backward()


def train(options=None, *, step_of=plain_step, steps=4, rows=ROWS, width=WIDTH, in_flight=None, inspect=None):
    """Gradients of every step; `inspect` is given the handle after the last."""
    torch.manual_seed(0)
    model = mlp(width).to("sim")
    handle = offload.enable(model, **options) if options is not None else None
    if handle is not None and in_flight is not None:
        handle._engine.in_flight_bytes_max = in_flight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        step_of(model, batch(step, rows, width))
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    found = [each.cpu() for each in found]
    if handle is not None:
        if inspect is not None:
            inspect(handle)
        handle.disable()
    return found


def assert_same(found, expected):
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def something_moved(handle):
    assert handle.report().swapped.tensors > 0


@pytest.mark.parametrize("seed", SEEDS_OF_ROWS)
@pytest.mark.parametrize("in_flight", [None, 1])
@pytest.mark.parametrize("options", BY_HAND)
def test_by_hand(options, in_flight, seed):
    sim.schedule(seed, 500)
    assert_same(train(options, in_flight=in_flight, inspect=something_moved), train())


@pytest.mark.parametrize(
    "wish", [{"memory_limit": 0.99}, pytest.param({"max_slowdown": 0.5}, marks=pytest.mark.full), {}]
)
def test_planned(wish):
    options = {"min_tensor_bytes": 1, **wish}
    assert_same(train(options, steps=6), train(steps=6))


def retained(model, x):
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def doubly(model, x):
    loss = model(x).tanh().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(each.square().sum() for each in gradients).backward()


@pytest.mark.parametrize("wish", [{"memory_limit": 0.99}, {"max_slowdown": 1.0}])
@pytest.mark.parametrize("step_of", [retained, doubly])
def test_planned_steps_with_two_backwards(step_of, wish):
    """The next step begins while the device runs the second."""
    options = {"min_tensor_bytes": 1, **wish}
    sim.schedule(0, 2000)
    assert_same(train(options, step_of=step_of, steps=10, rows=256), train(step_of=step_of, steps=10, rows=256))


def test_the_end_of_a_step_is_recorded_on_the_callers_stream(monkeypatch):
    """Where backward has begun on another."""
    moved = []

    class Clock(_core.DeviceClock):
        def move_to(self, stream):
            moved.append(stream)
            super().move_to(stream)

    monkeypatch.setattr(Engine, "start_clock", lambda engine: Clock(engine._events, engine.current_stream()))
    side = torch.sim.Stream()

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.beside = mlp(), mlp()

        def forward(self, x):
            y, main = self.main(x).square().mean(), torch.sim.current_stream()
            side.wait_stream(main)
            with torch.sim.stream(side):
                z = self.beside(x).square().mean()
            main.wait_stream(side)
            return y + z

    model = Beside().to("sim")
    with offload.enable(model, **BY_HAND[0]):
        for step in range(3):
            model(batch(step)).backward()
        torch.sim.synchronize()
    assert len(moved) >= 4
    assert set(moved[::2]) == {side.native_handle}
    assert set(moved[1::2]) == {torch.sim.current_stream().native_handle or 0}


def test_a_side_stream_without_parameters():
    """Nothing but its own last mark tells whether the device has reached those of the side stream."""
    side = torch.sim.Stream()

    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            y, main = self.layers(x), torch.sim.current_stream()
            side.wait_stream(main)
            with torch.sim.stream(side):
                z = y.tanh()
            main.wait_stream(side)
            return z

    model = Ends().to("sim")
    for seed in range(4):
        sim.schedule(seed, 3000)
        with offload.enable(model, **BY_HAND[0]) as handle:
            for step in range(8):
                model(batch(step)).square().mean().backward()
                torch.sim.current_stream().synchronize()
            something_moved(handle)
        sim.schedule(0, 0)
        torch.sim.synchronize()


def test_blocks_of_several_slices_and_a_disk_behind_the_slabs(tmp_path):
    options = {"n_tensors": -1, "lb": 2, "min_tensor_bytes": 1, "host_limit": "8MiB", "spill_dir": str(tmp_path)}

    def spilled(handle):
        assert handle.report().store["spilled_bytes"] > 0

    sizes = {"rows": 1024, "width": 256, "steps": 3}
    assert_same(train(options, inspect=spilled, **sizes), train(**sizes))


def accumulated(model, x):
    for part in x.chunk(4):
        plain_step(model, part)


def checkpointed(model, x):
    inner = model[4].forward
    model[4].forward = lambda y: checkpoint(inner, y, use_reentrant=False)
    plain_step(model, x)
    del model[4].forward


def two_forwards(model, x):
    first, second = model(x).sum(), model(x * 2).square().sum()
    second.backward()
    first.backward()


def partly(model, x):
    y = model(x)
    torch.autograd.grad(y.sum(), model[-2].weight, retain_graph=True)
    y.square().sum().backward()


def mixed(model, x):
    with torch.autocast("sim", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()


def abandoned(model, x):
    y = model(x)
    torch.autograd.grad(y.sum(), model[-2].weight)
    del y
    plain_step(model, x)


def failing_forward(model, x):
    def fail(module, args):
        raise ValueError("half-way")

    hook = model[6].register_forward_pre_hook(fail)
    with contextlib.suppress(ValueError):
        model(x)
    hook.remove()
    plain_step(model, x)


def failing_backward(model, x):
    def fail(module, gradients):
        raise ValueError("half-way")

    hook = model[6].register_full_backward_pre_hook(fail)
    with contextlib.suppress(ValueError):
        plain_step(model, x)
    hook.remove()
    model.zero_grad()
    plain_step(model, x)


def interrupted(model, x):
    def interrupt(module, args):
        raise KeyboardInterrupt

    hook = model[8].register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        model(x)
    hook.remove()
    plain_step(model, x)


def out_of_memory(model, x):
    sim.fail_allocation(9)
    with contextlib.suppress(torch.OutOfMemoryError):
        plain_step(model, x)
    sim.fail_allocation(0)
    gc.collect()
    model.zero_grad()
    plain_step(model, x)


def side_stream(model, x):
    side = torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    x.record_stream(side)
    with torch.sim.stream(side):
        plain_step(model, x)
    torch.sim.current_stream().wait_stream(side)


STEPS = [
    accumulated,
    checkpointed,
    retained,
    doubly,
    two_forwards,
    partly,
    mixed,
    abandoned,
    failing_forward,
    failing_backward,
    interrupted,
    out_of_memory,
    side_stream,
]


# Where the order of copies and of computation is what the step changes, both distances are run by default.
ORDERED = [two_forwards, partly, abandoned, out_of_memory, side_stream]
AHEAD = [
    pytest.param(
        step, lb, marks=[pytest.mark.full] if lb == 8 and step not in ORDERED else [], id=f"{step.__name__}-{lb}"
    )
    for step in STEPS
    for lb in (1, 8)
]


@pytest.mark.parametrize(("step_of", "lb"), AHEAD)
def test_what_a_step_may_do(step_of, lb):
    options = {"n_tensors": -1, "lb": lb, "min_tensor_bytes": 1}
    expected = train(step_of=step_of)
    for seed in SEEDS[:2]:
        sim.schedule(seed, 500)
        assert_same(train(options, step_of=step_of, in_flight=seed, inspect=something_moved), expected)


def test_layers_on_two_streams():
    """What a node of one stream prefetches is used by a node of the other."""
    streams = [torch.sim.Stream() for _ in range(2)]

    def hop(number):
        def hook(module, args):
            before, stream = torch.sim.current_stream(), streams[number // 2 % 2]
            stream.wait_stream(before)
            args[0].record_stream(stream)
            torch.sim.set_stream(stream)

        return hook

    def step_of(model, x):
        hooks = [layer.register_forward_pre_hook(hop(number)) for number, layer in enumerate(model)]
        y = model(x).square().mean()
        last, default = torch.sim.current_stream(), torch.sim.default_stream()
        torch.sim.set_stream(default)
        default.wait_stream(last)
        y.record_stream(default)
        y.backward()
        torch.sim.synchronize()
        for hook in hooks:
            hook.remove()

    expected = train(step_of=step_of)
    for seed in SEEDS:
        sim.schedule(seed, 500)
        assert_same(train(BY_HAND[1], step_of=step_of, in_flight=1), expected)


def test_models_on_two_devices_at_once():
    options = {"n_tensors": -1, "lb": 4, "min_tensor_bytes": 1}

    def run(enabled):
        torch.manual_seed(0)
        models = [mlp().to(f"sim:{device}") for device in range(2)]
        handles = [offload.enable(model, **options) for model in models] if enabled else []
        for step in range(3):
            x = batch(step)
            y = models[1](models[0](x).to("sim:1"))  # a pipeline of two
            y.square().mean().backward()
        found = [parameter.grad.cpu() for model in models for parameter in model.parameters()]
        for handle in handles:
            something_moved(handle)
            handle.disable()
        return found

    expected = run(False)
    for seed in SEEDS:
        sim.schedule(seed, 500)
        assert_same(run(True), expected)


def test_pinned_memory_that_runs_out_keeps_tensors_where_they_are():
    expected = train()
    gc.collect()
    sim.limit_pinned(sim.pinned_bytes())
    assert_same(train(BY_HAND[0]), expected)


def test_captured_streams_are_refused():
    model, x = mlp().to("sim"), batch(0)
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1):
        stream = torch.sim.Stream()
        torch.sim.synchronize()
        sim.set_capturing(stream, True)
        with torch.sim.stream(stream), pytest.raises(offload.DriverError, match="captured into a CUDA graph"):
            model(x)
        sim.set_capturing(stream, False)
        plain_step(model, x)
        torch.sim.synchronize()


def test_prefetched_batches():
    given = [torch.arange(1 << 12) * (number + 1) for number in range(5)]
    for seed in SEEDS:
        sim.schedule(seed, 500)
        found = [batch.sum() for batch in offload.contrib.Prefetcher(given, device="sim")]
        assert [each.item() for each in found] == [each.sum().item() for each in given]


def test_recovery_frees_the_device():
    model = mlp().to("sim")
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1):
        plain_step(model, batch(0))
        torch.sim.synchronize()
        freed = offload.recover()
        assert freed.keys() == {"cpu", "sim:0", "sim:1"}
