"""Sizes, bandwidths and durations: what is understood, what is refused, what is said then."""

import math

import pytest
from forked_python import run_python
from hypothesis import given
from hypothesis import strategies as st

from offload.units import (
    check_slowdown,
    format_bandwidth,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12GiB", 12 * 1024**3),
        ("12GB", 12 * 1000**3),
        (" 1.5 gib ", 3 * 1024**3 // 2),
        ("1MiB", 1 << 20),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("3TB", 3 * 10**12),
        ("512", 512),
        ("512B", 512),
        ("1e9", 10**9),
        ("1_000", 1000),
        (".5KiB", 512),
        (7, 7),
        (7.9, 7),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "value",
    [
        *("12GB!", "", "GB", "-1", "-1GiB", "0", "0GB", "nan", "inf", "12 parsecs", "1.5.2", "0.3", "12GB/s"),
        *(0, -5, math.nan, math.inf, None, True, []),
    ],
)
def test_what_is_no_size_says_what_to_write(value):
    with pytest.raises(ValueError, match=r"memory_limit: .* is not understood; write a positive size such as \"8GiB\""):
        parse_bytes(value, "memory_limit")


@pytest.mark.parametrize(
    ("text", "binary", "decimal"),
    [("12G", "12GiB", "12GB"), ("12Gi", "12GiB", "12GB"), ("1.5 t", "1.5TiB", "1.5TB"), ("64k", "64KiB", "64kB")],
)
def test_a_size_whose_unit_is_open_is_refused_with_both(text, binary, decimal):
    with pytest.raises(ValueError, match=f'is ambiguous; write "{binary}" .* or "{decimal}" '):
        parse_bytes(text)


@pytest.mark.parametrize("value", [0, 0.0, 0.05, 1.0, 5.0])
def test_slowdowns(value):
    assert check_slowdown(value) == value


@pytest.mark.parametrize(("value", "percent"), [(1, "0.01 for 1 %"), (5, "0.05 for 5 %"), (200, "2.0 for 200 %")])
def test_a_slowdown_that_may_be_percent_is_refused_with_both(value, percent):
    with pytest.raises(ValueError, match=f"write {percent}, or {value}.0 for {value}00 %"):
        check_slowdown(value)


@pytest.mark.parametrize("value", [-0.1, -5, math.nan, math.inf, "5%", None, True])
def test_what_is_no_slowdown_says_what_to_write(value):
    with pytest.raises(ValueError, match=r"a fraction of the step time of at least 0, such as 0\.05, not"):
        check_slowdown(value)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("12GB/s", 12e9), ("15.754GB/s", 15.754e9), ("1GiB/s", 2.0**30), (1e9, 1e9), (5, 5.0), ("inf", math.inf)],
)
def test_bandwidths(text, rate):
    assert parse_bandwidth(text) == rate


@pytest.mark.parametrize("value", ["12GB", "12Gb/h", "0", "0.5", "1e9", "-3GB/s", "nan", "", None, 0, math.nan, False])
def test_what_is_no_bandwidth_says_what_to_write(value):
    with pytest.raises(ValueError, match=r"(not understood|has no unit); write a positive bandwidth such as \"12GB"):
        parse_bandwidth(value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("10us", 1e-5), ("10µs", 1e-5), ("1.5ms", 0.0015), ("2s", 2.0), (3, 3.0), ("5ns", 5e-9)]
)
def test_durations(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("value", ["-1us", "x", "nan", "inf", "0"])
def test_what_is_no_duration_says_what_to_write(value):
    with pytest.raises(ValueError, match=r"not understood; write a duration such as \"10us\""):
        parse_seconds(value)


def test_a_latency_may_be_zero():
    assert parse_seconds("0", zero=True) == parse_seconds(0, zero=True) == 0.0


@given(st.integers(1, 2**50))
def test_bytes_written_in_words_are_read_back_closely(count):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)


def test_words():
    assert [format_bytes(x) for x in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.50 KiB", "5.00 GiB"]
    assert [format_bandwidth(x) for x in (15.754e9, 800.0, math.inf)] == ["15.75 GB/s", "800 B/s", "unlimited"]
    assert [format_seconds(x) for x in (0, 4.5e-5, 0.0123, 0.5, 12.3456)] == [
        "0.000 s",
        "45 us",
        "12.3 ms",
        "500 ms",
        "12.346 s",
    ]


def test_a_slip_of_units_is_refused_at_the_call():
    script = """
import torch, offload
model = torch.nn.Linear(4, 4)
for slip in ({"memory_limit": 12}, {"memory_limit": "12"}, {"memory_limit": "12G"}, {"max_slowdown": 5}):
    try:
        offload.enable(model, **slip)
    except ValueError as error:
        print(error)
"""
    ran = run_python("-c", script)
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert len(said) == 4
    for line, remedy in zip(said, ('"12GiB"', '"12GiB"', '"12GiB"', "0.05 for 5 %"), strict=True):
        assert remedy in line
