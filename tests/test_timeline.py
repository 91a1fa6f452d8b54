"""A recorded step: what the lanes show is what happened, and recording changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import KIND, is_simulated
from page_check import charts_of, check_page
from torch import Tensor, nn

import offload
from offload.diagnostics.html import timeline as timeline_page
from offload.diagnostics.step_recording import StepRecording
from offload.diagnostics.timeline import LANES, MemorySample, Span, StepTimeline, merged, without


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block())


def step(model: nn.Module, before_backward: Callable[[], None] = lambda: None) -> list[Tensor]:
    model.zero_grad()
    loss = model(torch.ones(128, 64)).square().mean()
    before_backward()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def handle(model: nn.Module) -> Iterator[Any]:
    with offload.enable(model, n_tensors=-1, lb=2, min_tensor_bytes="4KiB") as handle:
        step(model)
        yield handle


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[StepTimeline]:
    """The timelines that recordings make, besides what they write."""
    found: list[StepTimeline] = []
    whole = StepRecording._step

    def keep(self: StepRecording, copies: Any) -> StepTimeline:
        found.append(whole(self, copies))
        return found[-1]

    monkeypatch.setattr(StepRecording, "_step", keep)
    return found


def test_the_lanes_show_what_happened(
    model: nn.Module, handle: Any, written: list[StepTimeline], tmp_path: Path
) -> None:
    handle._engine.drain()
    handle._engine.store.quiesce()  # copies of the steps before are on the lanes too, where they last into this one
    before = handle._counts.swapped.nbytes
    with handle.timeline(tmp_path / "step.html"):
        step(model, handle._engine.drain)  # else backward takes back what has not left yet, and nothing is copied
    (found,) = written
    swapped = handle._counts.swapped.nbytes - before
    assert swapped == found.moved_bytes("out") == found.moved_bytes("in") > 0
    forward = [span.name for span in found.on("compute") if span.kind == "forward"]
    assert {"0.up", "0.down", "1.up", "2.down"} <= set(forward)
    assert forward.index("0.up") < forward.index("1.up") < forward.index("2.up")
    backward = [span.name for span in found.on("compute") if span.kind == "backward"]
    assert any(name.startswith("TanhBackward0 of 2") for name in backward)
    assert {span.name for span in found.on("copy out")} <= {
        f"{block}{layer}" for block in "012" for layer in ("", ".up", ".down")
    }
    assert max(sample.unswapped for sample in found.memory) == swapped
    assert_tensors_are_told(found, swapped)
    assert found.memory[-1].resident == 0
    for lane in LANES:
        spans = found.on(lane)
        assert all(0 <= span.start < span.end <= found.seconds for span in spans), lane
        assert spans == sorted(spans, key=lambda span: span.start)
    ends = {span.name: span.end for span in found.on("copy out")}
    assert all(span.start >= ends[span.name] for span in found.on("copy in") if list(ends).count(span.name) == 1)
    check_page((tmp_path / "step.html").read_text(encoding="utf-8"))


def assert_tensors_are_told(found: StepTimeline, swapped: int) -> None:
    """The saved tensors of `found`: what was swapped is away between its copies, and all are gone at the end."""
    tensors = [tensor for tensor in found.tensors if tensor.kind == "swapped"]
    assert sum(tensor.nbytes for tensor in tensors) == swapped
    assert {tensor.kind for tensor in found.tensors} <= {"swapped", "kept"}
    copies = {(span.kind, span.ticket): span for span in (*found.on("copy out"), *found.on("copy in"))}
    for tensor in tensors:
        left, back = tensor.resident[1], tensor.resident[2]
        assert list(tensor.resident) == sorted(tensor.resident)
        assert copies["out", tensor.ticket].name == tensor.name
        assert copies["out", tensor.ticket].end <= left <= back <= copies["in", tensor.ticket].start
        assert tensor.resident[-1] < found.seconds
    names = [tensor.name for tensor in tensors]
    assert [name[0] for name in names] == sorted(name[0] for name in names)


def test_kept_tensors_are_told_too_and_parameters_are_not(
    model: nn.Module, written: list[StepTimeline], tmp_path: Path
) -> None:
    with offload.enable(model, n_tensors=1, min_tensor_bytes="4KiB") as handle:
        step(model)
        with handle.timeline(tmp_path / "step.html"):
            step(model, handle._engine.drain)
    (found,) = written
    assert sorted(tensor.kind for tensor in found.tensors) == [*["kept"] * 5, "swapped"]
    # What enters each block, and what leaves its tanh.
    assert [tensor.nbytes // (128 * 4) for tensor in found.tensors] == [64, 256, 64, 256, 64, 256]
    assert all(len(tensor.resident) == 2 for tensor in found.tensors if tensor.kind == "kept")
    assert max(tensor.resident[-1] for tensor in found.tensors) < found.seconds
    page = charts_of((tmp_path / "step.html").read_text("utf-8"))[0]
    assert [kind[0] for kind in page["kinds"] if kind[0] in ("kept", "swapped")] == ["swapped", "kept"]
    assert [curve["name"] for curve in page["curves"]] == ["without offload", "with offload"]


def test_the_optimizer_is_told_from_the_rest(
    model: nn.Module, handle: Any, written: list[StepTimeline], tmp_path: Path
) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    with handle.timeline(tmp_path / "step.html"):
        step(model)
        optimizer.step()
    optimizer.step()
    (found,) = written
    kinds = [span.kind for span in found.on("compute")]
    assert kinds[0] == "forward"
    assert kinds[-1] == "optimizer"
    assert kinds.count("optimizer") == 1


def test_recording_changes_no_bit_and_leaves_nothing(model: nn.Module, handle: Any, tmp_path: Path) -> None:
    expected = step(make_model())
    hooks = [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()]
    with handle.timeline(tmp_path / "step.json"):
        found = step(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(found) == len(expected)
    assert hooks == [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()]
    step(model)
    assert handle._engine.store.take_copies() == []  # the store's log is off again


def test_perfetto_reads_it(model: nn.Module, handle: Any, tmp_path: Path) -> None:
    with handle.timeline(tmp_path / "step.json"):
        step(model, handle._engine.drain)
    events = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert set(names) == set(LANES)
    for lane in ("compute", "copy out", "copy in"):
        complete = [event for event in events if event["ph"] == "X" and event["tid"] == names[lane]]
        assert complete
        assert all(event["dur"] > 0 and event["ts"] >= 0 for event in complete)
    assert any(event["ph"] == "C" for event in events)
    moved = sum(event["args"]["bytes"] for event in events if event.get("cat") == "out")
    assert moved > 0


def test_without_a_block_it_is_the_next_step(model: nn.Module, handle: Any, tmp_path: Path) -> None:
    path = tmp_path / "step.html"
    handle.timeline(path)
    step(model)
    assert not path.exists()
    step(model)
    check_page(path.read_text(encoding="utf-8"))
    written_at = path.stat().st_mtime_ns
    step(model)
    assert path.stat().st_mtime_ns == written_at


def test_disable_ends_a_recording(model: nn.Module, handle: Any, tmp_path: Path) -> None:
    handle.timeline(tmp_path / "step.html")
    step(model)
    handle.disable()
    check_page((tmp_path / "step.html").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="offload is disabled on this model"):
        handle.timeline(tmp_path / "step.html")


def test_a_step_that_raises_is_written_too(model: nn.Module, handle: Any, tmp_path: Path) -> None:
    path = tmp_path / "step.html"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), handle.timeline(path):
        model(torch.ones(3, 7))
    check_page(path.read_text(encoding="utf-8"))
    assert not any(each._forward_hooks for each in model.modules())
    assert step(model)


def test_backward_may_come_after_the_recording(model: nn.Module, handle: Any, tmp_path: Path) -> None:
    expected = step(make_model())
    model.zero_grad()
    with handle.timeline(tmp_path / "step.html"):
        loss = model(torch.ones(128, 64)).square().mean()
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_mistakes_are_said(handle: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.html or, for Perfetto, \.json, not 'step\.txt'"):
        handle.timeline("step.txt")
    with handle.timeline(tmp_path / "a.html"), pytest.raises(ValueError, match=r"a\.html is being recorded already"):
        handle.timeline(tmp_path / "b.html")
    assert not (tmp_path / "b.html").exists()


# -- the timeline itself ----------------------------------------------------------------------------------------------


def span(start: float, end: float, name: str = "a", kind: str = "forward", lane: str = "compute") -> Span:
    return Span(lane, kind, name, start, end)


def test_waits_are_cut_out_of_compute() -> None:
    holes = [span(2, 3), span(4, 6), span(6.5, 7), span(9, 9.5)]
    left = without([span(0, 1), span(1, 5), span(5, 8), span(9.1, 9.4)], holes)
    assert [(each.start, each.end) for each in left] == [(0, 1), (1, 2), (3, 4), (6, 6.5), (7, 8)]
    assert without([span(0, 1)], []) == [span(0, 1)]


def test_neighbours_of_one_name_are_joined() -> None:
    joined = merged([span(0, 1), span(1, 2), span(2, 3, "b"), span(4, 5, "b")])
    assert [(each.name, each.start, each.end) for each in joined] == [("a", 0, 2), ("b", 2, 3), ("b", 4, 5)]


def test_busy_seconds_count_overlaps_once() -> None:
    spans = (span(0, 2, lane="copy in"), span(1, 3, lane="copy in"), span(5, 6, lane="copy in"))
    assert StepTimeline("cpu", "disk", "resident", 9.0, spans, ()).busy_seconds("copy in") == 4.0


def test_a_page_of_thousands_of_spans_stays_small() -> None:
    kinds = {"compute": "forward", "copy out": "out", "copy in": "in", "disk": "spill"}
    spans = tuple(
        Span(lane, kind, f"<m{i}>", i * 1e-5, i * 1e-5 + 9e-6, 4096)
        for lane, kind in kinds.items()
        for i in range(20_000)
    )
    memory = tuple(MemorySample(i * 1e-5, (1 << 33) + i, i << 20, i << 21) for i in range(20_000))
    text = timeline_page.render(StepTimeline("cuda:0", "pinned RAM", "allocated by torch", 0.2, spans, memory))
    check_page(text)
    assert [name for name, _ in charts_of(text)[0]["lanes"]] == ["compute", "copy out", "copy in", "disk"]
    assert charts_of(text)[0]["names"][0] == "<m0> and 2 more"
    assert len(text) < 3_000_000


def test_an_empty_recording_is_a_page() -> None:
    text = timeline_page.render(StepTimeline("cpu", "disk", "resident", 0.0, (), ()))
    check_page(text)
    assert "Compute waited 0.000 s" in text


@pytest.mark.gpu
def test_a_gpus_step(written: list[StepTimeline], tmp_path: Path) -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU()))).to(KIND)
    x = torch.randn(256 if is_simulated else 4096, 1024, device=KIND)
    with offload.enable(model, n_tensors=-1, lb=2) as handle:
        for _ in range(2):
            model(x).sum().backward()
        with handle.timeline(tmp_path / "step.html"):
            loss = model(x).sum()
            handle._engine.drain()  # what has not left by then need not come back
            loss.backward()
    (found,) = written
    assert found.moved_bytes("out") == found.moved_bytes("in") > 0
    assert {each.kind for each in found.on("compute")} == {"forward", "backward"}
    assert all(0 <= each.start < each.end <= found.seconds for each in found.spans)
    ends = [each.end for each in found.on("compute") if each.kind == "forward"]
    assert all(each.start >= max(ends) for each in found.on("compute") if each.kind == "backward")
