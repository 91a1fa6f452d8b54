"""The global random generators that a program draws from: those of Python, of NumPy, and of torch for each device.

The trial of an optimizer (`separable`) and `offload.fit` call code of the program that may draw from them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from offload.devices.device import device_of, is_known

__all__ = ["RandomNumbers", "is_global"]


def is_global(generator: object) -> bool:
    """Return whether this is the generator behind the functions of `random`, or behind those of `numpy.random`."""
    methods = [random.random, *([np.random.rand] if "numpy.random" in sys.modules else [])]
    return any(getattr(each, "__self__", None) is generator for each in methods)


class RandomNumbers:
    """The states of the generators of Python, of NumPy, of the CPU and of some devices, at one moment.

    NumPy's has none before `numpy.random` is imported. Devices that `enable` does not know are left out.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        known = [device_of(each) for each in {torch.device("cpu"), *devices} if is_known(each)]
        self._torch = [(each, each.random_state()) for each in known]
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False) if "numpy.random" in sys.modules else None

    def is_same(self, other: RandomNumbers) -> bool:
        """Return whether the next numbers are the same as at another moment."""
        one, two = (tree_leaves([each._numpy, [state for _, state in each._torch]]) for each in (self, other))
        return self._python == other._python and len(one) == len(two) and all(map(np.array_equal, one, two))

    def restore(self) -> None:
        """Have all generators draw the same numbers again."""
        random.setstate(self._python)
        if self._numpy is not None:
            np.random.set_state(self._numpy)
        for device, state in self._torch:
            device.set_random_state(state)
