"""Records one step, forward and backward: what autograd saves and when backward uses it.

`Profiler` also measures durations and memory, for a plan.

The first step of each signature is recorded; later steps follow a schedule that is computed from the record.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from offload._core import SwappedStorage
from offload.plan import unswapped_bytes
from offload.plan.trace import Node, Trace
from offload.profiling.allocations import StepAllocations
from offload.profiling.model_state import HeldBytes
from offload.profiling.saved_storage import SavedStorage, tensor_of
from offload.runtime.disturbance import disturb
from offload.runtime.engine import Engine, has_storage
from offload.runtime.executor import Stopwatch
from offload.runtime.hooks import innermost_step_hooks
from offload.runtime.recomputation import Recomputation
from offload.runtime.recomputed_storage import RecomputedStorage
from offload.runtime.schedule import PackEntry, StepOrder
from offload.runtime.weak import call_when_dead
from offload.torch_compat.autograd import call_at_end_of_backward
from offload.torch_compat.backward_pass import current_node
from offload.torch_compat.call_stack import running_module
from offload.torch_compat.compiled import is_compiled_node
from offload.torch_compat.modules import gradients_of

_ROOT = "forward"


class Recorder:
    """Records only the order of events of one forward pass and the backward pass over it.

    Every tensor that can be swapped is swapped, and loaded on demand.
    """

    caps_in_flight = True
    cursor = None
    copies = None
    reason = ""
    recomputation: Recomputation | None = None

    def __init__(self) -> None:
        self.order = StepOrder()
        self._slots: dict[int, weakref.ref[SwappedStorage]] = {}
        self._autograd_node: object = None

    @property
    def finished(self) -> bool:
        """Return whether backward has unpacked a tensor."""
        return bool(self.order.uses)

    def watches(self, pack_index: int) -> bool:
        """Return True: every unpack is reported."""
        return True

    def begin(self) -> None:
        """Do nothing when a hook begins."""

    def pass_by(self, pack_index: int) -> None:
        """Do nothing; not called, because every tensor that can be swapped is swapped."""

    def reason_to_keep(self, pack_index: int, nbytes: int) -> str | None:
        """Record the storage. Return None: it is swapped."""
        self.order.entries[pack_index] = PackEntry(pack_index, nbytes, packed=self._node)
        return None

    def need(self, pack_index: int) -> int:
        """Return an estimate of how late backward needs the tensor: sooner if it is saved later."""
        return 2**32 - pack_index

    def swapped(self, pack_index: int, slot: SwappedStorage, tensor: torch.Tensor) -> None:
        """Record that the copy-out of a storage has been started."""
        self._slots[pack_index] = weakref.ref(slot)
        self._advance()
        self.order.node_after_pack[pack_index] = self._node

    def duplicated(self, pack_index: int, slot: SwappedStorage | RecomputedStorage) -> None:
        """Record that another view of a storage was saved."""
        first = next((i for i, reference in self._slots.items() if reference() is slot), None)
        if first is not None:
            self.order.duplicates[pack_index] = first
            self._advance()
            self.order.node_after_pack[pack_index] = self._node

    def packed(self, pack_index: int) -> None:
        """Do nothing: called when the hook of this pack is about to return."""

    def unpacking(self, pack_index: int) -> None:
        """Record that backward needs the tensor of this pack."""
        node = current_node()
        if node is None:
            return  # code outside of backward reads grad_fn's attributes
        # A reference to the node would keep it alive. The Python object of a node may be a new one at each call, and
        # objects of different nodes may have the same address one after the other.
        identity = (node.name(), node._sequence_nr())
        if identity != self._autograd_node:
            self._autograd_node = identity
            self._advance()
            self.order.backward_nodes.append(self._node)
            if is_compiled_node(identity[0]):
                self.order.compiled_nodes.add(self._node)
        self.order.uses.append((self._node, pack_index))
        entry = self.order.entry_of(pack_index)
        if entry is not None:
            entry.first_backward = self._node if entry.first_backward is None else entry.first_backward
            entry.last_use = self._node

    def unpacked(self, pack_index: int) -> None:
        """Do nothing after the tensor of this pack has been loaded."""

    @property
    def _node(self) -> int:
        return self.order.node_count - 1

    def _advance(self) -> None:
        self.order.node_count += 1


@dataclass(frozen=True)
class Profile:
    """A recorded step that can be planned.

    Attributes
    ----------
    trace
        The trace; `base_bytes` includes the bytes in use before the step.
    gradient_bytes
        For each node: the bytes of gradients in `base_bytes` that this step allocated before the node began.
    members
        Pack indices of each of the trace's tensors, by id.
    held
        Bytes in use before the step.
    knows_temporaries
        Whether all allocations of the step were recorded, to its end.
    made_gradient_bytes
        The bytes of gradients that this step allocated, including those of its last node.
    frees_inputs
        Whether an input is among the trace's tensors: only the graph holds it after forward.
    """

    order: StepOrder
    trace: Trace
    members: Mapping[int, Sequence[int]]
    gradient_bytes: Sequence[int]
    held: HeldBytes
    knows_temporaries: bool
    made_gradient_bytes: int = 0
    frees_inputs: bool = False

    def with_shorter_nodes(self, node_seconds: Sequence[float]) -> Profile:
        """Return the profile with the shorter of two durations for each node: its own, and that of another step.

        The recorded step is often the first one that computes: it allocates all memory anew, and kernels are loaded. On
        a CPU, its nodes then take a quarter longer in total, and some of them ten times as long.

        Parameters
        ----------
        node_seconds
            The node durations of a step that was as recorded, in seconds. 0: the node did not begin.
        """
        pairs = zip(self.trace.nodes, node_seconds, strict=True)
        nodes = tuple(replace(node, seconds=min(node.seconds, seconds or node.seconds)) for node, seconds in pairs)
        return replace(self, trace=replace(self.trace, nodes=nodes))

    def room_bytes(self, limit_bytes: int | None, held: HeldBytes) -> int:
        """Return how many bytes the measurement of copy speed may use: `limit_bytes` less what `held` counts.

        Without a limit, what the profiled step would need without swapping takes its place. At least 1/64 of it may be
        used, so that blocks of a useful size can be copied in any case: with ``optimizer_state="auto"``, state that a
        plan will move out may still take all of the limit.
        """
        if limit_bytes is None:
            limit_bytes, held = max(unswapped_bytes(self.trace), default=0), self.held
        gradient_bytes = max(held.gradients, self.made_gradient_bytes)  # `held` may be from before backward
        return max(limit_bytes // 64, limit_bytes - held.kept - gradient_bytes)


class Profiler(Recorder):
    """Records a step for a plan: also its times, its memory and the names of its modules.

    The step needs the least memory possible: each copy-out ends before its pack returns.
    """

    def __init__(self, engine: Engine, model: nn.Module, held: HeldBytes) -> None:
        super().__init__()
        self.stopwatch = Stopwatch(engine)
        self._engine = engine
        self._held = held
        self._model = weakref.ref(model)
        self._gradient_places: set[int] = set()
        self._module_names = {id(module): name for name, module in model.named_modules()}
        self.rounds_since = 0  # number of steps that need a profile and began after this one
        self.is_alone = True  # whether no other step of the model began before this one's backward had ended
        self._watched_to_the_end: bool | None = None  # whether the step was over at the first `stop`; None before
        self._input_bytes: Mapping[int, int] = {}
        self._names = [_ROOT]
        self._module = _ROOT  # module whose tensor is being packed or unpacked
        self._pack_names: dict[int, str] = {}
        self._saved: dict[int, SavedStorage] = {}  # by identity of the storage, while it is alive
        self._all_saved: list[SavedStorage] = []
        hooks = innermost_step_hooks()
        self._hooks = weakref.ref(hooks) if hooks is not None else None
        self._memory = StepAllocations(engine.device)
        call_when_dead(self, partial(_unwatch, self._memory, self._all_saved))
        self._is_listening = False  # whether a callback at the end of the running backward pass is registered
        self._memory.begin()
        self._memory.node(0)

    @property
    def finished(self) -> bool:
        """Return whether the step is over, backward included."""
        return self.stopwatch.finished

    @property
    def is_lost(self) -> bool:
        """Whether no backward can begin any more, because the step's graph is freed.

        The graph's nodes hold the step's hooks. So once the hooks are freed, the graph is too.
        """
        return self._hooks is not None and self._hooks() is None

    def note_inputs(self, nbytes: Mapping[int, int]) -> None:
        """Set the bytes of the inputs, by the identity of their storages.

        They are among the bytes in use before the step. An input that only the graph holds can be swapped: if its bytes
        counted there too, they would count twice.
        """
        self._input_bytes = nbytes

    def stop(self) -> bool:
        """Stop recording allocations. Return False if another thread has to do it."""
        if self._watched_to_the_end is None:
            self._watched_to_the_end = self.finished
        model = self._model()
        if model is not None and not self._gradient_places:
            made = gradients_of(model.parameters())
            self._gradient_places = {self._engine.address_of(gradient) for gradient in made if has_storage(gradient)}
        return self._memory.stop()

    def watches(self, pack_index: int) -> bool:
        """Record the module of this pack. Return True: every unpack is reported."""
        self._note_module(pack_index)
        return True

    def begin(self) -> None:
        """Record that a hook begins."""
        self.stopwatch.begin()

    def swapped(self, pack_index: int, slot: SwappedStorage, tensor: torch.Tensor) -> None:
        """Record a storage whose copy-out has been started, and wait until the copy-out ends."""
        self._note_module(pack_index)
        identity = self._engine.identity(tensor)
        storage = self._saved.get(identity)
        if storage is None or storage.last_forward is not None:
            nbytes, input_bytes = tensor.untyped_storage().nbytes(), self._input_bytes.get(identity, 0)
            storage = self._saved[identity] = SavedStorage(
                self._engine.watch_storage(tensor),
                self._engine.address_of(tensor),
                nbytes,
                # On an accelerator, the bytes in use before the step include all of its storage.
                input_bytes=nbytes if input_bytes and self._engine.is_accelerator else input_bytes,
                is_held_state=identity in self._held.storages,
                may_be_reloaded=bool(self.order.backward_nodes) and not tensor.untyped_storage().resizable(),
            )
            self._all_saved.append(storage)
        storage.entries.append(pack_index)
        self._memory.saved(storage.entries[0])
        slot.wait_copied_out()
        super().swapped(pack_index, slot, tensor)

    def duplicated(self, pack_index: int, slot: SwappedStorage | RecomputedStorage) -> None:
        """Record that another view of a storage was saved."""
        self._note_module(pack_index)
        super().duplicated(pack_index, slot)

    def packed(self, pack_index: int) -> None:
        """Record the end of the hook of this pack."""
        self.stopwatch.end(None)

    def unpacking(self, pack_index: int) -> None:
        """Record that backward needs the tensor of this pack."""
        self.stopwatch.begin()
        self.stopwatch.listen_for_the_end()
        if not self._is_listening and current_node() is not None:
            self._is_listening = True
            call_at_end_of_backward(self._end_backward)
        self._module = self._pack_names.get(pack_index, _ROOT)
        super().unpacking(pack_index)
        self._memory.reload(begins=True)

    def unpacked(self, pack_index: int) -> None:
        """Record that the tensor of this pack has been loaded."""
        self._memory.reload(begins=False)
        self.stopwatch.end(pack_index)

    def _end_backward(self) -> None:
        self._is_listening = False
        self._memory.pause()

    def _advance(self) -> None:
        for identity, storage in list(self._saved.items()):
            if storage.alive.expired():
                storage.last_forward = self._node
                del self._saved[identity]
        super()._advance()
        node = self._node
        self.stopwatch.arrive(node)
        self._memory.node(node)
        self._names.append(self._module)

    def _note_module(self, pack_index: int) -> None:
        """Record the running module as the name of this pack."""
        self._module = self._pack_names[pack_index] = running_module(self._module_names) or _ROOT

    def profile(self) -> Profile | None:
        """Return the profile; None if the step is not over."""
        node_count = self.order.node_count
        measured = self.stopwatch.measured(node_count)
        if measured is None or not self.stop():
            return None
        disturb()
        members: dict[int, Sequence[int]] = {}
        places = {storage.entries[0]: storage.place for storage in self._all_saved}
        inputs: dict[int, int] = {}
        saved = []
        for storage in self._all_saved:
            tensor = tensor_of(storage, self.order)
            if tensor is not None:
                members[tensor.id] = tuple(storage.entries)
                inputs[tensor.id] = storage.input_bytes
                saved.append(tensor)
        backward = set(self.order.backward_nodes)
        found = self._memory.footprint(saved, places, self._gradient_places, node_count)
        knows = self._memory.complete and bool(self._watched_to_the_end)
        # A storage that was allocated in the step is no input: the identity of a freed input may be in use again.
        twice = {number: nbytes for number, nbytes in inputs.items() if nbytes and number not in found.produced}
        held_bytes = max(0, self._held.total - sum(twice.values()))
        others = self._from_before(found.produced) if knows else []
        held_bytes += sum(each.nbytes for each in others if each.entries[0] not in members)
        from_before = dict.fromkeys([*twice, *(each.entries[0] for each in others)], 0)
        produced = {**from_before, **found.produced}
        trace = Trace(
            nodes=tuple(
                Node(name, seconds, number in backward)
                for number, (name, seconds) in enumerate(zip(self._names, measured.node_seconds, strict=True))
            ),
            base_bytes=tuple(held_bytes + nbytes for nbytes in found.others),
            tensors=tuple(replace(tensor, produced=produced.get(tensor.id, tensor.packed)) for tensor in saved),
            source=f"recorded on {self._engine.device}, torch {torch.__version__}",
        )
        gradients, made = found.gradients, found.made_gradients
        return Profile(self.order, trace, members, gradients, self._held, knows, made, frees_inputs=bool(twice))

    def _from_before(self, produced: Mapping[int, int]) -> list[SavedStorage]:
        """Return the storages that are older than the step and not counted in the bytes in use before it.

        For example a loss's target, or a batch in an object of the program's own. None on an accelerator, where these
        bytes include all storages.
        """
        if self._engine.is_accelerator:
            return []
        unknown = [each for each in self._all_saved if each.entries[0] not in produced and not each.may_be_reloaded]
        return [each for each in unknown if not each.input_bytes and not each.is_held_state]


def _unwatch(memory: StepAllocations, saved: list[SavedStorage]) -> None:
    for storage in saved:
        storage.alive.close()
    memory.stop()
