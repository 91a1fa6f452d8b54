"""Pages of each kind, as the library writes them, from data that is given."""

from __future__ import annotations

from typing import Any

from offload.capacity import page as fit_page
from offload.capacity.answer import answer
from offload.demo import page as demo_page
from offload.devices.memory import DeviceMemory
from offload.diagnostics.html import oom as oom_page
from offload.diagnostics.html import plan as plan_page
from offload.diagnostics.html import timeline as timeline_page
from offload.diagnostics.timeline import MemorySample, RecordedTensor, Span, StepTimeline
from offload.plan import Link, Plan, Swap, make_plan
from offload.plan.trace import Node, Recompute, SavedTensor, Trace

MIB = 1 << 20
GIB = 1 << 30
LINK = Link(12e9, 12e9, 1e-5)


def trace(layers: int, *, nbytes: int = 64 * MIB, seconds: float = 0.01) -> Trace:
    """A step of layers that save two tensors each; the second of the two can be recomputed from the first."""
    nodes = [Node(f"blocks.{layer}.mlp", seconds, False) for layer in range(layers)]
    nodes += [Node(f"MulBackward0 of blocks.{layer}.mlp", seconds * 2, True) for layer in reversed(range(layers))]
    tensors = []
    for layer in range(layers):
        last = 2 * layers - 1 - layer
        nodes_of = (layer, layer, layer, last, last)
        tensors.append(SavedTensor(2 * layer, nbytes, *nodes_of))
        recipe = Recompute(seconds / 4, (2 * layer,), nbytes // 8)
        tensors.append(SavedTensor(2 * layer + 1, nbytes // (1 + layer % 3), *nodes_of, recompute=recipe))
    base = tuple(nbytes * 4 + (k % 5) * nbytes // 8 for k in range(len(nodes)))
    return Trace(tuple(nodes), base, tuple(tensors), "an example", LINK)


def plan(layers: int = 12, **sizes: Any) -> Plan:
    """Every second layer's first tensor swaps, every third layer's second tensor is recomputed."""
    step = trace(layers, **sizes)
    away = range(0, layers - 3, 2)
    swaps = [Swap(2 * layer, layer + 2, 2 * layers - 2 - layer) for layer in away]
    dropped = [2 * layer + 1 for layer in range(0, layers - 3, 3)]
    return make_plan(step, LINK, swaps, bound_seconds=sum(node.seconds for node in step.nodes), recomputes=dropped)


def timeline() -> StepTimeline:
    """A step of eight layers, on all lanes."""
    layers, spans, tensors, memory = 8, [], [], []
    for layer in range(layers):
        name, at = f"blocks.{layer}.mlp", 0.01 * layer
        back = 0.31 - 0.03 * layer
        spans.append(Span("compute", "forward", name, at, at + 0.009))
        spans.append(Span("copy out", "out", name, at + 0.009, at + 0.018, 32 * MIB, layer))
        spans.append(Span("copy in", "in", name, back - 0.012, back - 0.002, 32 * MIB, layer))
        spans.append(Span("waiting", "wait", f"MulBackward0 of {name}", back - 0.003, back))
        spans.append(Span("compute", "backward", f"MulBackward0 of {name}", back, back + 0.02))
        spans.append(Span("disk", "spill", name, at + 0.018, at + 0.027, 32 * MIB, layer))
        tensors.append(RecordedTensor(name, "swapped", 32 * MIB, layer, (at, at + 0.02, back - 0.012, back + 0.02)))
    spans.append(Span("recompute", "recompute", "MulBackward0 of blocks.3.mlp", 0.305, 0.309, 8 * MIB))
    spans.append(Span("compute", "optimizer", "step", 0.335, 0.345))
    for k in range(345):
        held = sum(32 * MIB for each in tensors if any(a <= k / 1e3 < b for a, b in halves(each.resident)))
        every = sum(32 * MIB for each in tensors if each.resident[0] <= k / 1e3 < each.resident[-1])
        memory.append(MemorySample(k / 1e3, GIB + held + (k % 7) * MIB, held, every))
    spans.sort(key=lambda span: span.start)
    return StepTimeline(
        "cuda:0", "pinned RAM", "allocated by torch", 0.345, tuple(spans), tuple(memory), tuple(tensors)
    )


def halves(times: tuple[float, ...]) -> list[tuple[float, float]]:
    """Start and end of each time."""
    return list(zip(times[::2], times[1::2], strict=True))


def demo_result(name: str, share: float) -> dict[str, Any]:
    """What one contestant of the demo hands back, as far as the page shows it."""
    curve = [(k / 100, int(800 * MIB * share * (1 - abs(k % 100 - 50) / 50))) for k in range(600)]
    return {
        "name": name,
        "peak_bytes": int(800 * MIB * share),
        "step_seconds_median": 1.0 + (1 - share) / 10,
        "gpu": False,
        "report": {"text": "swapped 7 tensors"} if share < 1 else None,
        "curve": curve,
        "last_step_curve": curve[-100:],
        "last_step_is_heap": True,
        "plan": plan_page.figure(plan()) if share < 1 else None,
    }


def demo() -> str:
    """The page of `offload demo`."""
    results = [demo_result("plain", 1.0), demo_result("offloaded", 0.3)]
    rows = [("peak growth of the resident set", ["800 MiB", "240 MiB  0.30×"])]
    return demo_page.render(rows, results, equal=True, compared="gradients of the last step", notes=["an example"])


def demo_of_state() -> str:
    """The page of `offload demo --state`."""
    shares = {"plain": 1.0, "state moved": 0.6, "and updated in backward": 0.4}
    results = [{**demo_result(*each), "state_bytes": 400 * MIB, "plan": None} for each in shares.items()]
    rows = [("peak growth of the resident set", ["800 MiB", "480 MiB  0.60×", "320 MiB  0.40×"])]
    compared = "weights and state at the end"
    return demo_page.render(rows, results, equal=True, compared=compared, notes=["an example"])


def out_of_memory(*, planned: bool = True) -> str:
    """The page of an out-of-memory error, in a step that follows a plan or in another one."""
    memory = DeviceMemory(
        device="cuda:0",
        is_accelerator=True,
        asked_bytes=2 * GIB,
        used_bytes=20 * GIB,
        reserved_bytes=21 * GIB,
        free_bytes=GIB // 2,
        total_bytes=24 * GIB,
        limit="device memory",
        peak_bytes=21 * GIB,
    )
    return oom_page.render(
        where="forward of blocks.3.mlp (Linear)",
        error="OutOfMemoryError: tried to allocate 2.00 GiB",
        parts=memory.parts(3 * GIB, 7 * GIB),
        memory_rows=memory.rows(),
        saved_rows=[("kept: not in the plan", "31 tensors, 7.00 GiB", "could be swapped")],
        verdict="1.50 GiB are missing; 7.00 GiB of saved tensors could be swapped.",
        remedies=[("offload.enable(model, n_tensors=-1, lb=1)", "swaps up to 7.00 GiB more; the step takes longer")],
        running=(plan(), 14) if planned else None,
        limit_bytes=1100 * MIB,
    )


def fit() -> str:
    """The page of `offload fit`."""
    step = trace(8)
    limit_bytes = 900 * MIB
    return fit_page.render(answer("train.py", step, LINK, limit_bytes, step.base_bytes, ["An example."]), step, LINK)


PAGES = {
    "plan": lambda: plan_page.render(plan(), "an example", limit_bytes=1400 * MIB),
    "timeline": lambda: timeline_page.render(timeline()),
    "demo": demo,
    "demo of state": demo_of_state,
    "oom": out_of_memory,
    "oom without a plan": lambda: out_of_memory(planned=False),
    "fit": fit,
}
