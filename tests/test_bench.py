"""The bench's own parts at tiny sizes: contestants compute plain's bits, searches find, children end at their cap."""

from __future__ import annotations

import gc
import json
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"
FAMILIES = ["gpt", "resnet", "unet", "lstm", "vit"]
KINDS = ["plain", "offload", "save_on_cpu", "checkpoint", "selective", "tutorial", "transformers"]
STEPS = 3


@pytest.fixture(scope="module")
def bench() -> Any:
    """The bench's modules, by name."""
    sys.path.insert(0, str(BENCH))
    try:
        import contestants
        import largest
        import models
        import race
        import training
    finally:
        sys.path.remove(str(BENCH))
    return {module.__name__: module for module in (contestants, largest, models, race, training)}


def bits(bench: Any, family: str, contestant: Any) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Losses and gradient hashes of a few steps of a tiny model, and the run's figures."""
    trainer = bench["training"].Trainer(bench["race"].setting_of(family, "tiny"), contestant)
    steps = [*trainer.settle(STEPS), trainer.step()]
    figures = trainer.figures()
    trainer.close()
    return [(step.loss, step.gradients) for step in steps], figures


@pytest.mark.long
@pytest.mark.parametrize(
    "family", [each if each == "resnet" else pytest.param(each, marks=pytest.mark.full) for each in FAMILIES]
)
def test_every_contestant_computes_the_same_bits(bench: Any, family: str) -> None:
    contestants = bench["contestants"]
    expected, _ = bits(bench, family, contestants.PLAIN)
    assert len({gradients for _, gradients in expected}) == len(expected)
    ran = set()
    for contestant in contestants.EVERY:
        if contestant.slow:
            continue
        try:
            found, figures = bits(bench, family, contestant)
        except contestants.Inapplicable:
            continue
        ran.add(contestant.kind)
        assert found == expected, contestant.name
        if contestant.name == contestants.LEAST.name:
            assert figures["report"]["swapped"]["tensors"] > 0
            assert figures["disk_bytes"] > 0
    assert ran == set(KINDS)


def test_steps_are_timed_once_the_search_for_a_plan_has_ended(bench: Any) -> None:
    """In steps of a search, plans are tried, and reference steps wait for copies."""
    contestants, training = bench["contestants"], bench["training"]
    counts = {}
    for contestant in (contestants.PLAIN, contestants.by_name("offload, max_slowdown 5 %")):
        trainer = training.Trainer(bench["race"].setting_of("gpt", "tiny"), contestant)
        steps = trainer.settle()
        assert all(step.gradients for step in steps)
        counts[contestant.name] = len(steps), (trainer.figures()["report"] or {}).get("settled_steps")
        trainer.close()
    assert counts[contestants.PLAIN.name] == (training.STEPS_TO_SETTLE, None)
    steps, settled = counts["offload, max_slowdown 5 %"]
    assert training.STEPS_TO_SETTLE < steps <= training.STEPS_TO_SETTLE + training.STEPS_TO_STEADY_MAX
    assert settled == 1


@pytest.mark.parametrize("differing", [None, 0, 8])
def test_every_step_of_a_race_is_compared_with_plain(bench: Any, differing: int | None, monkeypatch: Any) -> None:
    """Also the timed ones, if a search for a plan took more steps than plain has trained."""

    class Run:
        def __init__(self, *_: Any, count: int = 7, wrong: int | None = differing) -> None:
            self._wrong = wrong
            self.steps = [self._step(number) for number in range(count)]

        def _step(self, number: int) -> dict[str, Any]:
            return {"loss": "0x1", "gradients": "wrong" if number == self._wrong else str(number)}

        def step(self) -> float:
            self.steps.append(self._step(len(self.steps)))
            return 1.0

        def finish(self) -> dict[str, Any]:
            return {"peak_bytes": 1}

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    plain: Any = Run(count=1, wrong=None)
    monkeypatch.setattr(bench["race"], "Runner", Run)
    race = bench["race"].Race(bench["race"].setting_of("gpt", "tiny"), bench["contestants"].PLAIN, plain)
    for _ in range(2):
        race.plain_step()
        race.step()
    row = race.row(1)
    assert (row["equal_gradients"], len(plain.steps), len(row["step_seconds"])) == (differing is None, 9, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
def test_a_checksum_tells_every_value_and_its_place(bench: Any, dtype: torch.dtype, monkeypatch: Any) -> None:
    checksum = bench["training"].checksum
    tensor = torch.arange(12).view(3, 4).to(dtype)
    found = checksum(tensor)
    assert found == checksum(tensor.t().contiguous().t())
    others = [tensor.flip(0), tensor.t(), torch.cat([tensor, tensor[:1] + 1]), tensor[:2]]
    for index in range(tensor.numel()):
        others.append(tensor.clone())
        others[-1].view(-1).view(bench["training"].INTEGERS[tensor.element_size()])[index] ^= 1
    assert found not in [checksum(other) for other in others]
    monkeypatch.setattr(bench["training"], "CHECKSUM_VALUES", 5)
    assert checksum(tensor) == found


def test_the_families_are_those_of_the_tests(bench: Any) -> None:
    assert list(bench["models"].FAMILIES) == FAMILIES


def test_checkpointing_saves_less(bench: Any) -> None:
    training, models = bench["training"], bench["models"]
    saved = {}
    for name in ("plain", "checkpoint per block", "selective checkpointing"):
        setting = bench["race"].setting_of("gpt", "tiny")
        trainer = training.Trainer(setting, bench["contestants"].by_name(name))
        kept: list[int] = []
        # checkpoint's own hooks are innermost, so only what it does not save itself comes here
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t.nbytes), t)[1], lambda t: t):
            x, y = models.batch_of("gpt", setting.size, seed=0, step=0, device="cpu", dtype=torch.float32)
            loss = models.loss_of(trainer._prepared.model(x), y)
        saved[name] = sum(kept)
        loss.backward()
    assert saved["checkpoint per block"] < 0.5 * saved["plain"]


def test_the_tutorials_files_go_with_the_graph(bench: Any) -> None:
    files = bench["contestants"].TutorialFiles()
    folder = Path(files._folder.name)
    x = torch.ones(2000, requires_grad=True)
    with files.hooks():
        y = (x * 2).exp()
    assert len(list(folder.iterdir())) > 0
    assert files.live_bytes == files.peak_bytes >= 8000
    y.sum().backward()
    del y
    gc.collect()
    assert list(folder.iterdir()) == []
    assert files.live_bytes == 0


def test_what_cannot_run_here_says_why(bench: Any) -> None:
    contestants = bench["contestants"]
    setting = bench["race"].setting_of("gpt", "tiny")
    for contestant in contestants.PEERS:
        if contestant.cuda_only:
            with pytest.raises(contestants.Inapplicable, match=r"needs CUDA: .{10}"):
                bench["training"].Trainer(setting, contestant)
    with pytest.raises(contestants.Inapplicable, match="no_such_package is not installed"):
        contestants.installed("no_such_package")
    with pytest.raises(ValueError, match="no contestant 'x'; there are plain,"):
        contestants.by_name("x")


@pytest.mark.parametrize("true_largest", [1, 7, 40, 333])
@pytest.mark.parametrize("multiple", [1, 16])
def test_a_search_finds_the_largest(bench: Any, true_largest: int, multiple: int) -> None:
    largest = bench["largest"]
    asked: list[int] = []

    def probe(value: int) -> Any:
        asked.append(value)
        fits = value <= true_largest * multiple
        return largest.Try(value, 900 * value // (true_largest * multiple) if fits else None)

    tries = largest.search(probe, 1000, multiple, multiple=multiple, tolerance=0.05)
    found = largest.largest_of(tries)
    assert all(value % multiple == 0 for value in asked)
    assert len(asked) == len(set(asked)) <= largest.TRIES_MAX
    assert found.value <= true_largest * multiple
    assert found.value >= 0.95 * true_largest * multiple - multiple


@pytest.mark.parametrize("true_largest", [47, 60])
def test_a_search_goes_on_where_more_grew_by_less(bench: Any, true_largest: int) -> None:
    """A resident set differs from run to run: the line through two neighbours may tell nothing."""
    largest = bench["largest"]
    measured = {4: 73 << 20, 14: 128 << 20, 39: 260 << 20, 40: 227 << 20}

    def probe(value: int) -> Any:
        growth = measured.get(value, int((60 + 200 * value / true_largest) * (1 << 20)))
        return largest.Try(value, growth if value <= true_largest else None)

    found = largest.largest_of(largest.search(probe, 268 << 20, 4, tolerance=0.05))
    assert found.value >= 0.9 * true_largest


def test_a_search_where_nothing_fits(bench: Any) -> None:
    largest = bench["largest"]
    tries = largest.search(lambda value: largest.Try(value, None), 1000, 4)
    assert largest.summary(tries)["largest"] == 0


@pytest.mark.long
def test_a_run_ends_at_its_cap(bench: Any) -> None:
    race, contestants, models = bench["race"], bench["contestants"], bench["models"]
    setting = bench["training"].Setting("gpt", {**models.FAMILIES["gpt"].tiny, "batch": 256, "length": 128})
    with pytest.raises(race.OverCap, match="plain grew beyond its cap"):
        race.Runner(setting, contestants.PLAIN, cap_bytes=16 << 20)


@pytest.mark.full
def test_a_race_compares_bits_and_figures(bench: Any) -> None:
    race, contestants = bench["race"], bench["contestants"]
    with race.Meeting(race.setting_of("lstm", "tiny"), rounds=2) as meeting:
        row = meeting.race(contestants.BY_HAND[0])
        absent = meeting.race(contestants.ACCELERATOR_ONLY[0])
    assert row["equal_losses"]
    assert row["equal_gradients"]
    assert not race.wrong(row)
    assert race.wrong({**row, "equal_gradients": False})
    assert len(row["step_seconds"]) == len(row["plain_step_seconds"]) == 2
    assert row["plain_peak_bytes"] == meeting.plain_peak_bytes > 0
    assert row["memory_over_plain"] == row["peak_bytes"] / row["plain_peak_bytes"]
    assert row["all_steps_peak_bytes"] >= row["peak_bytes"]
    assert row["stall_seconds_per_step"] >= 0
    assert absent["inapplicable"].startswith("needs CUDA: ")


@pytest.mark.long
def test_a_race_out_of_time_leaves_the_rest_out_and_rows_stay(bench: Any, tmp_path: Path) -> None:
    race = bench["race"]
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps({"rows": [{"family": "gpt", "name": "kept"}, {"family": "lstm", "name": "replaced"}]}))
    command = ["--json", str(path), "--family", "lstm", "--size", "tiny", "--contestant", "checkpoint per block"]
    assert race.main([*command, "--keep", "--seconds", "0"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["kept", "checkpoint per block"]
    assert rows[1]["inapplicable"] == "left out: the time for this network was up"


def test_a_run_that_takes_too_long_is_ended(bench: Any) -> None:
    race = bench["race"]
    setting = race.setting_of("lstm", "tiny")
    with pytest.raises(RuntimeError, match=r"the run of plain took more than 0 s"):
        race.Runner(setting, bench["contestants"].PLAIN, seconds_max=0.05)


def test_memory_counts_from_before_a_contestant_looks_at_a_step(bench: Any) -> None:
    """Bytes that a probing step leaves to malloc must not pass for bytes that were there before."""
    training, contestants = bench["training"], bench["contestants"]
    order: list[str] = []
    begin, prepare = training.Trainer._begin, contestants.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Trainer, "_begin", lambda self: (order.append("begin"), begin(self))[1])
        patch.setattr(contestants, "prepare", lambda *a, **k: (order.append("prepare"), prepare(*a, **k))[1])
        training.Trainer(bench["race"].setting_of("lstm", "tiny"), contestants.LEAST).close()
    assert order == ["begin", "prepare"]


def test_memory_of_the_timed_steps_leaves_out_the_search(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training, contestants = bench["training"], bench["contestants"]
    trainer = training.Trainer(bench["race"].setting_of("lstm", "tiny"), contestants.PLAIN)
    step = trainer.step

    def large_step(*about: Any, **more: Any) -> Any:
        with mmap.mmap(-1, 64 << 20) as block:
            block.write(b"x" * len(block))
            return step(*about, **more)

    monkeypatch.setattr(trainer, "step", large_step)
    trainer.settle(1)
    monkeypatch.setattr(trainer, "step", step)
    trainer.step()
    figures = trainer.figures()
    trainer.close()
    assert figures["peak_bytes"] >= 64 << 20
    assert 0 < figures["settled_peak_bytes"] <= figures["peak_bytes"] - (48 << 20)


@pytest.mark.long
def test_a_run_that_fails_says_what_it_wrote(bench: Any) -> None:
    race = bench["race"]
    setting = bench["training"].Setting("gpt", {"layers": 1})
    with pytest.raises(RuntimeError, match=r"the run of plain ended with exit status 1:(.|\n)*KeyError"):
        race.Runner(setting, bench["contestants"].PLAIN)
