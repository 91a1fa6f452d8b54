"""`offload fit` of a step that cannot run here: counted on tensors without data, beside the same step with data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import need
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import offload
from offload.capacity import without_data
from offload.capacity.device import parse_device
from offload.capacity.step_counter import StepCounter
from offload.cli.main import main
from offload.torch_compat.fake import NEEDS_VALUES, Fakes, converted_in_place, flops_of, is_fake

SCRIPTS = Path(__file__).parent / "unmodified"
MIB, GIB = 1 << 20, 1 << 30
DEVICE = "88MiB,12GB/s,1TFLOP/s"


def said(*words: object) -> dict[str, Any]:
    """What the command prints, in a process of its own."""
    command = [sys.executable, "-m", "offload", "fit", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 3), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Block(nn.Module):
    """Attention and a wide layer, with a residual sum; normalization and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.wide(x)


def make(width: int = 128) -> nn.Module:
    return nn.Sequential(*[Block(width) for _ in range(2)])


def make_batch(n: int) -> torch.Tensor:
    return torch.randn(n, 128, 128)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def fitted(model: nn.Module, **more: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    return offload.fit(model, make_batch, memory="64MiB", batch=16, loss=loss, optimizer=optimizer, **more)


@pytest.mark.long
def test_a_model_without_data_needs_what_it_needs_with_data() -> None:
    with torch.device("meta"):
        model = make()
    found, real = fitted(model, device=DEVICE), fitted(make(), device=DEVICE)
    assert real.peak_bytes <= found.peak_bytes <= 1.06 * real.peak_bytes
    assert real.least_bytes <= found.least_bytes <= 1.10 * real.least_bytes
    for counted, measured in zip(found.choices, real.choices, strict=False):
        if counted.name in ("keep everything", "swap"):
            assert 0.9 * measured.largest_batch <= counted.largest_batch <= measured.largest_batch
    assert "Counted without data" in found.notes[0]
    assert "needs data" in " ".join(found.notes)
    assert all(each.is_meta for each in model.parameters()), "the model is as it was"
    assert "forward" not in vars(model)


def test_a_model_much_larger_than_this_machine() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(65536, 65536), nn.GELU())])
    optimizer = torch.optim.Adam(model.parameters())
    words = {"device": "520GiB,50GB/s,100TFLOP/s", "batch": 1024, "optimizer": optimizer}
    found = offload.fit(model, lambda n: torch.empty(n, 65536, device="meta"), **words)
    weights = 8 * 65536 * 65537 * 4
    assert 4 * weights < found.peak_bytes < 4.3 * weights, "weights, gradients and Adam's state, and one's temporaries"
    moved = found.choices[-1]
    assert found.best is moved
    assert moved.moved.nbytes == 2 * 8 * 65536 * 65536 * 4
    flops = 6 * 8 * 65536 * 65536 * 1024 - 2 * 65536 * 65536 * 1024  # the input needs no gradient
    assert moved.plan is not None
    assert moved.plan.compute_seconds == pytest.approx(flops / 100e12)
    assert optimizer.state == {}
    assert all(each.is_meta for group in optimizer.param_groups for each in group["params"])


def test_a_device_has_to_be_given() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="on the meta device, where it cannot be timed; give device="):
        offload.fit(model, lambda n: torch.randn(n, 2))


def test_nothing_that_runs_backward() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="backward needed no tensor that the model saved"):
        offload.fit(model, lambda n: torch.randn(n, 2), device=DEVICE, loss=lambda model, x: model.weight.sum())


# -- the counter ------------------------------------------------------------------------------------------------------


def counted(model: nn.Module, x: torch.Tensor, *, min_nbytes: int = 1) -> StepCounter:
    fakes = Fakes()
    for module in model.modules():
        for name, each in module._parameters.items():
            if each is not None:
                module._parameters[name] = nn.Parameter(fakes.like(each.detach()))
    counter = StepCounter(model, parse_device(DEVICE), fakes, (), min_nbytes)
    with counter.counting():
        with counter.hooks():
            value = model(x).sum()
        value.backward()
    return counter


def chain(layers: int = 3) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(64, 64), nn.Tanh())])


def test_a_chain_is_counted_to_the_byte() -> None:
    x = torch.randn(1024, 64)
    step = counted(chain(), x).recorded(1024, without_data._bytes_of(x))
    assert step is not None
    one = 1024 * 64 * 4
    assert [tensor.bytes for tensor in step.trace.tensors] == [one] * 3
    parameters = 3 * (64 * 64 + 64) * 4
    assert step.trace.base_bytes[:2] == (parameters + one, parameters + 2 * one), (
        "input, and what the first layer returns"
    )
    assert step.fixed_bytes[0] == parameters
    assert step.fixed_bytes[-1] > parameters, "gradients"
    flops = sum(node.seconds for node in step.trace.nodes) * 1e12
    assert flops == pytest.approx((3 * 3 - 1) * 2 * 1024 * 64 * 64)


class Forgets(dict[int, Any]):
    """Holds nothing."""

    def __setitem__(self, key: int, value: Any) -> None: ...


@pytest.mark.parametrize("guard", ["copies", "held"])
def test_guards_of_the_counter(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = counted(chain(), torch.randn(1024, 64)).recorded(1024)
    plain = StepCounter.__init__

    def leaving_out(self: StepCounter, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if guard == "copies":  # what is saved in the place of a tensor is none of the step's
            self._copies = Forgets()
        else:  # parameters are held before the step
            self._held = {}

    monkeypatch.setattr(StepCounter, "__init__", leaving_out)
    left_out = counted(chain(), torch.randn(1024, 64)).recorded(1024)
    assert whole is not None
    assert left_out is not None
    assert left_out.trace.base_bytes != whole.trace.base_bytes


def test_what_a_loop_holds_stays_and_is_no_tensor_of_the_trace() -> None:
    x = torch.randn(1024, 64)
    fakes, kept = Fakes(), []

    class Keeps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x.tanh())
            return kept[-1].exp()

    model = nn.Sequential(nn.Linear(64, 64), Keeps())
    step = counted(model, x).recorded(1024)
    assert step is not None
    assert [each.bytes for each in step.trace.tensors] == [1024 * 64 * 4], "the result of exp alone"
    assert is_fake(kept[0])
    assert fakes is not None


def test_operations_of_attention_on_the_cpu() -> None:
    q = torch.randn(2, 4, 16, 8)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output = operator(q, q, q)
    assert flops_of(operator.default, (q, q, q), {}, output) == 2 * 2 * 2 * 4 * 16 * 16 * 8
    assert flops_of(torch.ops.aten.add.Tensor, (q, q), {}, q) == 0


def test_values_cannot_be_read() -> None:
    with pytest.raises(NEEDS_VALUES):
        Fakes().like(torch.zeros(3)).sum().item()


# -- conversions -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).tanh())
        return y


def prepared(model: nn.Module) -> nn.Module:
    accelerate = need("accelerate")
    try:
        found: nn.Module = accelerate.Accelerator(cpu=True).prepare(model)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
    return found


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to": (lambda model: model.to("cpu"), torch.float32),
    "float": (lambda model: model.float(), torch.float32),
    "half and back": (lambda model: model.half().float(), torch.float32),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "double": (lambda model: model.double(), torch.float64),
    "accelerate": (prepared, torch.float32),
}


def converting(convert: Callable[[nn.Module], nn.Module], time: str, dtype: torch.dtype) -> None:
    """A training loop that converts its model."""
    model, fired = Tied(), []
    model.first.weight.register_hook(lambda gradient: fired.append(gradient.dtype))
    model.first.weight.note = "mine"  # type: ignore[attr-defined]
    kept = list(model.parameters())
    if time == "before the optimizer":
        convert(model)
    optimizer = torch.optim.SGD(kept, lr=0.1, momentum=0.9)
    if time == "after it":
        convert(model)
    trained_in = model.first.weight.dtype
    model(torch.randn(1024, 512, dtype=trained_in)).sum().backward()
    if time == "between backward and step":
        convert(model)
    assert all(each is was for each, was in zip(model.parameters(), kept, strict=True))
    assert model.second.weight is model.first.weight
    assert model.first.weight.note == "mine"
    assert fired == [trained_in]
    assert {each.dtype for each in kept} == {each.grad.dtype for each in kept if each.grad is not None} == {dtype}
    optimizer.step()


@pytest.mark.parametrize("time", ["before the optimizer", "after it", "between backward and step"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_script_that_converts_its_model(name: str, time: str) -> None:
    convert, dtype = CONVERSIONS[name]
    script = without_data.CountedScript(parse_device(DEVICE))
    with pytest.raises(SystemExit), script.running():
        converting(convert, time, dtype)
    step = script.step()
    assert step is not None
    trained_in = torch.float32 if time == "between backward and step" else dtype
    assert step.fixed_bytes[0] == (512 * 512 + 2 * 512) * (trained_in.itemsize + dtype.itemsize), "weights and momentum"


def test_a_conversion_to_another_device_and_of_tensors_with_data() -> None:
    model, fakes, plain = nn.Linear(2, 2), Fakes(), torch.utils.swap_tensors
    weight, one, other = nn.Parameter(fakes.like(model.weight.detach())), torch.zeros(2), torch.ones(3)
    model.weight, model.bias = weight, None  # type: ignore[assignment]
    on_a_gpu = FakeTensor(fakes._mode, torch.empty(2, 2, device="meta"), torch.device("cuda:0"))
    with converted_in_place():
        model._apply(lambda _: on_a_gpu)
        torch.utils.swap_tensors(one, other)
    assert model.weight is weight
    assert weight.device.type == "cuda"
    assert torch.equal(one, torch.ones(3))
    assert torch.utils.swap_tensors is plain


# -- scripts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(name="threads")
def threads_fixture() -> Iterator[None]:
    """The scripts choose how many threads torch uses."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_script_without_data(capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    assert main(["fit", str(SCRIPTS / "text.py"), "--without-data", "--device", DEVICE, "--json"]) == 0
    assert not [each for each in recwarn if "FakeTensor" in str(each.message)]
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] == "swap"
    assert found["batch"] == 24
    assert abs(found["peak_bytes"] - 99.29 * MIB) < MIB, "as with data: see test_fit.py"
    assert "twice more, with 24 items and with 12" in found["notes"][-1]


HUGE = """
import torch
from torch import nn
model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(32768, 32768, bias=False), nn.GELU())])
model.append(nn.BatchNorm1d(32768))
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    rows, wanted = torch.randn(64, 32768), torch.zeros(64, dtype=torch.long)
    loss = nn.functional.cross_entropy(model(rows), wanted)
    {between}
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
"""


def huge(folder: Path, between: str = "", width: int = 32768) -> Path:
    script = folder / "train.py"
    script.write_text(HUGE.replace("{between}", between).replace("32768", str(width)))
    return script


@pytest.mark.long
def test_a_script_whose_parameters_do_not_fit_here(tmp_path: Path) -> None:
    found = said(huge(tmp_path), "--without-data", "--device", "53GiB,25GB/s,50TFLOP/s")
    weights = 3 * 32768 * 32768 * 4
    assert found["peak_bytes"] > 5 * weights == 60 * GIB, "weights, gradients, Adam's state, and three temporaries"
    # While a weight is updated: weights and gradients, its state, that of the next one, half of that of the one before,
    # which is being written, and two temporaries. test_fit_moved_state.py has the same in small, beside what happens.
    assert found["least_bytes"] == pytest.approx((24 + 8 + 8 + 4 + 8) * GIB, abs=GIB / 8)
    assert found["fits"] == "state moved"
    assert found["line"].endswith("optimizer=optimizer, optimizer_state=True)")


@pytest.mark.parametrize("kind", ["values", "no device", "no step", "memory"])
def test_what_cannot_be_counted(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words: list[object] = [huge(tmp_path, "assert loss > 0", 256), "--without-data", "--device", DEVICE]
    expected = "reads the values of a tensor before its first optimizer step is over"
    if kind == "no device":
        words, expected = words[:2], "--without-data needs --device"
    elif kind == "no step":
        Path(str(words[0])).write_text("print('nothing')")
        expected = "finished no training step"
    elif kind == "memory":
        Path(str(words[0])).write_text("import torch\ntorch.empty(1 << 60)")
        words, expected = words[:1], "--without-data"
    assert main(["fit", *map(str, words)]) == 2
    assert expected in capsys.readouterr().err
    assert not is_fake(nn.Linear(2, 2).weight)


def accumulating() -> None:
    """A training loop whose optimizer steps after three passes."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        model(torch.randn(1024, 512)).sum().backward()
    optimizer.step()


def test_a_step_of_accumulated_gradients_is_the_first_one() -> None:
    script = without_data.CountedScript(parse_device(DEVICE))
    with pytest.raises(SystemExit), script.running():
        accumulating()
    step = script.step()
    assert step is not None
    assert [tensor.bytes for tensor in step.trace.tensors] == [2 * MIB] * 2, (
        "the input, which only the graph holds, too"
    )
    assert step.batch == 1024
    assert script.watch.peak_bytes >= 3 * (512 * 512 + 512) * 4
    assert not is_fake(nn.Linear(2, 2).weight), "parameters have data again"
