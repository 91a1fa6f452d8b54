"""Random sequences of store operations, one per seed: all bytes come back, nothing leaks, and no accesses race.

PyTorch's CUDA sanitizer looks for races in the logs of the stepped runs on the slab tier. By default 60 seeds run; with
`--long` 250 further ones, with `--full` 500 instead of these 250; with `--seeds N` exactly N. `--seed N` repeats one
seed on every tier and under every schedule.
"""

from collections import Counter

import pytest
from campaign.build import build_mutants
from campaign.seeds import SEEDS, THREADED_EVERY, TIERS, run_apart

SEEDS_LONG = 250
SEEDS_FULL = 500


@pytest.fixture(scope="module")
def core():
    return build_mutants()


@pytest.mark.timeout(0)
def test_every_seed_survives(core, request, figures):
    one, asked = request.config.getoption("--seed"), request.config.getoption("--seeds")
    count = 1 if one is not None else asked or SEEDS
    first = request.config.getoption("--first-seed") if one is None else one
    survive(core, first, count, figures)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_more_seeds_survive(core, request, figures):
    if any(request.config.getoption(name) is not None for name in ("--seed", "--seeds")):
        pytest.skip("the other test walks what was asked for")
    survive(core, SEEDS, SEEDS_FULL if request.config.getoption("--full") else SEEDS_LONG, figures)


def survive(core, first, count, figures):
    """Walk these seeds, and add to what was counted."""
    tally = run_apart(core, first=first, count=count)
    counted = {name: getattr(tally, name) for name in ("seeds", "walks", "returned", "faults", "operations_judged")}
    failed = len(tally.failures) + len(tally.oracle_reports)
    figures.setdefault("seeds", Counter()).update(counted | {"failed": failed})
    replay = "\nreplay: pytest tests/campaign/test_seeds.py --seed N"
    assert not tally.failures, "\n".join(tally.failures[:10]) + replay
    assert not tally.oracle_reports, "\n".join(tally.oracle_reports[:10]) + replay
    assert tally.seeds == count
    assert tally.walks >= count * len(TIERS)
    assert tally.returned > 5 * count, "the walks hardly bring anything back"
    assert tally.operations_judged > 100 * count, "the oracle sees hardly anything"


@pytest.mark.long
def test_a_seed_replays(core):
    first, second = (run_apart(core, first=0, count=THREADED_EVERY) for _ in range(2))
    assert len(first.digests) == THREADED_EVERY * len(TIERS)
    assert first.digests == second.digests
    assert len(set(first.digests.values())) == len(first.digests), "different seeds walk different ways"
