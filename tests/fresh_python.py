"""Runs a script in a fresh interpreter: tests of how a process begins or ends, and of its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_fresh_python(script: str, *arguments: str, **variables: str) -> str:
    """Return what the script prints. It must end with status 0 and write nothing to stderr.

    `variables` are added to the environment.
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout
