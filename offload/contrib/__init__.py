"""Conveniences for training loops without a framework; the engine does not use them.

`GradAccumulator` and `Prefetcher` are for your own training loop, `LMSCallback` for users of TensorFlow Large Model
Support. With accelerate, Lightning or a Trainer, use its own gradient accumulation. If loading is slow, set
`num_workers` and `pin_memory` of the DataLoader first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.contrib.gradient_accumulation import GradAccumulator
    from offload.contrib.lms_callback import LMSCallback
    from offload.contrib.prefetcher import Prefetcher

__all__ = ["GradAccumulator", "LMSCallback", "Prefetcher"]

_HOMES = {"GradAccumulator": "gradient_accumulation", "LMSCallback": "lms_callback", "Prefetcher": "prefetcher"}


def __getattr__(name: str) -> Any:
    """Import a convenience at first use: one of them needs Keras."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'offload.contrib' has no attribute {name!r}")
    return getattr(importlib.import_module(f"offload.contrib.{home}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
