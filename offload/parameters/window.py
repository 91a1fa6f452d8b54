"""The moved parameters that are in memory now: who uses them, and when they leave again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from offload.parameters.content import Content
from offload.parameters.keep import Keep, needs_keep
from offload.parameters.moved_parameter import MovedParameter, gradient_allows_leaving, stands_for_object
from offload.parameters.read_ahead import ReadAhead
from offload.parameters.saved_parameter import SavedParameter, SavedView
from offload.torch_compat.autograd import innermost_hooks, is_script_tracing
from offload.torch_compat.overrides import alias_of, requires_grad_of, storage_of, unseen
from offload.torch_compat.tensors import is_read_lazily, storage_identity

if TYPE_CHECKING:
    from offload.parameters.stored_parameter import StoredParameter

__all__ = ["Window"]

_TRACED = (
    "torch.jit.trace keeps the memory of parameters, and offload moves them out of it: call offload.disable(model) "
    "before and offload.enable(model, ...) after, or use torch.export.export"
)
PLACEHOLDERS_MAX = 4096  # if there are more, each pass removes those of parameters that no longer exist


class Window:
    """The moved parameters of one model.

    Parameters
    ----------
    ahead_bytes_max
        Limit on the bytes of the parameters that are read ahead. Also, after a torch function or backward has used a
        parameter, parameters without users leave until at most this many bytes of parameters are in memory.
    moves_trained
        Whether trained parameters leave too.

    Attributes
    ----------
    present, placeholders
        The records by the identity of the parameter's storage in memory, and by the identity of its placeholder's
        storage.
    in_bytes, out_bytes
        Bytes read so far, and bytes written so far. The first copy of each parameter does not count as written.
    rewritten
        How often a parameter was stored again, after an update or a change by the program.
    refused
        How often the store had no room for a parameter; `refusal` is the latest error.
    """

    def __init__(self, ahead_bytes_max: int, *, moves_trained: bool = False) -> None:
        self.ahead = ReadAhead(ahead_bytes_max)
        self.moves_trained = moves_trained
        self.lock = threading.RLock()  # a signal handler in the same thread may read a parameter
        self.present: dict[int, weakref.ref[StoredParameter]] = {}
        self.placeholders: dict[int, weakref.ref[StoredParameter]] = {}
        self.in_bytes = 0
        self.out_bytes = 0
        self.rewritten = 0
        self._leaving: set[StoredParameter] = set()
        self.refused = 0
        self.refusal = ""

    def refuse(self, error: Exception) -> None:
        """Count a parameter that stays in memory because the store cannot take it."""
        self.refused += 1
        self.refusal = str(error)

    def acquire(self, parameter: nn.Parameter, record: StoredParameter, user: object, *, plain: bool = False) -> None:
        """Bring a parameter into memory and keep it there until `release`.

        With `plain` it has its ordinary class until then.

        Raises
        ------
        ParameterError
            The parameter cannot be read.
        ValueError
            torch.jit.trace runs: its result would read the parameter's memory after the parameter has left it.
        """
        if is_script_tracing():
            raise ValueError(_TRACED)
        with self.lock:
            record.users[user] = threading.get_ident()
            self.ahead.needs(record, record.content)
            record.bring(parameter)
            record.watch_gradient(parameter)
            if plain:
                record.plain_users.add(user)
                parameter.__class__ = nn.Parameter

    def release(self, records: Iterable[StoredParameter], user: object) -> None:
        """End the use of these parameters by `user`. They may still have other users. A second call does nothing."""
        with self.lock:
            for record in records:
                record.users.pop(user, None)
                record.plain_users.discard(user)
                parameter = record.parameter()
                if parameter is not None and not record.plain_users and "_offload_stored" in parameter.__dict__:
                    parameter.__class__ = MovedParameter

    def accessed(self, parameter: nn.Parameter, record: StoredParameter) -> None:
        """Check a parameter after a torch function that may have replaced its memory or its `requires_grad`."""
        self.look(parameter, record)
        self.settle(nbytes_max=self.ahead.nbytes_max)

    def look(self, parameter: nn.Parameter, record: StoredParameter) -> None:
        """Notice memory that the program has replaced. Bring the parameter back for good if it may no longer leave.

        Raises
        ------
        ParameterError
            The parameter may no longer leave, and cannot be read.
        """
        with self.lock:
            record.look(parameter)
            if not gradient_allows_leaving(parameter, record.content.layout, also_trained=self.moves_trained):
                record.forget(parameter)

    def updated(self, parameter: nn.Parameter, record: StoredParameter) -> None:
        """Move a parameter out after an optimizer may have changed it. Its version counter need not show the change."""
        with self.lock:
            if record.is_away_in(parameter):  # it could not be read, so it was not updated
                return
            record.look(parameter)
            record.is_changed = True
            if not record.users and not record.is_address_given:
                self._settle(record, parameter)

    def needed_in_backward(self, parameter: nn.Parameter, record: StoredParameter) -> None:
        """Bring a trained parameter into memory. As long as there is room, it stays there until its update.

        Raises
        ------
        ParameterError
            The parameter cannot be read.
        """
        with self.lock:
            record.bring(parameter)
            held = alias_of(parameter)  # so that this parameter does not leave at once
            self.settle(nbytes_max=self.ahead.nbytes_max)
            del held

    def unpacked(self, parameter: nn.Parameter, record: StoredParameter, content: Content) -> None:
        """Note that backward needs these bytes of a parameter now. A trained one is brought into memory.

        Raises
        ------
        ParameterError
            The parameter cannot be read.
        """
        self.ahead.needs(record, content)
        if requires_grad_of(parameter):
            self.needed_in_backward(parameter, record)
        record.look(parameter)

    def begin_pass(self) -> None:
        """Begin a forward of the model. Users of this thread are left over from an interrupt, so their use is ended."""
        with self.lock:
            for record, _ in self.in_memory():
                for user, thread in list(record.users.items()):
                    if thread == threading.get_ident():
                        self.release((record,), user)
                record.is_address_given = False
            if len(self.placeholders) > PLACEHOLDERS_MAX:
                self.placeholders = {key: each for key, each in self.placeholders.items() if each() is not None}
        self.settle()

    def in_memory(self) -> Iterator[tuple[StoredParameter, nn.Parameter]]:
        """Yield the parameters that were brought back and are in memory, in the order in which they came back."""
        for identity, reference in list(self.present.items()):
            record = reference()
            parameter = record.parameter() if record is not None else None
            if record is None or parameter is None:
                self.present.pop(identity, None)
            else:
                yield record, parameter

    def nbytes(self) -> int:
        """Bytes of the parameters in memory."""
        return sum(record.nbytes for record, _ in self.in_memory())

    def settle(self, *, nbytes_max: int = 0) -> None:
        """Move unused parameters out, in the order in which they came back, until `nbytes_max` bytes are left."""
        with self.lock:
            found = list(self.in_memory())
            nbytes = sum(record.nbytes for record, _ in found)
            for record, parameter in found:
                if nbytes <= nbytes_max:
                    break
                if not record.users and not record.is_address_given and self._settle(record, parameter):
                    nbytes -= record.nbytes

    def _settle(self, record: StoredParameter, parameter: nn.Parameter) -> bool:
        """Move one parameter out. Returns False if it stays, or if it is being moved out already (signal handlers)."""
        if record in self._leaving:
            return False
        try:
            self._leaving.add(record)
            return unseen(record.settle, parameter)
        finally:
            self._leaving.discard(record)

    def saving(self) -> AbstractContextManager[object]:
        """Return a context in which autograd holds no memory of these parameters."""
        if not needs_keep():
            return nullcontext()
        keep = Keep(self.saved, innermost_hooks())
        return saved_tensors_hooks(keep.pack, keep.unpack)

    def saved(self, tensor: Tensor) -> SavedParameter | None:
        """Return what autograd holds instead of a parameter or a view of a moved one; None for any other tensor.

        A parameter that has not left yet is replaced too: it may leave before backward. An operator's result is not,
        although it may be a parameter that was changed in place: it would hold its own graph.
        """
        if type(tensor) is MovedParameter:
            return SavedParameter(tensor)
        if type(tensor) is nn.Parameter and tensor.is_leaf and tensor.layout is torch.strided and not tensor.is_nested:
            return SavedParameter(tensor)
        if type(tensor) not in (Tensor, nn.Parameter):
            return None
        try:
            identity = storage_identity(storage_of(tensor))
        except (RuntimeError, NotImplementedError):  # the tensor has no storage, such as a sparse one
            return None
        reference = self.present.get(identity) or self.placeholders.get(identity)
        record = reference() if reference is not None else None
        parameter = record.parameter() if record is not None else None
        if record is None or parameter is None or is_read_lazily(tensor):
            return None
        if stands_for_object(tensor):
            return SavedParameter(parameter)
        if record.is_away_in(tensor):
            return SavedView(tensor, parameter, record) if tensor.shape == record.content.layout.shape else None
        is_known = record.is_in_storage(parameter, identity) and record.is_current_in(parameter)
        return SavedView(tensor, parameter, record) if is_known else None  # a view holds its memory itself
