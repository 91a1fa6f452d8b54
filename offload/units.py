"""Parses sizes, bandwidths and durations as people write them, and formats numbers in the same way.

Arguments are parsed with it, and reports are written with it.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterable

__all__ = [
    "alike_bytes",
    "alike_seconds",
    "check_slowdown",
    "format_bandwidth",
    "format_bytes",
    "format_seconds",
    "own_number",
    "parse_bandwidth",
    "parse_bytes",
    "parse_flops",
    "parse_seconds",
    "round_up_bytes",
    "whole_number",
]

_DECIMAL = {prefix: 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t", "p"))}
_BINARY = {f"{prefix}i": 1024**power for power, prefix in enumerate(("", "k", "m", "g", "t", "p")) if power}
_BYTES = {f"{prefix}b": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_PER_SECOND = {"ns": 1e9, "us": 1e6, "µs": 1e6, "μs": 1e6, "ms": 1e3, "s": 1.0}  # dividing by these rounds once
_NUMBER = re.compile(r"\s*([+-]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf|nan)\s*(.*?)\s*", re.I)


def parse_bytes(value: str | float, name: str = "size") -> int:
    """Return a number of bytes.

    Parameters
    ----------
    value : str or number
        ``"12GiB"`` (binary: 1024**3), ``"12GB"`` (decimal: 1000**3), ``"512"`` or a number of bytes. ``"12G"`` is
        refused, because some programs mean 12 GiB by it and others 12 GB.
    name : str, default "size"
        Name of the argument for the error message.

    Returns
    -------
    int
        Whole bytes, rounded down.

    Raises
    ------
    ValueError
        If the value is not a size, or is less than one byte.

    Examples
    --------
    >>> parse_bytes("1.5GiB"), parse_bytes("2 kB"), parse_bytes(7)
    (1610612736, 2000, 7)
    """
    example = 'a positive size such as "8GiB", "12GB" or 4194304'
    number, unit = _split(value, name, example)
    if unit and unit.removesuffix("i") in _DECIMAL:
        binary = f"{number:g}{unit[0].upper()}iB"
        decimal = f"{number:g}{'k' if unit[0] == 'k' else unit[0].upper()}B"
        raise ValueError(
            f'{name}: {value!r} is ambiguous; write "{binary}" (powers of 1024) or "{decimal}" (powers of 1000)'
        )
    if unit and unit not in _BYTES:
        raise _error(name, value, example)
    count = number * _BYTES.get(unit, 1)
    if not 1 <= count < math.inf:
        raise _error(name, value, example)
    return int(count)


def parse_bandwidth(value: str | float, name: str = "bandwidth") -> float:
    """Return a bandwidth in bytes per second; ``"inf"`` stands for a link that takes no time.

    Parameters
    ----------
    value : str or number
        ``"12GB/s"``, ``"11GiB/s"`` or a number of bytes per second. Text without a unit is refused.
    name : str, default "bandwidth"
        Name of the argument for the error message.

    Raises
    ------
    ValueError
        If the value is not a bandwidth, or not positive.

    Examples
    --------
    >>> parse_bandwidth("15.754GB/s")
    15754000000.0
    """
    example = 'a positive bandwidth such as "12GB/s", "11GiB/s" or 12e9'
    number, unit = _split(value, name, example)
    if isinstance(value, str) and not unit and not math.isnan(number) and "inf" not in value.lower():
        raise ValueError(f'{name}: {value!r} has no unit; write a positive bandwidth such as "12GB/s" or "11GiB/s"')
    if unit and not (unit.endswith("/s") and unit[:-2].rstrip() in _BYTES):
        raise _error(name, value, example)
    rate = number * _BYTES.get(unit[:-2].rstrip(), 1)
    if not rate > 0:
        raise _error(name, value, example)
    return float(rate)


def parse_flops(value: str | float, name: str = "speed") -> float:
    """Return a speed in floating-point operations per second.

    Parameters
    ----------
    value : str or number
        ``"40TFLOP/s"``, ``"40 TFLOPS"`` or a number.
    name : str, default "speed"
        Name of the argument for the error message.

    Raises
    ------
    ValueError
        If the value is not a speed, or not positive.

    Examples
    --------
    >>> parse_flops("40TFLOP/s"), parse_flops("1.5e12")
    (40000000000000.0, 1500000000000.0)
    """
    example = 'a positive speed such as "40TFLOP/s" or 4e13'
    number, unit = _split(value, name, example)
    prefix = unit.removesuffix("/s").removesuffix("flops").removesuffix("flop").rstrip()
    is_one = not unit or (prefix in _DECIMAL and unit.endswith(("flop/s", "flops")))
    if not is_one or not 0 < number < math.inf:
        raise _error(name, value, example)
    return float(number * _DECIMAL[prefix])


def parse_seconds(value: str | float, name: str = "duration", *, zero: bool = False) -> float:
    """Return a duration in seconds.

    Parameters
    ----------
    value : str or number
        ``"10us"``, ``"1.5ms"``, ``"2s"`` or a number of seconds.
    name : str, default "duration"
        Name of the argument for the error message.
    zero : bool, default False
        Whether zero is allowed, as for a latency.

    Raises
    ------
    ValueError
        If the value is not a duration, or is negative, or is zero and `zero` is False.

    Examples
    --------
    >>> parse_seconds("250ms"), parse_seconds(2)
    (0.25, 2.0)
    """
    example = 'a duration such as "10us", "1.5ms" or 0.002'
    number, unit = _split(value, name, example)
    if unit and unit not in _PER_SECOND:
        raise _error(name, value, example)
    seconds = float(number / _PER_SECOND.get(unit, 1.0))
    if not (0 < seconds < math.inf or (zero and seconds == 0)):
        raise _error(name, value, example)
    return seconds


def own_number(value: object) -> object:
    """Return a number of NumPy, or of another library, as an int or a float; any other value as it is."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def whole_number(value: object, least: int) -> int | None:
    """Return a whole number of at least `least` as an int, also one of NumPy; None if the value is something else.

    Examples
    --------
    >>> whole_number(3, 1), whole_number(0, 1), whole_number(3.0, 1), whole_number(True, 1)
    (3, None, None, None)
    """
    count = own_number(value)
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= least else None


def check_slowdown(value: object, name: str = "max_slowdown") -> float:
    """Return a slowdown, as a fraction of the step time.

    Parameters
    ----------
    value : object
        0.05 for 5 %. An int other than 0 is an error, because it may mean percent.
    name : str, default "max_slowdown"
        Name of the argument for the error message.

    Raises
    ------
    ValueError
        If the value is not such a fraction.

    Examples
    --------
    >>> check_slowdown(0.05), check_slowdown(2.0)
    (0.05, 2.0)
    """
    value = own_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is a fraction of the step time of at least 0, such as 0.05, not {value!r}")
    if value and isinstance(value, int):
        raise ValueError(
            f"{name} is a fraction of the step time: {value!r} leaves open what is meant; write {value / 100} for "
            f"{value} %, or {value}.0 for {value}00 %"
        )
    return float(value)


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, with binary units: ``"1.50 GiB"``, ``"512 B"``."""
    for unit, factor in (("PiB", 1024**5), ("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(count) >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def alike_bytes(counts: Iterable[int | None]) -> Callable[[int], str]:
    """Return a function that formats numbers of bytes in one unit, chosen by the largest of `counts`.

    Examples
    --------
    >>> words = alike_bytes([325 << 20, None, 7 << 20])
    >>> words(325 << 20), words(7 << 20)
    ('325 MiB', '7 MiB')
    """
    largest = max((count for count in counts if count is not None), default=0)
    units = (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
    unit, factor = next(((unit, factor) for unit, factor in units if largest >= 2 * factor), ("B", 1))
    digits = _digits(largest / factor) if factor > 1 else 0
    return lambda count: f"{count / factor:.{digits}f} {unit}"


def alike_seconds(durations: Iterable[float | None]) -> Callable[[float], str]:
    """Return a function that formats durations in one unit, chosen by the longest of `durations`.

    Examples
    --------
    >>> words = alike_seconds([1.02, 0.98])
    >>> words(1.02), words(0.98)
    ('1.02 s', '0.98 s')
    """
    longest = max((seconds for seconds in durations if seconds is not None), default=0.0)
    unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if longest * f >= 1), ("us", 1e6))
    digits = _digits(longest * factor)
    return lambda seconds: f"{seconds * factor:.{digits}f} {unit}"


def round_up_bytes(count: int) -> str:
    """Return a size of at least `count` as short text that `parse_bytes` understands.

    Examples
    --------
    >>> round_up_bytes(163704904), parse_bytes(round_up_bytes(163704904)) >= 163704904
    ('157MiB', True)
    """
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= factor:
            steps = 100 if count < 10 * factor else 10 if count < 100 * factor else 1
            return f"{-(-count * steps // factor) / steps:g}{unit}"
    return f"{count}B"


def format_bandwidth(rate: float) -> str:
    """Return a bandwidth as text, with decimal units: ``"15.75 GB/s"``."""
    if math.isinf(rate):
        return "unlimited"
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if rate >= factor:
            return f"{rate / factor:.2f} {unit}"
    return f"{rate:.0f} B/s"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: ``"1.235 s"``, ``"12.3 ms"``, ``"45 us"``."""
    if seconds == 0 or abs(seconds) >= 1:
        return f"{seconds:.3f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 0.1 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e6:.3g} us"


def _digits(largest: float) -> int:
    """Return the number of digits after the point with which `largest` has three digits."""
    return 2 if largest < 10 else 1 if largest < 100 else 0


def _split(value: str | float, name: str, example: str) -> tuple[float, str]:
    """Return the number and the lower-case unit; whole numbers are returned as int, without rounding."""
    given = own_number(value)
    if isinstance(given, bool):
        raise _error(name, value, example)
    if isinstance(given, (int, float)):
        return given, ""
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _error(name, value, example)
    digits = match[1].replace("_", "")
    number: float = int(digits) if digits.lstrip("+-").isdigit() else float(digits)
    return number, match[2].lower()


def _error(name: str, value: object, example: str) -> ValueError:
    return ValueError(f"{name}: {value!r} is not understood; write {example}")
