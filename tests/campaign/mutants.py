"""Deliberately broken guards, and who catches each.

    python -m campaign.mutants OUTPUT.json     (with tests/ and the checkout on PYTHONPATH)

runs the whole table and writes it.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from campaign.build import ROOT, build_mutants, mutants_package
from campaign.seeds import SEEDS, run_apart
from stress.build import USE_AFTER_FREE, run_planted

SECONDS_MAX = 240
WALK = "tests/campaign/test_seeds.py::test_every_seed_survives"

# The five that the oracle, too, must report, from the log alone.
JUDGED = {
    "copy-out waits for compute",
    "copy-in waits for its copy-out",
    "copy-in waits for compute",
    "consumer waits for copy-in",
    "slot waits for its last read",
}
EDGES = JUDGED | {
    "a batch has only free targets",
    "a batch has only produced blocks",
    "bounce waits for its last read",
    "cancel refuses a copy that has begun",
    "checksum is verified",
    "copy-in holds its target's owner",
    "event is recycled after its last waiter",
    "extent outlives its fill",
    "failure is reported after earlier slices have ended",
    "copy-in ends with its last slice",
    "short write is continued",
    "source outlives its copy-out",
    "spill waits for copy-out",
}
# No order of steps need miss a lock or an owner: a sanitizer has to say so. Guard: sanitizer, pattern of that, test.
STRESS = "tests/stress/test_stress.py::test_a_planted_"
SANITIZED = {
    "event pool is locked": ("thread", "ThreadSanitizer: data race", STRESS + "race_is_found"),
    "a queued spill holds its slot": (
        "address,undefined",
        USE_AFTER_FREE,
        STRESS + "memory_error_is_found",
    ),
}

# Left out by campaign/broken_engine.py: the tests that must all fail then, and must pass otherwise.
AUTOGRAD = "tests/autograd/test_"
SHARED_VIEWS = AUTOGRAD + "tensor_kinds.py::test_views_share_a_storage_whether_or_not_it_leaves_between_them"
FAULTS = AUTOGRAD + "faults.py::test_"
PROCESSES = "tests/processes/test_"
PRIVACY = PROCESSES + "spill_privacy.py::test_"
LONG_RUN = PROCESSES + "long_run.py::test_nothing_grows"
KEPT = AUTOGRAD + "kept_tensors.py::test_"
SWAPPED = AUTOGRAD + "swapped_without_python.py::test_"
FOLLOWING = "tests/recomputation/test_following.py::test_"
BESIDE = "tests/recomputation/test_swapped_beside.py::test_"


def nth(operation: str, kind: str, number: int, persistence: str, *setups: str) -> list[str]:
    """Cases of the test in which the N-th operation fails."""
    return [f"{FAULTS}nth_operation_fails[{setup}-{operation}-{kind}-{number}-{persistence}]" for setup in setups]


DIRECT = "direct-threads0-settled"
SLAB = "slab-stepped4-settled"
PYTHON = {
    "version of a kept tensor is checked": [AUTOGRAD + "in_place.py::test_tensors_that_pass_through_are_watched_too"],
    "a failed copy-in writes to no parameter": nth("read", "error", errno.EIO, "transient", DIRECT, SLAB),
    "copies end before the interpreter does": [PROCESSES + "kills.py::test_no_copy_is_under_way_when_tensors_go"],
    "a control group's limit counts": ["tests/test_host_limit.py::test_every_ancestor_counts"],
    "an interrupt leaves no hooks on": [AUTOGRAD + "interruptions.py::test_an_interrupt_as_hooks_go_on_or_off"],
}


# Guards in C++ against what fails below the store, and around the process; below, those of the hooks.
OUTSIDE = {
    "a freed slot gives its extent back": [LONG_RUN],
    "a failed write gives its extent back": nth("write", "error", errno.EIO, "transient", DIRECT, SLAB),
    "an error names the offset in the spill file": nth("read", "error", errno.EIO, "transient", DIRECT, SLAB),
    "a read that ends early is reported": [FAULTS + "file_truncated_behind_the_back"],
    "a read that failed is reported": nth("read", "error", errno.EIO, "persistent", DIRECT, SLAB),
    "a second copy-in clears the failure of the first": nth("read", "error", errno.EIO, "transient", DIRECT, SLAB),
    "a write that failed is reported": nth("write", "error", errno.ENOSPC, "persistent", DIRECT, SLAB),
    "an allocation that failed is reported": nth("allocate", "error", errno.ENOSPC, "persistent", DIRECT, SLAB),
    "an interrupted allocation is repeated": nth("allocate", "error", errno.EINTR, "transient", SLAB),
    "an interrupted transfer is repeated": [
        *nth("write", "error", errno.EINTR, "transient", DIRECT, SLAB),
        *nth("read", "error", errno.EINTR, "transient", DIRECT, SLAB),
    ],
    "a refused pinning is not tried again": [
        "tests/core/test_faults_below.py::test_a_refused_pinning_is_not_tried_again"
    ],
    "a slab that cannot be pinned is refused": ["tests/core/test_faults_below.py::test_pinning_fails_at_the_nth_slab"],
    "room is awaited without the lock": [
        "tests/core/test_faults_below.py::test_eight_threads_and_one_block_of_memory[with disk]"
    ],
    "a spill that failed may be tried again": [
        "tests/twin/test_store_over_double.py::test_every_call_fails_once[cuEventQuery-True]"
    ],
    "a failed allocation raises an out-of-memory error": [PROCESSES + "limits.py::test_no_address_space[slab]"],
    "a thread that cannot start is not needed": [PROCESSES + "limits.py::test_no_address_space[thread]"],
    "the spill file has no name": [
        PRIVACY + "private_and_unlinked[fallback]",
        PROCESSES + "kills.py::test_eight_processes_in_one_folder",
    ],
    "the spill file is its owner's": [PRIVACY + "private_and_unlinked"],
    "a planted link is refused": [PRIVACY + "planted_link_is_refused"],
    "a forked child does not free its tickets": [PROCESSES + "forks.py::test_child_that_touches_the_engine"],
    "a forked child waits for no lane": [PROCESSES + "forks.py::test_child_that_leaves_the_engine_alone"],
    "slabs are not locked with mlock": [PROCESSES + "limits.py::test_no_memory_to_lock[slab]"],
    "a copy that could not be listed is waited for": ["tests/core/test_no_memory.py::test_no_memory_for_the_engine"],
    "freed engines wait for copy-outs": [
        "tests/core/test_freed_engines.py::test_an_engine_that_is_freed_waits_for_its_copies"
    ],
    "freed engines wait for copy-ins": [
        "tests/core/test_freed_engines.py::test_an_engine_that_is_freed_waits_for_a_copy_in"
    ],
    "a forked child is refused": [PROCESSES + "forks.py::test_child_that_touches_the_engine"],
}
OUTSIDE |= {
    "source is held until its copy ends": [AUTOGRAD + "copies_in_flight.py::test_a_freed_source_may_be_overwritten"],
    "version of a swapped tensor is checked": [
        AUTOGRAD + "in_place.py::test_write_after_save_is_the_usual_error",
        AUTOGRAD + "in_place.py::test_write_that_races_with_the_copy_out",
    ],
    "a duplicate keeps its stride": [AUTOGRAD + "tensor_kinds.py::test_views_come_back_onto_one_storage"],
    "a source that backward has used is kept": [
        SHARED_VIEWS,
        AUTOGRAD + "saved_records.py::test_a_source_that_backward_has_used_stays",
    ],
    "a used source keeps the offset of its span": [SHARED_VIEWS],
    "an abandoned graph frees its records": [
        AUTOGRAD + f"graph_lifetimes.py::test_abandoned_forwards_leave_the_pool_as_it_was[{setup}]"
        for setup in (DIRECT, SLAB)
    ],
    "a source is freed after its copy-out": [AUTOGRAD + "copies_in_flight.py::test_a_source_is_freed_as_its_copy_ends"],
    "a view keeps its offset": [
        AUTOGRAD + "tensor_kinds.py::test_a_slice_that_is_copied_with_its_storage_keeps_its_offset"
    ],
    "a version is checked while others hold the storage": [
        AUTOGRAD + "in_place_after_copies.py::test_a_write_after_the_copy_is_the_usual_error"
    ],
    "an owner that was freed matches nothing": [
        AUTOGRAD + "in_place.py::test_freed_addresses_that_come_back_are_other_tensors"
    ],
    "a version is part of an identity": [AUTOGRAD + "in_place.py::test_saved_written_to_and_saved_again"],
    "a changed parameter is noticed": ["tests/test_model_state.py::test_a_change_between_looks_is_noticed"],
    "what the model holds stays": [SWAPPED + "what_the_model_holds_stays_at_the_place_of_a_swapped_tensor"],
    "a swapped storage has the recorded size": [
        SWAPPED + "another_size_at_the_place_of_a_swapped_tensor_ends_the_schedule"
    ],
    "a kept tensor has the recorded size": [KEPT + "a_tensor_of_another_size_ends_the_schedule"],
    "a small tensor has the size of earlier steps": [
        "tests/core/test_hook_core.py::test_a_small_tensor_of_another_size_than_in_earlier_steps_is_looked_at"
    ],
    "packs between recorded operators are reported": [BESIDE + "the_same_bits"],
    "what is due at a kept tensor is done": [KEPT + f"what_is_due_while_a_kept_tensor_is_unpacked_is_done[{DIRECT}]"],
}
# Operators that are exactly those of a template; what differs is decided in Python, whose guards have a table beside
# their tests (tests/recomputation/test_guards.py).
OUTSIDE |= {
    "a followed operator reads the version that was bound": [FOLLOWING + "a_write_by_another_thread"],
    "a followed operator reads the same values": [FOLLOWING + "arguments_in_another_order"],
    "a followed operator sees its arguments as before": [FOLLOWING + "tensors_seen_otherwise"],
    "a write to what is known ends the following": [FOLLOWING + "a_write_through_data"],
    "a followed operator has the same numbers": [FOLLOWING + "scalars_are_those_of_the_step[floats]"],
    "a followed product saves its factors as before": [FOLLOWING + "a_weight_in_whose_place_another_tensor_is_saved"],
    "settings are the step's": [FOLLOWING + "settings_are_those_of_the_step_alone"],
}
TESTED = PYTHON | OUTSIDE

# Ordering on an accelerator, in C++ and in Python: each left out on the simulated one, under its order checker.
ON_ACCELERATORS = {
    "abandoned targets are kept",
    "a prefetch for another stream is not used",
    "a batch has only free targets",
    "a batch has only produced blocks",
    "a batch has only blocks that are copied out",
    "bounce waits for its last read",
    "consumer waits for copy-in",
    "copy-in waits for compute",
    "copy-in waits for its copy-out",
    "copy-out waits for compute",
    "event is recycled after its last waiter",
    "copy-in ends with its last slice",
    "record_stream on sources",
    "slot waits for its last read",
    "source is held until its copy ends",
    "source outlives its copy-out",
    "spill waits for copy-out",
    "the current stream orders",
}


# Finds nothing where every edge is there. That each edge's scenario finds something where it is left out is for --long.
SCENARIOS = "tests/twin/inside/test_edges.py::test_nothing_is_found_where_nothing_is_left_out"


def edges_in_sources() -> set[str]:
    """Every guard that can be left out."""
    text = "".join(path.read_text() for path in (ROOT / "csrc").glob("*.[ch]*"))
    return set(re.findall(r'OFFLOAD_(?:EDGE|BROKEN)\(\s*"([^"]+)"', text))


def walk_without(core: Path, edge: str) -> dict[str, Any]:
    """Leave one guard out, and walk as a short run does until somebody notices."""
    tally = run_apart(core, 0, SEEDS, edge, timeout=SECONDS_MAX)
    row: dict[str, Any] = {"name": edge, "caught_by": [WALK], "caught": bool(tally.failures)}
    row["first"] = tally.failures[0] if tally.failures else ""
    if edge in JUDGED:
        row["oracle"] = tally.oracle_reports[0] if tally.oracle_reports else ""
        row["caught"] = row["caught"] and bool(tally.oracle_reports)
    return row


def break_engine(table: dict[str, list[str]], *, unbroken: bool = True) -> list[dict[str, Any]]:
    """Run the named tests broken, where they must fail; before that `unbroken`, where they must pass."""
    rows: dict[str, dict[str, Any]] = {}
    with mutants_package() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests")])}
        children = []
        for first in range(2):  # at once: what hangs leaves a core to the others
            half = dict(list(table.items())[first::2])
            command = [sys.executable, "-m", "campaign.broken_engine", *["--unbroken"][:unbroken], json.dumps(half)]
            pipe = subprocess.PIPE
            children.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=folder))
        for child, (out, err) in [(child, child.communicate()) for child in children]:
            if child.returncode != 0:
                raise RuntimeError(out + err)
            rows |= {row["name"]: row for row in json.loads(out.splitlines()[-1])}
    return [rows[guard] for guard in table]


def leave_out_on_accelerators() -> list[dict[str, Any]]:
    """Each edge of ON_ACCELERATORS left out, and what the order checker names first."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "edges.json")
        command = [sys.executable, str(ROOT / "tests" / "twin" / "mutants.py"), "--json", str(table)]
        subprocess.run(command, capture_output=True, check=False)
        found = {row["name"]: row["checker"] for row in json.loads(table.read_text())}
    return [
        {
            "name": f"on an accelerator: {name}",
            "caught_by": [SCENARIOS],
            "caught": bool(found[name]),
            "first": found[name],
        }
        for name in sorted(ON_ACCELERATORS)
    ]


def without_paths(row: dict[str, Any]) -> dict[str, Any]:
    """A row that says nothing of the machine it was made on."""
    path = r"(?<![\w.])/[\w.-]+(?:/[\w.\[\]-]+)+"
    return {key: re.sub(path, "PATH", value)[:1000] if isinstance(value, str) else value for key, value in row.items()}


def main() -> int:
    """Everything, recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    core = build_mutants()
    rows = [walk_without(core, edge) for edge in sorted(EDGES)]
    for edge, (sanitizer, says, test) in SANITIZED.items():
        found = re.search(says, run_planted(edge, sanitizer, says))
        first = found[0] if found else ""
        rows.append({"name": edge, "caught_by": [test], "caught": bool(found), "first": first})
    rows += break_engine(TESTED)
    rows += leave_out_on_accelerators()
    missed = [row["name"] for row in rows if not row["caught"] or not row.get("passes_unbroken", True)]
    found = {"mutants": [without_paths(row) for row in rows], "failed": len(missed)}
    output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(rows) - len(missed)} of {len(rows)} mutants caught", *missed, sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
