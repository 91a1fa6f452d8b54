"""What autograd holds instead of a moved parameter: where its bytes are in the store, and which view was saved."""

from __future__ import annotations

from torch import Tensor, nn

from offload.parameters.stored_parameter import StoredParameter
from offload.torch_compat.overrides import alias_of, version_of_object
from offload.torch_compat.tensors import raise_changed

__all__ = ["SavedParameter"]


class SavedParameter:
    """A view of a moved parameter, saved for backward. It holds memory on the device only if it is told to.

    Parameters
    ----------
    tensor
        The tensor that autograd saves. It has the storage of the parameter or of its placeholder.
    parameter
        The parameter. It is held here, as autograd would hold it.
    holds
        Whether to hold the memory of `tensor`, because the store does not have its bytes. The parameter then stays in
        memory too: `StoredParameter.settle` finds that it shares its memory.
    """

    __slots__ = (
        "_content",
        "_dtype",
        "_epoch",
        "_held",
        "_offset",
        "_parameter",
        "_record",
        "_saved_version",
        "_size",
        "_stride",
    )

    def __init__(
        self, tensor: Tensor, parameter: nn.Parameter, record: StoredParameter, *, holds: bool = False
    ) -> None:
        like = record.content.layout if record.is_away_in(tensor) else alias_of(tensor)
        self._parameter = parameter
        self._held = alias_of(tensor) if holds else None
        self._record = record
        self._content, self._epoch = record.content, record.epoch  # now: the program may replace the memory later
        self._dtype, self._size = like.dtype, like.shape
        self._stride, self._offset = like.stride(), int(like.storage_offset())
        self._saved_version = version_of_object(parameter)  # a tensor restored for backward has a counter of its own

    def restore(self) -> Tensor:
        """Return the tensor as it was saved.

        Raises
        ------
        RuntimeError
            The parameter was changed in place since, as without offload.
        ParameterError
            The bytes cannot be read; a later call tries again.
        """
        now = version_of_object(self._parameter)
        if now != self._saved_version:
            raise_changed("Parameter", tuple(self._size), now, self._saved_version)
        if self._held is not None:
            return self._held
        return self._record.view(self._content, self._epoch, self._dtype, self._offset, self._size, self._stride)
