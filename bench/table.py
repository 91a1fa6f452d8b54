"""What a table of results is: rows, marks, and the machine that they were measured on. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PEER_BETTER = "peer better"
NOT_REACHED = "not reached"
UNEQUAL = "OTHER BITS"
EQUAL = "bit-equal"
GRADIENTS = "gradients"
SMALL = "small "  # begins the keys of rows that pytest-benchmark measured, at a small size
NETWORKS = {"gpt": "GPT", "gpt, the demo": "GPT of the demo", "lstm": "LSTM", "resnet": "ResNet", "unet": "U-Net",
            "vit": "ViT", "gpt, width 2048": "GPT on a GPU", "gpt, width 4096": "Wider GPT on a GPU",
            "gpt, width 2048, first run": "GPT on a GPU, first run"}  # fmt: skip


@dataclass
class Row:
    """One line of a table. `key` names it for `why.json`; `point` is memory and step time over plain."""

    key: str
    cells: list[str]
    mark: str = ""
    ours: bool = False
    point: tuple[float, float] | None = None


@dataclass
class Table:
    """Rows under one title, and the machine they were measured on."""

    title: str
    columns: list[str]
    rows: list[Row]
    machine: Mapping[str, Any]
    kind: str = "plain"  # "frontier", "bars", "simulated" and "settling" have a picture
    values: dict[str, float] = field(default_factory=dict)  # of the bars, by label
    note: str = ""  # stands above the rows
    page: str = "parts"  # the page of the documentation that it is on
    run: Mapping[str, Any] = field(default_factory=dict)  # of "settling": the row of the result file

    @property
    def title_with_device(self) -> str:
        """The title, and the device if the title does not name it."""
        is_named = self.title.endswith(processor_of(self.machine))
        return self.title if is_named else f"{self.title} · {device_of(self.machine)}"

    @property
    def slug(self) -> str:
        """The title and the device as a file's name."""
        whole = self.title_with_device
        words = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in whole)
        return "-".join(words.lower().split())


def device_of(machine: Mapping[str, Any]) -> str:
    """Where it ran, in two words."""
    return str(machine.get("device") or machine.get("processor") or "unknown")


def processor_of(machine: Mapping[str, Any]) -> str:
    """The processor's name in a title: "Intel Xeon" for "Intel(R) Xeon(R) Processor"."""
    return str(machine.get("processor", "unknown")).removesuffix(" Processor").replace("(R)", "")


def about(machine: Mapping[str, Any]) -> str:
    """Where, when and with what it ran, in one line."""
    words = [device_of(machine)]
    if machine.get("device") is None and machine.get("processors"):
        words.append(f"{machine['processors']} cores")
    for name, key in (("driver", "driver"), ("Python", "python"), ("torch", "torch")):
        if machine.get(key):
            words.append(f"{name} {machine[key]}")
    words += [str(machine.get("date", "date unknown"))[:10], f"commit {str(machine.get('commit', 'unknown'))[:12]}"]
    if machine.get("rehearsal"):
        words.append("A REHEARSAL: sizes are tiny, figures mean nothing")
    return ", ".join(words)
