"""An optimizer's `state` with some tensors in the store. A look-up of a parameter brings that parameter's tensors back.

`StateMover` replaces torch's dictionary with this one.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import Tensor

from offload import _core
from offload.optimizer_state.aliases import Aliases
from offload.optimizer_state.loading import convert
from offload.optimizer_state.snapshot import Snapshot
from offload.optimizer_state.state_tensor import StateTensor, is_movable, is_replaceable, replacement_of
from offload.runtime.engine import REFUSALS, Engine
from offload.runtime.unreadable import UnreadableError
from offload.torch_compat.holders import holds_alone
from offload.torch_compat.optimizers import is_called_by_state_dict, register_as_tree
from offload.torch_compat.tensors import is_local_held, local_of

__all__ = ["OptimizerStateError", "StreamedState", "would_leave"]

State = dict[Any, Any]

# Spill priority. State goes to disk before any saved tensor does, because backward reads no state, except for the
# updates of `StepInBackward`.
SPILL_FIRST = 1 << 40

# If the program has read or set more state than this, the oldest of it leaves, unless the program still holds it.
ASKED_BYTES = 64 << 20


class OptimizerStateError(UnreadableError):
    """Optimizer state could not be read back; load it from the latest checkpoint. `parameter`: the parameter's name."""


_SAMPLE = {"": torch.empty(0)}
_HELD_ONCE = sys.getrefcount(_SAMPLE[""])  # reference count of a value that only one dictionary holds


def is_held(state: dict[Any, Any], key: Any, own_holders: int = 0) -> bool:
    """Return whether other code than this dictionary and `own_holders` more places holds the value of a key."""
    return sys.getrefcount(dict.__getitem__(state, key)) > _HELD_ONCE + own_holders


def would_leave(state: State, name: Any, device: torch.device, min_nbytes: int) -> bool:
    """Return whether a tensor of one parameter's state could leave memory. The state must be in memory."""
    if not is_movable(state[name], device, min_nbytes):
        return False
    is_held = sys.getrefcount(state[name]) > _HELD_ONCE or is_local_held(state[name])
    return not is_held and holds_alone(local_of(state[name]))


class StreamedState(defaultdict[Any, State]):
    """Maps parameters to their state, as torch's own dictionary does.

    Parameters
    ----------
    state
        The dictionary that this one replaces; its tensors are in memory.
    engine
        Copies the tensors.
    min_nbytes
        Smaller tensors stay.
    name_of
        The name of a parameter, for errors.
    """

    def __init__(
        self, state: dict[Any, State], engine: Engine, min_nbytes: int, name_of: Callable[[Tensor], str]
    ) -> None:
        super().__init__(dict, state)
        self._lock = threading.RLock()  # another thread, or a signal handler in this one, may copy the state meanwhile
        self.engine = engine
        self.is_moved = True
        self.tensors: dict[Any, list[StateTensor]] = {}
        self._away_nbytes: int | None = 0  # None: out of date, because state has left or come back
        self.held: dict[Any, int] = {}  # by key: number of tensors that stay because other code holds or reaches them
        self._asked: dict[Any, int] = {}  # by key: bytes that the program has read or set, oldest first
        self.refused, self.refusal = 0, ""  # how often the copy-out of a tensor could not start, and the latest reason
        self._min_nbytes = min_nbytes
        self._name_of = name_of

    # -- what leaves and comes back -----------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that leave memory, whether they are away now or not."""
        return sum(each.nbytes for tensors in self.tensors.values() for each in tensors)

    @property
    def away_nbytes(self) -> int:
        """Bytes of the tensors that are away now."""
        if self._away_nbytes is None:
            every = (each for tensors in self.tensors.values() for each in tensors)
            self._away_nbytes = sum(each.nbytes for each in every if each.is_away)
        return self._away_nbytes

    def nbytes_of(self, key: Any) -> int:
        """Return the bytes of one parameter's tensors that leave; 0 if none has left yet."""
        return sum(each.nbytes for each in self.tensors.get(key, ()))

    def leave(self, key: Any, need: int, own_holders: int = 0) -> int:
        """Start the copy-outs of those of one parameter's tensors that can leave. Returns their bytes.

        `need`: the spill priority; blocks with a larger one go to disk sooner. `own_holders`: how many places that are
        not the program's hold the dictionary. If the program holds it too, all its tensors stay.
        """
        with self._lock:
            return self._leave(key, need, own_holders)

    def _leave(self, key: Any, need: int, own_holders: int) -> int:
        is_reached = key in self and is_held(self, key, own_holders)
        state = self.peek(key)
        convert(key, state)
        self._away_nbytes = None
        if not isinstance(state, dict):  # there is none, or the entry is not a parameter's state
            self._keep(key, [])
            return 0
        tensors = self.tensors.setdefault(key, [])
        known = {id(each.tensor): each for each in tensors}
        present: list[StateTensor] = []
        nbytes = held = 0
        for name in list(state):
            each = known.get(id(state[name]))
            if each is None or not each.is_away:
                if not is_movable(state[name], self.engine.device, self._min_nbytes):
                    continue
                # True if another key, an attribute or a variable also holds the tensor, and would read NaN if it left.
                references = sys.getrefcount(state[name]) - (each is not None)
                stays = is_reached or references > _HELD_ONCE or is_local_held(state[name])
                if not stays and not holds_alone(local_of(state[name])):
                    self.engine.drain()  # an unfinished copy-out may still hold the memory
                    stays = not holds_alone(local_of(state[name]))
                if stays:
                    held += 1
                    continue
                if each is None:
                    each = StateTensor(name, state[name])
                    tensors.append(each)  # before it leaves: after an interrupt, a tensor that is away is still listed
                self._put_out(each, need)
                nbytes += each.nbytes if each.is_away else 0
            present.append(each)
        self._keep(key, present, held)
        return nbytes

    def stay(self, key: Any) -> None:
        """Stop moving those of one parameter's tensors that are in memory now."""
        convert(key, self.peek(key))
        if key in self.tensors or key in self.held:
            self._keep(key, [each for each in self.tensors.get(key, ()) if each.is_away])

    def _keep(self, key: Any, present: list[StateTensor], held: int = 0) -> None:
        """Forget all tensors of a key except `present`; other code holds `held` of its tensors."""
        self._away_nbytes = None
        self._asked.pop(key, None)
        self.tensors[key], self.held[key] = present, held
        if not present:
            del self.tensors[key]
        if not held:
            del self.held[key]

    def _put_out(self, each: StateTensor, need: int) -> None:
        try:
            each.leave(self.engine, need)
        except REFUSALS as error:  # the tensor stays in memory
            self.refused += 1
            self.refusal = str(error)

    def owned(self) -> Iterator[Any]:
        """Replace each tensor by a copy: the caller of `load_state_dict` may hold the original, and load it again.

        Yields each key after its tensors are replaced. Tensors that share memory stay: they cannot leave.
        """
        aliases = Aliases(self._values())
        for key in list(self):
            self._own(key, aliases)  # a function, so that nothing here holds the state that it replaces
            yield key

    def _own(self, key: Any, aliases: Aliases) -> None:
        found = self.peek(key)
        state = found if isinstance(found, dict) else {}
        for name, value in state.items():
            if is_replaceable(value) and value not in aliases:  # of any size: a part of an old state would fit no step
                state[name] = replacement_of(value)

    def _is_movable(self, value: Any, aliases: Aliases) -> bool:
        return is_movable(value, self.engine.device, self._min_nbytes) and value not in aliases

    def _values(self) -> Iterator[Any]:
        for state in dict.values(self):
            yield from state.values() if isinstance(state, dict) else ()

    def begin(self, key: Any) -> int:
        """Start the copy-ins of one parameter's state. Returns the bytes."""
        with self._lock:
            return sum(each.nbytes for each in self.tensors.get(key, ()) if each.begin())

    def abandon(self, key: Any) -> None:
        """Free the memory of copy-ins that are no longer needed."""
        with self._lock:
            for each in self.tensors.get(key, ()):
                each.abandon()

    def fetch(self, key: Any) -> int:
        """Bring one parameter's state into memory. Returns the bytes that were away.

        Raises
        ------
        OptimizerStateError
            A tensor could not be read. It and the tensors after it are still away.
        """
        nbytes = 0
        with self._lock:
            convert(key, self.peek(key))
            for each in self.tensors.get(key, ()):
                if each.is_away:
                    self._read(key, each, each.bring)
                    nbytes += each.nbytes
                    self._away_nbytes = None
        return nbytes

    def _read(self, key: Any, each: StateTensor, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except _core.SpillError as error:
            name = self._name_of(key)
            raise OptimizerStateError.of(
                error,
                name,
                f"the optimizer state {each.name!r} of parameter {name} cannot be read back; load the optimizer's "
                "state_dict of the latest checkpoint to go on",
            ) from error

    def peek(self, key: Any) -> State | None:
        """Return a parameter's state without bringing it back: tensors that are away read as NaN. None: no state."""
        return dict.get(self, key)

    def copied(self, *, is_snapshot: bool) -> defaultdict[Any, State]:
        """Return a plain dictionary with copies of all tensors. Tensors that are away stay away.

        Copies share memory where the tensors do.

        Parameters
        ----------
        is_snapshot
            Where the copies of moved tensors are. If False, in the device's memory. If True and the device is an
            accelerator, in host memory (DTensors: on the device). If True on the CPU, in a file, together with the
            copies of other tensors that could move and share no memory; all are in memory if no file can be made.
        """
        aliases = Aliases(self._values())
        snapshot = self._snapshot(aliases) if is_snapshot and not self.engine.is_accelerator else None
        with closing(snapshot) if snapshot is not None else nullcontext():
            result = self._copied(aliases, snapshot, to_host=is_snapshot and self.engine.is_accelerator)
            if snapshot is not None:
                snapshot.end()
        return result

    def _copied(self, aliases: Aliases, snapshot: Snapshot | None, *, to_host: bool) -> defaultdict[Any, State]:
        result: defaultdict[Any, State] = defaultdict(dict)
        for key, state in dict.items(self):
            result[key] = {} if isinstance(state, dict) else state
            with self._lock:
                convert(key, state)
                known = {id(each.tensor): each for each in self.tensors.get(key, ())}
                for name, value in state.items() if isinstance(state, dict) else ():
                    each = known.get(id(value))
                    has_moved = each is not None and (each.is_away or value not in aliases)
                    if each is not None and has_moved:
                        value = self._read(key, each, each.copy)
                        value = value.cpu() if to_host and value is local_of(value) else value
                    if snapshot is not None and (has_moved or self._is_movable(value, aliases)):
                        snapshot.put(result[key], name, value)
                    else:
                        result[key][name] = value if has_moved else aliases.copied(value)
        return result

    def _snapshot(self, aliases: Aliases) -> Snapshot | None:
        """Return a file for copies of all tensors that could move; None if there can be none."""
        moved = {id(each.tensor): each.nbytes for tensors in self.tensors.values() for each in tensors}
        others = {id(each): local_of(each).nbytes for each in self._values() if self._is_movable(each, aliases)}
        nbytes = sum(map(Snapshot.space_for, {**others, **moved}.values()))
        if not nbytes or not self.engine.spill_dir:
            return None
        try:
            return Snapshot(self.engine.spill_dir, nbytes)
        except OSError:  # the copies are in memory
            return None

    def _ask(self, key: Any) -> None:
        """Bring one parameter's state into memory because the program reads it."""
        if nbytes := self.fetch(key):
            self._note(key, nbytes)

    def _note(self, key: Any, nbytes: int) -> None:
        """Record that the program uses one more parameter's state; move out the oldest of more than `ASKED_BYTES`."""
        self._asked[key] = nbytes
        for each in list(self._asked)[:-1]:
            if sum(self._asked.values()) <= ASKED_BYTES:
                break
            del self._asked[each]
            self.engine.collect()
            self.leave(each, SPILL_FIRST)
            self.engine.limit_in_flight()

    # -- a dictionary -------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> State:
        self._ask(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._keep(key, [])
        if self.is_moved and isinstance(value, dict):
            self._note(key, sum(local_of(each).nbytes for each in value.values() if isinstance(each, Tensor)))

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()  # overridden: only then do dict() and ** call `__getitem__` for each item

    def get(self, key: Any, default: Any = None) -> Any:
        """As `dict` does, with the state brought back."""
        self._ask(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As `dict` does, with the state brought back."""
        self.fetch(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """As `dict` does, with the state brought back."""
        self.fetch(key)
        self._keep(key, [])
        return super().pop(key, *default)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._keep(key, [])

    def clear(self) -> None:
        """As `dict` does."""
        super().clear()
        self._away_nbytes = 0
        self.tensors.clear()
        self.held.clear()
        self._asked.clear()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def popitem(self) -> tuple[Any, State]:
        """As `dict` does, with the state brought back."""
        key = next(reversed(self.keys()))
        return key, self.pop(key)

    def items(self) -> Any:
        """Return a view whose iteration brings each value back. The optimizer's `state_dict` gets copies instead."""
        if is_called_by_state_dict():
            return self.copied(is_snapshot=True).items()
        return ItemsView(self)

    def values(self) -> Any:
        """Return a view that brings each value back during iteration."""
        return ValuesView(self)

    def copy(self) -> defaultdict[Any, State]:  # type: ignore[override]
        """Bring all state back and return a plain dictionary of the same tensors."""
        return defaultdict(dict, self.items())

    __copy__ = copy  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, State]:
        result: defaultdict[Any, State] = defaultdict(dict)
        for key, state in dict.items(self):
            with self._lock:
                convert(key, state)
                for each in self.tensors.get(key, ()):
                    if each.is_away:
                        memo[id(each.tensor)] = self._read(key, each, each.copy)
                result[copy.deepcopy(key, memo)] = copy.deepcopy(state, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.copied(is_snapshot=False).__reduce_ex__(protocol)


register_as_tree(StreamedState, defaultdict)
