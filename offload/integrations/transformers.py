"""Trainers of transformers, and subclasses such as TRL's: a mixin, and a callback that needs no subclass.

The Trainer computes its loss inside `compute_loss_context_manager`, which the mixin extends.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from offload.handle import Session
from offload.integrations.switch import CallSkipper, CallWrapper, Switch, Switched, nothing_around
from offload.session import remark

CHECKPOINTING_REMARK = (
    "gradient checkpointing is on: tensors inside its blocks are recomputed instead of saved, so only the others are "
    "swapped; without it (gradient_checkpointing=False) more can be swapped, and checkpointing recomputes nothing"
)
GRAD_NORM = "_get_grad_norm"  # the Trainer's norm of all gradients, for its log


class OffloadTrainerMixin:
    """Enables offload in a Trainer for the duration of `train`.

    Put it before the Trainer in the list of bases. Offload is disabled when `train` ends or raises an exception.

    Parameters
    ----------
    *args, **kwargs
        Arguments of the Trainer.
    offload
        Arguments of `offload.enable`, as a dictionary.

    Raises
    ------
    ValueError
        In `train`: the Trainer's own activation offloading is on, it uses DataParallel, or it uses gradients that
        `step_in_backward` has freed.

    Examples
    --------
    >>> from transformers import Trainer
    >>> from offload.integrations.transformers import OffloadTrainerMixin
    >>> class OffloadTrainer(OffloadTrainerMixin, Trainer):
    ...     pass
    """

    def __init__(self, *args: Any, offload: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._offload = Switch(type(self).__name__, offload or {})
        self._is_training_run = False
        super().__init__(*args, **kwargs)

    @property
    def offload_handle(self) -> Session:
        """The session of the current run of `train`, or of the last one."""
        return self._offload.handle

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with offload enabled."""
        refuse_other_offloading(self.args)  # type: ignore[attr-defined]
        self._is_training_run = True
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._is_training_run = False
            self._offload.turn_off()

    def compute_loss_context_manager(self) -> ExitStack:
        """Return the Trainer's own context, with offload applied to the step inside."""
        stack: ExitStack = super().compute_loss_context_manager()  # type: ignore[misc]
        if self._is_training_run and torch.is_grad_enabled():
            # Not earlier, because `train` itself may create, move and wrap the model.
            if not self._offload.is_on:
                turn_on(self._offload, self.model, self.args, self.optimizer)  # type: ignore[attr-defined]
            stack.enter_context(self._offload.handle.step())
            show_progress(self, self._offload.handle)
        return stack

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of all gradients, which the Trainer logs; None where gradients are gone."""
        if self._is_training_run and self._offload.steps_in_backward:
            return None
        return super()._get_grad_norm(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log memory at the peak, memory saved, time stalled and slowdown with the loss."""
        if self._is_training_run:
            add_metrics(logs, self._offload)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class OffloadTrainerCallback(Switched, TrainerCallback):  # type: ignore[misc]
    """Enables offload in any Trainer, without a subclass.

    It also covers a loss that is computed outside the model. An exception in a step, in the data loader, in an
    evaluation or in another callback disables offload at once. After any other exception, such as a keyboard interrupt
    between these calls or an error in another callback's `on_train_begin`, offload is disabled when the next `train`
    begins; the mixin disables it at once in these cases too.

    Parameters
    ----------
    **options
        The arguments of `offload.enable`: `preset`, `memory_limit`, `max_slowdown`, `n_tensors`, `lb`,
        `min_tensor_bytes`, `exclude`, `host_limit`, `spill_dir`, `recompute`, `optimizer_state`, `step_in_backward`,
        `gradients`, `parameters`; `optimizer` is the Trainer's.

    Raises
    ------
    ValueError
        In `train`: the Trainer's own activation offloading is on, it uses DataParallel, or it uses gradients that
        `step_in_backward` has freed.

    Examples
    --------
    >>> from offload.integrations.transformers import OffloadTrainerCallback
    >>> callback = OffloadTrainerCallback(n_tensors=-1)  # then: Trainer(..., callbacks=[callback])
    """

    def __init__(self, **options: Any) -> None:
        self._begin("an OffloadTrainerCallback", options)
        self._state: Any = None  # the TrainerState of the current run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Enable offload and wrap the Trainer's step."""
        trainer = _calling_trainer()
        current = getattr(vars(trainer).get("training_step"), "callback", None)
        if current is not None:
            is_of_this_run = current._state is state
            current.undo()  # an earlier run failed outside its steps, or this one fails with the error below
            if is_of_this_run:
                raise ValueError("the Trainer has OffloadTrainerCallback twice; keep one of them")
        self.undo()
        refuse_other_offloading(args)
        handle = turn_on(self._switch, kwargs["model"], args, kwargs.get("optimizer"))
        self._state = state

        def around_step(_: Any) -> AbstractContextManager[None]:
            show_progress(trainer, handle)
            return handle.step()

        def around_log(logged: tuple[Any, ...]) -> AbstractContextManager[None]:
            if logged:
                add_metrics(logged[0], self._switch)
            return nullcontext()

        step = CallWrapper(trainer, "training_step", around_step, self.undo)
        step.callback = self  # type: ignore[attr-defined]
        self._wrappers.append(step)
        self._wrappers.append(CallWrapper(trainer, "log", around_log, self.undo))
        if self._switch.steps_in_backward and hasattr(trainer, GRAD_NORM):
            self._wrappers.append(CallSkipper(trainer, GRAD_NORM, nothing_around, self.undo))
        # Other methods that may raise an exception during training, including those that call other callbacks.
        for name in ("get_batch_samples", "evaluate", "save_model"):
            self._wrappers.append(CallWrapper(trainer, name, nothing_around, self.undo))
        self._wrappers.append(CallWrapper(trainer.callback_handler, "call_event", nothing_around, self.undo))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Disable offload."""
        self.undo()

    def undo(self) -> None:
        """Unwrap the Trainer and disable offload. A second call does nothing."""
        super().undo()
        self._state = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_state": None}


def turn_on(switch: Switch, model: nn.Module, args: Any, optimizer: Any) -> Session:
    """Enable offload and add a note to its report if gradient checkpointing is on."""
    name = type(args).__name__
    switch.refuse_what_needs_all_gradients(
        {
            f"{name}(max_grad_norm={args.max_grad_norm}), which max_grad_norm=0 switches off,": args.max_grad_norm,
            f"{name}(gradient_accumulation_steps={args.gradient_accumulation_steps})": (
                args.gradient_accumulation_steps > 1
            ),
            f"the GradScaler of {name}(fp16=True)": args.fp16,
        }
    )
    handle = switch.turn_on(model, [optimizer] if optimizer is not None else [])
    if _argument(args, "activation_checkpointing") or _argument(args, "gradient_checkpointing"):
        remark(handle, CHECKPOINTING_REMARK)
    return handle


def add_metrics(logs: dict[str, float], switch: Switch) -> None:
    """Add the figures of the latest step to `logs` if it contains the loss, so that it is about training."""
    if "loss" in logs:
        logs.update({name: round(value, 3) for name, value in switch.metrics().items()})


def show_progress(trainer: Any, handle: Session) -> None:
    """Show the handle's figures after the Trainer's progress bar, if it has one."""
    for callback in trainer.callback_handler.callbacks:
        bar = getattr(callback, "training_bar", None)
        if bar is not None and hasattr(bar, "set_postfix"):
            bar.set_postfix(handle.postfix(), refresh=False)


def refuse_other_offloading(args: Any) -> None:
    """Check that the Trainer does not swap the same tensors itself.

    Raises
    ------
    ValueError
        The Trainer offloads activations itself, or it would run the model on several devices in one process.
    """
    name = type(args).__name__
    if _argument(args, "activation_offloading"):
        raise ValueError(
            f"{name}(activation_offloading=True) swaps the same tensors, and autograd calls only the innermost "
            "saved-tensor hooks: set activation_offloading=False, or do not use offload"
        )
    for knob in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        chosen = _argument(args, knob)
        if isinstance(chosen, dict) and chosen.get("offload"):
            raise ValueError(
                f'{name}({knob}={{"offload": True}}) moves the same tensors itself, on the compute stream: remove that '
                "entry, or do not use offload"
            )
    if args.n_gpu > 1:
        raise ValueError(
            f"the Trainer would use DataParallel over {args.n_gpu} GPUs of one process, and offload supports one "
            "device per process: run torchrun --nproc_per_node=N, or set CUDA_VISIBLE_DEVICES to one device"
        )


def _argument(args: Any, name: str) -> Any:
    # Read from the instance: some names are deprecated properties that warn, and older releases lack others.
    return vars(args).get(name)


def _calling_trainer() -> Trainer:
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("OffloadTrainerCallback.on_train_begin must be called by a transformers Trainer")
