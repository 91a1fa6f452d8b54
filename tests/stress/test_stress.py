"""The stress program under the thread sanitizer and under the address and undefined-behaviour sanitizers.

`--rounds N` makes it longer.
"""

import os

import pytest
from stress.build import build_stress, find_planted_race, missing_sanitizer, run_stress, run_within

pytestmark = pytest.mark.timeout(900)


def require(sanitizer):
    reason = missing_sanitizer(sanitizer)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_stress_is_clean(sanitizer, request, campaign_counts):
    require(sanitizer)
    rounds = request.config.getoption("--rounds")
    run = run_stress(build_stress(sanitizer), rounds, seed=rounds)
    assert run.returncode == 0, run.stderr[:8000]
    assert run.stderr == ""
    assert run.stdout == f"{5 * rounds} rounds of 4 threads\n"
    campaign_counts["rounds under sanitizers"] += 5 * rounds


def test_a_run_that_hangs_says_where():
    with pytest.raises(AssertionError, match=r"not done after 2 s:\n(?s:.*)(nanosleep|sleep)"):
        run_within(["sleep", "600"], 2, dict(os.environ))


def test_a_planted_race_is_found():
    require("thread")
    said = find_planted_race("event pool is locked")
    assert "WARNING: ThreadSanitizer: data race" in said
    assert "event_pool.h" in said
