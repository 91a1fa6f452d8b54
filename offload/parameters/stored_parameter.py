"""One moved parameter: its object stays in the model, its bytes are in the store, and in memory while they are used.

The bytes are written once, and again after each change: an update, or a write by the program. `Window` decides when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.hooks import RemovableHandle

from offload import _core
from offload.parameters.moved_parameter import MovedParameter, is_movable
from offload.runtime.engine import Engine
from offload.torch_compat.optimizers import nan_like
from offload.torch_compat.overrides import (
    alias_of,
    call_without_overrides,
    is_held_alone,
    requires_grad_of,
    set_data,
    storage_of,
    unseen,
    version_of_object,
)
from offload.torch_compat.tensors import StorageWatch, storage_identity

if TYPE_CHECKING:
    from offload.parameters.window import Window

__all__ = ["Content", "ParameterError", "StoredParameter"]

# Where host memory runs short, parameters go to disk before saved tensors do: few of them are needed at a time.
NEED_FIRST = 1 << 39


class ParameterError(_core.SpillError):
    """A moved parameter could not be read back. `parameter` is its name; load the latest checkpoint to go on."""

    parameter: str


def _storage_of(tensor: Tensor) -> int:
    return storage_identity(storage_of(tensor))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes that a parameter had at one moment.

    Attributes
    ----------
    stored
        Where they are in the store; None while they are replaced by others.
    version
        The parameter's, at that moment.
    layout
        A tensor of the same shape and strides, without bytes.
    placeholder, placeholder_id
        What the parameter has in their place while they are away, and the identity of its storage.
    """

    stored: _core.SwappedStorage | None
    version: int
    layout: Tensor
    placeholder: Tensor
    placeholder_id: int

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.layout.nbytes


class StoredParameter:
    """The record of a parameter that leaves memory. The parameter holds it.

    An interrupt between any two lines leaves true values: what a line has not noted yet, `look` finds.

    Attributes
    ----------
    content
        What the store has.
    users
        Who needs the bytes in memory now: calls of modules, and functions that run. By each, its thread.
    plain_users
        Of these, who needs it as an ordinary parameter: compiled code.
    is_suspect
        Its bytes may have been changed without a trace in its version.
    is_lent
        Such a change may come: the program was given a view of a trained parameter.
    is_changed
        An optimizer has updated it.
    is_pinned
        Somebody was given its address: it stays until the model's next forward.
    epoch
        How often the program has given it other memory (`parameter.data = …`).
    """

    def __init__(
        self, parameter: nn.Parameter, engine: Engine, window: Window, name_of: Callable[[Tensor], str]
    ) -> None:
        self.parameter = weakref.ref(parameter)
        self.reference = weakref.ref(self)
        self.window = window
        self.users: dict[object, int] = {}
        self.plain_users: set[object] = set()
        self.is_suspect = False
        self.is_lent = False
        self.is_changed = False
        self.is_pinned = False
        self.epoch = 0
        self._gradient_hook: RemovableHandle | None = None
        self._engine = engine
        self._name_of = name_of
        self._watched: tuple[int, StorageWatch] | None = None  # of its storage: reserves the identity
        self.content = unseen(self._store, parameter)

    def _store(self, parameter: Tensor) -> Content:
        """Start the copy-out. The engine holds the memory until the copy has ended, and for good where it failed."""
        plain = alias_of(parameter)
        key, _ = self._engine.look(plain, plain.nbytes)
        assert key is not None  # it covers its storage
        version = version_of_object(parameter)
        stored = self._engine.swap_out(plain, key, NEED_FIRST)
        stored.add_view()
        there = torch.device("meta")
        layout = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=there)
        placeholder = nan_like(plain)
        return Content(stored, version, layout, placeholder, _storage_of(placeholder))

    @property
    def nbytes(self) -> int:
        """Of the parameter."""
        return self.content.nbytes

    def is_away_in(self, parameter: Tensor) -> bool:
        """Whether the parameter has no bytes of its own. Its storage tells, whatever an interrupt has left undone."""
        return _storage_of(parameter) == self.content.placeholder_id

    def is_in_storage(self, parameter: Tensor, identity: int) -> bool:
        """Whether the parameter has this storage, by its identity.

        After an interrupt the window may know the record by a storage that is gone, whose identity another one has.
        """
        return _storage_of(parameter) == identity

    def is_current_in(self, parameter: Tensor) -> bool:
        """Whether the store surely has the same bytes as a parameter that is in memory."""
        is_known = not (self.is_suspect or self.is_changed or self.content.stored is None)
        return is_known and version_of_object(parameter) == self.content.version

    def is_in_memory(self) -> bool:
        """Whether reading ahead would be in vain: the parameter has bytes of its own, or is gone."""
        parameter = self.parameter()
        return parameter is None or not self.is_away_in(parameter)

    def bring(self, parameter: nn.Parameter) -> None:
        """Have the bytes in memory.

        Raises
        ------
        ParameterError
            They cannot be read; the parameter is away as before.
        """
        if self.is_away_in(parameter):
            tensor = self.read(self.content)
            if self.is_away_in(parameter):  # else a signal handler was faster
                set_data(parameter, tensor)
                self._note_storage(parameter)
        self.look(parameter)

    def watch_gradient(self, parameter: nn.Parameter) -> None:
        """Have the parameter in memory when its gradient is stored, if autograd copies its strides to the gradient."""
        if self._gradient_hook is not None or not requires_grad_of(parameter) or self.content.layout.is_contiguous():
            return
        mine = self.reference

        def bring(_: Tensor) -> None:
            record = mine()
            found = record.parameter() if record is not None else None
            if record is not None and found is not None and "_offload_stored" in found.__dict__:
                record.window.needed_in_backward(found, record)

        self._gradient_hook = call_without_overrides(Tensor.register_hook, (), (parameter, bring))

    def begin_anew(self, parameter: nn.Parameter, values: Sequence[object]) -> bool:
        """Give a parameter that cannot be read other memory, with the values that are about to overwrite all of it.

        Parameters
        ----------
        values
            One tensor. False: it does not fit.
        """
        layout = self.content.layout
        value = values[0] if values else None
        if type(value) not in (Tensor, nn.Parameter) or value.shape != layout.shape:  # type: ignore[attr-defined]
            return False
        fresh = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=self._engine.device)
        set_data(parameter, unseen(fresh.copy_, alias_of(value)))  # type: ignore[arg-type]
        self.look(parameter)
        return True

    def look(self, parameter: nn.Parameter) -> None:
        """Take note of bytes that the program has put in the parameter's place."""
        known = self._watched[0] if self._watched is not None else None
        if not self.is_away_in(parameter) and known != _storage_of(parameter):
            self.is_suspect = True
            self.epoch += 1
            self._note_storage(parameter)

    def _note_storage(self, parameter: nn.Parameter) -> None:
        self._forget_storage()
        storage = storage_of(parameter)
        watched = storage_identity(storage), StorageWatch(storage)
        self._watched = watched
        self.window.present[watched[0]] = self.reference

    def _forget_storage(self) -> None:
        if self._watched is not None:
            self.window.present.pop(self._watched[0], None)
        self._watched = None

    def put_away(self, parameter: nn.Parameter) -> None:
        """Free the memory. What the store has must be what the parameter has."""
        parameter.__dict__["_offload_stored"] = self
        parameter.__class__ = MovedParameter  # first: there never is an ordinary one without bytes
        self._forget_storage()
        self.window.placeholders[self.content.placeholder_id] = self.reference
        set_data(parameter, self.content.placeholder)

    def settle(self, parameter: nn.Parameter) -> bool:
        """Free the memory if nobody uses it. True: the parameter is away, or is none that leaves memory any more."""
        if self.is_away_in(parameter):
            return True
        if not is_movable(parameter, self._engine.device, 0, also_trained=self.window.moves_trained):
            self.forget(parameter)
            return True
        if self._engine.in_flight_bytes:
            self._engine.collect()
        if not is_held_alone(parameter):
            return False
        if (self.is_lent or not self.is_current_in(parameter)) and not self._store_again(parameter):
            return False
        self.put_away(parameter)
        self._engine.limit_in_flight()
        return True

    def _store_again(self, parameter: Tensor) -> bool:
        """Have in the store what the parameter has now. False: there is no room."""
        try:
            if unseen(self._has_stored_bytes, parameter):
                self.content = replace(self.content, version=version_of_object(parameter))
            else:
                self._renew(parameter)
                self.window.rewritten += 1
                self.window.out_bytes += self.nbytes
        except (MemoryError, OSError, _core.PinningFailed) as error:
            self.window.refuse(error)
            return False
        self.is_suspect = self.is_lent = self.is_changed = False
        return True

    def _renew(self, parameter: Tensor) -> None:
        """Store the parameter in the place of what was stored before, which is free unless a graph refers to it."""
        placeholder_id = self.content.placeholder_id
        self.content = replace(self.content, stored=None)
        self.content = unseen(self._store, parameter)
        self.window.placeholders.pop(placeholder_id, None)

    def _has_stored_bytes(self, parameter: Tensor) -> bool:
        """Whether nothing has changed, of a parameter that may have been written to without a trace."""
        is_written = version_of_object(parameter) != self.content.version and requires_grad_of(parameter)
        if self.content.stored is None or self.is_changed or is_written:
            return False
        layout, plain = self.content.layout, alias_of(parameter)
        now = (plain.dtype, plain.shape, plain.stride())
        if now != (layout.dtype, layout.shape, layout.stride()):
            return False
        try:
            before = self.read(self.content)
        except ParameterError:  # it has been loaded again
            return False
        return torch.equal(_bytes_of(before.untyped_storage()), _bytes_of(plain.untyped_storage()))

    def forget(self, parameter: nn.Parameter) -> None:
        """Make it an ordinary parameter again. It is in memory."""
        parameter.__class__ = nn.Parameter
        if self._gradient_hook is not None:
            self._gradient_hook.remove()
        self._forget_storage()
        self.window.placeholders.pop(self.content.placeholder_id, None)
        parameter.__dict__.pop("_offload_stored", None)

    def read(self, content: Content) -> Tensor:
        """Return a tensor with the bytes of the store.

        Raises
        ------
        ParameterError
            They cannot be read.
        """
        storage, begin = self.read_storage(content)
        layout = content.layout
        offset = begin // layout.itemsize
        return unseen(_tensor_over, storage, layout.dtype, offset, layout.shape, layout.stride())

    def copy(self, parameter: nn.Parameter) -> Tensor:
        """Return a tensor of its own with the same bytes; the parameter stays where it is.

        Raises
        ------
        ParameterError
            They cannot be read.
        """
        if self.is_away_in(parameter):
            return self.read(self.content)
        return alias_of(parameter).clone(memory_format=torch.preserve_format)

    def view(
        self, content: Content, epoch: int, dtype: torch.dtype, offset: int, size: torch.Size, stride: Sequence[int]
    ) -> Tensor:
        """Return a view of the present bytes; of `content`, if the program has given it other memory since `epoch`.

        The offset is in elements.

        Raises
        ------
        ParameterError
            They cannot be read.
        """
        parameter = self.parameter()
        if parameter is not None and "_offload_stored" in parameter.__dict__:
            self.window.ahead.needs(self, content)
            if requires_grad_of(parameter):
                self.window.needed_in_backward(parameter, self)
            self.look(parameter)
            if epoch == self.epoch:
                if not self.is_away_in(parameter):
                    return unseen(_tensor_over, storage_of(parameter), dtype, offset, size, stride)
                content = self.content
        storage, begin = self.read_storage(content)
        return unseen(_tensor_over, storage, dtype, begin // dtype.itemsize + offset, size, stride)

    def read_storage(self, content: Content) -> tuple[UntypedStorage, int]:
        """Return a storage with the bytes of the store, and where they begin in it. What fails is tried again once."""
        stored = content.stored
        assert stored is not None  # else the parameter is in memory
        self.window.ahead.used(stored)
        stored.wait_copied_out()  # else it would be the memory that is being copied, which the reader may write to
        try:
            try:
                found: tuple[UntypedStorage, int] = stored.swap_in()
            except _core.SpillError:
                found = stored.swap_in()
        except _core.SpillError as error:
            raise self._told(error) from error
        self.window.in_bytes += content.nbytes
        return found

    def _told(self, error: _core.SpillError) -> ParameterError:
        parameter = self.parameter()
        name = self._name_of(parameter) if parameter is not None else "of a model that is gone"
        is_trained = parameter is not None and requires_grad_of(parameter)
        what, load = ("parameter", "the latest checkpoint") if is_trained else ("frozen parameter", "the model again")
        told = ParameterError(
            error.errno,
            f"the {what} {name} cannot be read back; load {load} to go on: {error.strerror}",
            error.filename,
        )
        told.offset, told.parameter = error.offset, name
        return told


def _tensor_over(
    storage: UntypedStorage, dtype: torch.dtype, offset: int, size: torch.Size, stride: Sequence[int]
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, tuple(stride))
