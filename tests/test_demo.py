"""The demo, in sizes that take seconds: its data, its comparison, its page and its processes."""

from __future__ import annotations

import argparse
import io
import json
import mmap
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from page_check import charts_of, without_code

import offload
from offload.demo import command as demo
from offload.demo import page as demo_page
from offload.demo import worker as demo_worker
from offload.demo.memory import MemoryMeter, resident_bytes, thin
from offload.demo.model import ByteGPT, Shape

ROOT = Path(__file__).parents[1]
TINY = Shape(layers=2, width=32, heads=2, batch=2, length=32)
SIZES = {"layers": 2, "width": 64, "heads": 2, "batch": 4, "length": 256, "steps": 3}

WORK: dict[str, Any] = {
    "steps": 3,
    "until_settled": False,
    "seed": 0,
    "device": "cpu",
    "of_state": False,
    "tell": lambda event: None,
}


def result(**changes: Any) -> dict[str, Any]:
    made = {
        "name": "plain",
        "losses": [3.5, 3.25],
        "gradients": "00ff" * 8,
        "baseline_bytes": 300 << 20,
        "peak_bytes": 800 << 20,
        "counted_peak_bytes": 700 << 20,
        "saved_bytes": 400 << 20,
        "parameter_bytes": 20 << 20,
        "parameters": 5 << 20,
        "step_seconds_median": 2.0,
        "steps_counted": 1,
        "steps_settled": None,
        "steps": 2,
        "seed": 0,
        "batch": 2,
        "length": 32,
        "device": "a <processor> & more",
        "threads": 2,
        "gpu": False,
        "allocator": "tcmalloc",
        "allocator_costs": "tcmalloc: recycles",
        "python": "3.11",
        "torch": "2.6",
        "report": None,
        "plan": None,
        "curve": [(0.0, 0), (1.0, 800 << 20), (2.0, 100 << 20)],
        "last_step_curve": [(1.0, 800 << 20), (2.0, 100 << 20)],
        "last_step_is_heap": True,
    }
    return {**made, **changes}


def result_of_state(**changes: Any) -> dict[str, Any]:
    made = result(**{"weights_and_state": "00ff" * 8, "state_bytes": 40 << 20, **changes})
    del made["gradients"]
    return made


def run_demo(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    command = [sys.executable, "-m", "offload.demo", "--device=cpu", f"--html={page}", *sizes]
    return subprocess.run([*command, *options], capture_output=True, text=True, cwd=ROOT, check=False)


def assert_self_contained(page: str) -> None:
    assert re.findall(r"https?:|//[a-z]|\bsrc=|\bhref=|@import|url\(", without_code(page)) == []
    assert "default-src 'none'" in page  # which test_pages_in_browser.py sees obeyed
    assert page.startswith("<!DOCTYPE html>")
    assert page.rstrip().endswith("</html>")


@pytest.mark.long
def test_the_corpus_is_source_text_and_the_same_every_time() -> None:
    corpus = demo_worker.read_corpus(200_000)
    assert len(corpus) == 200_000
    assert corpus == demo_worker.read_corpus(200_000)
    assert b"import " in corpus


def test_too_little_source_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "x.py").write_text("y" * 100, encoding="utf-8")
    (tmp_path / "a.py").write_text("pass", encoding="utf-8")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="asked 50 bytes, found 4 in"):
        demo_worker.read_corpus(50)


def test_batches_depend_on_the_seed_alone() -> None:
    text = torch.arange(256, dtype=torch.uint8).repeat(8)

    def drawn(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(demo_worker.batches(text, TINY, steps=3, seed=seed, device="cpu"))

    first, second, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    x, y = first[0]
    assert x.shape == y.shape == (2, 32)
    assert torch.equal(y, (x + 1) % 256)


def test_the_default_sizes_save_twenty_times_the_parameters() -> None:
    parameters, kept = sizes_of(Shape(**demo.SIZES))
    assert 9e6 < parameters < 11e6
    assert kept >= 20 * parameters


def test_the_sizes_for_state_save_little_beside_the_state() -> None:
    parameters, kept = sizes_of(Shape(**demo.STATE_SIZES))
    assert 5e7 < parameters < 7e7
    assert kept < parameters / 4


def sizes_of(shape: Shape) -> tuple[int, int]:
    """Numbers of parameters, and of values saved for backward."""
    with torch.device("meta"):
        model = ByteGPT(shape)
    # A block keeps 16 widths a token: both norms' inputs and outputs (4), queries, keys and values
    # (3), what attention mixed (1), the MLP before and after GELU (8).
    kept = 16 * shape.width * shape.layers * shape.batch * shape.length
    return sum(parameter.numel() for parameter in model.parameters()), kept


def test_saved_bytes_count_every_storage_once_and_no_parameter() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    saved = demo_worker.SavedBytesCounter(layer)
    x = torch.randn(4, 8, requires_grad=True)
    with saved.counting():
        product = layer(x) * x
    product.sum().backward()
    assert saved.total == 2 * 4 * 8 * 4


def test_the_meter_sees_memory_that_came_and_went() -> None:
    meter = MemoryMeter("cpu")
    meter.start()
    block = mmap.mmap(-1, 32 << 20)  # not from a heap that may have as much to give again
    for at in range(0, len(block), mmap.PAGESIZE):
        block[at] = 1
    assert resident_bytes() >= len(block)
    block.close()
    meter.stop()
    assert meter.peak_bytes - meter.baseline_bytes >= 30 << 20
    assert meter.samples


def test_a_lap_of_the_meter_has_its_own_peak() -> None:
    meter = MemoryMeter("cpu")
    meter.start()
    block = mmap.mmap(-1, 32 << 20)
    for at in range(0, len(block), mmap.PAGESIZE):
        block[at] = 1
    block.close()
    high, low = meter.lap(), meter.lap()
    meter.stop()
    assert high - meter.baseline_bytes >= 30 << 20
    assert low <= high - (30 << 20)
    assert meter.peak_bytes == high


def test_thinning_keeps_the_extremes_in_order() -> None:
    samples = [(float(at), at * 7919 % 1000) for at in range(5000)]
    kept = thin(samples, 100)
    assert len(kept) <= 100
    assert kept == sorted(kept)
    assert max(used for _, used in kept) == max(used for _, used in samples)
    assert min(used for _, used in kept) == min(used for _, used in samples)
    assert thin(samples[:50], 100) == samples[:50]


def test_one_bit_of_difference_is_no_agreement() -> None:
    plain = result()
    assert demo.agreement([plain, result(name="offloaded")])
    assert not demo.agreement([plain, result(losses=[3.5, 3.2500000000000004])])
    assert not demo.agreement([plain, result(losses=[3.4, 3.25])])
    assert not demo.agreement([plain, result(gradients="00fe" * 8)])
    assert demo.agreement([result_of_state(), result_of_state()])
    assert not demo.agreement([result_of_state(), result_of_state(weights_and_state="00fe" * 8)])
    nan = result(losses=[float("nan")])
    assert demo.agreement([nan, result(losses=[float("nan")])])


def test_the_table_compares_with_the_first() -> None:
    other = result(name="offloaded", peak_bytes=200 << 20, step_seconds_median=2.2)
    results = [result(), other]
    out = io.StringIO()
    demo.show(demo.table_rows(results), results, out)
    table = out.getvalue()
    assert re.search(r"peak growth of the resident set +800 MiB +200 MiB  0\.25×", table)
    assert re.search(r"median step +2\.00 s +2\.20 s  1\.10×", table)
    assert re.search(r"as float\.hex +0x1\.a000000000000p\+1 ", table)
    assert "NO" in dict(demo.table_rows([result(), result(gradients="")]))["  equal to the last bit"]
    assert re.search(r"peak resident set +1100 MiB +500 MiB", table)
    state = dict(demo.table_rows([result_of_state(), result_of_state()]))
    assert state["weights and state at the end, hash"] == ["00ff00ff00ff"] * 2
    assert "weights 20 MiB, gradients as much, AdamW's state 40 MiB: 80 MiB together" in demo.setting(
        [result_of_state()]
    )


def test_the_output_says_which_steps_the_median_is_of() -> None:
    searched = result(name="offloaded", steps=30, steps_counted=21, steps_settled=21)
    results = [result(steps=30, steps_counted=29), searched]
    assert dict(demo.table_rows(results))["  counted steps"] == ["29 of 30", "21 of 30"]
    assert "offloaded: the median counts the steps after the search for a plan" in (demo.remarks(results))
    searching = result(name="offloaded", steps=12, steps_counted=11, steps_settled=2)
    assert any(line.startswith("offloaded: only 2 steps came after the search") for line in demo.remarks([searching]))
    assert not any("search" in line for line in demo.remarks([result_of_state()]))


def test_that_saved_tensors_stay_is_no_remark_of_the_demo_of_state() -> None:
    model = torch.nn.Linear(4, 4)
    with offload.enable(model, n_tensors=0) as handle:
        [note] = [each for each in handle.report().notes if each.startswith("NO SAVED TENSOR IS SWAPPED")]
    said = demo.remarks([result_of_state(report={"notes": [note, "another"]})])
    assert note not in said
    assert "another" in said


def test_under_glibc_the_remedy_is_said_and_the_engines_notes_pass_through() -> None:
    engine = {"notes": ["0 tensors swapped"]}
    costs = "glibc: fragments"
    said = demo.remarks([result(allocator="glibc", allocator_costs=costs), result(report=engine)])
    assert costs in said
    assert "0 tensors swapped" in said
    assert costs not in demo.remarks([result(allocator_costs=costs)])


def test_the_page_is_self_contained_and_escaped() -> None:
    report = {"text": "swapped <7>"}
    results = [result(), result(name="offloaded", peak_bytes=200 << 20, report=report)]
    rows, notes = demo.table_rows(results), demo.setting(results)
    compared = "gradients of the last step"
    page = demo_page.render(rows, results, equal=True, compared=compared, notes=notes)
    assert_self_contained(page)
    assert "a &lt;processor&gt; &amp; more" in page
    assert "swapped &lt;7&gt;" in page
    assert "0.25× the memory, 1.00× the step time of the plain run" in page
    assert "NOT EQUAL" not in page
    assert "Losses, and gradients of the last step: equal to the last bit." in page
    assert "NOT EQUAL" in demo_page.render(rows, results, equal=False, compared=compared, notes=notes)
    assert [chart["title"] for chart in charts_of(page)] == ["from the start of the step", "from the start of the run"]
    assert "plain, peak 800.00 MiB" in page
    assert "prefers-color-scheme: dark" in page


@pytest.mark.long
def test_all_contestants_agree_to_the_last_bit(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run_demo(page, "--with-checkpoint", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    plain, offloaded, checkpointed = summary["contestants"]
    assert summary["equal"]
    assert len(plain["losses"]) == 3
    assert plain["losses"] == offloaded["losses"] == checkpointed["losses"]
    assert plain["gradients"] == offloaded["gradients"] == checkpointed["gradients"]
    assert plain["allocator"] == offloaded["allocator"] == checkpointed["allocator"]
    assert plain["saved_bytes"] > plain["parameter_bytes"]
    assert offloaded["report"]["swapped"]["tensors"] > 0
    assert_self_contained(page.read_text(encoding="utf-8"))


@pytest.mark.long
def test_weights_and_state_agree_where_state_is_moved(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    # Each weight of a linear layer has at least `min_tensor_bytes`.
    sizes = ["--width=512", "--layers=1", "--heads=2", "--batch=1", "--length=16", "--steps=3"]
    done = run_demo(page, "--state", "--json", *sizes)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["equal"]
    plain, moved, in_backward = summary["contestants"]
    assert plain["report"] is None
    for each in (moved, in_backward):
        assert each["weights_and_state"] == plain["weights_and_state"]
        assert each["losses"] == plain["losses"]
        assert each["report"]["optimizer_state"][0]["tensors"] == 2 * 4
        assert each["steps_counted"] == 2
    assert plain["state_bytes"] == moved["state_bytes"] > 2 * plain["parameter_bytes"]
    assert moved["report"]["step_in_backward"] == []
    assert in_backward["report"]["step_in_backward"][0]["in_backward"] > 0
    text = page.read_text(encoding="utf-8")
    assert_self_contained(text)
    assert "weights and optimizer state included" in text


def test_steps_of_the_search_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled = iter([False, False, True, True, False, True])
    monkeypatch.setattr(demo_worker.Contestant, "has_settled", lambda contestant: next(settled))
    monkeypatch.setattr(demo_worker.Contestant, "searches", True)
    found = demo_worker.train("plain", TINY, **{**WORK, "steps": 6})
    assert (found["steps_counted"], found["steps_settled"]) == (3, 3)
    seconds = found["step_seconds"]
    assert found["step_seconds_median"] == sorted([seconds[2], seconds[3], seconds[5]])[1]


@pytest.mark.long
def test_a_contestant_that_fails_ends_the_demo_with_its_words(tmp_path: Path) -> None:
    done = run_demo(tmp_path / "page.html", "--contestants", "plain", "--heads", "7")
    assert done.returncode == 2
    assert "the plain run ended with exit status 1" in done.stderr
    assert "RuntimeError" in done.stderr


def test_bad_options_are_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--steps", "1"]) == 2
    assert "--steps 1: the first step is not timed; give 2 or more" in capsys.readouterr().err
    for seed in (-1, 1 << 63):
        assert demo.main(["--seed", str(seed)]) == 2
        assert f"--seed {seed}: give 0 or more, and less than 2 to the power of 63" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--html", "/no/such/folder/x.html"])
    assert "/no/such/folder/x.html: its folder does not exist" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cuda"]) == 2
    assert "use --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("settled_from", "steps"), [(3, 3 + demo_worker.SETTLED_STEPS), (1000, 20)])
def test_a_run_can_end_once_steps_have_followed_the_search(
    settled_from: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or at the number of steps that is given; the gradients are those of its last step."""
    asked = iter(range(1000))
    monkeypatch.setattr(demo_worker.Contestant, "has_settled", lambda self: next(asked) >= settled_from)
    monkeypatch.setattr(demo_worker.Contestant, "searches", True)
    found = demo_worker.train("plain", TINY, **{**WORK, "steps": 20, "until_settled": True})
    assert (found["steps"], len(found["losses"])) == (steps, steps)
    monkeypatch.undo()
    alone = demo_worker.train("plain", TINY, **{**WORK, "steps": steps})
    assert found["gradients"] == alone["gradients"]


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (["--steps=5"], [("plain", 5, False), ("offloaded", 5, False)]),
        ([], [("offloaded", demo.STEPS_MAX, True), ("plain", 33, False)]),
        (
            ["--with-checkpoint"],
            [("offloaded", demo.STEPS_MAX, True), ("plain", 33, False), ("checkpointed", 33, False)],
        ),
        (["--contestants=plain"], [("plain", demo.STEPS_OF_STATE, False)]),
    ],
)
def test_without_a_number_the_offloaded_run_decides_how_many_steps_all_runs_have(
    options: list[str], runs: list[tuple[str, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, int, bool]] = []

    def train(name: str, args: Any) -> dict[str, Any]:
        found.append((name, args.steps, args.until_settled))
        return result(name=name, steps=33)

    monkeypatch.setattr(demo, "_train_apart", train)
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    results = demo._train_all(parser.parse_args(options))
    assert found == runs
    assert results[0]["name"] == "plain"
