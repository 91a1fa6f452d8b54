"""Support of torch.compile: keeps its tracer out of the hooks, and finds the memory that a compiled backward needs.

A compiled graph saves its tensors through the same hooks as eager code, but all at the end of its forward, and its
backward unpacks all of them before it begins.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from offload.torch_compat import late_writes
from offload.units import format_bytes

_REASON = (
    "offload enters its hooks here, which a graph cannot contain: enable what torch.compile returned, "
    "offload.enable(torch.compile(model, fullgraph=True)); before torch.export, call offload.disable(model)"
)
_STEP_REASON = "offload moves what this optimizer updates, so its step runs uncompiled: do not compile it"
_PACKAGE = __name__.partition(".")[0]
_COMPILED_NODE = "CompiledFunctionBackward"

Function = TypeVar("Function", bound=Callable[..., object])
Result = TypeVar("Result")


def opaque(function: Function, reason: str = _REASON) -> Function:
    """Make torch.compile run a function uncompiled, with a graph break and a reason at the call.

    It has the effect of `torch.compiler.disable(recursive=False)`, without importing the compiler: functions that this
    function calls are compiled as usual.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


def opaque_in_step(function: Function) -> Function:
    """Do what `opaque` does, for a function that an optimizer's step calls."""
    return opaque(function, _STEP_REASON)


@opaque
def untraced(function: Callable[..., Result], *args: object) -> Result:
    """Call a function with torch.compile's tracer disabled."""
    if _Tracer.call_untraced is None:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:
            return function(*args)
        _Tracer.call_untraced = dynamo.disable(_call)
        _Tracer.call_untraced(_keep_tracer_out, dynamo.trace_rules)
    called: Result = _Tracer.call_untraced(function, *args)
    return called


def _call(function: Callable[..., Result], *args: object) -> Result:
    return function(*args)


def _keep_tracer_out(rules: Any) -> None:
    """Add rules by which the tracer skips this package. Unlike a wrapper, a rule takes no time in each hook call.

    All modules that run within a step are loaded at this time. There is one rule per module, because a rule for the
    whole package would also skip models that are defined in it. `late_writes` is traced: its hooks belong to modules
    that a graph may contain, and do nothing there.
    """
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith(f"{_PACKAGE}.")]
    modules = [module for module in loaded if not hasattr(module, "__path__")]
    own = [module for module in modules if not _defines_models(module) and module is not late_writes]
    rules.SKIP_DIRS.extend(module.__file__ for module in own if module.__file__ is not None)
    rules.add(__name__)  # it is among them; `add` also compiles all rules into one expression, which takes long


def _defines_models(module: ModuleType) -> bool:
    found = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return any(each.__module__ == module.__name__ for each in found)


class _Tracer:
    """State of torch.compile's tracer after it was loaded."""

    call_untraced: Callable[..., Any] | None = None


def with_traced_frame(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function that calls a forward and that torch.compile traces, if it would skip the forward itself.

    torch.compile skips the forwards of torch.nn, such as Sequential's. `torch.compile(module)` adds such a function
    itself, unless offload's wrapper hides the forward. None if the compiler is not loaded.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return None
    framed: Callable[..., Any] = dynamo.external_utils.wrap_inline(forward) if _is_passed_over(forward) else forward
    return framed


def untraceable_wrappers(module: nn.Module) -> list[nn.Module]:
    """Return the results of torch.compile for a module, if torch.compile has added a function around its forward.

    Their graphs would break at a wrapper of the module's forward.
    """
    return wrappers_of(module) if _is_passed_over(type(module).forward) else []


def modules_in_graphs(model: nn.Module) -> set[nn.Module]:
    """Return the parts of a model that torch.compile traces: a hook on them would break a graph."""
    kind = _optimized_module()
    roots = [model] if wrappers_of(model) else []
    for part in model.modules():
        if kind is not None and type(part) is kind:
            roots.append(part.get_submodule("_orig_mod"))
        elif getattr(part, "_compiled_call_impl", None) is not None:
            roots.append(part)
    return {part for root in roots for part in root.modules()}


def compiled_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the outermost compiled parts of a model that is not compiled itself.

    Yields
    ------
    tuple of str, torch.nn.Module and str
        The part's name, the part, and which of its attributes holds the compiled callable.
    """
    kind = _optimized_module()
    if kind is None or getattr(model, "_compiled_call_impl", None) is not None or wrappers_of(model):
        return
    pending = list(reversed(list(model.named_children())))
    seen = {id(model)}
    while pending:
        name, part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if type(part) is kind:
            yield name, part, "forward"
        elif getattr(part, "_compiled_call_impl", None) is not None:
            yield name, part, "_compiled_call_impl"
        else:
            pending += reversed([(f"{name}.{inner}", each) for inner, each in part.named_children()])


def has_compiled_parts(model: nn.Module) -> bool:
    """Return whether the model or a part of it is compiled. Results of `torch.compile(model)` are not searched for."""
    kind = _optimized_module()
    if kind is None:
        return False
    # `model.modules()` would take five times as long, and every step that recomputes calls this function.
    pending, seen = [model], {id(model)}
    while pending:
        part = pending.pop()
        if getattr(part, "_compiled_call_impl", None) is not None or type(part) is kind:
            return True
        for each in part._modules.values():
            if each is not None and id(each) not in seen:
                seen.add(id(each))
                pending.append(each)
    return False


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled in place, or is what torch.compile returned. Not whether it is inside of such."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module) is _optimized_module()


def wrappers_of(module: nn.Module) -> list[nn.Module]:
    """Return the results of `torch.compile(module)`; the module has no reference to them."""
    kind = _optimized_module()
    if kind is None:
        return []
    return [each for each in gc.get_objects() if type(each) is kind and each._orig_mod is module]


def _optimized_module() -> Any:
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)


def _is_passed_over(forward: Callable[..., Any]) -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    return isinstance(forward, FunctionType) and dynamo is not None and bool(dynamo.trace_rules.check(forward))


class Fallbacks:
    """Finds functions of a model that torch.compile leaves uncompiled, from torch's counters."""

    def __init__(self) -> None:
        self._attempts = 0  # attempts to compile a frame in this process, as last read
        self._failures = 0
        self._reasons: Counter[str] = Counter()
        self._given_up: Counter[str] = Counter()
        self._breaks = 0
        self._leaves_step = False
        self._look()

    def step_begins(self) -> None:
        """Read the counters for code that was compiled since the last step, such as a function that calls the model."""
        if not _is_loaded():
            return
        reasons = self._look()[1]
        self._count({each: count for each, count in reasons.items() if _REASON in each or _STEP_REASON in each})

    def step_ends(self) -> None:
        """Read the counters for code that was compiled within the step."""
        if not _is_loaded():
            return
        failures, reasons = self._look()
        ours = [reason for reason in reasons if _REASON in reason or _STEP_REASON in reason or _folder() in reason]
        self._count({reason: reasons.pop(reason) for reason in ours})
        titles = {reason.partition("\n")[0] for reason in reasons if reason in _counted("unimplemented")}
        if failures > 0 and titles:
            self._given_up[", ".join(sorted(titles))] += failures

    def notes(self) -> Iterator[str]:
        """Yield notes for the user."""
        for reason, count in self._given_up.items():
            yield (
                f"torch.compile gave up on {count} of this model's functions, which run uncompiled: {reason}; "
                "TORCH_LOGS=recompiles,graph_breaks shows which and why"
            )
        if self._breaks:
            yield (
                f"torch.compile broke its graphs {self._breaks} times where offload enters its hooks: compile the "
                "model by itself, offload.enable(torch.compile(model)), and exclude no module inside a graph"
            )
        if self._leaves_step:
            yield (
                "a compiled optimizer.step() runs uncompiled, because offload moves what it updates: do not compile "
                "it, or pass optimizer_state=False"
            )

    def _count(self, reasons: Mapping[str, int]) -> None:
        self._breaks += sum(count for reason, count in reasons.items() if _STEP_REASON not in reason)
        self._leaves_step |= any(_STEP_REASON in reason for reason in reasons)

    def _look(self) -> tuple[int, Counter[str]]:
        """Return the number of frames that torch failed to compile since the last call, and all reasons."""
        frames = _counted("frames")
        if frames["total"] == self._attempts:
            return 0, Counter()
        failures, reasons = self._failures, self._reasons
        self._attempts, self._failures = frames["total"], frames["total"] - frames["ok"]
        self._reasons = _counted("unimplemented") + _counted("graph_break")
        return self._failures - failures, self._reasons - reasons


def _folder() -> str:
    return next(iter(sys.modules[_PACKAGE].__path__))


def _is_loaded() -> bool:
    return "torch._dynamo.utils" in sys.modules


def _counted(what: str) -> Counter[str]:
    """Return one of the tracer's counters; empty if it is not loaded."""
    utils = sys.modules.get("torch._dynamo.utils")
    found: Counter[str] = utils.counters[what] if utils is not None else Counter()
    return found


@dataclass(frozen=True)
class Demand:
    """Number and bytes of the tensors that one compiled backward node unpacks at once, and of all swappable ones."""

    tensors: int
    nbytes: int
    tensors_in_all: int
    nbytes_in_all: int

    @property
    def is_most(self) -> bool:
        """Whether swapping hardly lowers the peak, because the node needs most of the bytes at once."""
        return self.tensors > 1 and 2 * self.nbytes > self.nbytes_in_all

    def __str__(self) -> str:
        return (
            f"torch.compile made one graph whose backward asks for {self.tensors} of the {self.tensors_in_all} saved "
            f"tensors at once ({format_bytes(self.nbytes)} of {format_bytes(self.nbytes_in_all)}): they are together "
            "before and after it, and swapping them hardly lowers the peak; compile block by block instead, such as "
            "for block in model.blocks: block.compile()"
        )


def is_compiled_node(name: str) -> bool:
    """Return whether an autograd node of this name is the backward of a compiled graph."""
    return name.startswith(_COMPILED_NODE)


def largest_demand(uses: Iterable[tuple[int | None, int]], compiled_nodes: Iterable[int]) -> Demand | None:
    """Return the compiled node that unpacks the most bytes at once; None if nothing was compiled.

    Parameters
    ----------
    uses
        For every storage that could be swapped: the backward node that needs it first, and its bytes.
    compiled_nodes
        Backward nodes that are compiled graphs.
    """
    found = list(uses)
    demands = [[nbytes for node, nbytes in found if node == compiled] for compiled in compiled_nodes]
    if not demands:
        return None
    largest = max(demands, key=sum)
    return Demand(len(largest), sum(largest), len(found), sum(nbytes for _, nbytes in found))
