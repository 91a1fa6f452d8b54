"""Runs `offload demo` and returns what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def run_demo(*options: str) -> dict[str, Any]:
    """Run `offload demo` on the CPU with a checkpointed contestant and return its JSON.

    Raises
    ------
    RuntimeError
        The demo ended without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        page = str(Path(folder, "demo.html"))
        command = [sys.executable, "-m", "offload", "demo", "--device", "cpu", "--json"]
        command += ["--with-checkpoint", "--html", page, *(option for option in options if option)]
        environment = {**os.environ, "OFFLOAD_SEARCH_ANEW": "1"}  # as in a first training
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if run.returncode not in (0, 1):  # 1: it ran, but losses differ; the result says so too
        raise RuntimeError(f"offload demo ended with exit status {run.returncode}; see above")
    result: dict[str, Any] = json.loads(run.stdout)
    return result
