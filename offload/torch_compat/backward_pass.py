"""What backward runs in this thread, from private interfaces.

Profilers and executors ask for it at every unpack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OUTSIDE", "current_backward", "current_node"]

# Returns the number of the backward pass in which this thread runs a node or a callback; `OUTSIDE` if it runs none. At
# the end of the node torch restores the thread's former state: its dispatch modes, and whether a profiler is on.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
OUTSIDE = -1
# The autograd node that is running in this thread; None outside of a backward pass.
current_node: Callable[[], Any] = torch._C._current_autograd_node
