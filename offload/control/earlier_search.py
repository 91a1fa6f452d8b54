"""Keeps what a search for a plan has measured in a file, so that the next training of the same step begins with it.

The next training measures the plan again that the earlier search ended with. Both measurements count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.control.limits import Limits
from offload.control.measured_slowdown import standard_error
from offload.control.plan_search import PlanSearch
from offload.control.tried_plan import TriedPlan
from offload.devices import allocator
from offload.devices.device import device_of
from offload.options import Options
from offload.plan import Link, Plan, make_plan
from offload.plan.simulate import Swap
from offload.plan.trace import SavedTensor, Trace
from offload.profiling.cache_files import cache_path, environment, load, save
from offload.runtime.stores import checks_every_byte, throttle

__all__ = ["EarlierSearch", "EarlierSearches", "earlier_searches"]

log = logging.getLogger("offload")

KEPT_SECONDS_MAX = 7 * 86400.0
_PLANS_MAX = 8  # of the latest plans; with each training the search knows more
_FIGURES = ("measured", "deviation", "compute_seconds", "unexplained_seconds", "slowdown", "error")


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
        `earlier_pairs`, `trainings_spread`.
    folder
        Where the files are. Default: ``offload`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
    """

    def __init__(self, device: torch.device, options: Options, limits: Limits, folder: Path | None = None) -> None:
        self._device = device
        self._options = options
        self._limits = limits
        self._folder = folder

    def find(self, trace: Trace, link: Link) -> EarlierSearch | None:
        """Return the latest search for this step. None if there is none, or if this trace lacks a recipe that it used.

        Of each plan, at most `earlier_pairs` pairs of steps count. Slowdowns differ between trainings by more than
        their standard errors: `trainings_spread` is added.
        """
        key = self._key(trace)
        path = cache_path("search", key, self._folder)
        try:
            found = load(path, key, KEPT_SECONDS_MAX)
            if found is None:
                return None
            rows, number = found["tried"], found["plan"]
            deviations = [float(row["deviation"]) for row in rows]
            tried = [self._read(row, trace, link, deviations) for row in rows]
            return EarlierSearch(tried, None if number is None else tried[number])
        except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
            log.info("cannot use %s, so the search begins anew: %s", path, error)
            return None

    def keep(self, search: PlanSearch, plan: Plan) -> None:
        """Write what a search that has ended with `plan` has measured, unless other programs shared the processor."""
        ended_with = search.judged(plan)
        tried = search.tried[-_PLANS_MAX:]
        if ended_with is not None and ended_with not in tried:
            tried = [ended_with, *tried]
        if search.is_shared or not tried or any(each.plan.state is not None for each in tried):
            return
        key = self._key(plan.trace)
        number = None if ended_with is None else tried.index(ended_with)
        try:
            save(cache_path("search", key, self._folder), key, {"tried": [*map(_written, tried)], "plan": number})
        except OSError as error:
            log.info("what this search has measured is not kept, so the next training begins anew: %s", error)

    def _read(self, row: Mapping[str, Any], trace: Trace, link: Link, deviations: Sequence[float]) -> TriedPlan:
        swaps = [Swap(*map(int, each)) for each in row["swaps"]]
        plan = make_plan(trace, link, swaps, recomputes=row["recomputes"])
        figures = {name: float(row[name]) for name in _FIGURES}
        pairs = min(int(row["reference_steps"]), self._limits.earlier_pairs)
        if not all(map(math.isfinite, figures.values())) or figures["compute_seconds"] <= 0 or pairs <= 0:
            raise ValueError("a figure is not a valid number")
        error = standard_error(figures["deviation"], pairs, deviations, self._limits)
        error = math.hypot(error, self._limits.trainings_spread)
        return TriedPlan(plan, measured_error=error, reference_steps=pairs, keeps_all=bool(row["keeps_all"]), **figures)

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
            "threads": torch.get_num_threads(),
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
