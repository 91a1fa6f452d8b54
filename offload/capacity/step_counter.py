"""Counts a training step on tensors without data: what is allocated, saved and freed, and floating-point operations.

`without_data` uses it for steps that cannot run on this machine. Nothing is measured: bytes are those of the tensors'
shapes, and durations are operations divided by a device's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from offload.capacity.device import AbsentDevice
from offload.control.profile_listener import RecordedStep
from offload.plan.trace import Node, Trace
from offload.profiling.allocations import NO_NODE, Event, footprint
from offload.profiling.model_state import tensors_in
from offload.profiling.profiler import Recorder
from offload.profiling.saved_storage import SavedStorage, tensor_of
from offload.torch_compat.autograd import call_at_end_of_backward
from offload.torch_compat.call_stack import running_module
from offload.torch_compat.dispatch import OperatorMode
from offload.torch_compat.fake import Fakes, flops_of, is_fake
from offload.torch_compat.tensors import StorageWatch, storage_identity

__all__ = ["StepCounter"]

_ROOT = "forward"
Packed = tuple[Tensor, int]


class StepCounter(Recorder):
    """Counts one step of a model whose parameters have no data: forward, backward, and the optimizer's step.

    Saved tensors are replaced by copies while they are saved, as swapping does: so it is seen when forward is done with
    each of them.

    Parameters
    ----------
    model
        Its parameters have no data.
    device
        The device that the step is for.
    fakes
        Makes tensors without data.
    optimizers
        Those that have stepped already; their state is held.
    min_nbytes
        Smaller saved tensors stay.
    """

    def __init__(
        self,
        model: nn.Module,
        device: AbsentDevice,
        fakes: Fakes,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        min_nbytes: int = 1 << 20,
    ) -> None:
        super().__init__()
        self._device, self._fakes, self._min_nbytes = device, fakes, min_nbytes
        self._model = model
        self._module_names = {id(module): name for name, module in model.named_modules()}
        self._module = _ROOT
        self._names, self._flops = [_ROOT], [0]
        self._pack_names: dict[int, str] = {}
        self._packs = 0
        self._events: list[Event] = [("node", 0, 0)]
        self._live: dict[int, tuple[StorageWatch, int]] = {}
        self.live_bytes = self.live_bytes_max = 0
        self._copies: dict[int, StorageWatch] = {}
        self._saved: dict[int, SavedStorage] = {}
        self._all_saved: list[SavedStorage] = []
        self._gradients: set[int] = set()
        self._is_over = self._is_copying = self._is_listening = False
        self._held: dict[int, int] = {}
        self._hold(tensors_in([list(each.state.values()) for each in optimizers]))
        self.hold(model)

    # -- while the step runs ------------------------------------------------------------------------------------------

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within, count what is allocated and freed in this thread."""
        with _Mode(self):
            yield

    def hold(self, module: nn.Module) -> None:
        """Count the parameters and buffers of a module as held before the step."""
        self._hold([*module.parameters(), *module.buffers()])

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        self._held.update(map(_storage_of, tensors))
        self.held_bytes = sum(self._held.values())

    def hooks(self) -> saved_tensors_hooks:
        """Return the hooks for the model's forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """Forward and backward are over. What is allocated from now on is not of the step."""
        if not self._is_over:
            self._is_over = True
            gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
            self._gradients = {storage_identity(each.untyped_storage()) for each in gradients}
            self._events.append(("node", NO_NODE, 0))

    def watch_peak(self) -> None:
        """Begin to watch `live_bytes_max`: the most bytes besides those held before the step."""
        self.look()
        self.live_bytes_max = self.live_bytes

    def look(self) -> None:
        """Note which storages have been freed."""
        if self._is_copying:
            return
        gone = [identity for identity, (watch, _) in self._live.items() if watch.expired()]
        for identity in gone:
            nbytes = self._live.pop(identity)[1]
            self.live_bytes -= nbytes
            self._events.append(("free", identity, nbytes))

    def ran(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Note what an operator has allocated, and its operations."""
        if self._is_copying:
            return
        found = [each for each in tree_leaves(output) if is_fake(each)]
        for identity, nbytes in map(_storage_of, found):
            if identity not in self._held and identity not in self._live and identity not in self._copies:
                watch = StorageWatch(next(each for each in found if _storage_of(each)[0] == identity).untyped_storage())
                self._live[identity] = watch, nbytes
                self.live_bytes += nbytes
                self._events.append(("alloc", identity, nbytes))
        self.live_bytes_max = max(self.live_bytes_max, self.live_bytes)
        if found and not self._is_over:
            self._flops[-1] += flops_of(operator, args, kwargs, output)

    def _pack(self, tensor: Tensor) -> Packed:
        index, self._packs = self._packs, self._packs + 1
        self._module = self._pack_names[index] = running_module(self._module_names) or _ROOT
        identity, nbytes = _storage_of(tensor)
        if identity in self._held or self._is_over:
            return tensor, index
        if nbytes < self._min_nbytes:
            return tensor.detach(), index
        self.look()
        storage = self._saved.get(identity)
        if storage is None:
            storage = self._saved[identity] = SavedStorage(StorageWatch(tensor.untyped_storage()), identity, nbytes)
            storage.entries.append(index)
            self._all_saved.append(storage)
            self._events.append(("saved", index, 0))
            self.reason_to_keep(index, nbytes)
        else:
            self.order.duplicates[index] = storage.entries[0]
        self._advance()
        self._is_copying = True
        try:
            copy = self._fakes.like(tensor.detach())
            self._copies[_storage_of(copy)[0]] = StorageWatch(copy.untyped_storage())  # reserves the identity
            return copy, index
        finally:
            self._is_copying = False

    def _unpack(self, packed: Packed) -> Tensor:
        tensor, index = packed
        if not self._is_over:
            if not self._is_listening:
                self._is_listening = True
                call_at_end_of_backward(self.end)
            self._module = self._pack_names[index]
            self.unpacking(index)
        return tensor

    def _advance(self) -> None:
        self.look()
        for identity, storage in list(self._saved.items()):
            if storage.alive.expired():
                storage.last_forward = self._node
                del self._saved[identity]
        super()._advance()
        self._events.append(("node", self._node, 0))
        self._names.append(self._module)
        self._flops.append(0)

    # -- the result ---------------------------------------------------------------------------------------------------

    def recorded(
        self, batch: int | None, input_bytes: Mapping[int, int] | None = None, state_bytes: int = 0
    ) -> RecordedStep | None:
        """Return the step; None if no backward pass has run.

        Parameters
        ----------
        batch
            Its batch size.
        input_bytes
            Bytes of the model's inputs, by the identity of their storages.
        state_bytes
            Optimizer state that has been created since, in bytes.
        """
        if not self.finished:
            return None
        self.end()
        count = self.order.node_count
        pairs = [(storage, tensor_of(storage, self.order)) for storage in self._all_saved]
        saved = [(storage, tensor) for storage, tensor in pairs if tensor is not None]
        tensors = [tensor for _, tensor in saved]
        places = {tensor.id: storage.place for storage, tensor in saved}
        found = footprint(self._events, tensors, places, self._gradients, count)
        backward = set(self.order.backward_nodes)
        inputs = input_bytes or {}
        freed = {tensor.id for tensor in tensors if tensor.id not in found.produced and places[tensor.id] in inputs}
        freed_bytes = sum(inputs[places[number]] for number in freed)  # the trace counts them with its tensors
        produced = {**dict.fromkeys(freed, 0), **found.produced}
        held = self.held_bytes + state_bytes
        nodes = [
            Node(name, flops / self._device.flops, number in backward)
            for number, (name, flops) in enumerate(zip(self._names, self._flops, strict=True))
        ]
        trace = Trace(
            nodes=tuple(nodes),
            base_bytes=tuple(held + sum(inputs.values()) - freed_bytes + nbytes for nbytes in found.others),
            tensors=tuple(replace(each, produced=produced.get(each.id, each.packed)) for each in tensors),
            source="counted without data",
        )
        return RecordedStep(
            trace=trace,
            link=self._device.link,
            device="cpu",
            device_bytes=self._device.memory_bytes,
            host_bytes_max=0,
            may_try=False,
            batch=batch,
            fixed_bytes=tuple(held + nbytes for nbytes in found.gradients),
            no_recipes="recipes are compared in bits, which needs data",
            frees_inputs=bool(freed),
        )


class _Mode(OperatorMode):  # type: ignore[no-untyped-call]
    """Tells a counter of each operator."""

    def __init__(self, counter: StepCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._counter.look()
        output = func(*args, **(kwargs or {}))
        self._counter.ran(func, args, kwargs or {}, output)
        return output


def _storage_of(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage_identity(storage), storage.nbytes()
