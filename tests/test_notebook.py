"""The quickstart notebook is executed, cell by cell, as a user of Colab or Kaggle would."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from frameworks import need

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "quickstart.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(PATH, as_version=4)


def printed(notebook) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(output.get("text", "")) for output in outputs)


def labels(notebook) -> tuple[set[str], list[str]]:
    """The rows of the report, except those that depend on a run, and how the plan's lines on the whole step begin."""
    data = [output.data for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    (report,) = [each["text/html"] for each in data if "offload-report" in each.get("text/html", "")]
    rows = {row for row in re.findall("<th>([^<]+)</th>", report) if not re.match("kept: |recomputed|process", row)}
    return rows, [line.split()[0] for line in printed(notebook).splitlines() if line.startswith(("step ", "peak "))]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_cell_runs(notebook, tmp_path, monkeypatch):
    need("ipykernel")
    client = need("nbclient").NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    client.execute()
    said = printed(notebook)
    assert re.search(r"no (swap-only )?plan within", said)
    assert (tmp_path / "step.html").stat().st_size > 0
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert any("data:text/html;base64," in data.get("text/html", "") for data in shown)
    (report,) = [data["text/html"] for data in shown if "offload-report" in data.get("text/html", "")]
    assert re.search(r"<th>swapped</th><td>[1-9]\d* tensors", report), report
    assert re.search("<th>memory</th><td>activations .* at peak", report), report
    if not torch.cuda.is_available():  # the saved outputs are those of a CPU
        assert labels(notebook) == labels(nbformat.read(PATH, as_version=4)), "run python docs/notebook.py"


def test_outputs_are_committed(notebook):
    """Of a run without an error, in the order of the cells."""
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert re.search(r"no (swap-only )?plan within", printed(notebook))
    assert PATH.stat().st_size < 2 << 20


@pytest.fixture(name="module")
def module_fixture():
    need("nbclient")
    need("mkdocs")
    specification = importlib.util.spec_from_file_location("docs_notebook", ROOT / "docs" / "notebook.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_it_is_what_its_script_writes(notebook, module, monkeypatch):
    monkeypatch.delenv("OFFLOAD_REPO_URL", raising=False)
    made = module.notebook()
    assert [(cell.id, cell.source) for cell in notebook.cells] == [(cell.id, cell.source) for cell in made.cells]
    assert notebook.metadata.kernelspec == made.metadata.kernelspec


@pytest.mark.parametrize("address", ["", "https://example.org/offload"])
def test_the_first_cell_installs_from_the_address_of_the_site_or_asks_for_one(module, address, monkeypatch):
    monkeypatch.setenv("OFFLOAD_REPO_URL", address)
    cell = next(cell for cell in module.notebook().cells if cell.cell_type == "code")
    code = f"""
import sys
from IPython.core.interactiveshell import InteractiveShell

sys.modules["offload"] = None  # as if it was not installed
shell = InteractiveShell.instance()
shell.register_magic_function(lambda line: print("pip", line), "line", "pip")
shell.run_cell({cell.source!r}).raise_error()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if address:
        assert run.stdout == 'pip install -q "offload[cli] @ git+https://example.org/offload"\n', run.stderr
    else:
        assert run.returncode != 0
        assert "RuntimeError: offload is not installed, and this notebook knows no address" in run.stderr
        assert "write the address of its repository into REPOSITORY, in the first line of this cell" in run.stderr
        assert "pip" not in run.stdout.splitlines()
