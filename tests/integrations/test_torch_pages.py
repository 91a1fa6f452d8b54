"""Every code block of the pages about torch and about several processes is executed, in order, as one script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCHERS = ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "RANK", "WORLD_SIZE")


def blocks(page, language):
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("page", "processes", "expected"), [("torch.md", 1, 5), ("distributed.md", 2, 3)])
def test_python_blocks(tmp_path, page, processes, expected):
    found = blocks(page, "python")
    assert len(found) == expected
    script = tmp_path / "page.py"
    script.write_text("\n".join([*found, 'print("finished")']))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    ran = subprocess.run(
        [sys.executable, *launcher, script],
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.split().count("finished") == processes


def test_command_is_that_of_the_example():
    """The command itself is run by test_torch_distributed.py."""
    (command,) = blocks("distributed.md", "console")
    assert command == "$ torchrun --nproc_per_node=2 examples/ddp_gpt.py --quick\n"
    assert command[2:].strip() in (ROOT / "examples" / "ddp_gpt.py").read_text()
