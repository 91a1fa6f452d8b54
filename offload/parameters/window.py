"""The moved parameters that are in memory now: who uses them, and when they leave again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from offload.parameters.keep import Keep, needs_keep
from offload.parameters.moved_parameter import MovedParameter
from offload.parameters.read_ahead import ReadAhead
from offload.parameters.saved_parameter import SavedParameter
from offload.torch_compat.autograd import innermost_hooks
from offload.torch_compat.overrides import alias_of, requires_grad_of, storage_of, unseen
from offload.torch_compat.tensors import storage_identity

if TYPE_CHECKING:
    from offload.parameters.stored_parameter import StoredParameter

__all__ = ["Window"]

PLACEHOLDERS_MAX = 4096  # beyond it, those of parameters that are gone are looked for in each pass


class Window:
    """What the parameters of one model share.

    Parameters
    ----------
    ahead_bytes_max
        Of parameters that are read ahead, and of those that stay after somebody else than a module has used them.
    moves_trained
        Whether parameters that are trained leave too.

    Attributes
    ----------
    present, placeholders
        The records by the identity of the storage of each parameter in memory, and by that of its placeholder.
    in_bytes, out_bytes
        Read so far, and written after the first copy of each parameter.
    rewritten
        How often a parameter was stored again, after an update or a change by the program.
    refused
        Parameters for which the store had no room, each time; `refusal` is the latest error.
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
        """Have a parameter in memory until `release`. With `plain` it is an ordinary one for that time.

        Raises
        ------
        ParameterError
            It cannot be read.
        """
        with self.lock:
            record.users[user] = threading.get_ident()
            self.ahead.needs(record, record.content)
            record.bring(parameter)
            record.watch_gradient(parameter)
            if plain:
                record.plain_users.add(user)
                parameter.__class__ = nn.Parameter

    def release(self, records: Iterable[StoredParameter], user: object) -> None:
        """Nobody but others needs these parameters in memory any more. It may be called again."""
        with self.lock:
            for record in records:
                record.users.pop(user, None)
                record.plain_users.discard(user)
                parameter = record.parameter()
                if parameter is not None and not record.plain_users and "_offload_stored" in parameter.__dict__:
                    parameter.__class__ = MovedParameter

    def accessed(self, parameter: nn.Parameter, record: StoredParameter) -> None:
        """A function of the program has run that may have changed the parameter as a whole."""
        with self.lock:
            record.look(parameter)
            if requires_grad_of(parameter) and not self.moves_trained:
                record.forget(parameter)
        self.settle(nbytes_max=self.ahead.nbytes_max)

    def updated(self, parameter: nn.Parameter, record: StoredParameter) -> None:
        """An optimizer may have changed the parameter, in whatever way: it leaves."""
        with self.lock:
            if record.is_away_in(parameter):  # it could not be read
                return
            record.look(parameter)
            record.is_changed = True
            if not record.users and not record.is_pinned:
                self._settle(record, parameter)

    def needed_in_backward(self, parameter: nn.Parameter, record: StoredParameter) -> None:
        """Have a trained parameter in memory. It stays there for its update, as long as there is room.

        Raises
        ------
        ParameterError
            It cannot be read.
        """
        with self.lock:
            record.bring(parameter)
            held = alias_of(parameter)  # so that this one does not leave at once
            self.settle(nbytes_max=self.ahead.nbytes_max)
            del held

    def begin_pass(self) -> None:
        """A forward of the model begins in this thread, which uses no parameter: an interrupt may have left some."""
        with self.lock:
            for record, _ in self.in_memory():
                for user, thread in list(record.users.items()):
                    if thread == threading.get_ident():
                        self.release((record,), user)
                record.is_pinned = False
            if len(self.placeholders) > PLACEHOLDERS_MAX:
                self.placeholders = {key: each for key, each in self.placeholders.items() if each() is not None}
        self.settle()

    def in_memory(self) -> Iterator[tuple[StoredParameter, nn.Parameter]]:
        """Yield the parameters in memory that this window has brought back, longest there first."""
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
        """Have parameters leave that nobody uses, longest there first, until few enough bytes are in memory."""
        with self.lock:
            found = list(self.in_memory())
            nbytes = sum(record.nbytes for record, _ in found)
            for record, parameter in found:
                if nbytes <= nbytes_max:
                    break
                if not record.users and not record.is_pinned and self._settle(record, parameter):
                    nbytes -= record.nbytes

    def _settle(self, record: StoredParameter, parameter: nn.Parameter) -> bool:
        """Have one parameter leave. False: it stays, or a signal handler asks in the middle of its leaving."""
        if record in self._leaving:
            return False
        try:
            self._leaving.add(record)
            return unseen(record.settle, parameter)
        finally:
            self._leaving.discard(record)

    def saving(self) -> AbstractContextManager[object]:
        """A context in which autograd holds no memory of these parameters."""
        if not needs_keep():
            return nullcontext()
        keep = Keep(self.saved, innermost_hooks())
        return saved_tensors_hooks(keep.pack, keep.unpack)

    def saved(self, tensor: Tensor) -> SavedParameter | None:
        """Return what autograd holds in a tensor's place, where it is of a moved parameter; None for all others."""
        if type(tensor) not in (Tensor, nn.Parameter, MovedParameter):
            return None
        try:
            identity = storage_identity(storage_of(tensor))
        except (RuntimeError, NotImplementedError):  # it has none, such as a sparse tensor
            return None
        reference = self.present.get(identity) or self.placeholders.get(identity)
        record = reference() if reference is not None else None
        parameter = record.parameter() if record is not None else None
        if record is None or parameter is None or tensor.is_conj() or tensor.is_neg():
            return None
        is_whole = tensor.shape == record.content.layout.shape
        if record.is_away_in(tensor):
            return SavedParameter(tensor, parameter, record) if is_whole else None
        is_its_memory = record.is_in_storage(parameter, identity)
        return SavedParameter(tensor, parameter, record) if is_its_memory and record.is_current_in(parameter) else None
