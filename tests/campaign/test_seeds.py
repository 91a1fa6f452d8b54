"""Thousands of seeded walks: every byte comes back, nothing is left, and a second opinion finds no race in any log.

`--seeds N` walks N seeds (the long run is 100,000), `--seed N` replays one on every tier and under every schedule.
"""

import pytest
from campaign.build import build_mutants
from campaign.seeds import THREADED_EVERY, TIERS, run_apart


@pytest.fixture(scope="module")
def core():
    return build_mutants()


@pytest.mark.timeout(0)
def test_every_seed_survives(core, request, figures):
    one = request.config.getoption("--seed")
    count = 1 if one is not None else request.config.getoption("--seeds")
    first = request.config.getoption("--first-seed") if one is None else one
    tally = run_apart(core, first=first, count=count)
    figures["seeds"] = {
        name: getattr(tally, name) for name in ("seeds", "walks", "returned", "faults", "operations_judged")
    } | {"failed": len(tally.failures) + len(tally.oracle_reports)}
    replay = "\nreplay: pytest tests/campaign/test_seeds.py --seed N"
    assert not tally.failures, "\n".join(tally.failures[:10]) + replay
    assert not tally.oracle_reports, "\n".join(tally.oracle_reports[:10]) + replay
    assert tally.seeds == count
    assert tally.walks >= count * len(TIERS)
    assert tally.returned > 5 * count, "the walks hardly bring anything back"
    assert tally.operations_judged > 100 * count, "the oracle sees hardly anything"


def test_a_seed_replays(core):
    first, second = (run_apart(core, first=0, count=THREADED_EVERY) for _ in range(2))
    assert len(first.digests) == THREADED_EVERY * len(TIERS)
    assert first.digests == second.digests
    assert len(set(first.digests.values())) == len(first.digests), "different seeds walk different ways"
