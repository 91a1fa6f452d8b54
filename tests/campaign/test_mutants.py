"""Every guard of the data plane and of the engine, left out by name: somebody must notice."""

import pytest
from campaign.build import build_mutants
from campaign.mutants import EDGES, JUDGED, PYTHON, RACES, break_engine, edges_in_sources, walk_without

pytestmark = pytest.mark.timeout(600)


def test_every_guard_is_in_the_table():
    assert edges_in_sources() == EDGES | set(RACES)
    assert len(JUDGED) == 5


@pytest.mark.parametrize("edge", sorted(EDGES))
def test_a_missing_guard_is_noticed(edge):
    row = walk_without(build_mutants(), edge)
    assert row["first"], f"{edge}: nobody missed it"
    if edge in JUDGED:
        assert row["oracle"], f"{edge}: the oracle did not miss it"


def test_a_broken_engine_is_noticed():
    rows = break_engine()
    assert [row["name"] for row in rows] == list(PYTHON)
    for row in rows:
        assert row["passes_unbroken"], row
        assert row["caught"], row
