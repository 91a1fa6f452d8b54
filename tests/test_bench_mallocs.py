"""`bench/mallocs.py`: memory and time with each malloc."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_bench_same_script import ROOT, rows_of


def row(malloc: str, peak_mib: int, seconds: float, *, bits_equal: bool = True) -> dict[str, Any]:
    plain = {"peak_bytes": 200 << 20, "seconds": 1.0}
    own = {"peak_bytes": peak_mib << 20, "seconds": seconds}
    return {"family": "gpt", "malloc": malloc, "bits_equal": bits_equal, "plain": plain, "offloaded": own}


def cells_of(rows: list[dict[str, Any]], tmp_path: Path) -> list[str]:
    """The last line of the table, without the network."""
    results = tmp_path / "mallocs.json"
    content = {"format": "offload-mallocs/1", "machine": {"processor": "test"}, "rows": rows}
    results.write_text(json.dumps(content), encoding="utf-8")
    return rows_of(results, tmp_path)["GPT"]


def test_memory_of_several_processes_is_a_range(tmp_path: Path) -> None:
    rows = [row("jemalloc", 90, 1.3), row("tcmalloc", 90, 1.1), row("tcmalloc", 120, 1.2), row("tcmalloc", 100, 1.02)]
    cells = ["tcmalloc", "bit-equal", "200.00 MiB–200.00 MiB", "90.00 MiB–120.00 MiB", "30%", "1.000 s", "1.10 ×"]
    assert cells_of(rows, tmp_path) == cells


def test_other_bits_are_told(tmp_path: Path) -> None:
    assert cells_of([row("glibc", 90, 1.0), row("glibc", 90, 1.0, bits_equal=False)], tmp_path)[1] == "OTHER BITS"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "mallocs.json"
    command = [sys.executable, "bench/mallocs.py", "--json", str(out), "--size", "tiny", "--family", "encoder"]
    subprocess.run([*command, "--malloc", "mimalloc", "--malloc", "glibc", "--rounds", "1"], cwd=ROOT, check=True)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [each["malloc"] for each in rows] == ["mimalloc", "glibc"]
    for each in rows:
        assert each["bits_equal"]
        assert each["plain"]["peak_bytes"] > 0 < each["plain"]["seconds"]
        assert {kind for kind, _ in each["plain"]["steps"]} == {"plain"}
        assert {"profiled", "planned"} <= {kind for kind, _ in each["offloaded"]["steps"]}


def test_a_malloc_that_is_not_there_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "bench/mallocs.py", "--json", str(tmp_path / "x.json"), "--malloc", "glibc"]
    environment = {**os.environ, "LD_PRELOAD": "/lib/none.so"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "LD_PRELOAD is set" in done.stderr
    assert not (tmp_path / "x.json").exists()
