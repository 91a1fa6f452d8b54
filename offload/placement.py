"""One enabled model on one device: its engine, what of the model may move, and who decides what does.

On the data path: every pack asks here before the engine moves a tensor. A model that is moved gets another placement.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from offload import oom, planning
from offload.engine import Engine, has_storage
from offload.held import HeldMemory
from offload.options import Options
from offload.plan import Link
from offload.planning import ByHand, ByPlan, Pursuit
from offload.report import Counts
from offload.schedule import StepOrder

__all__ = ["Placement"]

log = logging.getLogger("offload")

UNHELD_MAX = 4096


class Placement:
    """Answers what hooks ask (`hooks.Policy`), for the rounds that begin while the model is on this device.

    Parameters
    ----------
    device
        Where the model is.
    link
        Measures the link; called at the first plan.
    recorded
        Told of every step that has been recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        options: Options,
        engine: Engine,
        link: Callable[[], Link],
        recorded: Callable[[StepOrder], None],
    ) -> None:
        self.device = device
        self.options = options
        self.engine = engine
        self.counts = Counts()
        self.planning: ByHand | ByPlan
        self.held: HeldMemory | None = None
        self.devices = {device}  # of the model's parameters and buffers, at the latest look
        self._pid = os.getpid()
        self._model = weakref.ref(model)
        self._local = threading.local()
        self._parameters: set[int] = set()
        # Looked for among all of the model's in vain: a step must not do that once for each of its masks. A storage
        # that became a parameter since is seen at the next forward.
        self._unheld: set[int] = set()
        self._warned: set[type] = set()
        fixed = options.n_tensors == 0 or (options.n_tensors is not None and options.lookahead_nodes is not None)
        if fixed and planning.on_profile is None:
            self.planning = ByHand(options, engine, self.counts, recorded)
        else:
            self.held = HeldMemory(model, engine)
            self.planning = ByPlan(options, engine, self.counts, recorded, link, self.held.look)
            self.held.on_optimizer_step(self.planning.stop)

    def settle(self) -> Pursuit | None:
        """Read what the last steps have measured; the pursuit of the latest signature, None by hand."""
        return self.planning.settle() if isinstance(self.planning, ByPlan) else None

    def close(self, *, trim: bool) -> None:
        """Watch nothing any longer, and wait for the copies under way. Its graphs can still be differentiated.

        Parameters
        ----------
        trim
            Whether to give back what the store keeps for later; nobody else may be using it.
        """
        if self.held is not None:
            self.held.close()
        self.planning.stop()
        if os.getpid() != self._pid:
            return  # copies and store are those of the process that this one was forked from
        self.engine.drain()
        if trim:
            self.engine.store.quiesce()
            self.engine.store.trim()

    # -- what hooks ask -----------------------------------------------------------------------------------------------

    def supports(self, tensor: Tensor) -> bool:
        """Whether the engine can move tensors of this kind."""
        return (
            tensor.device == self.engine.device
            and not tensor.is_quantized
            and not tensor._is_zerotensor()
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        )

    def why_held(self, tensor: Tensor) -> str | None:
        """Who holds this storage anyway: "parameter" (or buffer, or a view of one, as they are now) or "leaf"."""
        storage_id = Engine.identity(tensor)
        if storage_id in self._parameters:
            return "parameter"
        if tensor.requires_grad:
            return "leaf" if tensor.is_leaf else None  # somebody wants its gradient, so somebody holds it
        if tensor.grad_fn is None:  # maybe a frozen parameter or a buffer that was put in place meanwhile
            if storage_id in self._unheld:
                return None
            self.refresh_parameters()
            if storage_id in self._parameters:
                return "parameter"
            if len(self._unheld) >= UNHELD_MAX:
                self._unheld.clear()
            self._unheld.add(storage_id)
        return None

    def is_excluded(self) -> bool:
        """Whether the module now running in this thread is one of `exclude`."""
        return getattr(self._local, "excluded", 0) > 0

    def warn_once(self, error: Exception) -> None:
        """Say, once per kind of error, that a tensor stays because the store cannot take it."""
        if type(error) not in self._warned:
            self._warned.add(type(error))
            log.warning("a tensor stays on the device: %s", str(error))  # not its frames, which hold graphs

    def explain(self, error: BaseException, path: str | os.PathLike[str] | None = None) -> None:
        """Note on `error`, where it says that memory ran out, why; and write a page of it where `path` is given."""
        swapped, kept = self.counts.in_round()
        oom.tell(error, oom.Subject(self._model(), self.engine, self.options, swapped, kept), path)

    # -- what the session tells ---------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """A forward pass begins in this thread, in no excluded module."""
        self._local.excluded = 0
        self.counts.begin_round()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """A module of `exclude` runs inside, in this thread."""
        self._local.excluded = getattr(self._local, "excluded", 0) + 1
        try:
            yield
        finally:
            self._local.excluded -= 1

    def refresh_parameters(self) -> None:
        """Look up which storages are parameters and buffers now, and where they are."""
        model = self._model()
        if model is None:
            return
        held = [*model.parameters(), *model.buffers()]
        self._parameters = {Engine.identity(tensor) for tensor in held if has_storage(tensor)}
        self.devices = {tensor.device for tensor in held}
