"""Keeps a model's frozen parameters, or all of them, in the swap store while no module uses them.

The session makes one `ParameterMover`. It wraps the forward of each module that has such parameters: before a call, the
wrapper brings the module's own parameters (not those of its submodules) into memory. A compiled part is wrapped as a
whole: before a call, all of its parameters are brought into memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.parameters.gathered import CompiledCall, Forward, Gathered, Pass, moved_in
from offload.parameters.moved_parameter import MovedParameter, is_movable
from offload.parameters.saved_parameter import SavedParameter
from offload.parameters.stored_parameter import StoredParameter
from offload.parameters.window import Window
from offload.runtime.engine import REFUSALS, Engine
from offload.runtime.forward_wrapper import ForwardWrapper
from offload.runtime.hooks import StepHooks
from offload.torch_compat.compiled import compiled_parts, is_compiled, untraceable_wrappers, wrappers_of
from offload.torch_compat.held_objects import is_saved_itself
from offload.torch_compat.holders import holds_alone
from offload.torch_compat.modules import is_sharded, own_parameters, scripted_parameters, walk
from offload.torch_compat.optimizers import allow_foreach
from offload.torch_compat.overrides import requires_grad_of, unseen
from offload.units import format_bytes

__all__ = ["ParameterCounts", "ParameterMover", "copied_bytes_max"]

AHEAD_BYTES = 64 << 20
BEHIND_BYTES = 64 << 20


def copied_bytes_max(memory_limit: int | None) -> tuple[int, int]:
    """Return how many bytes of parameters may be read ahead, and how many may wait to be written."""
    if memory_limit is None:
        return AHEAD_BYTES, BEHIND_BYTES
    return min(AHEAD_BYTES, memory_limit // 16), min(BEHIND_BYTES, memory_limit // 8)


@dataclass
class ParameterCounts:
    """How many of a model's parameters move, and how many bytes.

    Attributes
    ----------
    which : str
        Which parameters may leave: "all" or "frozen".
    tensors, nbytes : int
        Parameters that leave memory while no module uses them, and their bytes.
    trained : int
        How many of these parameters are trained.
    passes : int
        Forwards of the model. A pass lasts until the next one begins.
    in_bytes, out_bytes : int
        Bytes read so far, and bytes written so far. The first copy of each parameter does not count as written.
    rewritten : int
        How often a parameter was written again, after an update or a change by the program.
    held : int
        Parameters that stay because another tensor, or a NumPy array, shares their memory, or because a pending
        backward pass reads it.
    failed : int
        How often a parameter stayed because it could not be written; each try counts. `failure` is the latest error.
    is_sharded : bool
        Whether all parameters stay because FSDP shards the model, or a module in it.
    whole : str
        Name of the compiled part (or "the model") that has more than half of the bytes that leave. While it runs, all
        of its parameters are in memory. Empty if there is no such part.
    """

    which: str
    tensors: int = 0
    nbytes: int = 0
    trained: int = 0
    passes: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    rewritten: int = 0
    held: int = 0
    failed: int = 0
    failure: str = ""
    is_sharded: bool = False
    whole: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.tensors:
            return "no parameter leaves memory"
        passes = max(self.passes, 1)
        told = f"per step {format_bytes(round(self.in_bytes / passes))} read"
        if self.trained:
            told += f", {format_bytes(round(self.out_bytes / passes))} written"
        return f"{self.tensors} tensors, {format_bytes(self.nbytes)}, leave memory between uses; {told}"

    def notes(self) -> Iterator[str]:
        """Yield notes for the user."""
        if self.failed:
            yield f"parameters stayed {self.failed} times because they could not be written: {self.failure}"
        if self.held:
            yield (
                f"{self.held} parameters stay because another tensor, a NumPy array or a pending backward pass uses "
                "their memory"
            )
        if not self.tensors and (self.is_sharded or not self.held):
            kind = "" if self.which == "all" else f"{self.which} "
            why = f"the model has no {kind}ordinary nn.Parameter of at least min_tensor_bytes"
            if self.is_sharded:
                why = "FSDP shards the parameters, and gathers and frees them itself"
            yield f'parameters="{self.which}" moves nothing: {why}'
        if self.whole:
            yield (
                f"all moved parameters of {self.whole} are in memory while it runs, because it is one compiled graph: "
                "compile smaller parts, such as for block in model.blocks: block.compile()"
            )


class ParameterMover:
    """Moves the parameters of a model.

    Parameters
    ----------
    engine
        Copies the parameters. It is used for nothing else.
    min_nbytes
        Smaller parameters stay.
    name_of
        The name of a parameter, for errors.
    memory_limit
        Memory limit of the model, in bytes. The bytes read ahead and the bytes being written are limited to small
        shares of it, but one parameter is always read ahead.
    also_trained
        Whether trained parameters leave, and not only frozen ones.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        min_nbytes: int,
        name_of: Callable[[Tensor], str],
        memory_limit: int | None = None,
        *,
        also_trained: bool = False,
    ) -> None:
        self.counts = ParameterCounts("all" if also_trained else "frozen")
        self.engine = engine
        self._model = weakref.ref(model)
        self._min_nbytes = min_nbytes
        self._name_of = name_of
        self._memory_limit, self._in_flight_bytes_max = memory_limit, engine.in_flight_bytes_max
        ahead_bytes, behind_bytes = self._copied_bytes_max(memory_limit)
        self.window = Window(ahead_bytes, moves_trained=also_trained)
        if also_trained:
            allow_foreach(MovedParameter)
        self._passes = Pass()
        self._pid = os.getpid()
        self._is_open = True
        self._is_whole = False  # the whole model is one compiled graph
        self._wrapped: dict[int, weakref.ref[Any]] = {}  # ForwardWrapper or CompiledCall by the identity of its module
        self._compiled: frozenset[int] = frozenset()
        self._largest_bytes = 0  # the most bytes of parameters that one module or compiled part uses
        engine.in_flight_bytes_max = behind_bytes
        try:
            unseen(self._leave, model)
            engine.drain()
        except BaseException:  # also after an interrupt
            self.close()
            raise

    # -- what leaves --------------------------------------------------------------------------------------------------

    def _leave(self, model: nn.Module) -> None:
        """Move out all parameters that may leave and are still ordinary ones; none if FSDP shards the model."""
        held = 0
        self.counts.is_sharded = is_sharded(model)
        if self.counts.is_sharded:
            return
        modules = walk(model)
        scripted = scripted_parameters(modules)
        for module in modules:
            for parameter in own_parameters(module):
                is_plain = type(parameter) is nn.Parameter and "_offload_stored" not in parameter.__dict__
                if is_plain and id(parameter) not in scripted:
                    held += self.leave(parameter)
        self.counts.held = held

    def leave(self, parameter: nn.Parameter) -> bool:
        """Move a parameter out if it is movable. Returns True if it stays because something else uses its memory."""
        trained = self.window.moves_trained
        with self.window.lock:
            if not is_movable(parameter, self.engine.device, self._min_nbytes, also_trained=trained):
                return False
            if not holds_alone(parameter) or is_saved_itself(parameter):
                return True
            try:
                StoredParameter(parameter, self.engine, self.window, self._name_of).put_away(parameter)
            except REFUSALS as error:
                self.window.refuse(error)
        self.engine.limit_in_flight()
        return False

    def wrap(self) -> None:
        """Wrap the modules, so that their parameters are in memory during calls. Existing wrappers are reused."""
        model = self._model()
        if model is not None:
            self._is_whole = is_compiled(model) or bool(wrappers_of(model))
            self._wrap(model, self._around_model(model))
            for outer in untraceable_wrappers(model):
                self._wrap(outer, self._around_model(model))
            self._wrap_parts(model)

    def _around_model(self, model: nn.Module) -> Callable[[Any, Any], AbstractContextManager[object]]:
        return partial(self._forward, weakref.ref(model))

    def _wrap_parts(self, model: nn.Module) -> None:
        modules = walk(model)
        compiled = frozenset(id(module) for module in modules if is_compiled(module))
        if compiled != self._compiled:
            self._unwrap(but=model)
            self._compiled = compiled
        inside: set[int] = set()
        largest = 0
        self.counts.whole, most = "", 0
        if self._is_whole or is_compiled(model):
            inside, largest = {id(module) for module in modules}, self.counts.nbytes
            self.counts.whole = "the model"
        elif compiled:
            for name, part, slot in list(compiled_parts(model)):
                nbytes = sum(record.nbytes for record, _ in moved_in(part))
                inside |= {id(module) for module in walk(part)}
                largest = max(largest, nbytes)
                if nbytes:
                    around = partial(self._gathered, weakref.ref(part), True)
                    self._wrap(part, around, slot)
                if 2 * nbytes > self.counts.nbytes > 0 and nbytes > most:
                    self.counts.whole, most = name, nbytes
        for module in modules:
            if id(module) in inside:
                continue
            nbytes = sum(record.nbytes for record in _records(module))
            largest = max(largest, nbytes)
            if nbytes and module is not model:
                self._wrap(module, partial(self._gathered, weakref.ref(module), False))
        self._largest_bytes = largest

    def _wrap(
        self, module: nn.Module, around: Callable[[Any, Any], AbstractContextManager[object]], slot: str = "forward"
    ) -> None:
        known = self._wrapped.get(id(module))
        if known is not None and known() is not None and module.__dict__.get(slot) is not None:
            return
        wrapper: ForwardWrapper | CompiledCall
        own = module.__dict__.get("forward")
        if slot != "forward":
            wrapper = CompiledCall(module, around)
        elif isinstance(own, ForwardWrapper) and own.is_of(module):
            wrapper = own
            wrapper.enter_also(around)
        else:
            wrapper = ForwardWrapper(module, around)
        self._wrapped[id(module)] = weakref.ref(wrapper)

    def _unwrap(self, but: nn.Module | None = None) -> None:
        for identity, reference in list(self._wrapped.items()):
            wrapper = reference()
            if but is not None and identity == id(but):
                continue
            del self._wrapped[identity]
            if isinstance(wrapper, ForwardWrapper) and wrapper.enters_also:
                wrapper.enter_also(None)
            elif wrapper is not None:
                wrapper.undo()

    # -- around calls -------------------------------------------------------------------------------------------------

    def _gathered(self, module: weakref.ref[nn.Module], whole: bool, *_: object) -> Gathered:
        return Gathered(module() if self._is_open else None, self.window, whole=whole)

    def _forward(self, model: weakref.ref[nn.Module], *_: object) -> Gathered:
        found = model() if self._is_open else None
        whole = self._is_whole or (found is not None and is_compiled(found))
        return Forward(found, self.window, self._passes, self.begin_pass, whole=whole)

    def begin_pass(self) -> None:
        """Begin a forward of the model. Move out what the program has read, changed or frozen since the last one."""
        model = self._model()
        if model is None or not self._is_open or os.getpid() != self._pid:
            return
        self.counts.passes += 1
        self.window.ahead.begin_pass(model.training and torch.is_grad_enabled())
        for record, parameter in moved_in(model):
            self.window.look(parameter, record)
        unseen(self._leave, model)
        self.window.begin_pass()
        self.look()
        self._wrap_parts(model)

    def hooks_before(self, hooks: StepHooks) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return pack and unpack hooks for parameters. They pass all other tensors to the hooks of a step."""
        return partial(_pack, self.window), _unpack

    # -- figures ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Bring `counts` up to date."""
        counts, model, window = self.counts, self._model(), self.window
        if self._is_open and model is not None:  # of a model that was freed, they stay as they were
            found = list(moved_in(model))
            counts.tensors, counts.nbytes = len(found), sum(record.nbytes for record, _ in found)
            counts.trained = sum(requires_grad_of(parameter) for _, parameter in found)
        counts.in_bytes, counts.out_bytes, counts.rewritten = window.in_bytes, window.out_bytes, window.rewritten
        counts.failed, counts.failure = self.engine.failed + window.refused, self.engine.failure or window.refusal

    def bytes_in_memory_max(self, memory_limit: int | None = None) -> int:
        """Return an upper bound on the bytes of moved parameters in memory at a time while the model runs.

        `memory_limit`: as in `bytes_copied_max`.
        """
        present = self.window.nbytes()
        return min(self.counts.nbytes, max(present, self._largest_bytes) + self.bytes_copied_max(memory_limit))

    def bytes_away_min(self) -> int:
        """Return a lower bound on the bytes of moved parameters that are away while the model runs.

        Parameters that the program has brought back, such as for `state_dict()`, are not taken into account.
        """
        self.look()
        return max(0, self.counts.nbytes - self._largest_bytes - self.bytes_copied_max())

    def bytes_copied_max(self, memory_limit: int | None = None) -> int:
        """Return an upper bound on the bytes of moved parameters that are read ahead or being written at a time.

        Parameters
        ----------
        memory_limit
            The model's memory limit, in bytes. Default: the present one.
        """
        ahead, behind = self._copied_bytes_max(self._memory_limit if memory_limit is None else memory_limit)
        behind = behind if self.counts.trained else 0  # only updates are written
        return min(self.counts.nbytes, max(ahead, self._largest_bytes) + behind)

    def _copied_bytes_max(self, memory_limit: int | None) -> tuple[int, int]:
        ahead, behind = copied_bytes_max(memory_limit)
        return ahead, min(self._in_flight_bytes_max, behind)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Bring all parameters back for good.

        Raises
        ------
        ParameterError
            A parameter cannot be read. It and those after it are still away. The next call tries again.
        """
        if os.getpid() != self._pid:  # in a forked child the store is that of its parent
            return
        self.look()
        model = self._model()
        found = list(moved_in(model)) if model is not None else []
        with self.window.lock:
            for number, (record, parameter) in enumerate(found):
                for following, _ in found[number + 1 : number + 2]:
                    stored = following.content.stored
                    if stored is not None and not following.is_in_memory():
                        stored.prefetch()
                record.forget(parameter)
        self._is_open = False
        self._unwrap()
        self.window.ahead.close()
        self.engine.drain()


def _pack(window: Window, hooks: StepHooks, tensor: Tensor) -> Any:
    saved = window.saved(tensor)
    return hooks.pack(tensor) if saved is None else saved


def _unpack(hooks: StepHooks, packed: Any) -> Tensor:
    return packed.restore() if isinstance(packed, SavedParameter) else hooks.unpack(packed)


def _records(module: nn.Module) -> list[StoredParameter]:
    found = (parameter.__dict__.get("_offload_stored") for parameter in own_parameters(module))
    return [record for record in found if isinstance(record, StoredParameter)]
