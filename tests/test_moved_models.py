"""A model that is moved after `enable`: followed to where an engine can be, else said once, with both devices.

No GPU is needed: `meta` is a device that nobody can swap from, and a model that says it is on `cuda:0` stands in for
one there, over the CUDA driver's test double.
"""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from forked_python import run_python
from torch import nn
from twin.double import the_double

import offload
from offload import _core, handle, session
from offload.control import enabled_model
from offload.plan import Link
from offload.runtime import refusals
from offload.runtime.engine import Engine

TO_META = """
import json
import torch, offload
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)

def step(device):
    model(torch.randn(8, 256, device=device)).sum().backward()

step("cpu")
model.zero_grad()
model.to("meta")
for _ in range(3):
    step("meta")
away = handle.report()
model.zero_grad()
model.to_empty(device="cpu")
for parameter in model.parameters():
    nn.init.zeros_(parameter)
before = handle.report().swapped.tensors
step("cpu")
back = handle.report()
print(json.dumps({
    "away": away.notes[0], "kept": sorted(away.kept), "back": back.notes, "swapped": back.swapped.tensors - before,
}))
"""


def run(script: str) -> tuple[dict[str, object], str]:
    """What a script prints as JSON in a process of its own, and what it says on standard error."""
    ran = run_python("-c", script, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), ran.stderr


def test_a_device_that_is_not_supported_is_said_once_and_begins_the_notes() -> None:
    found, said = run(TO_META)
    (line,) = said.splitlines()
    assert "from cpu to meta" in line
    assert found["away"] == line
    assert line.startswith("NOTHING IS SWAPPED")
    assert "unsupported kind" not in found["kept"], "nothing was asked of hooks meanwhile"
    assert found["swapped"], "back on its device, it goes on"
    assert "meta" not in "".join(found["back"])


def test_a_part_that_is_moved_is_said_and_the_rest_is_swapped() -> None:
    script = """
import json
import torch, offload
from torch import nn
model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(64, 64), nn.Tanh()), "head": nn.Linear(64, 64)})
handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)
model["head"].to("meta")
for _ in range(2):
    with handle.step(torch.randn(8, 64)):
        loss = model["body"](torch.randn(8, 64)).sum()
    loss.backward()
report = handle.report()
print(json.dumps({"note": report.notes[0], "swapped": report.swapped.tensors}))
"""
    found, said = run(script)
    (line,) = said.splitlines()
    assert found["note"] == line
    assert "cpu, meta" in line
    assert found["swapped"] > 0


class Moving:
    """Models that say where they are, whose bytes stay where they were; an engine for `cuda:0` is over the double."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = torch.device("cpu")
        self.engines: list[weakref.ref[Engine]] = []
        self._make_engine = session.make_engine
        for module in (session, enabled_model):
            monkeypatch.setattr(module, "make_engine", self.make_engine)
        monkeypatch.setattr(handle, "measure_link", lambda *_: Link(1e12, 1e12))
        for module in (refusals, enabled_model):
            monkeypatch.setattr(module, "devices_of", lambda model: {self.place})
        monkeypatch.setattr(enabled_model, "first_device", lambda model: self.place)

    def make_engine(self, device: torch.device, options: object) -> Engine:
        assert device == self.place
        if device.type == "cpu":
            engine = self._make_engine(device, options)
        else:
            driver, lanes = the_double().driver(), _core.HostDriver()
            engine = Engine(_core.SwapStore.slab(driver, lanes, 64 << 20, ""), torch.device("cpu"))
        self.engines.append(weakref.ref(engine))
        return engine


@pytest.fixture(name="moving")
def moving_fixture(monkeypatch: pytest.MonkeyPatch) -> Moving:
    return Moving(monkeypatch)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))


def batch(number: int) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, go_to: object) -> list[torch.Tensor]:
    """Gradients of steps on three devices; at each move a graph of the device before is still to be differentiated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients, number = [], 0
    for place in ("cpu", "cuda:0", "cpu"):
        pending = model(batch(99)).square().mean() if number else None
        go_to(place)
        for _ in range(4):
            model(batch(number)).square().mean().backward()
            if pending is not None:
                pending.backward()
                pending = None
            gradients += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            number += 1
    return gradients


@pytest.mark.parametrize("knobs", [{}, {"memory_limit": "64MiB"}, {"n_tensors": -1}, {"n_tensors": 2, "lb": "auto"}])
def test_it_is_followed_bit_for_bit(moving: Moving, knobs: dict[str, object]) -> None:
    expected = train(make_model(), lambda place: None)
    model = make_model()
    handle = offload.enable(model, min_tensor_bytes=1, **knobs)
    seen = []

    def go_to(place: str) -> None:
        seen.append(handle.report())
        moving.place = torch.device(place)

    found = train(model, go_to)
    assert all(map(torch.equal, found, expected))
    reports = [*seen[1:], handle.report()]
    assert [(report.device, report.tier.split(" ")[0]) for report in reports] == [
        ("cpu", "disk"),
        ("cuda:0", "pinned"),
        ("cpu", "disk"),
    ]
    assert all(report.swapped.tensors > 0 for report in reports), "at least the profiled step swaps"
    assert [report.steps for report in reports] == [5, 5, 4], "counted since the move"
    assert str(handle.device) == "cpu"
    assert "moved from cuda:0 to cpu" in "".join(reports[-1].notes)
    assert handle.plan is None or handle.plan.trace.source.startswith("recorded on cpu")
    handle.disable()


def test_the_old_engine_goes_with_its_last_graph(moving: Moving) -> None:
    model = make_model()
    handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)
    model(batch(0)).sum().backward()
    pending = model(batch(1)).sum()
    moving.place = torch.device("cuda:0")
    model(batch(2)).sum().backward()
    old, new = moving.engines
    assert old() is not None
    assert handle._engine is new()
    pending.backward()
    del pending
    gc.collect()
    assert old() is None
    handle.disable()


def test_what_depends_on_the_device_is_checked_for_the_new_one(moving: Moving) -> None:
    model = make_model()
    handle = offload.enable(model, min_tensor_bytes=1, exclude=(name for name in ("4",)))
    assert handle._options.spill_dir
    moving.place = torch.device("cuda:0")
    model(batch(0)).sum().backward()
    assert handle._options.spill_dir == "", "the disk is the CPU's tier unless it is asked for"
    assert handle._options.exclude == ("4",)
    handle.disable()


def test_a_device_that_refuses_is_asked_once(moving: Moving, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)
    asked = []

    def refuse(device: torch.device, options: object) -> Engine:
        asked.append(device)
        raise RuntimeError("cuInit failed with code 100")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enabled_model, "make_engine", refuse)
        moving.place = torch.device("cuda:0")
        for number in range(3):
            model(batch(number)).sum().backward()
        (record,) = [record for record in caplog.records if record.name == "offload"]
        assert "from cpu to cuda:0: cuInit failed with code 100" in record.getMessage()
        assert asked == [moving.place]
        assert handle.report().notes[0] == record.getMessage()
        for place in ("cpu", "cuda:0"):
            moving.place = torch.device(place)
            model(batch(0)).sum().backward()
        assert asked == 2 * [moving.place], "it was moved there a second time"
    handle.disable()


def test_a_recorded_step_ends_with_the_move(moving: Moving, tmp_path: Path) -> None:
    model = make_model()
    handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)
    handle.timeline(tmp_path / "step.json")
    model(batch(0)).sum().backward()
    moving.place = torch.device("cuda:0")
    model(batch(1)).sum().backward()
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    handle.disable()
