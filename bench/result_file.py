"""Writes the results of one part of a suite as they come, so that a part that is stopped early keeps its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EXIT_SKIPPED = 77  # of a part that needs a device and finds none


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file as a whole: a reader, or a kill, never meets half of it."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
    draft.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """What the file holds; nothing where it does not exist or is no JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class ResultFile:
    """A JSON file with one object, rewritten at every addition."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content: dict[str, Any] = {}

    def set(self, name: str, value: object) -> None:
        """Keep one result under its name."""
        self._content[name] = value
        write_json(self.path, self._content)

    def append(self, name: str, row: object) -> None:
        """Add one row to the list of this name."""
        self.set(name, [*self._content.get(name, []), row])
