"""The base class of errors for a tensor of one parameter whose bytes could not be read back."""

from __future__ import annotations

from typing import TypeVar

from offload import _core

__all__ = ["UnreadableError"]

_Error = TypeVar("_Error", bound="UnreadableError")


class UnreadableError(_core.SpillError):
    """A tensor that belongs to a parameter could not be read back.

    Attributes
    ----------
    parameter
        The parameter's name; empty if the parameter is gone.
    """

    parameter: str

    @classmethod
    def of(cls: type[_Error], error: _core.SpillError, parameter: str, what: str) -> _Error:
        """Return the error for a failed read. `what`: which tensor it was, and how the program can go on."""
        told = cls(error.errno, f"{what}: {error.strerror}", error.filename)
        told.offset, told.parameter = error.offset, parameter
        return told
