"""Every code block of docs/integrations.md runs, and something is swapped in each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import need

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "integrations.md").read_text()
SECTIONS = {
    section.splitlines()[0]: code
    for section in PAGE.split("\n## ")[1:]
    for code in re.findall(r"```python\n(.*?)```", section, re.S)
}
FRAMEWORKS = {
    "Keras": "keras",
    "Lightning": "lightning",
    "transformers and TRL": "transformers",
    "accelerate": "accelerate",
}


@pytest.mark.parametrize("section", SECTIONS)
def test_code_block(section, tmp_path):
    if section in FRAMEWORKS:
        need(FRAMEWORKS[section])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SECTIONS[section]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    swapped = re.search(r"^swapped +(\d+) tensors", done.stdout, re.M)
    assert swapped is not None, done.stdout
    assert int(swapped[1]) > 0


def test_every_section_with_a_framework_has_a_block():
    assert set(SECTIONS) == {"A loop of your own", *FRAMEWORKS}
