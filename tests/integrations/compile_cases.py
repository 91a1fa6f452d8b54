"""Which compiled models are run with and without the engine: what is compiled how, when, and how the engine plans.

No torch here: `compile_worker.py` runs them, `test_compile_matrix.py` asks for it.
"""

import itertools
from dataclasses import dataclass

MODES = {
    "default": {},
    "memory_limit": {"memory_limit": "1GiB"},
    "n_tensors=-1, lb=2": {"n_tensors": -1, "lb": 2},
    "n_tensors=-1, lb=auto": {"n_tensors": -1, "lb": "auto"},
    "n_tensors=0": {"n_tensors": 0},
}
OPTIONS = {
    "": {},
    "fullgraph": {"fullgraph": True},
    "mode=default": {"mode": "default"},
    "mode=default, dynamic": {"mode": "default", "dynamic": True},
    "another batch size": {},
}
MODELS = ("class", "sequential")
WAYS = ("whole, the wrapper", "whole, the inner model", "whole in place", "block.compile()", "torch.compile(block)")
ORDERS = ("enable, compile, call", "compile, enable, call", "compile, call, enable")


@dataclass(frozen=True)
class Case:
    """One user's script; without a mode it does not use the engine."""

    model: str
    way: str
    order: str
    option: str
    mode: str | None

    @property
    def plain(self) -> "Case":
        """The same compiled run without the engine."""
        way = "whole, the inner model" if self.way.startswith("whole, ") else self.way
        return Case(self.model, way, "", self.option, None)

    def __str__(self) -> str:
        return " | ".join(filter(None, (self.model, self.way, self.order, self.option, self.mode)))


def every_case() -> list[Case]:
    """The whole matrix."""
    cases = (Case(*each) for each in itertools.product(MODELS, WAYS, ORDERS, OPTIONS, MODES))
    return [case for case in cases if is_worth_running(case)]


def is_worth_running(case: Case) -> bool:
    """Whether there is such a script, and it differs from the others in what the engine does."""
    if case.way == "whole, the wrapper" and case.order.startswith("enable"):
        return False  # what torch.compile returns cannot be enabled before
    if case.option == "mode=default":
        return case.model == "class" and case.mode == "default"  # it is torch's own default
    return case.option in ("", "fullgraph") or (case.model == "class" and case.mode != "n_tensors=0")


def some_cases() -> list[Case]:
    """Those that CI runs: a whole model that was called before enable, with sizes left open; and blocks."""
    _, _, whole, block, _ = WAYS
    first, _, last = ORDERS
    return [
        Case("class", whole, last, "mode=default, dynamic", "n_tensors=-1, lb=auto"),
        Case("class", block, first, "", "memory_limit"),
    ]


def differences(found: dict, plain: dict) -> list[str]:
    """In what the run with the engine differs from the one without."""
    if "error" in plain or "error" in found:
        return [each["error"] for each in (plain, found) if "error" in each]
    return [
        f"{name}: {found[name]} instead of {plain[name]}"
        for name in ("kernels", "breaks", "graphs", "fallbacks", "nodes", "digest", "traced")
        if found[name] != plain[name]
    ]
