"""`offload plan script.py`: the script's first steps are profiled, and a plan is printed for them."""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest
from forked_python import run_python

from offload.cli import main as cli
from offload.cli.script import run_script

SCRIPT = """
import sys, torch, offload
from torch import nn
assert sys.argv[1:] == ["--epochs", "3"], sys.argv
print("hello from the script")
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
offload.enable(model, min_tensor_bytes="4KiB", n_tensors=1)
optimizer = torch.optim.Adam(model.parameters())
for step in range({steps}):
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
    print("step", step)
print("the end")
"""


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.full)])
def test_plan_of_a_script(tmp_path, steps):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(steps=steps))
    done = run_python("-m", "offload", "plan", "--json", script, "--epochs", "3")
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    assert "hello from the script" in done.stderr
    assert ("the end" in done.stderr) == (steps == 1)
    names = [row["name"] for row in about["options"]]
    assert names == ["unswapped", "5% slowdown", "10% slowdown", "25% slowdown", "least memory"]
    for row in about["options"]:
        assert row["host_bytes"] == 0, "on the CPU everything goes to disk"
        assert row["peak_bytes"] <= about["options"][0]["peak_bytes"]
    assert about["options"][0]["disk_bytes"] == 0
    assert about["options"][-1]["disk_bytes"] > 0


def test_a_script_finds_itself_after_it_has_changed_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os, sys\nos.chdir('/')\nprint(open(__file__).read(), sys.argv)")
    with redirect_stdout(StringIO()) as shown:
        run_script("train.py", ["--epochs"], quiet=False)
    assert "os.chdir('/')" in shown.getvalue()
    assert f"['{tmp_path}/train.py', '--epochs']" in shown.getvalue()


def test_a_script_without_its_ending_is_no_trace(tmp_path, capsys):
    script = tmp_path / "train"
    script.write_text("import torch")
    assert cli.main(["plan", "--memory-limit", "1GiB", str(script)]) == 2
    assert f"{script} is neither a trace (JSON) nor a script (*.py)" in capsys.readouterr().err


WITH_RECIPES = """
import torch
from torch import nn

import offload

layers = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
model = nn.Sequential(*layers)
offload.enable(model, min_tensor_bytes="4KiB"{options})
for step in range({steps}):
    model(torch.randn(512, 64)).square().mean().backward()
    print("step", step)
"""
# A copy of 128 KiB takes two minutes and recomputing everything a few milliseconds, however busy the machine is:
# within a hundred times the step only recomputation frees memory.
SLOW = ["--out-bandwidth", "1KB/s", "--in-bandwidth", "1KB/s"]
WITHIN = ["--max-slowdown", "100.0"]


def plan_of(script, text, *words):
    script.write_text(text)
    done = run_python("-m", "offload", "plan", "--json", *SLOW, *words, script)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_plan_of_a_script_tries_recipes_where_the_swap_plan_waits(tmp_path):
    script = tmp_path / "train.py"
    about, printed = plan_of(script, WITH_RECIPES.format(steps=5, options=""), *WITHIN)
    assert about["recomputes"]
    assert "step 1" in printed  # the trial step
    assert "step 2" not in printed
    alone, printed = plan_of(script, WITH_RECIPES.format(steps=5, options=""), "--no-recompute", *WITHIN)
    assert alone["recomputes"] == []
    assert "step 1" not in printed
    assert about["peak_bytes"] < alone["peak_bytes"]


@pytest.mark.long
def test_plan_of_a_script_tries_recipes_with_the_default_slowdown(tmp_path):
    """Whether 5 % is enough to recompute depends on how busy the machine is; that it is tried does not."""
    _, printed = plan_of(tmp_path / "train.py", WITH_RECIPES.format(steps=5, options=""))
    assert "step 1" in printed
    assert "step 2" not in printed


def test_plan_of_a_script_tries_recipes_where_the_swap_plan_needs_the_least_memory(tmp_path):
    text = WITH_RECIPES.format(steps=5, options="")
    _, printed = plan_of(tmp_path / "train.py", text, "--max-slowdown", "1000000000.0")
    assert "step 1" in printed


@pytest.mark.long
def test_plan_of_a_script_of_two_steps_reads_the_trial_at_the_end(tmp_path):
    about, _ = plan_of(tmp_path / "train.py", WITH_RECIPES.format(steps=2, options=""), *WITHIN)
    assert about["recomputes"]


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (1, ""),
        pytest.param(3, ", recompute=False", marks=pytest.mark.full),
        pytest.param(3, ", n_tensors=1", marks=pytest.mark.full),
    ],
)
@pytest.mark.long
def test_plan_of_a_script_without_a_trial_step_swaps_alone(tmp_path, steps, options):
    about, printed = plan_of(tmp_path / "train.py", WITH_RECIPES.format(steps=steps, options=options))
    assert about["recomputes"] == []
    assert "step 1" not in printed


def test_plan_of_a_script_that_trains_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('nothing')")
    done = run_python("-m", "offload", "plan", script)
    assert done.returncode == 2
    assert "finished no training step under offload.enable" in done.stderr
    script.write_text("raise SystemExit(7)")
    assert run_python("-m", "offload", "plan", script).returncode == 7


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit()"])
@pytest.mark.parametrize(
    "words", [["plan"], ["plan", "--json"], ["fit"], ["fit", "--without-data", "--device", "12GiB,12GB/s,40TFLOP/s"]]
)
def test_a_script_that_trains_nothing_and_ends_itself_without_a_failure(tmp_path, capsys, words, end):
    script = tmp_path / "train.py"
    script.write_text(f"import sys\n{end}")
    assert cli.main([*words, str(script)]) == 2
    assert "finished no training step" in capsys.readouterr().err
