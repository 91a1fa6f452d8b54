"""Lightning: a callback for `Trainer.fit`.

All loops of Lightning run the user's step through `strategy.training_step`; the callback wraps that method.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from offload.integrations.switch import CallWrapper, Switched


class OffloadCallback(Switched, pl.Callback):  # type: ignore[misc]
    """Enables offload during `Trainer.fit`. Everything is restored when `fit` ends or raises an exception.

    Works with automatic and manual optimization, `accumulate_grad_batches` and the DDP strategy. The trainer's loggers
    get five figures of each step: memory at the peak, saved and swapped, time stalled, slowdown. Its progress bar shows
    memory at the peak and slowdown.

    Parameters
    ----------
    log
        Whether to log these figures.
    **options
        The arguments of `offload.enable`: `preset`, `memory_limit`, `max_slowdown`, `n_tensors`, `lb`,
        `min_tensor_bytes`, `exclude`, `host_limit`, `spill_dir`, `recompute`, `optimizer_state`, `step_in_backward`,
        `gradients`, `parameters`; `optimizer` is the module's.

    Raises
    ------
    TypeError
        An option is not an argument of `offload.enable`.
    ValueError
        In `fit`: the trainer uses gradients that `step_in_backward` has freed.

    Examples
    --------
    >>> import lightning.pytorch as pl
    >>> from offload.integrations.lightning import OffloadCallback
    >>> trainer = pl.Trainer(callbacks=[OffloadCallback(n_tensors=-1)], logger=False, accelerator="cpu")
    """

    def __init__(self, *, log: bool = True, **options: Any) -> None:
        self._logs = log
        self._begin("a Lightning OffloadCallback", options)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Enable offload and wrap the strategy's step. The model is already on its device."""
        self._switch.refuse_what_needs_all_gradients(
            {
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val})": trainer.gradient_clip_val,
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})": (
                    trainer.accumulate_grad_batches > 1
                ),
                "the precision plugin's GradScaler": getattr(trainer.precision_plugin, "scaler", None) is not None,
            }
        )
        handle = self._switch.turn_on(pl_module, trainer.optimizers)
        # The batch determines the step's shape: training_step may call parts of the module and not its forward.
        step = CallWrapper(trainer.strategy, "training_step", lambda args: handle.step(*args), self.undo)
        self._wrappers.append(step)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        """Log the figures of the step."""
        for name, value in self._switch.metrics().items() if self._logs else ():
            is_shown = name.endswith(("peak_mib", "slowdown_percent"))
            pl_module.log(
                name, value, on_step=True, on_epoch=False, prog_bar=is_shown, rank_zero_only=True, batch_size=1
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Disable offload: after an exception Lightning does not call `teardown`."""
        self.undo()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Disable offload."""
        self.undo()
