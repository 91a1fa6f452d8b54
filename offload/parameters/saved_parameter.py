"""What autograd holds instead of a moved parameter: where its bytes are in the store, and which view was saved."""

from __future__ import annotations

from torch import Tensor, nn

from offload.parameters.stored_parameter import StoredParameter
from offload.torch_compat.overrides import alias_of, version_of_object
from offload.torch_compat.tensors import raise_changed

__all__ = ["SavedParameter"]


class SavedParameter:
    """A view of a moved parameter, saved for backward. It holds no memory on the device.

    Parameters
    ----------
    tensor
        The tensor that autograd saves. It has the storage of the parameter or of its placeholder.
    parameter
        The parameter. It is held here, as autograd would hold it.
    """

    __slots__ = (
        "_content",
        "_dtype",
        "_epoch",
        "_offset",
        "_parameter",
        "_record",
        "_saved_version",
        "_size",
        "_stride",
    )

    def __init__(self, tensor: Tensor, parameter: nn.Parameter, record: StoredParameter) -> None:
        like = record.content.layout if record.is_away_in(tensor) else alias_of(tensor)
        self._parameter = parameter
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
        return self._record.view(self._content, self._epoch, self._dtype, self._offset, self._size, self._stride)
