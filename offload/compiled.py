"""torch.compile beside the engine: its tracer stays out of the hooks, and what a compiled backward costs is said.

Beside the data path: a compiled graph saves its tensors through the same hooks as eager code does, when its forward has
ended, and its backward takes all of them back before it begins.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from offload.units import format_bytes

_REASON = (
    "offload enters its hooks here, which a graph cannot contain: enable what torch.compile returned, "
    "offload.enable(torch.compile(model, fullgraph=True))"
)
_COMPILED_NODE = "CompiledFunctionBackward"

Function = TypeVar("Function", bound=Callable[..., object])
Result = TypeVar("Result")


def opaque(function: Function) -> Function:
    """Have torch.compile run a function as it is, break its graph at a call of it, and say why.

    What `torch.compiler.disable(recursive=False)` does, without importing the compiler for everybody: the frames that
    the function calls are compiled as ever.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    code = function.__code__
    if hasattr(frames, "skip_code"):  # older torch
        frames.skip_code(code)
    else:
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(code, skip)
    return function


@opaque
def untraced(function: Callable[..., Result], *args: object) -> Result:
    """Call a function with torch.compile's tracer off while it runs."""
    if _Tracer.call_untraced is None:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:
            return function(*args)
        for name in _own_modules():  # hooks are called a thousand times per step: a rule costs nothing where they run
            dynamo.trace_rules.add(name)
        _Tracer.call_untraced = dynamo.disable(_call)
    called: Result = _Tracer.call_untraced(function, *args)
    return called


def _call(function: Callable[..., Result], *args: object) -> Result:
    return function(*args)


def _own_modules() -> list[str]:
    """The modules of this package that are loaded, which what runs within a step is; not those of models."""
    package = f"{__name__.partition('.')[0]}."
    own = [(name, module) for name, module in list(sys.modules.items()) if name.startswith(package)]
    # A rule for a package would be one for all that is below it.
    return [name for name, module in own if not hasattr(module, "__path__") and not _defines_models(module)]


def _defines_models(module: ModuleType) -> bool:
    found = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return any(each.__module__ == module.__name__ for each in found)


class _Tracer:
    """What is known of torch.compile's tracer, once it is loaded."""

    call_untraced: Callable[..., Any] | None = None


def with_traced_frame(forward: Callable[..., Any], module: nn.Module | None) -> Callable[..., Any]:
    """A module's forward in a frame that torch.compile traces, where it would pass over forward's own.

    It does so with those of torch.nn, such as Sequential's. `torch.compile(module)` adds such a frame itself where no
    wrapper of ours hides that forward; `module.compile()` does not.
    """
    if not _is_passed_over(forward) or getattr(module, "_compiled_call_impl", None) is not None:
        return forward
    framed: Callable[..., Any] = sys.modules["torch._dynamo"].external_utils.wrap_inline(forward)
    return framed


def untraceable_wrappers(module: nn.Module) -> list[nn.Module]:
    """What torch.compile has returned for a module so far, where it added a frame of its own around it.

    Its graph would break at a wrapper of the module's forward.
    """
    if not _is_passed_over(type(module).forward):
        return []
    kind = sys.modules["torch._dynamo.eval_frame"].OptimizedModule
    return [each for each in gc.get_objects() if type(each) is kind and each._orig_mod is module]


def _is_passed_over(forward: Callable[..., Any]) -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    return isinstance(forward, FunctionType) and dynamo is not None and bool(dynamo.trace_rules.check(forward))


@dataclass(frozen=True)
class Demand:
    """What one node of a compiled backward asks for at once, among all that the recorded step could move."""

    tensors: int
    nbytes: int
    tensors_in_all: int
    nbytes_in_all: int

    @property
    def is_most(self) -> bool:
        """Whether swapping hardly lowers the peak, because most of the bytes are there together."""
        return self.tensors > 1 and 2 * self.nbytes > self.nbytes_in_all

    def __str__(self) -> str:
        return (
            f"torch.compile made one graph whose backward asks for {self.tensors} of the {self.tensors_in_all} saved "
            f"tensors at once ({format_bytes(self.nbytes)} of {format_bytes(self.nbytes_in_all)}): they are together "
            "before and after it, and swapping them hardly lowers the peak; compile block by block instead, such as "
            "for block in model.blocks: block.compile()"
        )


def is_compiled_node(name: str) -> bool:
    """Whether an autograd node of this name is the backward of a compiled graph."""
    return name.startswith(_COMPILED_NODE)


def largest_demand(uses: Iterable[tuple[int | None, int]], compiled_nodes: Iterable[int]) -> Demand | None:
    """The compiled node that asks for most bytes at once; None where nothing was compiled.

    Parameters
    ----------
    uses
        For every storage that could move: the backward node that asks for it first, and its bytes.
    compiled_nodes
        The backward nodes that are compiled graphs.
    """
    found = list(uses)
    demands = [[nbytes for node, nbytes in found if node == compiled] for compiled in compiled_nodes]
    if not demands:
        return None
    largest = max(demands, key=sum)
    return Demand(len(largest), sum(largest), len(found), sum(nbytes for _, nbytes in found))
