"""What autograd holds instead of a parameter, which may move: the object, or where a view's bytes are in the store."""

from __future__ import annotations

from torch import Tensor, nn

from offload.parameters.stored_parameter import StoredParameter
from offload.torch_compat.overrides import alias_of, call_without_overrides, version_of_object
from offload.torch_compat.tensors import raise_changed

__all__ = ["SavedParameter", "SavedView"]


class SavedParameter:
    """A parameter, saved for backward as an object. If it has moved, no memory on the device is held.

    Backward gets the memory, the shape and the strides that the parameter has then, as without offload.

    Parameters
    ----------
    parameter
        The parameter. It is held here, as autograd would hold it.
    """

    __slots__ = ("_parameter", "_saved_version", "_size")

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._size = parameter.shape
        self._saved_version = version_of_object(parameter)  # a tensor restored for backward has a counter of its own

    def restore(self) -> Tensor:
        """Return the tensor that was saved.

        Raises
        ------
        RuntimeError
            The parameter was changed in place since, as without offload.
        ParameterError
            The bytes cannot be read; a later call tries again.
        """
        now = version_of_object(self._parameter)
        if now != self._saved_version:
            kind: str = call_without_overrides(Tensor.type, (), (self._parameter,))
            raise_changed(kind, tuple(self._size), now, self._saved_version)
        return self._bytes()

    def _bytes(self) -> Tensor:
        record = self._parameter.__dict__.get("_offload_stored")
        return record.current(self._parameter) if isinstance(record, StoredParameter) else alias_of(self._parameter)


class SavedView(SavedParameter):
    """A view of a moved parameter, saved for backward. Backward gets the memory that was saved.

    Parameters
    ----------
    tensor
        The tensor that autograd saves. It has the storage of the parameter or of its placeholder.
    parameter
        The parameter.
    """

    __slots__ = ("_content", "_dtype", "_epoch", "_offset", "_record", "_stride")

    def __init__(self, tensor: Tensor, parameter: nn.Parameter, record: StoredParameter) -> None:
        super().__init__(parameter)
        like = record.content.layout if record.is_away_in(tensor) else alias_of(tensor)
        self._record = record
        self._content, self._epoch = record.content, record.epoch  # now: the program may replace the memory later
        self._dtype, self._size = like.dtype, like.shape
        self._stride, self._offset = like.stride(), int(like.storage_offset())

    def _bytes(self) -> Tensor:
        return self._record.view(self._content, self._epoch, self._dtype, self._offset, self._size, self._stride)
