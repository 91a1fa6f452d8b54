"""The data path in Python: autograd's hooks, the schedule that they follow, and the engine that moves bytes."""

from offload import _core  # noqa: F401  # where it is not built, this says what to type
