"""The Keras callback with the name and the arguments of TensorFlow Large Model Support, for its users."""

from __future__ import annotations

from typing import Any

from offload.integrations.keras import OffloadCallback


class LMSCallback(OffloadCallback):
    """`OffloadCallback` with the name and the arguments of TensorFlow Large Model Support.

    Parameters
    ----------
    n_tensors
        Number of storages to swap, longest-lived first; −1 swaps all, 0 none.
    lb
        A copy-in starts this many backward nodes before the tensor is used; at least 1.
    **options
        Further arguments of `offload.enable`.
    """

    def __init__(self, n_tensors: int = -1, lb: int = 1, **options: Any) -> None:
        super().__init__(n_tensors=n_tensors, lb=lb, **options)
