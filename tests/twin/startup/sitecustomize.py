"""On PYTHONPATH, this gives a Python process the simulated accelerator: for commands that start others."""

import accelerator  # noqa: F401
