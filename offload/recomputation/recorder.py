"""A dispatch mode that records operators while it is on: the versions of storages that each reads and writes.

Every operator of a window goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from offload._core import version_owner
from offload.recomputation.operators import Operator
from offload.recomputation.random_state import random_state
from offload.recomputation.template import Window
from offload.recomputation.values import Call, Held, Probe, Reference, Value
from offload.torch_compat.autograd import innermost_hooks
from offload.torch_compat.backward_pass import current_backward
from offload.torch_compat.dispatch import OperatorMode, mode_count, push_mode, remove_mode, restores_keys
from offload.torch_compat.settings import in_force
from offload.torch_compat.tensors import StorageWatch, has_own_bytes, storage_identity, version_of

__all__ = ["NO_KEY", "OperatorRecorder", "is_known", "key_of"]

_PLAIN = (torch.Tensor, Parameter)
NO_KEY = 0
_NO_SOURCE = Reference(Value(0, -1), torch.empty(0))


class OperatorRecorder(OperatorMode):  # type: ignore[no-untyped-call]
    """Records the operators of one forward pass while the recorder is on.

    Parameters
    ----------
    small_nbytes
        Tensors with fewer bytes are copied if a recipe reads them, unless they are packed, or parameters or buffers:
        the program may change them before backward.
    is_state
        Returns whether a storage, given by identity, is that of a parameter or a buffer that keeps its memory until
        backward.

    Attributes
    ----------
    is_on
        Whether it has been turned on, in the thread that created it.
    latest_pack
        Pack index of the latest pack that was reported to the recorder.
    window
        The window in which calls are stored too, for a template that later steps follow. None: no template is made.
    """

    def __init__(self, small_nbytes: int, is_state: Callable[[int], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_on = False
        self.latest_pack = -1
        self.window: Window | None = None
        self._small_nbytes = small_nbytes
        self._is_state = is_state
        self.thread = get_ident()
        self._modes = mode_count()
        self._backward = current_backward()
        self._hooks = innermost_hooks(while_tracing=True)  # those of the step
        self._calls = 0
        self.is_closed = False
        self._pack_before = -1
        self.values: dict[int, Value] = {}  # storage identity → latest value in this window
        self._saved: dict[int, Value] = {}  # storage identity → packed value; kept for the whole forward pass

    # -- windows ------------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Turn the recorder on. Does nothing while a newer mode is on: that mode's exit would pop this one."""
        if self.is_on or mode_count() != self._modes or self._is_confined():
            return
        self.is_on = True
        push_mode(self)

    def suspend(self) -> None:
        """Turn the recorder off; the recorded calls and values are kept.

        The recorder stays on inside torch.compile, transforms of torch.func, and a backward pass that the forward
        computes. `is_on` stays True if other code has temporarily removed all modes: that code puts them back.
        """
        if self.is_on and not self._is_confined():
            self.is_on = not remove_mode(self)

    def _is_confined(self) -> bool:
        """Return whether a change of this thread's modes would not last, or would be that of another thread."""
        return get_ident() != self.thread or current_backward() != self._backward or restores_keys()

    def forget(self) -> None:
        """End a window, and forget all values: until the next window, writes to tensors are not recorded."""
        self.values.clear()
        self.window = None

    def close(self) -> None:
        """End the forward pass."""
        self.suspend()
        self.is_closed = True  # if other code has removed the mode and restores it later, it records nothing
        self.window = None
        self.values.clear()
        self._saved.clear()

    # -- values -------------------------------------------------------------------------------------------------------

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """Return the present value of a tensor; None if unknown, or if a change of the tensor was not recorded."""
        value = self.values.get(storage_identity(tensor.untyped_storage()))
        return value if value is not None and value.version == version_of(tensor) else None

    def saved(self, tensor: torch.Tensor, index: int, slot: Any, nbytes: int) -> None:
        """Note that a storage was packed, so that recipes can read it.

        `slot` is a weak reference to the swapped or dropped storage that has the bytes. None: the tensor is kept.
        """
        storage = tensor.untyped_storage()
        key, version = storage_identity(storage), version_of(tensor)
        value = self.values.get(key)
        leaf = Value(nbytes, version, value.watch if value is not None else StorageWatch(storage))
        held, probe = (Held(tensor, nbytes), None) if slot is None else (None, Probe(tensor))
        for each in (leaf, value):
            if each is not None and each.version == version:
                each.index, each.slot, each.probe, each.held = index, slot, probe, held
        self._saved[key] = leaf
        if value is not None and value.version != version:
            # The window was opened by a pack inside an operator, and the operators that this one called next were
            # recorded. The version of `value` was predicted from them, and it is not the one that is packed now.
            self.values[key] = leaf

    def source(self, index: int) -> torch.UntypedStorage | None:
        """Return the storage that a pack saved; None if it was freed or changed."""
        for key, saved in self._saved.items():
            if saved.index == index:
                value = self.values.get(key)
                unchanged = value is None or value.version == saved.version
                return saved.watch.storage() if unchanged and saved.watch is not None else None
        return None

    def forget_freed(self) -> int:
        """Forget the packed storages that have been freed: no recipe can read them. Return the bytes of the others."""
        saved = self._saved.items()
        self._saved = {key: each for key, each in saved if each.watch is not None and each.watch.is_alive}
        return sum(each.nbytes for each in self._saved.values())

    # -- operators ----------------------------------------------------------------------------------------------------

    def record(self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and record what it reads and makes."""
        note = self._note
        noted = tuple([note(each) for each in args])
        named = {name: note(each) for name, each in kwargs.items()} if kwargs else kwargs
        random = random_state(args, kwargs) if operator.is_seeded else None
        saves = self.saves_factors(operator, args)
        settings = in_force(is_heavy=operator.is_heavy)
        call = Call(self._calls, func, operator, noted, named, random, self._pack_before, saves, settings)
        self._calls += 1
        if self.window is not None:
            self.window.calls.append(call)
        self._pack_before = self.latest_pack
        result = run(func, operator, args, kwargs)
        if operator.writes or operator.writes_all:
            self._note_writes(call, args, kwargs)
        if type(result) is torch.Tensor:
            self._note_result(call, 0, result)
        elif isinstance(result, (tuple, list)):
            for place, made in enumerate(result):
                if type(made) is torch.Tensor:
                    self._note_result(call, place, made)
        return result

    def saves_factors(self, operator: Operator, args: tuple[Any, ...]) -> bool:
        """Return whether autograd surely saves the factors of a matrix product or convolution.

        It saves none without gradients. What it saves through hooks other than the step's, such as a checkpoint's, is
        unknown.
        """
        if not (operator.saves_factors and torch.is_grad_enabled()):
            return False
        has_history = any(_has_history(given) for place, given in enumerate(args) if place not in operator.added)
        return has_history and innermost_hooks(while_tracing=True) == self._hooks

    def _note(self, given: Any) -> Any:
        kind = type(given)
        if kind is torch.Tensor or kind is Parameter:
            key = key_of(given)
            value = self.values.get(key)
            if value is None:
                if key == NO_KEY or not is_known(given):
                    return _NO_SOURCE
                value = self.values[key] = self.leaf(given, given.untyped_storage(), key)
            elif value.version != version_of(given):
                return _NO_SOURCE  # changed by code that is not recorded
            return Reference(value, given)
        if kind is list or kind is tuple:
            return [self._note(each) for each in given]
        return _NO_SOURCE if isinstance(given, torch.Tensor) else given

    def leaf(self, tensor: torch.Tensor, storage: torch.UntypedStorage, key: int) -> Value:
        """Return the value of a tensor that existed before the window."""
        version = version_of(tensor)
        saved = self._saved.get(key)
        if saved is not None and saved.version == version:
            return saved
        nbytes = storage.nbytes()
        leaf = Value(nbytes, version, StorageWatch(storage))
        is_state = self._is_state(key)
        if is_state or nbytes < self._small_nbytes:
            leaf.held = Held(tensor, nbytes, is_own=not is_state, is_state=is_state)
        return leaf

    def _note_writes(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        operator: Operator = call.operator
        places: tuple[int | str, ...] = (*range(len(args)), *kwargs) if operator.writes_all else operator.writes
        for place, number, tensor in written(places, args, kwargs):
            storage = tensor.untyped_storage()
            key = storage_identity(storage)
            before = self.values.get(key)
            watch = before.watch if before is not None else StorageWatch(storage)
            self.values[key] = Value(storage.nbytes(), version_after(operator, tensor), watch, call, (place, number))

    def _note_result(self, call: Call, place: int, made: torch.Tensor) -> None:
        key = key_of(made)
        # If the storage is known, its value stays: `_note_writes` has stored it, or the result is a view that the
        # schema does not declare.
        if key != NO_KEY and key not in self.values and not made.is_inference():
            storage = made.untyped_storage()
            nbytes = storage.nbytes()
            self.values[key] = Value(nbytes, version_of(made), StorageWatch(storage), call, place)
            call.made_bytes += nbytes


Place = int | str


def written(
    places: Sequence[Place], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Place, int, torch.Tensor]]:
    """Yield the known tensors at the given arguments of an operator: argument, number within a list, tensor."""
    for place in places:
        given: Any = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        for number, tensor in enumerate(given if type(given) in (list, tuple) else (given,)):
            if isinstance(tensor, torch.Tensor) and is_known(tensor):
                yield place, number, tensor


def run(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator, and increment the versions of tensors in lists that it writes: under a mode, torch does not."""
    if not operator.writes_lists:
        return func(*args, **kwargs)
    before = [version_of(tensor) for _, _, tensor in written(operator.writes, args, kwargs)]
    result = func(*args, **kwargs)
    for version, (_, _, tensor) in zip(before, written(operator.writes, args, kwargs), strict=True):
        if version_of(tensor) == version:
            increment_version(tensor)
    return result


def version_after(operator: Operator, tensor: torch.Tensor) -> int:
    """Return the version that a tensor just written by an operator will have after the mode has returned."""
    # For tensors in lists, `run` has incremented it already. For others, autograd's in-place layer does so afterwards.
    return version_of(tensor) + (not operator.writes_lists)


def key_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; `NO_KEY` if it has none, or is nested."""
    if tensor.is_nested:
        return NO_KEY
    try:
        return storage_identity(tensor.untyped_storage())
    except NotImplementedError:  # torch raises this if there is none: sparse, opaque, wrapped by functorch
        return NO_KEY


def is_known(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain, strided one that has its own bytes and a version."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_inference()
    return plain and has_own_bytes(tensor)


def _has_history(given: Any) -> bool:
    """Return whether an argument is a tensor that requires a gradient and is not a parameter or a view of one."""
    return isinstance(given, torch.Tensor) and given.requires_grad and type(version_owner(given)) is not Parameter
