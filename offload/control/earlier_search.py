"""Keeps what a search for a plan has measured in a file, so that the next training of the same step begins with it.

The next training measures the plan again that the earlier search ended with. Both measurements count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.control.limits import Limits
from offload.control.plan_search import PlanSearch
from offload.control.tried_plan import TriedPlan
from offload.devices import allocator
from offload.devices.device import device_of
from offload.devices.processes import local_processes
from offload.options import Options
from offload.plan import Link, Plan, make_plan
from offload.plan.simulate import Swap
from offload.plan.trace import SavedTensor, Trace
from offload.profiling.cache_files import cache_path, discard_older, environment, load, save
from offload.runtime.stores import checks_every_byte, throttle

__all__ = ["EarlierSearch", "EarlierSearches", "earlier_searches"]

log = logging.getLogger("offload")

KEPT_SECONDS_MAX = 7 * 86400.0
_PLANS_MAX = 8  # of the latest plans; with each training the search knows more
_FIGURES = ("measured", "measured_error", "deviation", "compute_seconds", "unexplained_seconds", "slowdown", "error")


class EarlierSearch(NamedTuple):
    """What an earlier search has found.

    Attributes
    ----------
    tried
        The plans that it judged.
    best
        The one of them that it ended with; None if it ended with a plan that moves nothing.
    """

    tried: list[TriedPlan]
    best: TriedPlan | None


class EarlierSearches:
    """Searches of earlier trainings in this environment with the same device and the same options.

    Parameters
    ----------
    device
        The device of the model.
    options
        The caller's arguments. `max_slowdown` is given, and `memory_limit` is not.
    limits
        `trainings_spread`.
    """

    def __init__(self, device: torch.device, options: Options, limits: Limits) -> None:
        self._device = device
        self._options = options
        self._limits = limits

    def find(self, trace: Trace, link: Link) -> EarlierSearch | None:
        """Return the latest search for this step. None if there is none, or if this trace lacks a recipe that it used.

        Slowdowns differ between trainings by more than their standard errors: `trainings_spread` is added, each time.
        """
        recipes = {tensor.id for tensor in trace.tensors if tensor.recompute is not None}
        try:
            key = self._key(trace)
            path = cache_path("search", key)
            found = load(path, key, KEPT_SECONDS_MAX)
            if found is None:
                return None
            rows, number = found["tried"], found["plan"]
            if not recipes.issuperset(each for row in rows for each in row["recomputes"] or ()):
                return None  # the trial step, which finds recipes, has not run
            if number is not None and number not in range(len(rows)):
                raise ValueError(number)
            tried = [self._read(row, trace, link) for row in rows]
        except (OSError, ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            log.info("the search begins anew, because what an earlier one has measured cannot be used: %s", error)
            return None
        return EarlierSearch(tried, None if number is None else tried[number])

    def keep(self, search: PlanSearch, plan: Plan) -> None:
        """Write what a search that has ended with `plan` has measured, unless other programs shared the processor."""
        ended_with = search.judged(plan)
        tried = search.tried[-_PLANS_MAX:]
        if ended_with is not None and all(each is not ended_with for each in tried):
            tried = [ended_with, *tried]
        if search.is_shared or not tried or any(each.plan.state is not None for each in tried):
            return
        number = next((number for number, each in enumerate(tried) if each is ended_with), None)
        try:
            key = self._key(plan.trace)
            path = cache_path("search", key)
            discard_older(path.parent, "search", KEPT_SECONDS_MAX)
            save(path, key, {"tried": [*map(_written, tried)], "plan": number})
        except OSError as error:
            log.info("what this search has measured is not kept, so the next one begins anew: %s", error)

    def _read(self, row: Mapping[str, Any], trace: Trace, link: Link) -> TriedPlan:
        swaps = [Swap(*map(int, each)) for each in row["swaps"]]
        plan = make_plan(trace, link, swaps, recomputes=row["recomputes"])
        figures = {name: float(row[name]) for name in _FIGURES}
        pairs = int(row["reference_steps"])
        is_valid = all(map(math.isfinite, figures.values())) and pairs > 0
        if not is_valid or figures["compute_seconds"] <= 0 or figures["measured_error"] < 0:
            raise ValueError(row)
        figures["measured_error"] = math.hypot(figures["measured_error"], self._limits.trainings_spread)
        return TriedPlan(plan, reference_steps=pairs, keeps_all=bool(row["keeps_all"]), is_earlier=True, **figures)

    def _key(self, trace: Trace) -> dict[str, Any]:
        """Return what identifies the step and its surroundings, but for durations and the memory of other tensors."""
        options, device = self._options, device_of(self._device)
        step = [
            [(node.name, node.backward) for node in trace.nodes],
            [(each.id, each.bytes, each.copied_bytes, *_nodes_of(each)) for each in trace.tensors],
        ]
        return {
            **environment(),
            "torch": torch.__version__,
            "threads": [torch.get_num_threads(), len(os.sched_getaffinity(0)), local_processes()],
            "kernels": [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
            "malloc": allocator.current() if self._device.type == "cpu" else "",
            "device": device.name(),
            "uuid": device.uuid(),
            "spill_device": Path(options.spill_dir).stat().st_dev if options.spill_dir else None,
            "throttle": throttle(),
            "checks_every_byte": checks_every_byte(),
            "max_slowdown": options.max_slowdown,
            "min_tensor_bytes": options.min_tensor_bytes,
            "host_limit": options.host_limit if options.host_limit_is_given else None,
            "recompute": options.recompute,
            "step": hashlib.sha256(json.dumps(step).encode()).hexdigest(),
        }


def earlier_searches(device: torch.device, options: Options, limits: Limits) -> EarlierSearches | None:
    """Return the earlier searches for steps on this device. None if none count.

    Plans within a memory limit, or with a share of optimizer state, depend on the memory in use. So none are kept with
    `memory_limit`. With ``OFFLOAD_SEARCH_ANEW=1`` every search begins anew, and what it measures is not kept.
    """
    is_off = os.environ.get("OFFLOAD_SEARCH_ANEW") == "1"
    if is_off or options.max_slowdown is None or options.memory_limit is not None:
        return None
    return EarlierSearches(device, options, limits)


def _nodes_of(tensor: SavedTensor) -> tuple[int, ...]:
    return tensor.produced, tensor.packed, tensor.last_forward, tensor.first_backward, tensor.last_use


def _written(tried: TriedPlan) -> dict[str, Any]:
    plan = tried.plan
    return {
        "swaps": [list(swap) for swap in plan.swaps],
        "recomputes": None if plan.swap_only else [row.id for row in plan.recomputes],
        "reference_steps": tried.reference_steps,
        "keeps_all": tried.keeps_all,
        **{name: getattr(tried, name) for name in _FIGURES},
    }
