"""Reads fields of JSON objects, with error messages that name the field. `trace` reads its files with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["kind_of", "read_field", "read_float", "read_int", "read_list", "read_mapping"]


def read_mapping(data: Any, where: str) -> Mapping[str, Any]:
    """Return `data`, which must be an object."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected an object, got {kind_of(data)}")
    return data


def read_field(row: Mapping[str, Any], field: str, where: str) -> Any:
    """Return a field of an object, which must be present."""
    if field not in row:
        raise ValueError(f"{where}.{field}: missing")
    return row[field]


def read_list(row: Mapping[str, Any], field: str, where: str) -> Sequence[Any]:
    """Return a field of an object, which must be a list; `where` names the field itself."""
    if field not in row:
        raise ValueError(f"{where}: missing")
    if not isinstance(row[field], (list, tuple)):
        raise ValueError(f"{where}: expected a list, got {kind_of(row[field])}")
    values: Sequence[Any] = row[field]
    return values


def read_int(value: Any, where: str) -> int:
    """Return an integer; a float without a fraction is accepted."""
    if isinstance(value, float) and value.is_integer():
        return int(value)  # some JSON writers write every number as a float, such as 4096.0
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{where}: expected an integer, got {kind_of(value)}")
    return value


def read_float(value: Any, where: str) -> float:
    """Return a number as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where}: expected a number, got {kind_of(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{where}: the number is too large") from None


def kind_of(value: Any) -> str:
    """Return the text that messages use for a value: the value itself if it is plain, otherwise its type."""
    if value is None:
        return "null"
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
