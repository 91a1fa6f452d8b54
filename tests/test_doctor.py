"""`offload doctor`: a real run, and what it says of machines that are worse than this one."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import KIND
from twin.build import build_machine

from offload import _core
from offload.cli import checks, doctor
from offload.cli import main as cli
from offload.cli.checks import Finding, examine
from offload.profiling import calibration, link_measurement

SECTIONS = {"versions", "driver", "devices", "host memory", "disk", "self-test"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibration, "BLOCK_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(link_measurement, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(calibration, "used_by_others", lambda: nullcontext(lambda: 0.0))  # whatever else runs here
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OFFLOAD_SPILL_DIR", str(tmp_path))


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_a_real_run_for_machines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert {each["section"] for each in found["findings"]} >= SECTIONS
    named = {each["name"]: each for each in found["findings"]}
    assert named["torch"]["value"] == torch.__version__
    assert named["10 steps on cpu"]["value"]["tensors_swapped"] > 0
    assert named["10 steps on cpu"]["value"]["tensors_compared"] == 10 * 17  # a loss and 16 gradients each
    assert min(named["copies, both at once"]["value"]) > 0
    assert named["free"]["value"] > 0
    assert list((tmp_path / "cache" / "offload").glob("link-*.json"))  # the planner reads it from there


def test_a_real_run_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "losses and gradients equal to the last bit" in " ".join(shown.split())
    assert "The engine works here." in shown


def test_gradients_that_differ_fail_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = checks._train

    def wrong(device: torch.device, *, swap: bool) -> tuple[list[torch.Tensor], int]:
        found, moved = whole(device, swap=swap)
        if swap:
            found[-1].view(-1)[0].add_(1e-6)
        return found, moved

    monkeypatch.setattr(checks, "_train", wrong)
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "1 of 170 tensors differ" in shown
    assert "the engine does not work here" in shown


def test_a_probe_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr(checks, "calibrate", full)
    failed = [finding for finding in examine() if finding.status == "failed"]
    assert [(finding.section, finding.name) for finding in failed] == [("disk", "OSError")]
    assert "No space left on device" in failed[0].text


def test_a_spill_folder_in_ram_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_in_memory", lambda path: True)
    monkeypatch.setattr(checks, "free_disk_bytes", lambda path: 1 << 20)
    found = by_name(list(checks._disk()))
    assert found["spill_dir by default"].status == "warning"
    assert "tmpfs" in found["spill_dir by default"].text
    assert (found["free"].status, found["free"].text) == ("warning", "1.00 MiB")


@pytest.mark.parametrize(
    ("without", "status", "named"),
    [
        ((), "ok", "entry points"),
        pytest.param(
            ("cuEventElapsedTime", "cuStreamIsCapturing"),
            "warning",
            "cuEventElapsedTime, cuStreamIsCapturing",
            marks=pytest.mark.long,
        ),
        (("cuEventQuery",), "failed", "cuEventQuery"),
    ],
)
def test_the_drivers_entry_points_are_counted(
    without: tuple[str, ...], status: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build_machine(tmp_path / "libsim.so", without=without)
    monkeypatch.setattr(checks, "LIBCUDA", str(library))
    finding = next(checks._driver())
    assert finding.status == status, finding
    assert named in finding.text
    missing = finding.value["missing_required"] + finding.value["missing_optional"]
    assert missing == list(without)
    assert finding.value["found"] + len(missing) == len(_core.cuda_symbols(str(library)))


def test_a_driver_that_does_not_load_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(b"no library")
    monkeypatch.setattr(checks, "LIBCUDA", str(library))
    (finding,) = checks._driver()
    assert finding.status == "failed"
    assert re.search(r"does not load: .*(file too short|invalid ELF header)", finding.text)


def test_no_driver_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LIBCUDA", "libnowhere.so.1")
    assert _core.cuda_symbols("libnowhere.so.1") == []
    assert [(finding.status, finding.value) for finding in checks._driver()] == [("ok", None)]


FINDINGS = [
    Finding("disk", "free", "76 GiB", 1),
    Finding("disk", "direct I/O", "no", 1, "warning", "give spill_dir on ext4"),
    Finding("self-test", "10 steps on cpu", "1 of 9 tensors differ", None, "failed", "do not train here"),
]


@pytest.fixture(params=["rich", "plain"])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        for name in ("rich.console", "rich.table", "rich.text"):
            monkeypatch.setitem(sys.modules, name, None)
    else:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich then writes as to a terminal, NO_COLOR without colours
        monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    doctor.show(FINDINGS, out)
    return out.getvalue()


def test_tables_say_everything_with_and_without_rich(shown: str) -> None:
    for finding in FINDINGS:
        (line,) = [line for line in shown.splitlines() if finding.name in line]
        assert finding.status in line
        assert finding.text in line
    assert "→ give spill_dir on ext4" in shown
    assert "1 failed: the engine does not work here as it is." in shown


@pytest.mark.gpu
def test_a_gpu_is_examined() -> None:
    found = list(examine())
    assert not [finding for finding in found if finding.status == "failed"]
    assert {"pinning", "copies, both at once"} <= {finding.name for finding in found if finding.section == f"{KIND}:0"}
    assert by_name(found)[f"10 steps on {KIND}:0"].value["tensors_swapped"] > 0
