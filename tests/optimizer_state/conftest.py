"""Small windows, so that small states have several chunks, are read ahead and written behind."""

import pytest

from offload.optimizer_state import mover, streamed_state


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(mover, "CHUNK_BYTES", 48 << 10)
    monkeypatch.setattr(mover, "AHEAD_BYTES", 64 << 10)
    monkeypatch.setattr(mover, "BEHIND_BYTES", 32 << 10)
    monkeypatch.setattr(streamed_state, "ASKED_BYTES", 16 << 10)
