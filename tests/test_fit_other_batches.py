"""`offload fit`: a script's other batch sizes, from its model's own forward with half of the batch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.capacity import replay
from offload.capacity.replay import Call, Held, sized
from offload.control.profile_listener import RecordedStep
from offload.plan import unswapped_bytes
from offload.plan.rescale import SizedStep, on_the_line_of
from offload.plan.trace import Link, Node, SavedTensor, Trace

MIB = 1 << 20

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, 2048))  # does not grow with the batch; nor does what is made of it
        self.layers = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(2048, 256), nn.Linear(256, 2048))])
    def forward(self, x):
        return self.layers(x @ (self.table.tanh().exp() @ self.table.t()).softmax(-1).tanh() @ self.table)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn({batch}, 256)
    {call}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def fit(folder: Path, batch: int, call: str = "loss = model(x).square().mean()", *words: str) -> dict[str, Any]:
    script = folder / f"train{batch}.py"
    script.write_text(SCRIPT.replace("{batch}", str(batch)).replace("{call}", call))
    command = [sys.executable, "-m", "offload", "fit", str(script), "--memory", "128MiB", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 3), done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def largest(said: dict[str, Any]) -> int:
    found: int = said["choices"][0]["largest_batch"]
    return found


@pytest.mark.full
def test_what_does_not_grow_with_the_batch_is_not_scaled(tmp_path: Path) -> None:
    said = fit(tmp_path, 512)
    assert "twice more, with 512 items and with 256" in said["notes"][-1]
    there = fit(tmp_path, largest(said))
    assert there["peak_bytes"] <= 128 * MIB
    assert there["peak_bytes"] > 126 * MIB, "and hardly more would fit"


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("--without-data", "--device", "1GiB,12GB/s,1TFLOP/s")])
def test_an_input_that_the_script_does_not_keep(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The replay does not keep it either, so that both save the same tensors."""
    kept = fit(tmp_path, 2048, "loss = model(x).square().mean()", *words)
    freed = fit(tmp_path, 2048, "batch = [x]; del x; loss = model(batch.pop()).square().mean()", *words)
    assert freed["peak_bytes"] <= kept["peak_bytes"]
    assert freed["least_bytes"] <= kept["least_bytes"]
    assert "twice more, with 2048 items and with 1024" in freed["notes"][-1]


@pytest.mark.long
def test_a_batch_that_cannot_be_halved_is_estimated_and_says_so(tmp_path: Path) -> None:
    said = fit(tmp_path, 512, "assert len(x) == 512; loss = model(x[:1]).square().mean()")
    assert "it cannot be halved" in said["notes"][-1]
    assert "in proportion" in said["notes"][-1]


# -- calls ------------------------------------------------------------------------------------------------------------


class Rows:
    """A batch that nobody can cut."""


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def call_of(model: nn.Module, *args: Any, **kwargs: Any) -> Call:
    return Call.of(model, args, kwargs, copied)


def test_what_has_as_many_rows_is_cut() -> None:
    x, weights, scale = torch.randn(6, 2, requires_grad=True), torch.randn(6), torch.tensor(3.0)
    call = call_of(nn.Linear(2, 2), x, {"weights": [weights], "table": torch.randn(5)}, scale=scale, names=("a", None))
    assert call.why_not(6) == ""
    args, kwargs = call.at(3, 6)
    assert torch.equal(args[0], x[:3])
    assert args[0].requires_grad
    assert args[0].is_leaf
    assert torch.equal(args[1]["weights"][0], weights[:3])
    assert len(args[1]["table"]) == 5
    assert kwargs["names"] == ("a", None)
    assert torch.equal(kwargs["scale"], scale)


@pytest.mark.parametrize(("batch", "words"), [(None, "it cannot be halved"), (1, "it cannot be halved")])
def test_a_batch_of_one_is_not_halved(batch: int | None, words: str) -> None:
    assert call_of(nn.Linear(2, 2), torch.randn(1, 2)).why_not(batch) == words


def test_what_nobody_can_cut_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(nn.Linear(2, 2), torch.randn(4, 2), Rows())
    assert "Rows" in call.why_not(4)
    monkeypatch.setattr(replay, "_is_known", lambda value: True)
    assert call.why_not(4) == "", "with the guard left out"


def test_one_of_several_processes_does_not_run_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert "other processes" in call_of(nn.Linear(2, 2), torch.randn(4, 2)).why_not(4)


def test_autocast_is_as_it_was() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        call = call_of(nn.Linear(2, 2), torch.randn(4, 2))
    with call.as_it_was():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert call_of(nn.Linear(2, 2), torch.randn(4, 2)).autocast == {}


# -- when a replay tells something ------------------------------------------------------------------------------------


def trace(batch: int, *, rest: int = 0, packed: int = 0, name: str = "a") -> Trace:
    """A step of which each item saves 10 bytes and needs 3 more; `rest` bytes per item are needed outside of it."""
    nodes = tuple(Node(name, 0.5 + 0.25 * batch, k > 1) for k in range(4))
    base = tuple(100 + 3 * batch * (k == 2) + rest * batch for k in range(4))
    return Trace(nodes, base, (SavedTensor(7, 10 * batch + 8, packed, packed, 1, 3, 3),))


def recorded(at: Trace, batch: int | None) -> RecordedStep:
    return RecordedStep(at, Link(1e9, 1e9), "cpu", 1 << 30, 0, False, batch, (100,) * 4)


def test_the_part_is_on_a_line_and_the_rest_in_proportion() -> None:
    whole = on_the_line_of(trace(8, rest=5), (100,) * 4, trace(8), (100,) * 4, trace(4), 8, 4)
    assert whole is not None
    for batch in (1, 4, 8, 32):
        assert unswapped_bytes(whole.at(batch)) == unswapped_bytes(trace(batch, rest=5))


def runs(*steps: Trace | Exception | None) -> Any:
    """What stands for a replay: it returns these in turn."""
    left = list(steps)

    def run(call: Call, items: int, batch: int, held: Held) -> RecordedStep | None:
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return None if found is None else recorded(found, items)

    return run


CALL = call_of(nn.Linear(2, 2), torch.randn(8, 2))


def test_a_replay_that_holds_its_output_or_does_not() -> None:
    other = trace(8, packed=1)
    found = sized(recorded(trace(8), 8), CALL, runs(other, trace(4), trace(8), trace(4)))
    assert isinstance(found, SizedStep)
    assert found.at(4).tensors == trace(4).tensors


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([trace(8, packed=1), trace(4, packed=1)] * 2, "with half of the batch it saves other tensors"),
        ([trace(8), trace(4, packed=1)] * 2, "with half of the batch it saves other tensors"),
        ([trace(7), trace(4)] * 2, "with half of the batch it saves other tensors"),
        ([None, None] * 2, "with half of the batch it saves other tensors"),
        ([RuntimeError("shapes differ\nand more")], "RuntimeError: shapes differ"),
        ([RuntimeError()], "RuntimeError: "),
    ],
)
def test_a_replay_that_tells_nothing_says_why(steps: list[Any], words: str) -> None:
    assert sized(recorded(trace(8), 8), CALL, runs(*steps)) == words


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_replay_keeps_inputs_where_the_script_does(is_kept: bool) -> None:
    found: list[Held] = []

    def run(call: Call, items: int, batch: int, held: Held) -> RecordedStep | None:
        found.append(held)
        return recorded(trace(items), items)

    assert isinstance(sized(replace(recorded(trace(8), 8), frees_inputs=not is_kept), CALL, run), SizedStep)
    assert found == [Held(output=True, inputs=is_kept)] * 2


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_a_real_replay_keeps(is_kept: bool) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))
    step = replay.replayed(call_of(model, torch.randn(2048, 256)), 1024, 2048, Held(output=False, inputs=is_kept))
    assert step is not None
    assert step.frees_inputs is not is_kept
    assert len(step.trace.tensors) == 2 + (not is_kept)


def test_a_real_replay_leaves_no_gradients_and_is_disabled() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 4))
    step = replay.replayed(call_of(model, torch.randn(2048, 64)), 1024, 2048, Held(output=True, inputs=True))
    assert step is not None
    assert step.batch == 1024
    assert step.trace.tensors[0].bytes == 1024 * 256 * 4
    assert all(each.grad is None for each in model.parameters())
    assert "forward" not in vars(model)
