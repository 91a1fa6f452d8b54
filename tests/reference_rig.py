"""What tests of reference steps share, on the CPU and on an accelerator."""

from typing import Any

import pytest

from offload.control.promise import SlowdownPromise


def every_second_step(monkeypatch: pytest.MonkeyPatch, settled_after: int | None = None) -> list[int]:
    """Make every second step a reference step; how many tensors each of them swaps is appended to the list.

    Measured times decide nothing: the first plan stays. `settled_after`: after so many, the search counts as ended.
    """
    monkeypatch.setattr(SlowdownPromise, "needs_plan", lambda promise, planned: False)
    monkeypatch.setattr(SlowdownPromise, "_wants_reference", lambda promise, planned: planned.steps % 2 == 0)
    schedule_of, found = SlowdownPromise.reference_schedule, []

    def reference_schedule(promise: Any, planned: Any) -> Any:
        planned.search.is_settled = len(found) == settled_after
        schedule = schedule_of(promise, planned)
        found.append(len(schedule.swapped))
        assert bool(planned.search.waits) == (bool(schedule.swapped) and promise._engine.device.type == "cpu")
        return schedule

    monkeypatch.setattr(SlowdownPromise, "reference_schedule", reference_schedule)
    return found
