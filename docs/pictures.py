"""Makes the pictures of docs/concepts.md with the tool itself: the timelines of two steps, and a plan.

    python docs/pictures.py [--out docs/pictures]

Needs Chromium (or Chrome), which photographs the pages. Their figures are those of the machine that it runs on.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import offload
from offload.demo_model import VOCABULARY, ByteGPT, Shape
from offload.plan_page import render

SHAPE = Shape(layers=3, width=256, heads=4, batch=12, length=256)
STEPS = 5
PICTURE_BYTES_MAX = 200_000
HEIGHTS = {"profiled": 806, "planned": 806, "plan": 905}  # down to where the interesting part ends


def write_pages(folder: Path) -> None:
    """Train a small GPT for a few steps; write the pages of its first step, of its last one and of the plan."""
    torch.manual_seed(0)
    model = ByteGPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = offload.enable(model, max_slowdown=0.05)

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


def photograph(page: Path, picture: Path, height: int) -> None:
    """Have a headless browser open `page` and write what it shows."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("docs/pictures.py needs Chromium: apt install chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--screenshot={picture}", f"--window-size=1240,{height}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> int:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        pages = Path(name)
        write_pages(pages)
        for stem, height in HEIGHTS.items():
            picture = out / f"{stem}.png"
            photograph(pages / f"{stem}.html", picture.resolve(), height)
            print(f"{picture}: {picture.stat().st_size} bytes")
            if picture.stat().st_size > PICTURE_BYTES_MAX:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
