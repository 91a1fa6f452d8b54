"""The engine on an accelerator: whole steps, bit-equal gradients, memory, limits, processes.

Slowness is made on purpose: `sleep` holds a stream up, so that an ordering edge that is missing
shows as wrong bytes and not once in a thousand runs.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import KIND, gpu, is_simulated, simulated, stream_handle
from gpu_rig import LONG_IF_SIMULATED, MIB, SLEEP_CYCLES, assert_nothing_left, cuda, sleep  # noqa: F401
from torch import Tensor, nn

import offload
from offload.devices.device import device_of

pytestmark = pytest.mark.gpu

# A processor computes what runs on the simulated one.
IN_FLIGHT_BYTES_MAX = 8 * MIB if is_simulated else device_of(torch.device(KIND)).in_flight_bytes_max


def convolutions() -> nn.Module:
    def block(width_in: int) -> list[nn.Module]:
        return [nn.Conv2d(width_in, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]

    return nn.Sequential(*block(3), *block(16), nn.Conv2d(16, 16, 3, stride=2), nn.Flatten(), nn.Linear(3600, 10))


def mlp(width: int = 64, layers: int = 6) -> nn.Module:
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(module for pair in pairs for module in pair))


def transformer() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (32, 64)),
    "transformer": (transformer, (4, 48, 64)),
    "convolutions": (convolutions, (4, 3, 32, 32)),
}


def train(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    options: dict[str, Any] | None = None,
    steps: int = 3,
    before_step: Callable[[], None] = lambda: None,
    check: Callable[[Any], None] = lambda handle: None,
    enabled: Callable[[Any], None] = lambda handle: None,
) -> list[Tensor]:
    """Losses and gradients of a few steps; `enabled` is given the handle before the first, `check` after the last."""
    torch.manual_seed(0)
    model = make().to(KIND)
    handle = None if options is None else offload.enable(model, **options)
    if handle is not None:
        enabled(handle)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    found = []
    for step in range(steps):
        x = torch.randn(shape, generator=torch.Generator(KIND).manual_seed(step), device=KIND)
        optimizer.zero_grad(set_to_none=True)
        before_step()
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        del loss
    if handle is not None:
        check(handle)
        handle.disable()
    return found


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), f"tensor {number} of {len(ours)} differs"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_tensors", [-1, 0, 7])
@pytest.mark.parametrize("lb", [1, 8])
def test_gradients_are_bit_equal(name: str, n_tensors: int, lb: int) -> None:
    make, shape = MODELS[name]

    def check(handle: Any) -> None:
        assert (handle.report().swapped.tensors > 0) == (n_tensors != 0)

    options = {"n_tensors": n_tensors, "lb": lb, "min_tensor_bytes": 1}
    assert_same(train(make, shape, options, check=check), train(make, shape))


@pytest.mark.parametrize("options", [pytest.param({}, marks=LONG_IF_SIMULATED), {"n_tensors": -1}])
def test_a_model_that_is_moved_is_followed(options: dict[str, Any]) -> None:
    def steps(enable: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp()
        handle = enable(model)
        found = []
        for place in ("cpu", KIND, "cpu"):
            model.zero_grad(set_to_none=True)
            model.to(place)
            for _ in range(3):
                loss = model(torch.ones(64, 64, device=place)).square().mean()
                loss.backward()
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                found += [found_on.detach().cpu().clone() for found_on in (loss, *gradients)]
            if handle is not None:
                assert handle.report().device == str(next(model.parameters()).device)
                assert handle.report().swapped.tensors > 0
        return found

    assert_same(steps(lambda model: offload.enable(model, min_tensor_bytes=1, **options)), steps(lambda model: None))


STEP_MODELS = [
    ("gpt", "float32"),
    ("gpt", "bfloat16"),
    *(pytest.param(family, "float32", marks=LONG_IF_SIMULATED) for family in ("resnet", "unet", "lstm", "vit")),
]


@pytest.mark.parametrize(("family", "dtype"), STEP_MODELS)
def test_step_models_are_bit_equal(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "bench"))
    from contestants import BY_HAND, PLAIN
    from models import FAMILIES
    from training import Setting, Trainer

    setting = Setting(family, FAMILIES[family].tiny, KIND, dtype, min_tensor_bytes=1024)
    found = {}
    for contestant in (PLAIN, PLAIN, *BY_HAND):
        trainer = Trainer(setting, contestant)
        steps = [*trainer.settle(), trainer.step()]
        if contestant.is_ours:
            assert trainer.figures()["report"]["swapped"]["tensors"] > 0
        trainer.close()
        bits = [(step.loss, step.gradients) for step in steps]
        assert found.setdefault("plain", bits) == bits, contestant.name  # plain twice: the model is deterministic


@pytest.mark.parametrize("side", ["computation", "copies", "both"])
@pytest.mark.parametrize("lb", [1, 8])
def test_delays_on_either_side_change_no_bit(side: str, lb: int) -> None:
    """Before every layer, forward and backward, the device sleeps; or the copy stream waits for one that does."""
    make, shape = MODELS["mlp"]
    sleeper, held = gpu.Stream(), []
    dummy = torch.zeros(1, dtype=torch.uint8, device=KIND)

    def delay(module: nn.Module, *_: Any) -> None:
        if side != "copies":
            gpu._sleep(SLEEP_CYCLES // 20)
        store = stores.get("engine")
        if side != "computation" and store is not None:
            with gpu.stream(sleeper):
                gpu._sleep(SLEEP_CYCLES // 10)
            held.append(store.swap_out(dummy.data_ptr(), 1, stream_handle(sleeper)))  # the copy stream waits for it

    def slow() -> nn.Module:
        model = make()
        for module in model:  # type: ignore[attr-defined]
            module.register_forward_pre_hook(delay)
            module.register_full_backward_hook(delay)
        return model

    stores: dict[str, Any] = {}
    expected = train(make, shape)

    def enabled(handle: Any) -> None:
        stores["engine"] = handle._engine.store

    def check(handle: Any) -> None:
        assert handle.report().swapped.tensors > 0
        assert bool(held) == (side != "computation")
        held.clear()

    options = {"n_tensors": -1, "lb": lb, "min_tensor_bytes": 1}
    assert_same(train(slow, shape, options, check=check, enabled=enabled), expected)


@pytest.mark.parametrize("kind", ["side", "external", "default"])
def test_the_stream_in_use_orders_the_copies(kind: str) -> None:
    make, shape = MODELS["mlp"]
    expected = train(make, shape)
    own = gpu.Stream()
    external, default = gpu.ExternalStream(stream_handle(own)), gpu.default_stream()
    stream = {"side": own, "external": external, "default": default}[kind]
    gpu.synchronize()
    with gpu.stream(stream):
        # With the device asleep, the host runs ahead of everything that follows.
        found = train(make, shape, {"n_tensors": -1, "lb": 2, "min_tensor_bytes": 1}, before_step=sleep)
    stream.synchronize()
    assert_same(found, expected)


def test_a_source_of_another_stream_is_not_overwritten() -> None:
    """The caching allocator gives a freed block back to the stream that it was allocated on.

    Three layers: the copy of the first one's input has to be let go while the step goes on.
    """
    side, rows, width = gpu.Stream(), 4096, 1024
    model = nn.Sequential(*(nn.Linear(width, width, device=KIND) for _ in range(3)))
    for layer in model:
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    with offload.enable(model, n_tensors=-1, lb=1, min_tensor_bytes=1) as handle:
        handle._engine.in_flight_bytes_max = 1  # let go of sources as early as it ever does
        with gpu.stream(side):
            x = torch.ones(rows, width, device=KIND)
        gpu.synchronize()
        sleep()
        loss = model(x).sum()
        del x
        with gpu.stream(side):
            other = torch.full((rows, width), 7.0, device=KIND)
        loss.backward()
        gpu.synchronize()
    assert model[0].weight.grad is not None
    assert bool((model[0].weight.grad == rows).all())
    assert bool((other == 7).all())


def peak_bytes(options: dict[str, Any], layers: int, width: int, batch: int) -> int:
    """Most memory that torch's allocator handed out in a settled step."""
    gpu.empty_cache()
    model = mlp(width, layers).to(KIND)
    handle = offload.enable(model, **options)
    handle._engine.in_flight_bytes_max = IN_FLIGHT_BYTES_MAX
    x = torch.ones(batch, width, device=KIND)
    for _ in range(3):
        gpu.synchronize()
        gpu.reset_peak_memory_stats()
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)
    gpu.synchronize()
    handle.disable()
    return gpu.max_memory_allocated()


def test_memory_really_falls() -> None:
    width, batch = (128, 4096) if is_simulated else (1024, 16384)
    saved_bytes = 4 * IN_FLIGHT_BYTES_MAX
    sizes = (saved_bytes // (4 * width * batch), width, batch)
    plain = peak_bytes({"n_tensors": 0}, *sizes)
    ours = peak_bytes({"n_tensors": -1, "lb": 4, "host_limit": 2 * saved_bytes}, *sizes)
    assert plain > saved_bytes
    assert plain - ours >= 0.3 * saved_bytes, f"{plain} bytes plain, {ours} offloaded"


@pytest.mark.parametrize("has_disk", [True, False])
def test_a_small_host_limit(has_disk: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def check(handle: Any) -> None:
        report = handle.report()
        assert report.swapped.tensors > 0
        assert report.store["failed"] == 0
        assert report.store["pool_held_bytes"] <= 8 * MIB
        assert (report.store["spilled_bytes"] > 0) == has_disk
        assert ("host limit" in report.kept) == (not has_disk)  # kept, and counted

    options = {"n_tensors": -1, "lb": 4, "host_limit": "8MiB", "spill_dir": tmp_path if has_disk else None}
    with caplog.at_level(logging.WARNING, "offload"):
        found = train(lambda: mlp(256, 24), (1024, 256), options, check=check)  # 1 MiB a layer
    assert any("raise host_limit" in record.getMessage() for record in caplog.records) == (not has_disk)
    assert_same(found, train(lambda: mlp(256, 24), (1024, 256)))


# -- refusals and ends ------------------------------------------------------------------------------


@contextmanager
def capturing() -> Iterator[None]:
    """What is queued is captured into a graph."""
    if not is_simulated:
        with gpu.graph(gpu.CUDAGraph()):
            yield
        return
    with gpu.stream(gpu.Stream()):
        simulated().set_capturing(gpu.current_stream(), True)
        yield
        simulated().set_capturing(gpu.current_stream(), False)


def test_capture_into_a_graph_is_refused() -> None:
    model, x = mlp().to(KIND), torch.ones(32, 64, device=KIND)
    model(x).sum().backward()
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle:
        with capturing(), pytest.raises(offload.DriverError, match="captured into a CUDA graph"):
            model(x)
        gpu.synchronize()
        model(x).sum().backward()  # and goes on afterwards
        assert handle.report().swapped.tensors > 0


def test_disable_leaves_nothing() -> None:
    model, x = mlp().to(KIND), torch.randn(32, 64, device=KIND)
    before = dict(model.__dict__)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)
    loss = model(x).square().sum()
    handle.disable()
    assert model.__dict__ == before
    found = torch.autograd.grad(loss, list(model.parameters()))  # a graph made before still works
    assert_same(found, expected)
    del loss
    assert_nothing_left(handle)


@pytest.mark.parametrize("moment", ["after forward", "half-way", "while copying"])
def test_an_abandoned_graph_frees_its_slots(moment: str, request: pytest.FixtureRequest) -> None:
    model, x = mlp().to(KIND), torch.randn(32, 64, device=KIND)
    model(x).sum().backward()
    gpu.synchronize()
    gc.disable()
    request.addfinalizer(gc.enable)
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle:
        allocated = gpu.memory_allocated()
        if moment == "while copying":
            sleep()
        y = model(x)
        if moment == "half-way":
            torch.autograd.grad(y.sum(), model[-2].weight)  # type: ignore[index]
        del y
        assert_nothing_left(handle)
        assert gpu.memory_allocated() == allocated


def train_both_ways() -> None:
    """What each of two processes does: offloaded and plain must agree."""
    torch.use_deterministic_algorithms(True)
    options = {"n_tensors": -1, "lb": 4, "min_tensor_bytes": 1}
    for make, shape in MODELS.values():
        assert_same(train(make, shape, options, steps=10), train(make, shape, steps=10))


@LONG_IF_SIMULATED
def test_two_processes_share_one_device(tmp_path: Path) -> None:
    folders = [str(Path(__file__).parent), str(Path(offload.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", "import test_gpu; test_gpu.train_both_ways()"]
    children = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    complaints = [child.communicate(timeout=200)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(complaints)
