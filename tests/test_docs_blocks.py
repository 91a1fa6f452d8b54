"""Every Python block of docs/ and of the README is executed: a page's blocks in order, in one fresh process.

A comment before a block says what it needs, `<!-- needs: cuda -->` or a module, `<!-- needs: keras -->`; where that is
missing, the block is skipped, visibly. `<!-- processes: 2 -->` runs its whole page under torchrun.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- needs: (?P<needs>[\w., -]+) -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S)
PROCESSES = re.compile(r"<!-- processes: (\d+) -->")
LAUNCHERS = ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "RANK", "WORLD_SIZE")
# What the README and the front page leave to the reader: a model, a loss, an optimizer and data.
FRONT_PAGES = ("README.md", "index.md")
PRELUDE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 4))
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters())
loader = [(torch.randn(2048, 256), torch.randint(4, (2048,))) for _ in range(3)]
"""


class Block(NamedTuple):
    page: str
    number: int
    code: str
    needs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page} block {self.number}"

    @property
    def missing(self) -> str | None:
        """What it needs and this machine has not."""
        for name in self.needs:
            if not (torch.cuda.is_available() if name == "cuda" else find_spec(name)):
                return name
        return None


def blocks_of(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text())
    split = [(match["code"], tuple(re.split(r",\s*", match["needs"] or ""))) for match in found]
    return [Block(page.name, i, code, tuple(filter(None, needs))) for i, (code, needs) in enumerate(split, start=1)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@cache
def outcome(page: str, folder: Path) -> tuple[int, subprocess.CompletedProcess[str]]:
    """Run those blocks of a page that can run here; how many processes it was, and how they ended."""
    path = next(path for path in PAGES if path.name == page)
    processes = int((PROCESSES.search(path.read_text()) or ["", "1"])[1])
    code = [PRELUDE] if page in FRONT_PAGES else []
    for block in blocks_of(path):
        if block.missing is None:
            code += [block.code, f'print("block {block.number} has ended", flush=True)']
    script = folder / f"{page}.py"
    script.write_text("\n".join(code))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    ran = subprocess.run(
        [sys.executable, *launcher, script],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return processes, ran


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block(block, folder):
    if block.missing == "cuda" and os.environ.get("OFFLOAD_REQUIRE_CUDA") == "1":
        pytest.fail("OFFLOAD_REQUIRE_CUDA=1, and torch sees no CUDA device", pytrace=False)
    if block.missing not in (None, "cuda") and os.environ.get("OFFLOAD_REQUIRE_FRAMEWORKS") == "1":
        pytest.fail(f"OFFLOAD_REQUIRE_FRAMEWORKS=1, and {block.missing} is not installed", pytrace=False)
    if block.missing is not None:
        pytest.skip(f"{block} needs {block.missing}")
    processes, ran = outcome(block.page, folder)
    ended = ran.stdout.count(f"block {block.number} has ended")
    assert ended == processes, f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_report_on_the_page_of_integrations_tells_of_swapped_tensors(folder):
    """A framework's one line that did nothing would train just as well."""
    page = "integrations.md"
    printed = [block for block in BLOCKS if block.page == page and block.missing is None and "print(" in block.code]
    assert printed
    _, ran = outcome(page, folder)
    assert len(re.findall(r"^swapped +[1-9]\d* tensors", ran.stdout, re.M)) == len(printed), ran.stdout


def test_no_block_is_overlooked():
    for page in PAGES:
        fences = re.findall(r"^ *```+ *(?:py|python)\b", page.read_text(), re.M)
        assert len(fences) == len(blocks_of(page)), page


@pytest.mark.parametrize("page", FRONT_PAGES)
def test_front_pages_use_what_the_prelude_gives(page):
    (block,) = [block for block in BLOCKS if block.page == page]
    for name in ("model", "criterion", "optimizer", "loader"):
        assert re.search(rf"\b{name}\b", block.code), name


def test_what_is_missing_is_said():
    assert Block("a.md", 1, "", ("torch", "no_such_framework")).missing == "no_such_framework"
    assert Block("a.md", 1, "", ("torch",)).missing is None
    assert BLOCK.search("<!-- needs: cuda, keras -->\n```python\nx\n```\n")["needs"] == "cuda, keras"


COMMAND = re.compile(r"^\$ (?:offload run -- )?((?:python|torchrun)\b.*\bexamples/.*)$", re.M)
COMMANDS = [command for page in PAGES for command in COMMAND.findall(page.read_text())]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_an_example_is_one_that_the_example_knows(command):
    """The commands themselves are run by test_examples.py and integrations/test_torch_distributed.py."""
    (example,) = re.findall(r"examples/\w+\.py", command)
    text = (ROOT / example).read_text()
    launcher, _, options = command.partition(example)
    assert launcher + example in text
    for option in options.split():
        assert option.isdigit() or f'"{option}"' in text


def test_every_example_has_its_command():
    for path in sorted((ROOT / "examples").glob("*.py")):
        assert any(f"examples/{path.name}" in command for command in COMMANDS), path
