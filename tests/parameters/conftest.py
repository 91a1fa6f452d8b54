"""Small windows, so that small parameters are read ahead, given up and written behind."""

import pytest

from offload.parameters import mover


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(mover, "AHEAD_BYTES", 24 << 10)
    monkeypatch.setattr(mover, "BEHIND_BYTES", 16 << 10)
