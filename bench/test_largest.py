"""The largest batch that trains within a cap on the resident set's growth.

    pytest bench/test_largest.py --benchmark-only

A benchmark's time is that of the search; what it found is in extra_info. `largest.py` searches finer, for more
contestants, and for a GPT's depth and a U-Net's resolution as well.
"""

from __future__ import annotations

from typing import Any

import pytest
from contestants import BY_HAND, CHECKPOINT, PLAIN, Contestant
from largest import CAPS, measure
from pytest_benchmark.fixture import BenchmarkFixture

CASES = [
    pytest.param("resnet:batch", contestant, id=f"resnet:batch-{contestant.name}")
    for contestant in (PLAIN, BY_HAND[1], CHECKPOINT)
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("what", "contestant"), CASES)
def test_largest(benchmark: BenchmarkFixture, what: str, contestant: Contestant) -> None:
    cap_bytes = CAPS["quick"][what]
    benchmark.group = f"largest {what} in {cap_bytes >> 20} MiB"
    rows: list[dict[str, Any]] = []
    benchmark.pedantic(lambda: rows.append(measure(what, contestant, size="quick", cap_bytes=cap_bytes)), rounds=1)
    if "inapplicable" in rows[0]:
        pytest.skip(rows[0]["inapplicable"])
    assert "error" not in rows[0], rows[0]["error"]
    benchmark.extra_info |= rows[0]
    assert rows[0]["largest"] > 0, "not even the smallest fits: raise CAPS"
