"""offload: train models whose saved tensors do not fit in device memory.

Call `offload.enable(model)`, then train as before: losses are bit-identical, and training needs less memory.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload import contrib
    from offload._core import DriverError, PoolExhausted, SpillError
    from offload.capacity.answer import Fit
    from offload.capacity.model import fit
    from offload.diagnostics.recovery import recover
    from offload.diagnostics.report import Report
    from offload.handle import Session
    from offload.optimizer_state.freed_gradient import StepInBackwardError
    from offload.optimizer_state.stored_gradient import GradientError
    from offload.optimizer_state.streamed_state import OptimizerStateError
    from offload.parameters.content import ParameterError
    from offload.plan import InfeasibleLimitError
    from offload.session import disable, enable, materialize

__version__ = "0.1.0"

__all__ = [
    "DriverError",
    "Fit",
    "GradientError",
    "InfeasibleLimitError",
    "OptimizerStateError",
    "ParameterError",
    "PoolExhausted",
    "Report",
    "Session",
    "SpillError",
    "StepInBackwardError",
    "contrib",
    "disable",
    "enable",
    "fit",
    "materialize",
    "recover",
]

_HOMES = {
    "DriverError": "offload._core",
    "Fit": "offload.capacity.answer",
    "GradientError": "offload.optimizer_state.stored_gradient",
    "InfeasibleLimitError": "offload.plan",
    "OptimizerStateError": "offload.optimizer_state.streamed_state",
    "ParameterError": "offload.parameters.content",
    "PoolExhausted": "offload._core",
    "Report": "offload.diagnostics.report",
    "Session": "offload.handle",
    "SpillError": "offload._core",
    "StepInBackwardError": "offload.optimizer_state.freed_gradient",
    "disable": "offload.session",
    "enable": "offload.session",
    "fit": "offload.capacity.model",
    "materialize": "offload.session",
    "recover": "offload.diagnostics.recovery",
}
_MODULES = {"_core", "contrib"}


def __getattr__(name: str) -> Any:
    """Import public names at first use, because `offload plan TRACE.json` and `offload run` need no torch."""
    home = f"offload.{name}" if name in _MODULES else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        raise _not_built() if error.name == "offload._core" else error from None
    if name in _MODULES:
        return module
    value = globals()[name] = getattr(module, name)
    return value


def _not_built() -> ImportError:
    package = Path(__file__).parent
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return ImportError(
        f"the extension of offload is not built for {python} in {package}; in the checkout, type: pip install -e . "
        "(where offload is installed already, start Python in another folder)"
    )


def __dir__() -> list[str]:
    """Return the public names, loaded or not, without the imported modules of the package."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
