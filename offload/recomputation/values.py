"""What a step computes, as values that never change: a version of a storage, and the call that made it.

Recipes are cut out of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload._core import Value
from offload.recomputation.operators import Operator
from offload.torch_compat.settings import Settings
from offload.torch_compat.tensors import conjugated, negated, version_of

__all__ = ["Call", "Held", "Probe", "Reference", "Value", "View", "copy_of", "references"]

COPIED_NBYTES_MAX = 64 << 10  # of a parameter or buffer that is copied rather than held


_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


class Probe:
    """Tells whether a tensor was changed in place since; holds none of its memory."""

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
        """Whether it was."""
        return version_of(self.tensor) != self.version

    @property
    def kind(self) -> str:
        """Torch's name for its type."""
        return self.tensor.type()


class Held:
    """A tensor that stays on the device until backward, and what version of it is meant.

    Attributes
    ----------
    is_own
        Only recipes hold it; its bytes count as theirs.
    is_state
        It is a parameter or a buffer.
    """

    __slots__ = ("_is_settled", "is_own", "is_state", "nbytes", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, nbytes: int, *, is_own: bool = False, is_state: bool = False) -> None:
        self.tensor = tensor  # with its history: below autograd no alias shares the version counter
        self.version = version_of(tensor)
        self.nbytes = nbytes
        self.is_own = is_own
        self.is_state = is_state
        self._is_settled = False

    def is_usable(self, is_saved: bool) -> bool:
        """Whether a recipe may read it in backward. `is_saved`: autograd saves it too, and notices changes.

        A small tensor is copied, so that it may be changed before backward, as plain torch allows: also in ways that
        no version tells of, such as by way of numpy.
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
        """Whether it was changed in place since."""
        return version_of(self.tensor) != self.version

    @property
    def kind(self) -> str:
        """Torch's name for its type."""
        return self.tensor.type()

    @property
    def shape(self) -> torch.Size:
        """Its sizes."""
        return self.tensor.shape


@dataclass(eq=False, slots=True)
class Call:
    """One operator that ran: its arguments are references to values, or what they were."""

    number: int
    func: Any
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: tuple[Any, torch.Tensor] | None  # a generator, and its state before
    opens: int  # the latest pack before the call that came before this one
    saves_weights: bool  # autograd saves its factors
    settings: Settings  # those of torch that were in force
    read: list[tuple[Reference, bool, bool]] | None = None  # its tensor arguments; whether it writes to, or adds them

    @property
    def ignored(self) -> tuple[int, ...]:
        """Positions of running statistics that a normalization updates beside its result: they are updated once."""
        operator = self.operator
        return operator.statistics if operator.statistics and self.args[operator.training] else ()


def _copy(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The same view of other memory with the same bytes; `nbytes` of the storage."""
    if tensor.is_contiguous() and tensor.nbytes == nbytes and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.data.clone()  # a third of the time
    return View(tensor).of(copy_of(tensor.untyped_storage()))


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Other memory with the same bytes."""
    copied: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copied


class View:
    """How a tensor sees its storage."""

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
        """Whether a tensor sees its storage so."""
        return (
            tensor.size() == self._shape
            and tensor.stride() == self._stride
            and tensor.dtype is self._dtype
            and tensor.storage_offset() == self._offset
            and tensor.is_conj() is self._is_conj
            and tensor.is_neg() is self._is_neg
        )

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same view of other bytes."""
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        tensor.set_(storage, int(self._offset), self._shape, self._stride)
        if self._is_conj:
            tensor = conjugated(tensor)
        return negated(tensor) if self._is_neg else tensor


class Reference(View):
    """A tensor argument: which value, and how it is seen."""

    __slots__ = ("value",)

    def __init__(self, value: Value, tensor: torch.Tensor) -> None:
        self.value = value
        # Not by way of `super`: most of what recording costs is here.
        self._dtype = tensor.dtype
        self._shape = tensor.size()
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._is_conj = tensor.is_conj()
        self._is_neg = tensor.is_neg()

    def view(self) -> View:
        """The same without the value, and without all that it was made of."""
        copied = View.__new__(View)
        copied._dtype, copied._shape, copied._stride = self._dtype, self._shape, self._stride
        copied._offset, copied._is_conj, copied._is_neg = self._offset, self._is_conj, self._is_neg
        return copied


def references(given: Any) -> list[Reference]:
    """The references in an argument, or in several."""
    if type(given) is Reference:
        return [given]
    if type(given) in (list, tuple):
        return [found for each in given for found in references(each)]
    if type(given) is dict:
        return references(list(given.values()))
    return []
