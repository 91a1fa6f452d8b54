"""Writes docs/quickstart.ipynb, which says in cells what docs/quickstart.md says on a page, with the cells' outputs.

python docs/notebook.py

Its first cell installs the project from the address of the repository, which is `repo_url` in mkdocs.yml.
"""

import json
import sys
import tempfile
from pathlib import Path

import nbformat
from mkdocs.config import load_config
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

CONFIG = Path(__file__).resolve().parent.parent / "mkdocs.yml"
INSTALL = """REPOSITORY = <address>

try:
    import offload
except ImportError as missing:
    if not REPOSITORY:
        raise RuntimeError(
            "offload is not installed, and this notebook knows no address to install it from: write the address of its "
            'repository into REPOSITORY, in the first line of this cell, such as "https://github.com/NAME/offload". '
            'Or run pip install ".[cli]" in a checkout, and then this cell again'
        ) from missing
    %pip install -q "offload[cli] @ git+{REPOSITORY}\""""
CELLS = [
    (
        "text",
        """# offload in five minutes

A model whose saved tensors do not fit in memory trains as before, with one line more. This notebook runs on a machine
without a GPU too; with one, change nothing.

The first cell installs the project if it is missing, from the address in `REPOSITORY`. This takes a minute or two: it
compiles a C++17 extension.""",
    ),
    ("code", INSTALL),
    (
        "code",
        """import torch
from torch import nn
from tqdm.auto import tqdm

import offload

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
model = nn.Sequential(*layers, nn.Linear(256, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters())""",
    ),
    (
        "text",
        """## The one line

By default it saves as much memory as it can for about 5 % slower steps. A fixed budget is `memory_limit="12GiB"` or a
fraction of the device, `memory_limit=0.4`. (`min_tensor_bytes` is here because this model is tiny.)""",
    ),
    ("code", """handle = offload.enable(model, max_slowdown=0.5, min_tensor_bytes="64KiB")"""),
    (
        "code",
        """def step():
    x, y = torch.randn(512, 256, device=device), torch.randint(4, (512,), device=device)
    with handle.step():  # covers the loss as well as the model's forward
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


with tqdm(range(6)) as bar:
    for _ in bar:
        loss = step()
        bar.set_postfix(loss=f"{loss:.3f}", **handle.postfix())  # peak, swapped, stalled""",
    ),
    (
        "text",
        """## What did it do?

The report begins with the memory and the time of a planned step, with and without offload; *details* shows what is
swapped, and what is not and why. The plan says what was chosen for each tensor, and how far the plan can be from the
best possible one (*gap*).""",
    ),
    ("code", "handle.report()"),
    ("code", "print(handle.plan.explain())"),
    (
        "text",
        """## A picture of one step

Green and purple is computing, orange is waiting for a copy. The same as `"step.json"` opens in ui.perfetto.dev.""",
    ),
    (
        "code",
        """import base64
from pathlib import Path

from IPython.display import IFrame

with handle.timeline("step.html"):
    step()
page = base64.b64encode(Path("step.html").read_bytes()).decode()
IFrame("data:text/html;base64," + page, width="100%", height=560)""",
    ),
    (
        "text",
        """## After running out of memory

The exception has a note: what uses the memory, and which arguments to use. The notebook's last traceback still holds
the tensors of the failed step; this call frees them. The model stays enabled.""",
    ),
    ("code", "offload.recover()"),
    ("text", "## Off again"),
    ("code", "handle.disable()"),
]


def notebook() -> nbformat.NotebookNode:
    """The notebook, without outputs. Until mkdocs.yml has the repository's address, it asks for one."""
    address = json.dumps(load_config(str(CONFIG)).repo_url or "")
    make = {"text": new_markdown_cell, "code": new_code_cell}
    cells = [
        make[kind](source.replace("<address>", address), id=f"cell-{number}")
        for number, (kind, source) in enumerate(CELLS, start=1)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def main() -> int:
    """Run it in a folder of its own, and write it beside this file."""
    made = notebook()
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(made, timeout=300, resources={"metadata": {"path": folder}}).execute()
    for cell in made.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if "outputs" in cell:  # a warning of tqdm's names folders of this machine
            cell.outputs = [each for each in cell.outputs if "IProgress" not in str(each.get("text", ""))]
    nbformat.write(made, Path(__file__).with_name("quickstart.ipynb"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
