"""Lightning: a callback for `Trainer.fit`.

In all its loops Lightning runs the user's step through `strategy.training_step`; the callback wraps that method.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from offload.integrations.switch import CallWrapper, Switched


class OffloadCallback(Switched, pl.Callback):  # type: ignore[misc]
    """Swaps what `training_step` saves for backward; everything is as before when `fit` ends, also with an exception.

    Works with automatic and manual optimization, `accumulate_grad_batches` and the DDP strategy.

    Parameters
    ----------
    **options
        The knobs of `offload.enable`: `memory_limit`, `max_slowdown`, `n_tensors`, `lb`, `min_tensor_bytes`,
        `exclude`, `host_limit`, `spill_dir`, `recompute`.

    Raises
    ------
    TypeError
        An option is none of `offload.enable`'s.

    Examples
    --------
    >>> import lightning.pytorch as pl
    >>> from offload.integrations.lightning import OffloadCallback
    >>> trainer = pl.Trainer(callbacks=[OffloadCallback(n_tensors=-1)], logger=False, accelerator="cpu")
    """

    def __init__(self, **options: Any) -> None:
        self._begin("a Lightning OffloadCallback", options)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Enable the engine and wrap the strategy's step; the model is on its device by now."""
        handle = self._switch.turn_on(pl_module)
        # The batch tells the step's shape: training_step may call parts of the module and never its forward.
        step = CallWrapper(trainer.strategy, "training_step", lambda args: handle.step(*args), self.undo)
        self._wrappers.append(step)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Undo it: Lightning does not call `teardown` then."""
        self.undo()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Undo it."""
        self.undo()
