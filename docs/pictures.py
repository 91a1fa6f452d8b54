"""Makes the pictures of the documentation with the tool itself: timelines, a plan, an OOM page, the doctor's table.

Each is made twice, for light and dark pages.

    python docs/pictures.py [--out docs/pictures]

Needs rich, and Chromium (or Chrome), which photographs the pages. Their figures are those of this machine.
"""

import argparse
import io
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
from rich.text import Text
from torch import nn
from torch.nn.functional import cross_entropy

import offload
from offload.demo.model import VOCABULARY, ByteGPT, Shape
from offload.diagnostics.html.plan import render

SHAPE = Shape(layers=3, width=256, heads=4, batch=12, length=256)
STEPS = 5
PICTURE_BYTES_MAX = 200_000
HEIGHTS = {"profiled": 838, "planned": 838, "plan": 806, "oom": 641, "doctor": 651}  # where the interesting part ends
# Chromium's preferredColorScheme, and the colours of a terminal.
SCHEMES = {"light": (1, DEFAULT_TERMINAL_THEME), "dark": (0, MONOKAI)}
LEFT_BYTES = 136 << 20  # of address space, for a step that needs more
TERMINAL_COLUMNS = 132
TERMINAL = """<!DOCTYPE html>
<meta charset="utf-8">
<style>{stylesheet} body {{ background: {background}; color: {foreground}; margin: 24px; }}
pre {{ font: 15px/1.4 "DejaVu Sans Mono", monospace; }}</style>
<pre>$ offload doctor
{code}</pre>
"""


def write_pages(folder: Path) -> None:
    """Train a small GPT for a few steps; write the pages of its first step, of its last one and of the plan."""
    torch.manual_seed(0)
    model = ByteGPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = offload.enable(model, memory_limit="80MiB")

    def step() -> None:
        x = torch.randint(VOCABULARY, (SHAPE.batch, SHAPE.length))
        with handle.step():
            loss = cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with handle.timeline(folder / "profiled.html"):
        step()
    for _ in range(STEPS):
        step()
    with handle.timeline(folder / "planned.html"):
        step()
    plan = handle.plan
    assert plan is not None  # it was made at the second step
    (folder / "plan.html").write_text(render(plan, "a small GPT"), encoding="utf-8")
    handle.disable()


def write_oom_page(path: Path) -> None:
    """Explain a step for which a limit of the address space leaves too little."""
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.Tanh())))
    handle = offload.enable(model, n_tensors=2)
    x = torch.randn(8192, 512)
    model(x).sum().backward()  # recorded: it moves everything, and leaves threads and code in place
    mapped = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (mapped + LEFT_BYTES,) * 2)
    try:
        with handle.explain_oom(path), handle.step():
            model(x).sum().backward()
    except RuntimeError as error:
        print(error)
        return
    raise AssertionError("the step found room where it should not")


def write_doctor_pages(folder: Path) -> None:
    """What `offload doctor` prints in a light and in a dark terminal, colours included."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(TERMINAL_COLUMNS)}
    command = [sys.executable, "-m", "offload", "doctor"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=200)
    console = Console(record=True, width=TERMINAL_COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(done.stdout))
    for name, (_, theme) in SCHEMES.items():
        page = console.export_html(code_format=TERMINAL, theme=theme, clear=False)
        (folder / f"doctor-{name}.html").write_text(page, encoding="utf-8")


def photograph(page: Path, picture: Path, height: int, color_scheme: int) -> None:
    """Have a headless browser open `page` in light or dark and write what it shows."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("docs/pictures.py needs Chromium: apt install chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--blink-settings=preferredColorScheme={color_scheme}"]
    command += [f"--screenshot={picture}", f"--window-size=1240,{height}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> int:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures")
    parser.add_argument("--oom", type=Path, help=argparse.SUPPRESS)  # in a process of its own, since it gets a limit
    args = parser.parse_args()
    if args.oom is not None:
        write_oom_page(args.oom)
        return 0
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        pages = Path(name)
        # What glibc keeps of freed blocks may serve the step that is to fail: have it give back the large ones.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        command = [sys.executable, __file__, "--oom", str(pages / "oom.html")]
        subprocess.run(command, check=True, timeout=200, env=environment)
        write_doctor_pages(pages)
        write_pages(pages)
        for stem, name in product(HEIGHTS, SCHEMES):
            picture = out / f"{stem}-{name}.png"
            page = next(filter(Path.is_file, (pages / f"{stem}-{name}.html", pages / f"{stem}.html")))
            photograph(page, picture.resolve(), HEIGHTS[stem], SCHEMES[name][0])
            print(f"{picture}: {picture.stat().st_size} bytes")
            if picture.stat().st_size > PICTURE_BYTES_MAX:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
