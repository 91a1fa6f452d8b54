"""The trace of one training step: its nodes, their durations, and the tensors saved for backward.

The profiler writes a trace, and the planner reads it. This module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

from offload.plan.json_fields import kind_of, read_field, read_float, read_int, read_list, read_mapping

FORMAT = "offload-trace/1"
OPTIMIZER_NODE = "optimizer.step"  # name of a node in which the optimizer updates the parameters

__all__ = ["FORMAT", "OPTIMIZER_NODE", "Link", "Node", "Recompute", "SavedTensor", "Trace"]


@dataclass(frozen=True, slots=True)
class Node:
    """One interval of the step. A step is divided into nodes, which run one after another.

    Parameters
    ----------
    name : str
        Module or operator that ran.
    seconds : float
        Duration of the computation, in seconds, without waits for copies.
    backward : bool
        Whether the node belongs to the backward pass.
    """

    name: str
    seconds: float
    backward: bool


@dataclass(frozen=True, slots=True)
class Recompute:
    """The recipe of a saved tensor, with which it can be recomputed instead of swapped.

    Parameters
    ----------
    seconds : float
        Duration of the operators that compute the tensor from its sources, in seconds.
    inputs : tuple of int
        Ids of the sources: saved tensors that these operators read (``from`` in the JSON form).
    workspace_bytes : int, default 0
        Bytes of temporaries that the operators need while they run (``workspace`` in the JSON form).
    least_seconds : float, optional
        The part of `seconds` that counts in lower bounds: an operator that m recipes share counts 1/m in each. By
        default, all of `seconds`.
    """

    seconds: float
    inputs: tuple[int, ...]
    workspace_bytes: int = 0
    least_seconds: float | None = None

    @property
    def bound_seconds(self) -> float:
        """Seconds that recomputing the tensor adds to a lower bound on the step time."""
        return self.seconds if self.least_seconds is None else self.least_seconds


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One storage that forward saves for backward; node numbers index ``Trace.nodes``.

    Parameters
    ----------
    id : int
        Unique within the trace.
    bytes : int
        Size of the storage, in bytes.
    produced, packed, last_forward, first_backward, last_use : int
        Nodes at which the storage is allocated, is saved, is last used by forward, is first used by backward and is
        last used; produced <= packed <= last_forward < first_backward <= last_use.
    recompute : Recompute, optional
        Present if the tensor can be recomputed.
    copy_bytes : int, optional
        Bytes that a swap copies, from 1 to `bytes`; fewer than `bytes` if only views of parts of the storage are saved.
        By default, all of them.
    """

    id: int
    bytes: int
    produced: int
    packed: int
    last_forward: int
    first_backward: int
    last_use: int
    recompute: Recompute | None = None
    copy_bytes: int | None = None

    @property
    def copied_bytes(self) -> int:
        """Bytes that each copy of the tensor transfers."""
        return self.bytes if self.copy_bytes is None else self.copy_bytes


@dataclass(frozen=True, slots=True)
class Link:
    """The link between device memory and the tier below it: two FIFO channels, one per direction.

    Parameters
    ----------
    out_bandwidth, in_bandwidth : float
        Bytes per second out of, and into, device memory; may be infinite.
    latency : float, default 0.0
        Seconds that every copy takes in addition to the time for its bytes.
    swap_seconds, byte_seconds : float, default 0.0
        Seconds by which each swapped tensor, and each swapped byte, slows the computation: the time of hooks, and the
        CPU time of copies. Swap-out and swap-in are counted together. `simulate` does not include these seconds.
    is_steady : bool, default True
        Whether repeated measurements of the link agreed.

    Raises
    ------
    ValueError
        If a bandwidth is not positive, or another figure is negative or not finite.
    """

    out_bandwidth: float
    in_bandwidth: float
    latency: float = 0.0
    swap_seconds: float = 0.0
    byte_seconds: float = 0.0
    is_steady: bool = True

    def __post_init__(self) -> None:
        for name in ("out_bandwidth", "in_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive; write bytes per second, e.g. 12e9")
        for name in ("latency", "swap_seconds", "byte_seconds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}: {getattr(self, name)} is not a duration; write seconds, e.g. 10e-6")

    def overhead_seconds(self, nbytes: int) -> float:
        """Return the seconds by which swapping a tensor of `nbytes` bytes slows the computation."""
        return self.swap_seconds + self.byte_seconds * nbytes


@dataclass(frozen=True, slots=True)
class Trace:
    """One training step, validated on construction.

    Parameters
    ----------
    nodes : tuple of Node
        In execution order.
    base_bytes : tuple of int
        One per node: bytes resident while the node runs, without those of `tensors`.
    tensors : tuple of SavedTensor
        The tensors that forward saves for backward.
    source : str, default ""
        Where the trace comes from, as free text.
    link : Link, optional
        The link as measured on the recording machine. A trace file stores only its bandwidths and its latency.

    Raises
    ------
    ValueError
        If a value is invalid; the message names the field with its index.

    Examples
    --------
    >>> trace = Trace(
    ...     nodes=(Node("fc", 0.5, False), Node("relu", 0.1, False), Node("fc.grad", 1.0, True)),
    ...     base_bytes=(10, 10, 10),
    ...     tensors=(SavedTensor(0, 4, 0, 0, 0, 2, 2),),
    ... )
    >>> trace.tensors[0].first_backward
    2
    >>> Trace.from_dict(trace.to_dict()) == trace
    True
    """

    nodes: tuple[Node, ...]
    base_bytes: tuple[int, ...]
    tensors: tuple[SavedTensor, ...]
    source: str = ""
    link: Link | None = None

    def __post_init__(self) -> None:
        for i, node in enumerate(self.nodes):
            if not (math.isfinite(node.seconds) and node.seconds >= 0):
                raise ValueError(
                    f"nodes[{i}].seconds: {node.seconds} is not a duration; write a finite number of at least 0"
                )
        if len(self.base_bytes) != len(self.nodes):
            raise ValueError(
                f"base_bytes: {len(self.base_bytes)} entries for {len(self.nodes)} nodes; write one per node"
            )
        for i, count in enumerate(self.base_bytes):
            if count < 0:
                raise ValueError(f"base_bytes[{i}]: {count} is negative; write at least 0")
        index_of: dict[int, int] = {}
        for i, tensor in enumerate(self.tensors):
            _check_tensor(tensor, f"tensors[{i}]", len(self.nodes))
            if tensor.id in index_of:
                raise ValueError(f"tensors[{i}].id: {tensor.id} is already the id of tensors[{index_of[tensor.id]}]")
            index_of[tensor.id] = i
        for i, tensor in enumerate(self.tensors):
            if tensor.recompute is not None:
                _check_recompute(tensor.recompute, f"tensors[{i}].recompute", tensor.id, index_of)
        self._check_order(index_of)
        if max(self.base_bytes, default=0) + sum(tensor.bytes for tensor in self.tensors) >= 2**63:
            raise ValueError("tensors: with base_bytes, 2^63 bytes or more; write less")
        if not math.isfinite(sum(node.seconds for node in self.nodes)):
            raise ValueError("nodes: the seconds add up to infinity; write less")

    def _check_order(self, index_of: Mapping[int, int]) -> None:
        """Raise an error if tensors would be recomputed from one another."""
        sources = {tensor.id: tensor.recompute.inputs for tensor in self.tensors if tensor.recompute is not None}
        try:
            TopologicalSorter(sources).prepare()
        except CycleError as error:
            ids = error.args[1]
            where = f"tensors[{index_of[ids[-1]]}].recompute.from"
            raise ValueError(f"{where}: the recipes of tensors {sorted(set(ids))} form a cycle") from None

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace from a JSON file.

        Parameters
        ----------
        path : str or Path
            File in the format ``offload-trace/1``.

        Raises
        ------
        ValueError
            If the file is not a valid trace; the message names the file and the field.
        OSError
            If the file cannot be read.
        """
        text = Path(path).read_bytes()
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON to `path`, for `load`. Of the link, only bandwidths and latency are written.

        Parameters
        ----------
        path : str or Path
            File to write; an existing file is replaced.
        """
        Path(path).write_text(json.dumps(self.to_dict(), separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trace:
        """Build a trace from its JSON form.

        Parameters
        ----------
        data : mapping
            The result of ``json.load``. Unknown keys are ignored.

        Raises
        ------
        ValueError
            If a field is missing or invalid; the message names it with its index.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"trace: expected an object, got {kind_of(data)}")
        if data.get("format") != FORMAT:
            raise ValueError(f"format: expected {FORMAT!r}, got {data.get('format')!r}")
        source = data.get("source", "")
        if not isinstance(source, str):
            raise ValueError(f"source: expected a string, got {kind_of(source)}")
        return cls(
            nodes=tuple(_read_node(x, f"nodes[{i}]") for i, x in enumerate(read_list(data, "nodes", "nodes"))),
            base_bytes=tuple(
                read_int(x, f"base_bytes[{i}]") for i, x in enumerate(read_list(data, "base_bytes", "base_bytes"))
            ),
            tensors=tuple(
                _read_tensor(x, f"tensors[{i}]") for i, x in enumerate(read_list(data, "tensors", "tensors"))
            ),
            source=source,
            link=None if data.get("link") is None else _read_link(data["link"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, format ``offload-trace/1``."""
        return {
            "format": FORMAT,
            "source": self.source,
            **({} if self.link is None else {"link": {name: getattr(self.link, name) for name in _LINK_FIELDS}}),
            "nodes": [{"name": n.name, "seconds": n.seconds, "backward": n.backward} for n in self.nodes],
            "base_bytes": list(self.base_bytes),
            "tensors": [_tensor_to_dict(tensor) for tensor in self.tensors],
        }


_ROUNDING = 1e-9  # relative tolerance: `least_seconds` and `seconds` are sums in different orders, so last bits differ
_LINK_FIELDS = ("out_bandwidth", "in_bandwidth", "latency")
_NODE_NUMBERS = ("produced", "packed", "last_forward", "first_backward", "last_use")


def _tensor_to_dict(tensor: SavedTensor) -> dict[str, Any]:
    row: dict[str, Any] = {"id": tensor.id, "bytes": tensor.bytes}
    row.update({field: getattr(tensor, field) for field in _NODE_NUMBERS})
    if tensor.copy_bytes is not None:
        row["copy_bytes"] = tensor.copy_bytes
    if tensor.recompute is not None:
        recipe = tensor.recompute
        row["recompute"] = {"seconds": recipe.seconds, "from": list(recipe.inputs)}
        if recipe.workspace_bytes:
            row["recompute"]["workspace"] = recipe.workspace_bytes
        if recipe.least_seconds is not None:
            row["recompute"]["least_seconds"] = recipe.least_seconds
    return row


def _check_tensor(tensor: SavedTensor, where: str, node_count: int) -> None:
    if tensor.bytes < 0:
        raise ValueError(f"{where}.bytes: {tensor.bytes} is negative; write at least 0")
    if not min(1, tensor.bytes) <= tensor.copied_bytes <= tensor.bytes:
        raise ValueError(f"{where}.copy_bytes: {tensor.copied_bytes} is not from 1 to bytes, {tensor.bytes}")
    for field in _NODE_NUMBERS:
        if not 0 <= getattr(tensor, field) < node_count:
            raise ValueError(
                f"{where}.{field}: {getattr(tensor, field)} is not a node; nodes are numbered 0 to {node_count - 1}"
            )
    for early, late in pairwise(_NODE_NUMBERS):
        first, second = getattr(tensor, early), getattr(tensor, late)
        if first > second:
            raise ValueError(f"{where}.{early}: {first} is after {late} {second}")
        if first == second and late == "first_backward":
            raise ValueError(f"{where}.{early}: {first} is not before {late} {second}")


def _check_recompute(recompute: Recompute, where: str, own_id: int, index_of: Mapping[int, int]) -> None:
    if not (math.isfinite(recompute.seconds) and recompute.seconds >= 0):
        raise ValueError(f"{where}.seconds: {recompute.seconds} is not a duration; write a finite number of at least 0")
    if recompute.workspace_bytes < 0:
        raise ValueError(f"{where}.workspace: {recompute.workspace_bytes} is negative; write at least 0")
    if not 0 <= recompute.bound_seconds <= recompute.seconds * (1 + _ROUNDING):
        raise ValueError(
            f"{where}.least_seconds: {recompute.least_seconds} is not from 0 to seconds, {recompute.seconds}; "
            "write at least 0 and no more than seconds"
        )
    for i, source in enumerate(recompute.inputs):
        if source == own_id:
            raise ValueError(f"{where}.from[{i}]: {source} is the tensor itself")
        if source not in index_of:
            raise ValueError(f"{where}.from[{i}]: no tensor has the id {source}")


def _read_node(data: Any, where: str) -> Node:
    row = read_mapping(data, where)
    name = read_field(row, "name", where)
    if not isinstance(name, str):
        raise ValueError(f"{where}.name: expected a string, got {kind_of(name)}")
    backward = read_field(row, "backward", where)
    if not isinstance(backward, bool):
        raise ValueError(f"{where}.backward: expected true or false, got {kind_of(backward)}")
    return Node(name, read_float(read_field(row, "seconds", where), f"{where}.seconds"), backward)


def _read_link(data: Any) -> Link:
    row = {"latency": 0.0, **read_mapping(data, "link")}
    out, into, latency = (read_float(read_field(row, name, "link"), f"link.{name}") for name in _LINK_FIELDS)
    try:
        return Link(out, into, latency)
    except ValueError as error:
        raise ValueError(f"link.{error}") from None


def _read_tensor(data: Any, where: str) -> SavedTensor:
    row = read_mapping(data, where)
    fields = {
        field: read_int(read_field(row, field, where), f"{where}.{field}") for field in ("id", "bytes", *_NODE_NUMBERS)
    }
    recompute = None if row.get("recompute") is None else _read_recompute(row["recompute"], f"{where}.recompute")
    copied = None if row.get("copy_bytes") is None else read_int(row["copy_bytes"], f"{where}.copy_bytes")
    return SavedTensor(**fields, recompute=recompute, copy_bytes=copied)


def _read_recompute(data: Any, where: str) -> Recompute:
    row = read_mapping(data, where)
    least = row.get("least_seconds")
    return Recompute(
        read_float(read_field(row, "seconds", where), f"{where}.seconds"),
        tuple(read_int(x, f"{where}.from[{i}]") for i, x in enumerate(read_list(row, "from", f"{where}.from"))),
        read_int(row.get("workspace", 0), f"{where}.workspace"),
        None if least is None else read_float(least, f"{where}.least_seconds"),
    )
