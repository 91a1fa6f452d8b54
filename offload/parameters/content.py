"""The bytes that a moved parameter had at one moment, and the error if they cannot be read back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offload import _core
from offload.runtime.unreadable import UnreadableError

__all__ = ["Content", "ParameterError"]


class ParameterError(UnreadableError):
    """A moved parameter could not be read back. `parameter` is its name; empty if the model no longer exists.

    To go on, load the latest checkpoint (trained parameter) or the model (frozen parameter) again.
    """


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes that a parameter had at one moment.

    Attributes
    ----------
    stored
        Where the bytes are in the store; None while new bytes are being stored in their place.
    version
        A value of the parameter's version counter at which it had these bytes.
    layout
        A tensor of the same shape and strides, without bytes.
    placeholder, placeholder_id
        The parameter's data while its bytes are away: a tensor of NaN; and the identity of this tensor's storage.
    """

    stored: _core.SwappedStorage | None
    version: int
    layout: Tensor
    placeholder: Tensor
    placeholder_id: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return self.layout.nbytes
