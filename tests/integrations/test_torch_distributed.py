"""DDP with no_sync, FSDP2 and a pipeline stage, each in two gloo processes under torchrun, plain and offloaded.

One launch runs them all (distributed_worker.py); the tests read what each rank found. Another launch kills a rank.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from offload import options
from offload.devices import memory, processes
from offload.options import default_host_limit

ROOT = Path(__file__).resolve().parent.parent.parent
WORKER = Path(__file__).parent / "distributed_worker.py"
LEFT_THREADS = Path(__file__).parent / "left_threads.py"
RUNS = [
    "ddp inner",
    "ddp inner, before it is wrapped",
    "ddp wrapper",
    "fsdp2",
    "fsdp2 kept after forward",
    "fsdp2 in bfloat16",
    "fsdp2 with detached weights",
    "fsdp2 with detached weights kept after forward",
    "fsdp2, enabled before it is sharded",
    "pipeline",
]
RANKS = 2
LAUNCHERS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_RANK", "WORLD_SIZE")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]


def torchrun(*command):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    return subprocess.run(
        [*launcher, *map(str, command)], env=environment, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each rank found, by run."""
    results, spill_dir = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("spill")
    ran = torchrun(WORKER, results, spill_dir, "all")
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads((results / str(rank)).read_text()) for rank in range(RANKS)]


@pytest.mark.long
def test_every_run_is_looked_at(outcomes):
    assert [set(each) for each in outcomes] == [{*RUNS, "machine"}] * RANKS


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_those_of_the_plain_run(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        found = outcome[name]
        assert found["bit_equal"], f"rank {rank}"
        assert found["swapped"] >= 10 * found["steps"] > 0
        assert found["parameters_kept"] > 0
        assert (found["failed"], found["records_left"]) == (0, 0)


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("fsdp2")])
def test_fsdp_weights_are_never_swapped_nor_held(outcomes, name):
    """Neither shards nor gathered weights go out; a saved view of a gathered weight lets FSDP free its memory."""
    for found in (outcome[name] for outcome in outcomes):
        assert found["weights_gathered"] > 0, "the watch saw them"
        assert found["weights_swapped"] == 0
        assert (found["gathered_bytes_after_forward"] == 0) == ("kept after forward" not in name)


def test_pipeline_stage_object_is_refused_with_the_remedy(outcomes):
    for outcome in outcomes:
        assert "not PipelineStage: enable its own part of the model, stage.submod" in outcome["pipeline"]["refused"]


def test_processes_of_one_machine_share_its_memory(outcomes, monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    alone = default_host_limit()
    for outcome in outcomes:
        assert 0.2 * alone < outcome["machine"]["host_limit"] < 0.8 * alone


def test_nothing_touches_cuda_or_stays_on_disk(outcomes):
    for outcome in outcomes:
        assert outcome["machine"]["files_in_spill_dir"] == []
        assert outcome["machine"]["cuda_initialized"] is False


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.long
def test_killed_rank_ends_the_run_and_leaves_nothing_on_disk(tmp_path):
    results, spill_dir = tmp_path / "results", tmp_path / "spill"
    results.mkdir()
    spill_dir.mkdir()
    ran = torchrun(WORKER, results, spill_dir, "kill")
    assert ran.returncode != 0
    assert "SIGKILL" in ran.stderr
    found = [json.loads((results / str(rank)).read_text()) for rank in range(RANKS)]
    assert all(each["spill_used_bytes"] > 0 for each in found), "both had bytes on disk when it happened"
    for each in found:
        for _ in range(100):
            if not is_running(each["pid"]):
                break
            time.sleep(0.1)
        assert not is_running(each["pid"])
    assert list(spill_dir.iterdir()) == []


# -- shares of one machine --------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Sets what a launcher tells."""

    def told(devices=0, **environment):
        for name in LAUNCHERS:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(processes._core, "cuda_device_count", lambda: devices)

    return told


@pytest.mark.parametrize(
    ("environment", "devices", "expected"),
    [
        ({}, 8, 1),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, 8, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 8, 3),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "16"}, 8, 8),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, 8, 2),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, 0, 2),
        ({"WORLD_SIZE": "16"}, 8, 1),
        ({"LOCAL_WORLD_SIZE": "many"}, 8, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 8, 1),
    ],
)
def test_local_processes(launched, environment, devices, expected):
    launched(devices, **environment)
    assert processes.local_processes() == expected


def test_default_host_limit_is_divided(launched, monkeypatch):
    monkeypatch.setattr(options, "_read", lambda path: "MemAvailable: 8388608 kB" if "meminfo" in str(path) else "")
    launched()
    assert default_host_limit() == 4 << 30
    launched(LOCAL_WORLD_SIZE="8")
    assert default_host_limit() == 512 << 20


def test_host_limit_that_is_given_is_each_process_s_own(launched):
    launched(LOCAL_WORLD_SIZE="8")
    arguments = dict.fromkeys(("memory_limit", "max_slowdown", "n_tensors", "lb", "spill_dir"))
    checked = options.check_options(
        torch.nn.Linear(2, 2),
        torch.device("cpu"),
        min_tensor_bytes=1,
        exclude=(),
        host_limit="1GiB",
        **arguments,
    )
    assert checked.host_limit == 1 << 30


def test_free_disk_must_do_for_every_process(launched, monkeypatch, tmp_path):
    monkeypatch.setattr(options, "free_disk_bytes", lambda path: 100 << 20)
    launched()
    assert options._check_spill_dir(torch.device("cpu"), tmp_path) == str(tmp_path)
    launched(LOCAL_WORLD_SIZE="2")
    with pytest.raises(OSError, match=r"less than 64 MiB free for each of 2 processes; name a folder on another"):
        options._check_spill_dir(torch.device("cpu"), tmp_path)


def test_a_cpu_model_initializes_no_cuda(launched, monkeypatch):
    import offload

    def forbidden(*_):
        raise AssertionError("a model on the CPU needs no CUDA")

    called = ("_lazy_init", "init", "is_available", "device_count", "current_device", "mem_get_info", "current_stream")
    for name in called:
        monkeypatch.setattr(torch.cuda, name, forbidden)
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # as if this torch had been built with it
    monkeypatch.setattr(memory, "_watching", False)
    launched(LOCAL_WORLD_SIZE="2")
    monkeypatch.setattr(processes._core, "cuda_driver", forbidden)
    model = torch.nn.Linear(64, 64)
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle:
        model(torch.ones(16, 64) * 2).sum().backward()
        assert handle.report().swapped.tensors == 1


# -- the example ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_example():
    ran = torchrun(LEFT_THREADS, ROOT / "examples" / "ddp_gpt.py", "--quick")
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.count("gloo's threads left: 0\n") == RANKS, ran.stdout
    assert "2 processes on" in ran.stdout
    assert "all losses equal to the last bit on every rank: yes" in ran.stdout
    assert "NOTHING WAS SWAPPED" not in ran.stdout
    swapped = next(line for line in ran.stdout.splitlines() if line.startswith("swapped "))
    assert int(swapped.split()[1]) > 0


def test_example_without_torchrun_says_how_to_start_it(launched):
    launched()
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / "ddp_gpt.py", "--quick"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 2
    assert "start it with torchrun --nproc_per_node=2 examples/ddp_gpt.py" in ran.stderr
