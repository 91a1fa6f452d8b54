"""The values that a step computes: each is one version of a storage, and has the call that made it.

Recipes are extracted from these values and calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload._core import Value
from offload.recomputation.operators import Operator
from offload.torch_compat.settings import Settings
from offload.torch_compat.tensors import conjugated, is_read_lazily, negated, version_of

__all__ = ["Call", "Held", "Probe", "Reference", "Value", "View", "copy_of", "references"]

COPIED_NBYTES_MAX = 64 << 10  # a parameter or buffer of at most this size is copied if autograd does not save it


_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


class Probe:
    """Shows whether a tensor was changed in place after this object was created; holds none of its memory."""

    __slots__ = ("shape", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.version = version_of(tensor)
        self.tensor = tensor.detach()  # shares the version counter
        kind = tensor.dtype, tensor.device
        if kind not in _empty:
            _empty[kind] = tensor.new_empty(0)
        self.tensor.data = _empty[kind]

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place."""
        return version_of(self.tensor) != self.version

    @property
    def kind(self) -> str:
        """Torch's name of the tensor's type."""
        return self.tensor.type()


class Held:
    """A tensor that stays on the device until backward, and its version when it was recorded.

    Attributes
    ----------
    is_own
        Whether only recipes hold the tensor; its bytes count as theirs.
    is_state
        Whether it is a parameter or a buffer.
    """

    __slots__ = ("_is_settled", "is_own", "is_state", "nbytes", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, nbytes: int, *, is_own: bool = False, is_state: bool = False) -> None:
        self.tensor = tensor  # not detached: below autograd, a detached alias would not share the version counter
        self.version = version_of(tensor)
        self.nbytes = nbytes
        self.is_own = is_own
        self.is_state = is_state
        self._is_settled = False

    def is_usable(self, is_saved: bool) -> bool:
        """Return whether a recipe may read the tensor in backward. `is_saved`: autograd saves it too and checks it.

        A small tensor is copied here, because the program may change it before backward, as without offload; also in
        ways that do not increment its version, such as through numpy.
        """
        if self.is_changed:
            return False
        is_copied = self.is_own or (self.is_state and not is_saved and self.nbytes <= COPIED_NBYTES_MAX)
        if self.is_state and not is_saved and not is_copied:
            return False
        if not self._is_settled:
            self.tensor = _copy(self.tensor, self.nbytes) if is_copied else self.tensor.detach()
            self.version = version_of(self.tensor)
            self.is_own = self.is_own or is_copied
            self._is_settled = True
        return True

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place after it was recorded."""
        return version_of(self.tensor) != self.version

    @property
    def kind(self) -> str:
        """Torch's name of the tensor's type."""
        return self.tensor.type()

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""
        return self.tensor.shape


@dataclass(eq=False, slots=True)
class Call:
    """One operator that ran. Its tensor arguments are stored as references to values, the others as they were."""

    number: int
    func: Any
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: tuple[Any, torch.Tensor] | None  # a generator, and its state before the call
    opens: int  # the latest pack before the previous call
    saves_weights: bool  # autograd saves the factors
    settings: Settings  # torch's settings during the call
    made_bytes: int = 0  # of the storages that the call allocated for its results
    read: list[tuple[Reference, bool, bool]] | None = None  # cache of `slicing._read_by`

    @property
    def ignored(self) -> tuple[int, ...]:
        """Positions of running statistics that a normalization updates. Recipes do not update them a second time."""
        operator = self.operator
        return operator.statistics if operator.statistics and self.args[operator.training] else ()


def _copy(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the same view of a copy of the tensor's storage, which has `nbytes` bytes."""
    if tensor.is_contiguous() and tensor.nbytes == nbytes and not is_read_lazily(tensor):
        return tensor.data.clone()  # takes a third of the time
    return View(tensor).of(copy_of(tensor.untyped_storage()))


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a new storage with the same bytes."""
    copied: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copied


class View:
    """The dtype, shape, stride and offset with which a tensor views its storage."""

    __slots__ = ("_dtype", "_is_conj", "_is_neg", "_offset", "_shape", "_stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype = tensor.dtype
        self._shape = tensor.size()
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._is_conj = tensor.is_conj()
        self._is_neg = tensor.is_neg()

    @property
    def facts(self) -> tuple[Any, ...]:
        """Dtype, shape, stride, offset, and whether it is conjugated or negated lazily."""
        return self._dtype, self._shape, self._stride, self._offset, self._is_conj, self._is_neg

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor views its storage in this way."""
        return (
            tensor.size() == self._shape
            and tensor.stride() == self._stride
            and tensor.dtype is self._dtype
            and tensor.storage_offset() == self._offset
            and tensor.is_conj() is self._is_conj
            and tensor.is_neg() is self._is_neg
        )

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor with this view of a storage."""
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        tensor.set_(storage, int(self._offset), self._shape, self._stride)
        if self._is_conj:
            tensor = conjugated(tensor)
        return negated(tensor) if self._is_neg else tensor


class Reference(View):
    """A tensor argument: a value, and the tensor's view of it."""

    __slots__ = ("value",)

    def __init__(self, value: Value, tensor: torch.Tensor) -> None:
        self.value = value
        # Does not call `super().__init__`, which is slower: recording takes most of its time here.
        self._dtype = tensor.dtype
        self._shape = tensor.size()
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._is_conj = tensor.is_conj()
        self._is_neg = tensor.is_neg()

    def view(self) -> View:
        """Return the view without the value, which would keep the recorded calls alive."""
        copied = View.__new__(View)
        copied._dtype, copied._shape, copied._stride = self._dtype, self._shape, self._stride
        copied._offset, copied._is_conj, copied._is_neg = self._offset, self._is_conj, self._is_neg
        return copied


def references(given: Any) -> list[Reference]:
    """Return the references in an argument, which may be a list, a tuple or a dictionary."""
    if type(given) is Reference:
        return [given]
    if type(given) in (list, tuple):
        return [found for each in given for found in references(each)]
    if type(given) is dict:
        return references(list(given.values()))
    return []
