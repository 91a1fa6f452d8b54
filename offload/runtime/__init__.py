"""The data path in Python: autograd's hooks, the schedule that they follow, and the engine that moves bytes."""

from offload import _core  # noqa: F401  # raises an error with the command to type if the extension is not built
