"""Moves an optimizer's state to the swap store after each step, and back for the next one.

A `StateMover` uses torch's hooks around `step` and `load_state_dict`. The session makes one for each optimizer.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offload.optimizer_state import gradients_in_step
from offload.optimizer_state.chunks import ChunkedStep, is_known, split, stepping_nothing
from offload.optimizer_state.counts import StateCounts
from offload.optimizer_state.divisible import HELD_ONCE, why_it_stays, why_not_divided
from offload.optimizer_state.loading import defer
from offload.optimizer_state.read_ahead import EarlyReads, read_ahead
from offload.optimizer_state.separable import is_separable
from offload.optimizer_state.share import Passes, Share
from offload.optimizer_state.streamed_state import SPILL_FIRST, StreamedState
from offload.optimizer_state.update_room import UpdateRoom, step_divided
from offload.optimizer_state.write_behind import WriteBehind
from offload.runtime.engine import Engine
from offload.torch_compat.compiled import opaque_in_step, untraced
from offload.torch_compat.optimizers import step_behind_hooks
from offload.torch_compat.tensors import local_of

__all__ = ["StateMover"]

log = logging.getLogger("offload")

# Limits on the bytes of state in memory during a step. The state of a single parameter may exceed each of them, and the
# copy-ins of the next chunk are always started.
CHUNK_BYTES = 32 << 20  # a chunk: parameters that are updated together
AHEAD_BYTES = 64 << 20  # copy-ins, also of gradients, that were started for later chunks
BEHIND_BYTES = 64 << 20  # copy-outs that have not ended; `StateInPasses` allows more where a plan leaves memory free

STAYS_BY_PLAN = "steps stay within memory_limit without swapping out this state"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StateMover:
    """Keeps one optimizer's state in the store between its steps.

    Parameters
    ----------
    engine
        Copies the optimizer's state, and its gradients if a `GradientMover` moves them; nothing else uses this engine.
    min_nbytes
        Tensors smaller than this stay in memory.
    name_of
        Returns the name of a parameter, for errors.
    behind, passes
        The limit on copy-outs that have not ended, and the count of forward passes. The optimizers of a model share
        them.
    moved
        Identities of the parameters whose state leaves memory; None for all.
    limit_bytes
        The memory limit. If the temporaries of a step might not fit into what is left of it, the step is divided even
        if all state stays (`UpdateRoom`).
    steps
        Whether the mover runs the optimizer's steps, in chunks. If not, `StepInBackward` updates the parameters, and
        calls the mover to bring in and move out their state.

    Attributes
    ----------
    share
        The parameters whose state leaves memory, and how long their updates take.
    early
        Starts copy-ins in backward, before the step.
    is_whole
        Whether all state was in memory during the latest step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Engine,
        min_nbytes: int,
        name_of: Callable[[Tensor], str],
        behind: WriteBehind | None = None,
        passes: Passes | None = None,
        *,
        moved: frozenset[int] | None = None,
        limit_bytes: int | None = None,
        steps: bool = True,
    ) -> None:
        self.counts = StateCounts(type(optimizer).__name__, why_it_stays(optimizer))
        self.engine = engine
        self._optimizer = weakref.ref(optimizer)
        self._min_nbytes = min_nbytes
        self._name_of = name_of
        self._is_separable: bool | None = True if is_known(optimizer) else None
        self._state: StreamedState | None = None
        self._behind = behind or WriteBehind()
        self.share = Share(engine, passes or Passes())
        self.share.moved = moved
        self._room = UpdateRoom(engine.device, limit_bytes)
        self.early = EarlyReads(self.counts)
        self._behind.early.add(self.early)
        self.is_whole = False
        self._hooks: list[RemovableHandle] = []
        if self.counts.stays:
            return
        try:
            self._begin(optimizer, steps=steps)
        except BaseException:  # also after an interrupt
            self.close()
            raise

    def _begin(self, optimizer: Optimizer, *, steps: bool) -> None:
        if steps:
            self._hooks += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(partial(defer, self, self._min_nbytes)))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(self._after_load_state_dict, prepend=True))
        self.counts.stays = STAYS_BY_PLAN if self.share.is_empty else ""
        self._leave_at_once(optimizer)

    def close(self) -> None:
        """Bring all state back and remove the hooks.

        Raises
        ------
        OptimizerStateError
            Some state cannot be read. Call `close` again, or load a checkpoint with `load_state_dict` first.
        """
        self.early.drop(self._state)
        optimizer = self._optimizer()
        if optimizer is not None:
            self._bring_back(optimizer)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.engine.drain()

    def follow(self, moved: frozenset[int] | None) -> None:
        """Move out the state of these parameters now and after each step.

        Other state in the store comes back when a step uses it, and then stays in memory.

        Parameters
        ----------
        moved
            Identities of these parameters; None for all.
        """
        self.share.moved = moved
        optimizer = self._optimizer()
        if optimizer is None or not self._hooks or self.share.is_empty:
            return
        if self._state is not None:
            self._leave_all(self._streamed(optimizer))
            return
        self.counts.stays = why_it_stays(optimizer)
        self._leave_at_once(optimizer)

    # -- the state ----------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, as long as it is alive."""
        return self._optimizer()

    @property
    def state(self) -> StreamedState | None:
        """The optimizer's state, if this mover moves it."""
        return self._state

    @property
    def rests(self) -> bool:
        """Whether this mover moves no state: none is to leave memory, and none is in the store."""
        return self._state is None and (self.share.is_empty or bool(self.counts.stays))

    def _streamed(self, optimizer: Optimizer) -> StreamedState:
        """Return `optimizer.state` as a `StreamedState`; wraps it first if it is another dictionary."""
        if self._state is None or optimizer.state is not self._state:
            self._state = StreamedState(optimizer.state, self.engine, self._min_nbytes, self._name_of)
            optimizer.state = self._state
        return self._state

    def _bring_back(self, optimizer: Optimizer) -> None:
        state = self._streamed(optimizer) if self._state is not None else None
        if state is not None:
            self._fetch_all(state)
            self._state = None
            state.is_moved = False
            if sys.getrefcount(optimizer.state) == HELD_ONCE + 1:  # no other code holds it
                optimizer.state = defaultdict(dict, dict.items(state))

    def _leave(self, state: StreamedState, key: Any, need: int, own_holders: int = 0) -> None:
        if key not in self.share:
            state.stay(key)
            return
        # If a tensor came back before its copy-out had ended, the engine holds its memory until `collect`.
        self.engine.collect()
        self.counts.out_bytes += state.leave(key, SPILL_FIRST + need, own_holders)
        self.limit_writing()

    def limit_writing(self) -> None:
        """Wait until copy-outs hold few enough bytes (`WriteBehind.allowed`), or only the latest of them remains."""
        self._behind.wait(self.engine, self._behind.limit_in_update(BEHIND_BYTES))

    def _leave_all(self, state: StreamedState) -> None:
        """Move out all state that should leave and is still in memory.

        After a step in chunks, this is state that the step did not use, or that the program has read.
        """
        for need, key in enumerate(list(state)):
            self._leave(state, key, need)
        self.look()

    def _leave_at_once(self, optimizer: Optimizer) -> None:
        """Move out the state that is there, except tensors that the program holds: it may read or write them later."""
        if not self.rests:
            self._leave_all(self._streamed(optimizer))

    def look(self) -> None:
        """Bring `counts` up to date."""
        counts, state = self.counts, self._state
        if state is not None:
            counts.nbytes, counts.tensors = state.nbytes, sum(map(len, state.tensors.values()))
            self.engine.collect()
            counts.held = sum(state.held.values())
            counts.failed = self.engine.failed + state.refused
            counts.failure = self.engine.failure or state.refusal

    # -- step ---------------------------------------------------------------------------------------------------------

    @opaque_in_step
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        return untraced(self._begin_step, optimizer, args, kwargs)

    def _begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        has_closure = closure is not None
        self.share.begin(has_closure=has_closure)
        if self.share.is_empty and self._state is not None:
            self._bring_back(optimizer)
            self.counts.stays, self.counts.nbytes, self.counts.tensors = STAYS_BY_PLAN, 0, 0
        is_at_rest = self.rests
        chunk_bytes = self._room.chunk_bytes(optimizer, has_closure=has_closure) if is_at_rest else CHUNK_BYTES
        if chunk_bytes is None:
            return None
        step = step_behind_hooks(optimizer)
        why_whole = self._why_whole(optimizer, step, (args, kwargs), has_closure=has_closure)
        self.counts.note_step(why_whole, is_at_rest=is_at_rest)
        if not is_at_rest:
            state = self._streamed(optimizer)
            self.engine.collect()
            self.is_whole = bool(why_whole)
            if why_whole:
                self.early.expected = ()
                self._fetch_all(state)
                gradients_in_step.bring_back(each for group in optimizer.param_groups for each in group["params"])
        if why_whole:
            return None
        grad_mode = torch.is_grad_enabled()

        def step_in_chunks() -> Any:
            loss = closure() if closure is not None else None
            with torch.set_grad_enabled(grad_mode):
                untraced(self._step_now, optimizer, step, chunk_bytes)
            return loss

        # The class's step function is called with an optimizer that has no parameters in place of `optimizer`, so that
        # it only calls the closure. It does so after all pre-hooks: one registered later can still change gradients.
        return (stepping_nothing(optimizer, has_state=not is_at_rest),), {"closure": opaque_in_step(step_in_chunks)}

    def _why_whole(
        self, optimizer: Optimizer, step: Callable[..., Any], arguments: Arguments, *, has_closure: bool
    ) -> str:
        """Return why a step cannot be divided into chunks; empty if it can."""
        args, kwargs = arguments
        why = why_not_divided(optimizer, step)
        if why:
            return why
        if len(args) > 2 or kwargs.keys() - {"closure"}:
            return "its step was called with arguments other than a closure"
        if self._is_separable is None:
            takes_closure = "closure" in inspect.signature(step).parameters
            self._is_separable = takes_closure and is_separable(optimizer, step)
        if not self._is_separable:
            return "its updates may not be bit-identical if only a few parameters are stepped at a time"
        return "it may call its closure more than once" if has_closure and not is_known(optimizer) else ""

    def _step_now(self, optimizer: Optimizer, step: Callable[..., Any], chunk_bytes: int) -> None:
        if not self._hooks:  # the closure or a hook has closed this mover since the step began
            step(optimizer)
        elif self.rests:
            step_divided(optimizer, step, chunk_bytes)
        else:
            self._step(self._streamed(optimizer), ChunkedStep(optimizer, step))

    # -- for `StepInBackward` -----------------------------------------------------------------------------------------

    def begin_step(self, optimizer: Optimizer) -> None:
        """Begin a step, at its first update in backward or in `optimizer.step()`."""
        self.share.begin()
        self._streamed(optimizer)
        self.engine.collect()
        self.counts.steps += 1

    def begin(self, param: Tensor) -> int:
        """Start the copy-ins of a parameter's state. Returns the bytes."""
        return self._known.begin(param)

    def fetch(self, param: Tensor) -> None:
        """Bring a parameter's state into memory."""
        self.counts.in_bytes += self._known.fetch(param)

    def leave(self, param: Tensor, need: int) -> None:
        """Start the copy-outs of a parameter's state. `need`: its place in the order in which state is needed again."""
        self._leave(self._known, param, need, own_holders=1)  # `BegunStep`

    def abandon(self, param: Tensor) -> None:
        """Free the memory of copy-ins that are no longer needed."""
        self._known.abandon(param)

    def step(self, step: ChunkedStep) -> None:
        """Run a step in chunks."""
        self._step(self._known, step)

    @property
    def _known(self) -> StreamedState:
        assert self._state is not None
        return self._state

    @property
    def largest_bytes(self) -> int:
        """The largest amount of state that leaves memory for any one parameter, in bytes."""
        state = self._state
        return max(map(state.nbytes_of, state.tensors), default=0) if state is not None else 0

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _step(self, state: StreamedState, step: ChunkedStep) -> None:
        chunks = list(
            split(step.params, lambda param: state.nbytes_of(param) or 2 * local_of(param).nbytes, CHUNK_BYTES)
        )
        begun = done = need = 0
        self.early.drop(state, needed=step.params)
        try:
            for number, chunk in enumerate(chunks or [[]]):  # a step without gradients may still change counters
                begun = read_ahead(state, chunks, number, begun, AHEAD_BYTES)
                for param in chunk:
                    self.counts.in_bytes += state.fetch(param)
                    self.early.use(param)
                with gradients_in_step.lent(chunk, step), self.share.timed(chunk):
                    step.run(chunk)
                for param in chunk:
                    self._leave(state, param, need)
                    need += 1
                done += 1
        finally:
            step.end()
            for chunk in chunks[done:begun]:  # after an error
                for param in chunk:
                    state.abandon(param)
                    gradients_in_step.abandon(param)
            self.early.end(state, step.params)

    def _fetch_all(self, state: StreamedState) -> None:
        keys = list(state)
        for number, key in enumerate(keys):
            for following in keys[number + 1 : number + 2]:
                state.begin(following)
            self.counts.in_bytes += state.fetch(key)

    @opaque_in_step
    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        untraced(self.end_step, optimizer)

    def end_step(self, optimizer: Optimizer) -> None:
        """End the step: move out the state that should leave and is in memory."""
        if not self._hooks:
            return
        self.share.count_passes()
        if self.rests:
            self.share.end(optimizer)
            return
        self._leave_all(self._streamed(optimizer))

    def _after_load_state_dict(self, optimizer: Optimizer) -> None:
        if self.rests:
            return
        state = self._streamed(optimizer)
        for need, key in enumerate(state.owned()):
            self._leave(state, key, need, own_holders=1)  # `load_state_dict`, until it returns
