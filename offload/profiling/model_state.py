"""The state of a model before a step: the storages of its parameters and buffers, their devices, and bytes in use.

The planner adds the bytes of parameters, gradients and optimizer state to those that a profiled step allocates. Every
step needs these values, so they are computed again only if `StateWatch` finds a difference. It reads each module's
dictionaries, and each tensor's storage, size and device.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offload._core import StateWatch
from offload.devices.device import device_of
from offload.runtime.engine import Engine, has_storage, storage_bytes
from offload.runtime.weak import WeakReferences, run_pending_callbacks, weak_callback
from offload.torch_compat.allocation_profile import mark_apart
from offload.torch_compat.backward_pass import OUTSIDE, current_backward
from offload.torch_compat.modules import gradients_of, is_sharded, state_tensors
from offload.torch_compat.tensors import StorageWatch, local_of

__all__ = ["HeldBefore", "HeldBytes", "HeldMemory", "ModelState", "tensors_in"]

UNHELD_MAX = 4096  # entries of the cache `ModelState.not_held`
LOOKS_MAX = 64  # in each step, beyond the one at its begin and those that find a parameter


@dataclass(frozen=True)
class HeldBytes:
    """Bytes in use on the device before a step begins."""

    state: int  # parameters, buffers, all optimizer state; on an accelerator everything except gradients
    gradients: int
    away: int = 0  # of `state`: optimizer state that is not on the device
    # Identities of the storages of gradients and optimizer state among these bytes; empty on an accelerator.
    storages: frozenset[int] = field(default=frozenset(), repr=False, compare=False)

    @property
    def kept(self) -> int:
        """Of `state`: what is on the device."""
        return self.state - self.away

    @property
    def total(self) -> int:
        """What is on the device, with gradients."""
        return self.kept + self.gradients

    def raised_to(self, now: HeldBytes) -> HeldBytes:
        """Return the larger `state` and the larger `gradients` of both, and `now.away`."""
        return replace(now, state=max(self.state, now.state), gradients=max(self.gradients, now.gradients))


HeldBefore = Callable[[], HeldBytes]
CountAt = Callable[[int | None], int]  # of a memory limit in bytes


class ModelState:
    """A model's parameters and buffers at the last call of `look`.

    Attributes
    ----------
    storages
        Identities of the storages of parameters and buffers.
    not_held
        Identities of storages that are known not to be among `storages`.
    devices
        Devices of the parameters and buffers.
    is_sharded
        Whether parameters are gathered for forward, and again for backward.
    nbytes, gradient_bytes
        Bytes of the storages of parameters and buffers, and of gradients; each storage is counted once.
    gradient_storages
        Identities of the storages of gradients.
    changes
        How often `look` found a change other than of `gradient_bytes`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._watch = StateWatch()
        self._lock = threading.RLock()
        self._is_known = False
        self._is_current = False
        self._looks_left = LOOKS_MAX
        self._watches: list[StorageWatch] = []  # while they exist, no other storage has one of the identities
        self.storages: frozenset[int] = frozenset()
        # A cache of negative look-ups, so that a mask, say, is not searched among the model's tensors at each pack. If
        # such a storage becomes a parameter, this is noticed at the next forward.
        self.not_held: set[int] = set()
        self.devices: frozenset[torch.device] = frozenset()
        self.is_sharded = False
        self.nbytes = 0
        self.gradient_bytes = 0
        self.gradient_storages: frozenset[int] = frozenset()
        self.changes = 0

    @property
    def model(self) -> nn.Module | None:
        """The model; None after it was freed."""
        return self._model()

    def expire(self) -> None:
        """Make the next call of `look` read the model again. Called when a step begins."""
        self._is_current = False
        self._looks_left = LOOKS_MAX

    def holds_now(self, storage_id: int) -> bool:
        """Return whether a storage is that of a parameter or a buffer, possibly of one added since the step began.

        Reading a model of thousands of layers takes milliseconds. So it is read again for at most `LOOKS_MAX` unknown
        storages in a row that are not found, in each step; for all if FSDP gathers the parameters during the step. A
        buffer that is added after them is noticed when the next step begins.
        """
        if storage_id not in self.storages and storage_id not in self.not_held:
            if self._looks_left > 0 or self.is_sharded:
                self._looks_left -= 1
                self._is_current = False
                self.look()
            if storage_id in self.storages:
                self._looks_left = LOOKS_MAX  # other code gives parameters new storages during the step
            else:
                if len(self.not_held) >= UNHELD_MAX:
                    self.not_held.clear()
                self.not_held.add(storage_id)
        return storage_id in self.storages

    def look(self) -> None:
        """Compare the model with the last call, and update the attributes; does nothing if this step has done so."""
        model = self._model()
        if self._is_current or model is None:
            return
        with self._lock:
            # False until everything is computed: after an interrupt, the next call computes it again.
            was_known, self._is_known = self._is_known, False
            same_tensors, same_gradients = self._watch.look(model)
            if not (was_known and same_tensors and same_gradients):
                self._compute(model, gradients_only=was_known and same_tensors)
            self._is_known = self._is_current = True

    def _compute(self, model: nn.Module, *, gradients_only: bool) -> None:
        parameters, buffers = state_tensors(model)
        gradients = storage_bytes(gradients_of(parameters))
        self.gradient_bytes, self.gradient_storages = sum(gradients.values()), frozenset(gradients)
        if gradients_only:
            return
        held = [*parameters, *buffers]
        found = storage_bytes(held)
        # A moved parameter may leave its storage during the step: no tensor that forward makes may get its identity.
        watches = [StorageWatch(tensor.untyped_storage()) for tensor in held if has_storage(tensor)]
        self.storages, self.nbytes = frozenset(found), sum(found.values())
        self._watches = watches
        self.devices = frozenset(tensor.device for tensor in held)
        self.is_sharded = is_sharded(model)
        self.changes += 1


_listeners: WeakReferences[HeldMemory] = WeakReferences()
_hooks: list[RemovableHandle] = []


def _listen(listener: HeldMemory) -> None:
    """Call `listener.optimizer_steps` before every optimizer step in this process.

    What the step allocates is marked in profiles that are still recording. The hooks serve all listeners and are never
    removed. Torch iterates over a dictionary of hooks. If a hook were removed during this iteration, because its model
    is freed, the optimizer's step would raise an error.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_tell))
        _hooks.append(register_optimizer_step_post_hook(_end_apart))
    _listeners.add(listener)


def _tell(optimizer: torch.optim.Optimizer, *_: object) -> None:
    run_pending_callbacks()
    for each in _listeners:
        each.optimizer_steps(optimizer)
    if current_backward() == OUTSIDE:  # `in_backward.py` marks its own updates
        mark_apart(begins=True)


def _end_apart(*_: object) -> None:
    if current_backward() == OUTSIDE:
        mark_apart(begins=False)


class HeldMemory:
    """Measures the memory that one model and the optimizers of its parameters use before a step."""

    def __init__(self, state: ModelState, engine: Engine) -> None:
        self._state = state
        self._watch = StateWatch()
        self._engine = engine
        self._counted = -1  # `changes` of the model's state when `_more_bytes` was counted
        self._more_bytes = 0  # bytes of optimizer state
        self._more_storages: frozenset[int] = frozenset()
        self._optimizers: WeakReferences[torch.optim.Optimizer] = WeakReferences()
        self._before_own: Callable[[], None] | None = None
        self._before_other: Callable[[], None] | None = None
        self._is_closed = False
        self._moving: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._in_memory_max: Callable[[], int] = int
        self._parameters: CountAt = lambda _: 0
        self._parameters_copied: CountAt = lambda _: 0
        self._moves_in_backward: Callable[[], bool] = bool
        self._found: Callable[[torch.optim.Optimizer], None] | None = None
        _listen(self)

    def on_optimizer_step(self, own: Callable[[], None], other: Callable[[], None]) -> None:
        """Register bound methods, called before optimizers step: those of the model's parameters, and all others.

        When its own optimizer steps, the model's backward is over. Others may step between its forward and its
        backward, as in a GAN.
        """
        self._before_own, self._before_other = weak_callback(own), weak_callback(other)

    def count_moving(
        self,
        nbytes: Callable[[], tuple[int, int]],
        in_memory_max: Callable[[], int],
        *,
        in_backward: Callable[[], bool],
    ) -> None:
        """Register what tells `look` how much optimizer state is away.

        Parameters
        ----------
        nbytes
            Returns the bytes that are away, and how many of them are being written at this moment.
        in_memory_max
            Returns the most bytes of them that are in memory while the model runs. They count as on the device.
        in_backward
            Returns whether state is read and written in backward.
        """
        self._moving, self._in_memory_max, self._moves_in_backward = nbytes, in_memory_max, in_backward

    def count_parameters(self, in_memory_max: CountAt, copied_max: CountAt) -> None:
        """Register what tells `look` how much moved parameters need while the model runs.

        Both functions take the memory limit in bytes; None is the present one.

        Parameters
        ----------
        in_memory_max
            Returns the most bytes of them that are in memory at a time.
        copied_max
            Returns how many of these bytes may be read ahead or still be written at a time. On an accelerator only
            these are added, because the others are among the allocations of the profiled step; but all are added if
            parameters are updated in backward, because what an update allocates is not counted in that step.
        """
        self._parameters, self._parameters_copied = in_memory_max, copied_max

    def on_found(self, call: Callable[[torch.optim.Optimizer], None]) -> None:
        """Register a function that is called with each optimizer of the model before its first step."""
        self._found = call

    def close(self) -> None:
        """Ignore further optimizer steps."""
        self._is_closed = True

    def moved_parameter_bytes(self, memory_limit: int | None = None) -> int:
        """Return how many bytes of moved parameters `look` counts. `memory_limit` in bytes; None: the present one."""
        if self._engine.is_accelerator and not self._moves_in_backward():
            return self._parameters_copied(memory_limit)
        return self._parameters(memory_limit)

    def look(self) -> HeldBytes:
        """Return the bytes in use now.

        On an accelerator: all that torch has allocated. On the CPU: the model's parameters, buffers and gradients, the
        states of its known optimizers, and the engine's resident bytes.
        """
        state = self._state
        state.look()
        moved_bytes, writing_bytes = self._moving()
        away_bytes = max(0, moved_bytes - self._in_memory_max()) if moved_bytes else 0
        if self._engine.is_accelerator:
            allocated_bytes = device_of(self._engine.device).allocated_bytes() - writing_bytes + moved_bytes
            allocated_bytes += self.moved_parameter_bytes()
            return HeldBytes(allocated_bytes - state.gradient_bytes, state.gradient_bytes, away_bytes)
        states = [list(dict.values(each.state)) for each in self._optimizers]  # swapped-out state stays so
        counted, self._counted = self._counted, -1  # as in `ModelState.look`
        if not self._watch.same_leaves(states) or counted != state.changes:
            found = storage_bytes(tensors_in(states))
            self._more_bytes = sum(nbytes for storage, nbytes in found.items() if storage not in state.storages)
            self._more_storages = frozenset(found)
        self._counted = state.changes
        more_bytes = self._more_bytes + moved_bytes + self.moved_parameter_bytes()
        storages = state.gradient_storages | self._more_storages
        state_bytes = state.nbytes + more_bytes + self._engine.resident.now
        return HeldBytes(state_bytes, state.gradient_bytes, away_bytes, storages)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped parameters of the model, as long as they are alive."""
        return list(self._optimizers)

    def parameter_bytes(self, min_nbytes: int) -> tuple[int, int]:
        """Return by how many bytes frozen parameters in memory, and all of them, could be fewer, without smaller ones.

        The parameters of the module with most of them stay, and so does what is left of a kind that moves already. Both
        are 0 if FSDP shards the model.
        """
        model = self._state.model
        if model is None or self._state.is_sharded:
            return 0, 0
        moved = {parameter.requires_grad for parameter in model.parameters() if "_offload_stored" in parameter.__dict__}

        def bytes_of(parameters: Iterable[nn.Parameter], kinds: set[bool]) -> int:
            return sum(each.nbytes for each in parameters if each.requires_grad in kinds and each.nbytes >= min_nbytes)

        def fewer(kinds: set[bool]) -> int:
            largest = max(bytes_of(module.parameters(recurse=False), kinds) for module in model.modules())
            return bytes_of(model.parameters(), kinds) - largest

        return fewer({False} - moved), fewer({False, True} - moved)

    def gradient_bytes_max(self, min_nbytes: int) -> int:
        """Return the bytes of the gradients of all trained parameters, without smaller ones."""
        model = self._state.model
        trained = [each for each in model.parameters() if each.requires_grad] if model is not None else []
        return sum(each.nbytes for each in trained if each.nbytes >= min_nbytes)

    def optimizer_bytes(self) -> int:
        """Return the bytes of optimizer state in memory, of the optimizers that have stepped."""
        found = storage_bytes(tensors_in([list(dict.values(each.state)) for each in self._optimizers]))
        return sum(nbytes for storage, nbytes in found.items() if storage not in self._state.storages)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer that is about to step, if it steps parameters of the model."""
        if self._is_closed:
            return
        is_known = any(each is optimizer for each in self._optimizers)
        is_own = is_known or self._steps_own(optimizer)
        before = self._before_own if is_own else self._before_other
        if before is not None:
            before()
        self._engine.collect()  # frees what backward passes that are over have left, before the optimizer needs memory
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._engine.settle_dropped(stepped)  # of a graph whose backward is still to come
        if is_own and not is_known:
            self._optimizers.add(optimizer)
            if self._found is not None:
                self._found(optimizer)

    def _steps_own(self, optimizer: torch.optim.Optimizer) -> bool:
        model = self._state.model
        own = {id(parameter) for parameter in model.parameters()} if model is not None else set()
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


_DEPTH_MAX = 16  # nesting of containers in an optimizer's state; one may contain itself. The same as in `StateWatch`


def tensors_in(value: object, depth: int = _DEPTH_MAX) -> Iterator[Tensor]:
    """Yield the tensors in nested dictionaries, lists, tuples and deques; LBFGS stores lists of tensors.

    Of a DTensor, the local tensor.
    """
    if isinstance(value, Tensor):
        yield local_of(value)
    elif depth and isinstance(value, Mapping | list | tuple | deque):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each, depth - 1)
