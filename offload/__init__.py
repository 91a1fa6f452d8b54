"""offload: train models whose saved tensors do not fit in device memory.

`offload.enable(model)`, then train as before: the same losses to the last bit, less memory.
"""

from offload._core import DriverError, PoolExhausted, SpillError
from offload.report import Report
from offload.session import Session, disable, enable

__version__ = "0.1.0"

__all__ = ["DriverError", "PoolExhausted", "Report", "Session", "SpillError", "disable", "enable"]
