"""The planner: from a trace, a link and a limit to a plan with a lower bound on the step time. Imports no torch.

The profiler records the trace, and the executor follows the plan.
"""

from offload.plan.bounds import (
    CutBounds,
    InfeasibleLimitError,
    Reason,
    check_limit,
    cut_bound,
    cut_bounds,
    least_feasible_limit,
)
from offload.plan.certify.exact import ExactSwaps, fastest_swaps
from offload.plan.certify.joint_proof import JointProof, prove_joint
from offload.plan.certify.proof import Proof, prove
from offload.plan.cycle import CycleTiming, StateChunk, Update, cycle_bound, cycle_bytes, simulate_cycle
from offload.plan.joint_bounds import joint_bound
from offload.plan.overlap import StateOverlap, state_overlap
from offload.plan.recompute import Recomputation, recomputations, recomputed
from offload.plan.result import Plan, make_plan
from offload.plan.search import fastest_plan, least_memory_plan, manual_plan
from offload.plan.serial import serial_swaps
from offload.plan.share import StateShare
from offload.plan.share_search import fastest_share
from offload.plan.simulate import Copy, Link, Swap, Timing, resident_bytes, simulate, unswapped_bytes

__all__ = [
    "Copy",
    "CutBounds",
    "CycleTiming",
    "ExactSwaps",
    "InfeasibleLimitError",
    "JointProof",
    "Link",
    "Plan",
    "Proof",
    "Reason",
    "Recomputation",
    "StateChunk",
    "StateOverlap",
    "StateShare",
    "Swap",
    "Timing",
    "Update",
    "check_limit",
    "cut_bound",
    "cut_bounds",
    "cycle_bound",
    "cycle_bytes",
    "fastest_plan",
    "fastest_share",
    "fastest_swaps",
    "joint_bound",
    "least_feasible_limit",
    "least_memory_plan",
    "make_plan",
    "manual_plan",
    "prove",
    "prove_joint",
    "recomputations",
    "recomputed",
    "resident_bytes",
    "serial_swaps",
    "simulate",
    "simulate_cycle",
    "state_overlap",
    "unswapped_bytes",
]
