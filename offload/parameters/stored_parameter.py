"""One moved parameter. Its object stays in the model. Its bytes are in the store, and in memory while they are used.

A `StoredParameter` is the record of one such parameter. The bytes are written when the record is made. When the
parameter leaves memory, they are written again if they have changed since. `Window` decides when it leaves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.hooks import RemovableHandle

from offload import _core
from offload.parameters.content import Content, ParameterError
from offload.parameters.moved_parameter import MovedParameter, is_movable
from offload.runtime.engine import REFUSALS, Engine
from offload.torch_compat.holders import holds_alone
from offload.torch_compat.optimizers import nan_like
from offload.torch_compat.overrides import (
    alias_of,
    call_without_overrides,
    requires_grad_of,
    set_data,
    storage_of,
    unseen,
    version_of_object,
)
from offload.torch_compat.tensors import StorageWatch, has_default_strides, storage_identity

if TYPE_CHECKING:
    from offload.parameters.window import Window

__all__ = ["StoredParameter"]

# Spill priority: blocks with a larger priority go to disk sooner. Parameters have a larger one than saved tensors,
# because at any time only few of them are needed soon.
SPILL_FIRST = 1 << 39


def _storage_of(tensor: Tensor) -> int:
    return storage_identity(storage_of(tensor))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class StoredParameter:
    """The record of a parameter that leaves memory. The parameter has a reference to it.

    After an interrupt at any point the parameter still has correct values: if an interrupt has skipped an update of
    this record, `look` detects it, because the identity of the storage differs.

    Attributes
    ----------
    content
        The bytes in the store.
    users
        Maps each current user of the bytes (a module's call or a running function) to its thread id.
    plain_users
        The subset of `users` for which the parameter must be an `nn.Parameter`, not a `MovedParameter`: compiled code,
        optimizer updates, and torch functions on a trained parameter.
    is_suspect
        The bytes may have changed without a change of the parameter's version counter.
    is_lent
        After a torch function was called with this trained parameter, another tensor shared its memory and may change
        the bytes later. So `settle` compares them with the store before it frees the memory.
    is_changed
        An optimizer may have updated the parameter since it was stored.
    is_address_given
        The program was given the raw address (`data_ptr`), so the parameter stays in memory until the model's next
        forward.
    epoch
        How often `look` has found that the parameter's memory was replaced (`parameter.data = …`).
    """

    def __init__(
        self, parameter: nn.Parameter, engine: Engine, window: Window, name_of: Callable[[Tensor], str]
    ) -> None:
        self.parameter = weakref.ref(parameter)
        self.reference = weakref.ref(self)
        self.window = window
        self.users: dict[object, int] = {}
        self.plain_users: set[object] = set()
        self.is_suspect = self.is_lent = self.is_changed = self.is_address_given = False
        self.epoch = 0
        self._gradient_hook: RemovableHandle | None = None
        self._engine = engine
        self._name_of = name_of
        # Identity of the parameter's storage, and a watch. While the watch exists, no other storage gets this identity.
        self._watched: tuple[int, StorageWatch] | None = None
        self.content = unseen(self._store, parameter)

    def _store(self, parameter: Tensor) -> Content:
        """Start the copy-out. The engine holds the memory until the copy ends, and keeps it if the copy fails."""
        plain = alias_of(parameter)
        key, _ = self._engine.look(plain, plain.nbytes)
        assert key is not None  # the parameter covers its whole storage
        version = version_of_object(parameter)
        stored = self._engine.swap_out(plain, key, SPILL_FIRST)
        stored.add_view()
        there = torch.device("meta")
        layout = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=there)
        placeholder = nan_like(plain)
        return Content(stored, version, layout, placeholder, _storage_of(placeholder))

    @property
    def nbytes(self) -> int:
        """Size of the parameter."""
        return self.content.nbytes

    def is_away_in(self, parameter: Tensor) -> bool:
        """Return whether the parameter is away: its data is the placeholder. Correct even after an interrupt."""
        return _storage_of(parameter) == self.content.placeholder_id

    def is_in_storage(self, parameter: Tensor, identity: int) -> bool:
        """Return whether the parameter's storage has this identity.

        After an interrupt, `Window.present` may still list the record under the identity of a freed storage, which a
        new storage may have reused.
        """
        return _storage_of(parameter) == identity

    def is_current_in(self, parameter: Tensor) -> bool:
        """Return whether the store is known to have the parameter's bytes. The parameter must be in memory."""
        is_known = not (self.is_suspect or self.is_changed or self.content.stored is None)
        return is_known and version_of_object(parameter) == self.content.version

    def is_in_memory(self) -> bool:
        """Return whether the parameter is in memory or no longer exists. In both cases it is not read ahead."""
        parameter = self.parameter()
        return parameter is None or not self.is_away_in(parameter)

    def _present(self, parameter: nn.Parameter) -> tuple[Tensor | None, Content]:
        """Return a tensor that holds the parameter's memory, None if the parameter is away; and its content then.

        A signal handler, or another thread, may run at any point. It may change the parameter and move it out again,
        which replaces `self.content`. Then `held` may be the placeholder of another content, so it is made again.
        """
        while True:
            content = self.content
            held = unseen(alias_of, parameter)
            if content is self.content:
                return (None if _storage_of(held) == content.placeholder_id else held), content

    def bring(self, parameter: nn.Parameter) -> None:
        """Bring the bytes into memory.

        Raises
        ------
        ParameterError
            The bytes cannot be read; the parameter is still away.
        """
        if self.is_away_in(parameter):
            tensor = self.read(self.content)
            if self.is_away_in(parameter):  # False if a signal handler has brought it back during the read
                set_data(parameter, tensor)
                self._note_storage(parameter)
        self.look(parameter)

    def watch_gradient(self, parameter: nn.Parameter) -> None:
        """Register a gradient hook that brings a trained parameter whose strides the placeholder lacks into memory.

        `AccumulateGrad` gives a new gradient the strides of the parameter.
        """
        is_needed = requires_grad_of(parameter) and not has_default_strides(self.content.layout)
        if self._gradient_hook is not None or not is_needed:
            return
        mine = self.reference

        def bring(_: Tensor) -> None:
            record = mine()
            found = record.parameter() if record is not None else None
            if record is not None and found is not None and "_offload_stored" in found.__dict__:
                record.window.needed_in_backward(found, record)

        self._gradient_hook = call_without_overrides(Tensor.register_hook, (), (parameter, bring))

    def begin_anew(self, parameter: nn.Parameter, values: Sequence[object]) -> bool:
        """Give the parameter new memory, filled with `values[0]`.

        Called before `parameter.copy_(…)` if the stored bytes cannot be read: `copy_` overwrites them anyway. Returns
        False if `values` does not begin with a tensor of the parameter's shape.
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
        """Mark the stored bytes as suspect if the program has replaced the memory (`parameter.data = …`)."""
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
        watched, self._watched = self._watched, None  # a signal handler may note another storage after this
        if watched is not None:
            self.window.present.pop(watched[0], None)

    def put_away(self, parameter: nn.Parameter) -> None:
        """Free the memory. The store must already have the parameter's current bytes."""
        parameter.__dict__["_offload_stored"] = self
        parameter.__class__ = MovedParameter  # before `set_data`: only this class loads the bytes again
        self._forget_storage()
        self.window.placeholders[self.content.placeholder_id] = self.reference
        set_data(parameter, self.content.placeholder)

    def settle(self, parameter: nn.Parameter) -> bool:
        """Free the memory; bytes that have changed are stored first.

        The memory stays if another tensor shares it, or if changed bytes cannot be stored. Returns True if the
        parameter is away or no longer movable (it is then an ordinary parameter again), False if it stays.
        """
        if self.is_away_in(parameter):
            return True
        if not is_movable(parameter, self._engine.device, 0, also_trained=self.window.moves_trained):
            self.forget(parameter)
            return True
        if self._engine.in_flight_bytes:
            self._engine.collect()
        if not holds_alone(parameter):
            return False
        if (self.is_lent or not self.is_current_in(parameter)) and not self._store_again(parameter):
            return False
        self.put_away(parameter)
        self._engine.limit_in_flight()
        return True

    def _store_again(self, parameter: Tensor) -> bool:
        """Make sure that the store has the parameter's current bytes. Returns False if they cannot be stored."""
        try:
            if unseen(self._has_stored_bytes, parameter):
                self.content = replace(self.content, version=version_of_object(parameter))
            else:
                self._renew(parameter)
                self.window.rewritten += 1
                self.window.out_bytes += self.nbytes
        except REFUSALS as error:
            self.window.refuse(error)
            return False
        self.is_suspect = self.is_lent = self.is_changed = False
        return True

    def _renew(self, parameter: Tensor) -> None:
        """Store the parameter again. The old copy is released first; a graph that uses it keeps it in the store."""
        placeholder_id = self.content.placeholder_id
        self.content = replace(self.content, stored=None)
        self.content = unseen(self._store, parameter)
        self.window.placeholders.pop(placeholder_id, None)

    def _has_stored_bytes(self, parameter: Tensor) -> bool:
        """Return whether the store has the parameter's current bytes. The bytes are compared.

        The result is False without a comparison if the store has no bytes, if an optimizer may have updated the
        parameter, if it requires gradients and has a new version, or if its dtype, shape or strides have changed.
        """
        is_written = version_of_object(parameter) != self.content.version and requires_grad_of(parameter)
        if self.content.stored is None or self.is_changed or is_written:
            return False
        layout, plain = self.content.layout, alias_of(parameter)
        now = (plain.dtype, plain.shape, plain.stride())
        if now != (layout.dtype, layout.shape, layout.stride()):
            return False
        try:
            before = self.read(self.content)
        except ParameterError:  # the stored copy is unreadable: the bytes in memory have to be stored again
            return False
        return torch.equal(_bytes_of(before.untyped_storage()), _bytes_of(plain.untyped_storage()))

    def forget(self, parameter: nn.Parameter) -> None:
        """Bring the bytes into memory and make the parameter an ordinary one again.

        Raises
        ------
        ParameterError
            The bytes cannot be read; the parameter is still away.
        """
        user = object()
        self.users[user] = threading.get_ident()  # a signal handler that reads the parameter does not move it out
        try:
            self.bring(parameter)
            parameter.__class__ = nn.Parameter  # from here on a signal handler's reads are not intercepted
            if self._gradient_hook is not None:
                self._gradient_hook.remove()
            self._forget_storage()
            self.window.placeholders.pop(self.content.placeholder_id, None)
            parameter.__dict__.pop("_offload_stored", None)
        finally:
            self.users.pop(user, None)

    def read(self, content: Content) -> Tensor:
        """Return a tensor with bytes from the store.

        Raises
        ------
        ParameterError
            The bytes cannot be read.
        """
        storage, begin = self.read_storage(content)
        layout = content.layout
        offset = begin // layout.itemsize
        return unseen(_tensor_over, storage, layout.dtype, offset, layout.shape, layout.stride())

    def copy(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy of the parameter as an independent tensor. A parameter that is away stays away.

        Raises
        ------
        ParameterError
            The bytes cannot be read.
        """
        present, content = self._present(parameter)
        if present is None:
            return self.read(content)
        return present.clone(memory_format=torch.preserve_format)

    def view(
        self, content: Content, epoch: int, dtype: torch.dtype, offset: int, size: torch.Size, stride: Sequence[int]
    ) -> Tensor:
        """Return a view of the parameter's current bytes. The offset is in elements.

        It is a view of the bytes of `content` instead if `parameter.data` has been replaced (`epoch` differs from the
        record's), if the parameter no longer exists, or if it no longer moves.

        Raises
        ------
        ParameterError
            The bytes cannot be read.
        """
        parameter = self.parameter()
        if parameter is not None and "_offload_stored" in parameter.__dict__:
            self.window.unpacked(parameter, self, content)
            if epoch == self.epoch:
                present, content = self._present(parameter)
                if present is not None:
                    return unseen(_tensor_over, storage_of(present), dtype, offset, size, stride)
        storage, begin = self.read_storage(content)
        return unseen(_tensor_over, storage, dtype, begin // dtype.itemsize + offset, size, stride)

    def current(self, parameter: nn.Parameter) -> Tensor:
        """Return a tensor with the bytes, the shape and the strides that the parameter has now.

        Raises
        ------
        ParameterError
            The bytes cannot be read.
        """
        self.window.unpacked(parameter, self, self.content)
        present, content = self._present(parameter)
        return self.read(content) if present is None else present

    def read_storage(self, content: Content) -> tuple[UntypedStorage, int]:
        """Return a storage with bytes from the store, and where they begin in it. A failed read is tried once more."""
        stored = content.stored
        assert stored is not None  # None only while the parameter is in memory
        self.window.ahead.used(stored)
        stored.wait_copied_out()  # before that, `swap_in` returns the memory being copied: writes would change the copy
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
        parameter, name, what = self.parameter(), "", "a parameter of a model that no longer exists cannot be read back"
        if parameter is not None:
            name, is_trained = self._name_of(parameter), requires_grad_of(parameter)
            kind, load = ("parameter", "latest checkpoint") if is_trained else ("frozen parameter", "model again")
            what = f"the {kind} {name} cannot be read back; load the {load} to go on"
        return ParameterError.of(error, name, what)


def _tensor_over(
    storage: UntypedStorage, dtype: torch.dtype, offset: int, size: torch.Size, stride: Sequence[int]
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, tuple(stride))
