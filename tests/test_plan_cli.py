"""`offload plan TRACE.json`: what it prints, for people and machines, and how it refuses."""

import argparse
import json
import os
import re
import subprocess
import sys
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path

import example_pages
import pytest
from page_check import charts_of, check_page, without_code

from offload.cli import plan as plan_cli
from offload.diagnostics.html.plan import render
from offload.plan import Link, fastest_plan, least_feasible_limit, unswapped_bytes
from offload.plan.trace import Node, Recompute, SavedTensor, Trace

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
LINK = ["--out-bandwidth", "100B/s", "--in-bandwidth", "100B/s"]
KEYS = {
    "step_seconds",
    "compute_seconds",
    "bound_seconds",
    "gap",
    "peak_bytes",
    "unswapped_peak_bytes",
    "swaps",
    "recomputes",
}


def call(*words):
    parser = argparse.ArgumentParser(prog="offload")
    plan_cli.add_parser(parser.add_subparsers(dest="command", required=True))
    return plan_cli.run(parser.parse_args(["plan", *map(str, words)]))


def command(*words):
    """The command in a fresh process."""
    line = [sys.executable, "-m", "offload", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(name="trace")
def trace_fixture():
    nodes = tuple(Node(f"layer{k}", 1.0, k > 3) for k in range(8))
    tensors = tuple(SavedTensor(i, 40 + i, i, i, i, 7 - i, 7 - i) for i in range(4))
    return Trace(nodes, (10,) * 8, tensors)


@pytest.fixture(name="path")
def path_fixture(trace, tmp_path):
    trace.save(tmp_path / "step.json")
    return tmp_path / "step.json"


def test_json_is_the_contract(trace, path, capsys):
    limit = least_feasible_limit(trace)
    assert call(path, "--memory-limit", limit, *LINK, "--latency", "10ms", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == KEYS
    assert data["recomputes"] == []
    assert all(set(swap) == {"id", "release", "prefetch"} for swap in data["swaps"])
    assert data["peak_bytes"] <= limit < data["unswapped_peak_bytes"] == max(unswapped_bytes(trace))
    assert data == fastest_plan(trace, Link(100.0, 100.0, 0.01), limit).to_dict()


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--n-tensors", "-1", "--lb", "1"], 0),
        (["--memory-limit", "1GiB", "--json"], 0),
        (["--memory-limit", "1", "--json"], 3),
        (["--memory-limit", "1"], 3),
        (["--lb", "1"], 2),
    ],
)
def test_a_reader_that_has_seen_enough_changes_no_status(path, words, status):
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "offload", "plan", str(path), *words, *LINK]
    ran = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert ran.returncode == status
    assert "pipe" not in ran.stderr.lower()
    assert (ran.stderr == "") == (status == 0)


def test_head_ends_a_long_table_without_a_word(tmp_path):
    """More than a pipe holds: the reader has left while it is still being written."""
    nodes = tuple(Node(f"layer{k}" * 40, 1.0, k > 999) for k in range(2000))
    tensors = tuple(SavedTensor(i, 1000 + i, i, i, i, 1999 - i, 1999 - i) for i in range(1000))
    Trace(nodes, (10,) * 2000, tensors, link=Link(1e9, 1e9)).save(tmp_path / "step.json")
    line = f"{sys.executable} -m offload plan {tmp_path}/step.json --n-tensors -1 --lb 1 --explain"
    shell = f"{line} | head -1; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=200, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(ran.stdout.splitlines()) == 1


def test_the_table_is_for_people(trace, path, capsys):
    assert call(path, "--memory-limit", least_feasible_limit(trace), *LINK) == 0
    shown = capsys.readouterr().out
    for word in ("unswapped", "this plan", "no swap-only plan within", "layer0", "prefetch"):
        assert word in shown


@pytest.fixture(name="recipes")
def recipes_fixture(trace, tmp_path):
    """The same step, in which all tensors but the first are made from the one before."""
    made = [replace(x, recompute=Recompute(0.125, (x.id - 1,)) if x.id else None) for x in trace.tensors]
    replace(trace, tensors=tuple(made)).save(tmp_path / "recipes.json")
    return tmp_path / "recipes.json"


SLOW = ["--out-bandwidth", "10B/s", "--in-bandwidth", "10B/s"]


def test_a_trace_with_recipes_is_planned_with_them(recipes, capsys):
    assert call(recipes, "--memory-limit", 150, *SLOW, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == KEYS
    assert data["recomputes"]
    assert all(set(row) == {"id", "at"} for row in data["recomputes"])
    assert {row["id"] for row in data["recomputes"]}.isdisjoint(swap["id"] for swap in data["swaps"])
    assert data == fastest_plan(Trace.load(recipes), Link(10.0, 10.0), 150).to_dict()
    assert call(recipes, "--memory-limit", 150, *SLOW, "--json", "--no-recompute") == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["recomputes"] == []
    assert alone["step_seconds"] > data["step_seconds"] >= data["bound_seconds"]


def test_without_recomputation_the_plan_is_that_of_the_trace_without_recipes(recipes, path, capsys):
    for words in (["--memory-limit", 150], ["--max-slowdown", "0.2"], []):
        assert call(recipes, *words, *SLOW, "--no-recompute") == 0
        alone = capsys.readouterr().out
        assert call(path, *words, *SLOW) == 0
        assert capsys.readouterr().out == alone


def test_the_table_tells_what_is_recomputed(recipes, capsys):
    assert call(recipes, "--memory-limit", 150, *SLOW) == 0
    shown = capsys.readouterr().out
    for words in ("recomputed at", "from", "takes", "recomputing", "; no plan within", "are recomputed,"):
        assert words in shown
    assert "swap-only" not in shown
    assert call(recipes, "--memory-limit", 150, *SLOW, "--explain") == 0
    assert "recomputed at node" in capsys.readouterr().out
    assert call(recipes, *SLOW) == 0
    assert "recomputed" in capsys.readouterr().out.splitlines()[0]


def test_the_exact_planner_knows_swaps_alone(recipes, capsys):
    assert call(recipes, "--memory-limit", 150, *SLOW, "--exact") == 2
    assert "write --exact --no-recompute" in capsys.readouterr().err
    assert call(recipes, "--memory-limit", 150, *SLOW, "--exact", "--no-recompute") == 0


def test_without_a_wish_the_options_stand_side_by_side(path, capsys):
    assert call(path, *LINK) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    names = ["unswapped", "5% slowdown", "10% slowdown", "25% slowdown", "least memory"]
    assert all(line.startswith(name) for line, name in zip(lines[1:], names, strict=True))


def test_a_plan_that_does_nothing_says_so(path, capsys):
    assert call(path, "--memory-limit", "1GiB", *LINK) == 0
    assert "nothing is swapped or recomputed" in capsys.readouterr().out


def test_explain_lists_every_tensor(trace, path, capsys):
    assert call(path, "--memory-limit", least_feasible_limit(trace), *LINK, "--explain") == 0
    assert "(tensor 0), 40 B: released at node" in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [False, True])
def test_an_infeasible_limit_is_status_3_and_names_the_least(trace, path, capsys, as_json):
    least = least_feasible_limit(trace)
    assert call(path, "--memory-limit", least - 1, *LINK, *(["--json"] if as_json else [])) == 3
    shown = capsys.readouterr()
    assert f"least feasible limit is {least} bytes" in shown.err
    if as_json:
        assert json.loads(shown.out)["least_feasible_bytes"] == least
    assert call(path, "--memory-limit", least, *LINK) == 0


def test_a_slowdown_and_a_limit_the_limit_is_kept(trace, path, capsys):
    least = least_feasible_limit(trace)
    assert call(path, "--max-slowdown", 0.01, "--memory-limit", least, *LINK, "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["peak_bytes"] <= least
    assert "warning: max_slowdown" in shown.err


def test_by_hand(path, capsys):
    assert call(path, "--n-tensors", -1, "--lb", 2, *LINK, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["swaps"]) == 4
    assert call(path, "--n-tensors", 0, *LINK, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["swaps"], data["step_seconds"]) == ([], data["compute_seconds"])


def test_exact(trace, path, capsys):
    pytest.importorskip("scipy", reason="the exact planner needs scipy")
    assert call(path, "--memory-limit", least_feasible_limit(trace), *LINK, "--exact", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)) == KEYS


def test_without_scipy_it_says_how_to_install_from_the_checkout(trace, path):
    program = "import sys; sys.modules['scipy'] = None; from offload.cli.main import main; sys.exit(main())"
    words = ["plan", path, "--memory-limit", least_feasible_limit(trace), *LINK, "--exact"]
    line = [sys.executable, "-c", program, *map(str, words)]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert 'in the checkout of offload, type: pip install ".[cli]"' in ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lb", "2"], "--lb needs --n-tensors"),
        (["--n-tensors", "2", "--max-slowdown", "0.1"], "use --max-slowdown (automatic) or --n-tensors (manual)"),
        (["--n-tensors", "3", "--memory-limit", "1GiB"], "use --memory-limit (automatic) or --n-tensors (manual)"),
        (["--exact"], "--exact needs --memory-limit"),
        (["--n-tensors", "-2"], "n_tensors: -2"),
    ],
)
def test_contradictions_are_refused_with_what_to_write(path, words, message):
    ran = command("plan", path, *words, *LINK)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert message in ran.stderr


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([], ["--out-bandwidth 12GB/s", "--in-bandwidth 12GB/s"]),
        (["--in-bandwidth", "1GB/s"], ["--out-bandwidth 12GB/s"]),
    ],
)
def test_missing_bandwidths_are_named_at_once(path, given, asked):
    ran = command("plan", path, "--memory-limit", "1GiB", *given)
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert all(each in line for each in asked)
    assert line.count("12GB/s") == len(asked)


def test_the_link_is_the_one_that_was_recorded(trace, tmp_path):
    replace(trace, link=Link(100.0, 50.0, 0.01)).save(tmp_path / "step.json")
    limit = least_feasible_limit(trace)
    ran = command("plan", tmp_path / "step.json", "--memory-limit", limit, "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == fastest_plan(trace, Link(100.0, 50.0, 0.01), limit).to_dict()
    ran = command("plan", tmp_path / "step.json", "--memory-limit", limit, "--in-bandwidth", "70B/s", "--json")
    assert json.loads(ran.stdout) == fastest_plan(trace, Link(100.0, 70.0, 0.01), limit).to_dict()


@pytest.mark.long
def test_a_step_is_planned_again_from_the_file_it_was_saved_to(tmp_path):
    script = """
import torch, offload
model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())])
with offload.enable(model, min_tensor_bytes="4KiB", max_slowdown=1.0) as handle:
    for _ in range(2):
        model(torch.randn(2048, 256)).sum().backward()
    handle.trace().save("trace.json")
    link = handle.plan.link
    print(link.out_bandwidth, link.in_bandwidth, link.latency)
"""
    command_line = [sys.executable, "-c", script]
    ran = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    found = json.loads((tmp_path / "trace.json").read_text())["link"]
    assert list(found) == ["out_bandwidth", "in_bandwidth", "latency"]
    assert list(found.values()) == [float(word) for word in ran.stdout.split()]
    ran = command("plan", tmp_path / "trace.json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[1].startswith("unswapped")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory-limit", "12GB!"], "'12GB!' is not understood; write a positive size"),
        (["--memory-limit", "0"], "write a positive size"),
        (["--out-bandwidth", "12GB"], "write a positive bandwidth"),
        (["--latency", "-1us"], "write a duration"),
        (["--memory-limit", "12G"], 'write "12GiB" (powers of 1024) or "12GB" (powers of 1000)'),
        (["--max-slowdown", "-1"], "--max-slowdown is a fraction of the step time of at least 0"),
        (["--max-slowdown", "5%"], "such as 0.05, not '5%'"),
        (["--max-slowdown", "5"], "write 0.05 for 5 %, or 5.0 for 500 %"),
        (["--lb", "some"], "write a number of nodes of at least 1, or auto"),
        (["--lb", "0"], "write a number of nodes of at least 1, or auto"),
    ],
)
def test_values_that_are_not_understood(path, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        call(path, *[f"{words[0]}={words[1]}"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_malformed_or_missing_trace_is_refused(path, tmp_path, capsys):
    path.write_text(path.read_text().replace('"last_forward":2', '"last_forward":9'))
    assert call(path, *LINK) == 2
    assert re.search(r"step\.json: tensors\[2\]\.last_forward: 9", capsys.readouterr().err)
    assert call(tmp_path / "none.json", *LINK) == 2
    assert "none.json" in capsys.readouterr().err


def test_the_page_is_one_file_that_loads_nothing(trace, path, tmp_path):
    page = tmp_path / "plan.html"
    assert call(path, "--memory-limit", least_feasible_limit(trace), *LINK, "--plot", page) == 0
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    check_page(text)
    assert not re.search(r"https?://|<link|<img|@import|url\(|src=", without_code(text))
    assert "default-src 'none'" in text
    assert "prefers-color-scheme" in text
    (chart,) = charts_of(text)
    assert [name for name, _ in chart["lanes"]] == ["compute", "copy out", "copy in"]
    assert chart["limit"] == least_feasible_limit(trace)
    assert any("layer0" in name for name in chart["names"])


def test_the_stack_of_the_page_is_what_the_plan_keeps_in_memory():
    plan = example_pages.plan()
    (chart,) = charts_of(render(plan, "an example"))
    times, totals = chart["rest"]["x"], chart["rest"]["y"]
    assert max(totals) == plan.peak_bytes
    recipes = {tensor.id: tensor.recompute for tensor in plan.trace.tensors}
    for k, (begin, end) in enumerate(zip(plan.timing.ready, plan.timing.finish, strict=True)):
        at = (begin + end) / 2
        stacked = sum(
            nbytes
            for _, _, nbytes, _, *resident in chart["tensors"]
            if any(first <= at < last for first, last in example_pages.halves(resident))
        )
        workspace = sum(recipes[row.id].workspace_bytes for row in plan.recomputes if row.at == k)
        assert totals[bisect_right(times, at) - 1] - stacked == plan.trace.base_bytes[k] + workspace
    kinds = [chart["kinds"][kind][0] for kind, *_ in chart["tensors"]]
    assert kinds.count("swapped") == len(plan.swaps) > 0
    assert kinds.count("recomputed") == len(plan.recomputes) > 0
    moved = {tensor for _, boxes in chart["lanes"] for *_, tensor in boxes if tensor >= 0}
    assert moved == {swap.id for swap in plan.swaps} | {row.id for row in plan.recomputes}


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ((), 0),
        (("--max-slowdown", 0.1), 0),
        (("--n-tensors", -1), 0),
        (("--max-slowdown", 0.5, "--memory-limit", 1000), 1),
    ],
)
def test_the_page_shows_a_limit_where_one_was_asked_for(path, tmp_path, words, lines):
    assert call(path, *words, *LINK, "--plot", tmp_path / "plan.html") == 0
    text = (tmp_path / "plan.html").read_text()
    assert [chart["limit"] for chart in charts_of(text)] == [1000 if lines else None]
    assert text.count(">limit 1000 B") == lines


@pytest.mark.parametrize("trace_of", [(), (Node("n", 0.0, False),)])
def test_the_page_of_next_to_nothing(trace_of, tmp_path):
    Trace(trace_of, (0,) * len(trace_of), ()).save(tmp_path / "step.json")
    assert call(tmp_path / "step.json", "--memory-limit", 1, *LINK, "--plot", tmp_path / "plan.html") == 0
    assert "nothing is swapped or recomputed" in (tmp_path / "plan.html").read_text()


def test_a_page_that_cannot_be_written_is_refused(path, tmp_path, capsys):
    assert call(path, "--memory-limit", "1GiB", *LINK, "--plot", "/dev/full") == 2
    assert "No space left on device" in capsys.readouterr().err
    for page, why in ((tmp_path, "this is a folder"), (tmp_path / ("x" * 300), "File name too long")):
        with pytest.raises(SystemExit):
            call(path, "--memory-limit", "1GiB", *LINK, "--plot", page)
        assert f"{page}: {why}" in capsys.readouterr().err


def test_the_shows_on_a_recorded_trace(capsys):
    path = SHARED / "vit.json"
    if not path.exists():
        pytest.skip(f"the recorded traces are not at {SHARED}")
    link = ["--out-bandwidth", "15.754GB/s", "--in-bandwidth", "15.754GB/s"]
    assert call(path, "--memory-limit", "24GiB", *link, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["peak_bytes"] <= 24 * 2**30
    assert data["gap"] <= 0.005
    assert call(path, "--memory-limit", "10GiB", *link) == 3
    assert f"{least_feasible_limit(Trace.load(path))} bytes" in capsys.readouterr().err
