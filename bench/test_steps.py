"""Whole training steps: the engine beside plain and beside what users would pick instead, memory against time.

    pytest bench/test_steps.py --benchmark-only

A benchmark's time is a contestant's step in a process of its own; a plain process steps in turn with it. On a GPU
`gpu_suite.py` measures this instead. The GPT meets most contestants, the other networks the ones that matter most;
`race.py` measures all of them, and steps that are not so short.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import contestants
import models
import pytest
from contestants import CHECKPOINT, LEAST, PLAIN, SLOWDOWNS, Contestant, Inapplicable
from pytest_benchmark.fixture import BenchmarkFixture
from race import Race, Runner, setting_of, wrong

ROUNDS = 9  # on a machine with neighbours, a pair of steps varies by 10 %
GROUP_SECONDS_MAX = 3600.0
SHORT = (PLAIN, SLOWDOWNS[2], LEAST, CHECKPOINT)
LONG = (*contestants.FIELD, *contestants.ACCELERATOR_ONLY, *contestants.COMPILED)
CASES = [
    pytest.param(family, contestant, id=f"{family}-{contestant.name}")
    for family in models.FAMILIES
    for contestant in (LONG if family == "gpt" else SHORT)
]


class Field:
    """One network's setting, and the plain run that every contestant's steps alternate with."""

    def __init__(self, family: str) -> None:
        self.setting = setting_of(family, "quick")
        self.plain = Runner(self.setting, PLAIN, seconds_max=GROUP_SECONDS_MAX)

    @cached_property
    def plain_peak_bytes(self) -> int:
        """Growth of the resident set in the timed steps of a plain run."""
        with Runner(self.setting, PLAIN) as run:
            for _ in range(ROUNDS):
                run.step()
            return int(run.finish()["settled_peak_bytes"])


@pytest.fixture(scope="module")
def fields() -> Iterator[dict[str, Field]]:
    """The field in use, by family; another family's ends it."""
    made: dict[str, Field] = {}
    yield made
    for field in made.values():
        field.plain.close()


def field_of(fields: dict[str, Field], family: str) -> Field:
    """Return the family's field, ending the one before."""
    if family not in fields:
        for other in fields.values():
            other.plain.close()
        fields.clear()
        fields[family] = Field(family)
    return fields[family]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "contestant"), CASES)
def test_steps(benchmark: BenchmarkFixture, fields: dict[str, Field], family: str, contestant: Contestant) -> None:
    if contestant.slow:
        pytest.skip("minutes of compilation: python bench/race.py --slow measures it")
    benchmark.group = f"steps, {family}"
    field = field_of(fields, family)
    try:
        race = Race(field.setting, contestant, field.plain)
    except Inapplicable as reason:
        pytest.skip(str(reason))
    try:
        benchmark.pedantic(race.step, setup=race.plain_step, rounds=ROUNDS)
        row = race.row(None if contestant is PLAIN else field.plain_peak_bytes)
        if contestant is PLAIN:
            field.plain_peak_bytes = int(row["peak_bytes"])
    finally:
        race.close()
    report = row.pop("report") or {}
    benchmark.extra_info |= {**row, "copy_out": report.get("copy_out"), "copy_in": report.get("copy_in")}
    assert not wrong(row), f"{contestant.name} computes other bits than plain"
