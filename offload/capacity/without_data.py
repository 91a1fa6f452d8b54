"""Counts a step whose parameters do not fit here, on tensors that have a shape and no data.

`offload fit --without-data` and `offload.fit` of a model on torch's meta device use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from offload.capacity.device import AbsentDevice
from offload.capacity.optimizer_step import SMALLEST_BYTES, OptimizerWatch
from offload.capacity.replay import Call, Held, called, own_loss
from offload.capacity.step_counter import StepCounter
from offload.capacity.unmodified import CALLS_MAX, end_the_script
from offload.control.profile_listener import RecordedStep
from offload.torch_compat.backward_pass import OUTSIDE, current_backward
from offload.torch_compat.fake import Fakes, converted_in_place, is_fake
from offload.torch_compat.tensors import storage_identity

__all__ = ["CountedOptimizers", "CountedScript", "count_step", "count_steps", "how_counted", "without_values"]


def how_counted(device: AbsentDevice) -> str:
    """Return how figures without data are known."""
    return (
        f"Counted without data, for {device}: bytes are those of the tensors that operators return. What kernels need "
        "inside (workspaces, and what an optimizer's fused or foreach kernels allocate) is not counted. Times are not "
        "measured: they are the operations of matrix products, convolutions and attention, divided by the speed. All "
        "else takes time too, so the slowdowns are rather too high."
    )


class CountedOptimizers(OptimizerWatch):
    """Counts the optimizers' steps of a model without data, with the counter of the step before.

    Attributes
    ----------
    counter
        Of the step that is running.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counter: StepCounter | None = None

    @property
    def state_bytes(self) -> int:
        """Of the state that the optimizers so far have created."""
        return sum(each.untyped_storage().nbytes() for each in self._state())

    def _begin(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.counter is not None and self.counter.finished:
            self.counter.end()
            self.counter.watch_peak()

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        counter = self.counter
        if counter is None or not counter.finished:  # another model's optimizer may step first, as in a GAN
            return
        if not any(each is optimizer for each in self._seen):
            self._seen.append(optimizer)
            counter.look()
            self._forecast(
                optimizer, counter.held_bytes + counter.live_bytes_max, counter.held_bytes + counter.live_bytes
            )
        if self.stepped is not None:
            self.stepped()

    @staticmethod
    def _leaves(device: torch.device, state: dict[Any, Any], name: Any) -> bool:
        value = state[name]
        is_number = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        return is_fake(value) and is_number and value.nbytes >= SMALLEST_BYTES


def count_step(
    call: Call, items: int, batch: int, held: Held, *, device: AbsentDevice, fakes: Fakes
) -> RecordedStep | None:
    """Count a call with the first `items` of `batch` items, and backward over what it returns; see `replay.sized`."""
    model = call.model
    model.zero_grad(set_to_none=True)
    counter = StepCounter(model, device, fakes, (), max(1, SMALLEST_BYTES * items // batch))
    args, kwargs = call.at(items, batch)
    input_bytes = _bytes_of((args, kwargs))
    with counter.counting():
        with counter.hooks(), call.as_it_was():
            output = model(*args, **kwargs)
        value = own_loss(output)
        if not held.output:
            del output
        if not held.inputs:
            del args, kwargs
        value.backward()  # type: ignore[no-untyped-call]
        del value
    counter.end()
    model.zero_grad(set_to_none=True)
    return counter.recorded(items, input_bytes)


def count_steps(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    sizes: tuple[int, int],
    device: AbsentDevice,
    loss: Callable[[nn.Module, Any], Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
    watch: CountedOptimizers,
) -> list[RecordedStep]:
    """Count a step of a model on the meta device at each batch size. The caller puts model and optimizer back."""
    fakes = Fakes()
    steps: list[RecordedStep] = []
    watch.listen()
    with without_values(model, optimizer, fakes):
        for items in sizes:
            inputs = tree_map(lambda each: fakes.like(each) if isinstance(each, Tensor) else each, make_batch(items))
            optimizers = [optimizer] if optimizer is not None and steps else []
            counter = StepCounter(model, device, fakes, optimizers, max(1, SMALLEST_BYTES * items // sizes[0]))
            watch.counter = counter
            with counter.counting():
                with counter.hooks():
                    value = own_loss(called(model, inputs)) if loss is None else loss(model, inputs)
                value.backward()  # type: ignore[no-untyped-call]
                del value
                counter.end()
                if optimizer is not None:
                    optimizer.step()
            model.zero_grad(set_to_none=True)
            step = counter.recorded(items, _bytes_of(inputs), 0 if optimizers else watch.state_bytes)
            if step is None:
                raise ValueError(
                    "backward needed no tensor that the model saved; give loss=lambda model, batch: … that runs it"
                )
            steps.append(step)
    return steps


@contextmanager
def without_values(model: nn.Module, optimizer: torch.optim.Optimizer | None, fakes: Fakes) -> Iterator[None]:
    """Within, a model on the meta device, and its optimizer, have parameters and buffers without data on the CPU."""
    made: dict[int, Any] = {}

    def like(tensor: Tensor | None) -> Any:
        if tensor is None or not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            same = fakes.like(tensor.detach())
            made[id(tensor)] = (
                nn.Parameter(same, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else same,
                tensor,
            )
        return made[id(tensor)][0]

    tables: list[Any] = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    before = [(table, dict(table)) for table in tables]
    groups = [(group, list(group["params"])) for group in optimizer.param_groups] if optimizer is not None else []
    try:
        for table in tables:
            table.update({name: like(value) for name, value in table.items()})
        for group, params in groups:
            group["params"] = [like(each) for each in params]
        yield
    finally:
        for table, was in before:
            table.clear()
            table.update(was)
        for group, params in groups:
            group["params"] = params


class CountedScript:
    """What a script has told: its first model's call and step.

    Attributes
    ----------
    watch
        Its optimizers.
    fakes
        Makes tensors without data.
    call
        The first call in training mode; None if there was none.
    """

    def __init__(self, device: AbsentDevice) -> None:
        self.watch = CountedOptimizers()
        self.fakes = Fakes()
        self.call: Call | None = None
        self._device = device
        self._counter: StepCounter | None = None
        self._calls = 0  # after the first one, until backward
        self._batch: int | None = None
        self._input_bytes: dict[int, int] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, parameters are made without data, and the first step of the first model is counted.

        `SystemExit` ends the script after the step of its optimizer.
        """
        plain_call, plain_register = nn.Module.__call__, nn.Module.register_parameter

        def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not is_fake(param):
                param = nn.Parameter(self.fakes.like(param.detach()), param.requires_grad)
            plain_register(module, name, param)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not (module.training and torch.is_grad_enabled()):
                return plain_call(module, *args, **kwargs)
            nn.Module.__call__ = plain_call  # type: ignore[method-assign]  # of the outermost module
            try:
                if self._counter is not None:
                    with self._hooks_of_more(module):
                        return plain_call(module, *args, **kwargs)
                if not any(each.requires_grad for each in module.parameters()):
                    return plain_call(module, *args, **kwargs)
                self._counter = self._note(module, args, kwargs)
                stack.enter_context(self._counter.counting())
                with self._counter.hooks():
                    return plain_call(module, *args, **kwargs)
            finally:
                nn.Module.__call__ = call  # type: ignore[method-assign]

        nn.Module.__call__ = call  # type: ignore[method-assign]
        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        with ExitStack() as stack:
            stack.callback(self.watch.close)
            stack.enter_context(converted_in_place())
            stack.enter_context(warnings.catch_warnings())  # torch's own code asks parameters where their data is
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            try:
                yield
            finally:
                nn.Module.__call__ = plain_call  # type: ignore[method-assign]
                nn.Module.register_parameter = plain_register  # type: ignore[method-assign]

    def step(self) -> RecordedStep | None:
        """Return the step; None if the script has run none."""
        if self._counter is None:
            return None
        return self._counter.recorded(self._batch, self._input_bytes, self.watch.state_bytes)

    def run(self, call: Call, items: int, batch: int, held: Held) -> RecordedStep | None:
        """Count the call again; see `replay.sized`."""
        return count_step(call, items, batch, held, device=self._device, fakes=self.fakes)

    def _hooks_of_more(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return the context for a further call: the hooks, if it is one of the counted model before its backward."""
        assert self._counter is not None
        assert self.call is not None
        if current_backward() != OUTSIDE:  # torch's checkpoint runs a part of forward again
            return nullcontext()
        if self._counter.finished:  # one step is counted
            self._counter.end()
            return nullcontext()
        self._calls += 1
        if self._calls > CALLS_MAX:  # no backward needs what the first call has saved
            end_the_script()
        self._counter.hold(module)
        return self._counter.hooks() if module is self.call.model else nullcontext()  # as `enable` has it

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCounter:
        self.call = Call.of(module, args, kwargs, self.fakes.like)
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._batch = next((len(each) for each in inputs if each.dim() and len(each)), None)
        self._input_bytes = _bytes_of(inputs)
        self.watch.counter = counter = StepCounter(module, self._device, self.fakes)
        self.watch.stepped = end_the_script
        self.watch.listen()
        return counter


def _bytes_of(inputs: Any) -> dict[int, int]:
    """Return the bytes of the inputs' storages, by their identity."""
    storages = [each.untyped_storage() for each in tree_leaves(inputs) if isinstance(each, Tensor)]
    return {storage_identity(each): each.nbytes() for each in storages}
