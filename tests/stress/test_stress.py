"""The stress program under the thread sanitizer and under the address and undefined-behaviour sanitizers.

`--rounds N` makes it longer.
"""

import os
import re

import pytest
from stress.build import USE_AFTER_FREE, build_stress, missing_sanitizer, run_planted, run_stress, run_within

pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]
ROUNDS_EACH = 50  # by one process: a sanitizer remembers every thread that there ever was, and a round starts hundreds


def require(sanitizer):
    reason = missing_sanitizer(sanitizer)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_stress_is_clean(sanitizer, request, campaign_counts):
    require(sanitizer)
    program, left = build_stress(sanitizer), request.config.getoption("--rounds")
    while left > 0:
        rounds = min(left, ROUNDS_EACH)
        run = run_stress(program, rounds, seed=left)
        assert run.returncode == 0, run.stderr[:8000]
        assert run.stderr == ""
        assert run.stdout == f"{5 * rounds} rounds of 4 threads\n"
        campaign_counts["rounds under sanitizers"] += 5 * rounds
        left -= rounds


def test_a_run_that_hangs_says_where():
    with pytest.raises(AssertionError, match=r"not done after 2 s:\n(?s:.*)(nanosleep|sleep)"):
        run_within(["sleep", "600"], 2, dict(os.environ))


def test_a_planted_race_is_found():
    require("thread")
    race = "WARNING: ThreadSanitizer: data race"
    said = run_planted("event pool is locked", "thread", race)
    assert race in said
    assert "event_pool.h" in said


def test_a_planted_memory_error_is_found():
    require("address,undefined")
    said = run_planted("a queued spill holds its slot", "address,undefined", USE_AFTER_FREE)
    assert re.search(USE_AFTER_FREE, said)
    assert "spiller.cpp" in said
