"""Saved tensors in any order of events against a plain dictionary of clones: the stateful test.

Tensors are packed, unpacked, dropped and written to; graphs are made, walked once and twice, and abandoned; the disk
fails, the pool is exhausted, the process forks. The schedule is stepped, so that an example replays.
"""

import errno
import os
import tempfile
from collections import Counter

import pytest
import torch
from faults.inject import inject_fault
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from torch import nn

import offload
from offload import _core, session
from offload.runtime.engine import Engine

COUNTS = Counter()
POOL_BYTES = 160 << 10
CHANGED = "modified by an inplace operation"
KINDS = ["plain", "transposed", "slice", "expanded", "flipped stride"]
FAULTS = [
    *((operation, "error", errno.EIO) for operation in ("allocate", "write", "read")),
    ("write", "error", errno.ENOSPC),
    ("read", "error", errno.EINTR),
    *((operation, "short_transfer", 0) for operation in ("write", "read")),
    ("read", "wrong_block", 0),
]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.complex64]


class Chain(nn.Module):
    """Saves a tensor a layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 40))

    def forward(self, x):
        for _ in range(4):
            x = (x * self.weight).tanh()
        return x.exp()


def view_of(whole, kind):
    return {
        "plain": lambda: whole,
        "transposed": lambda: whole.t(),
        "slice": lambda: whole[len(whole) // 3 : len(whole) // 2 + 1],
        "expanded": lambda: whole[:1].expand(7, -1),
        "flipped stride": lambda: whole[::2, 1::3],
    }[kind]()


class Source:
    """A tensor whose views are packed and that is written to, until it is let go."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.views = []


class Saved:
    """One packed tensor, and what the dictionary says of it."""

    def __init__(self, packed, tensor):
        self.packed = packed
        self.clone = tensor.clone()
        self.layout = layout_of(tensor)
        self.is_stale = False


class Graph:
    """A loss that waits for its backward, and the gradients that plain autograd gives."""

    def __init__(self, loss, leaf, expected):
        self.loss, self.leaf, self.expected = loss, leaf, expected


def layout_of(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj()


class SavedTensors(RuleBasedStateMachine):
    """What hooks hold, beside a dictionary."""

    sources = Bundle("sources")
    saved = Bundle("saved")
    graphs = Bundle("graphs")

    @initialize(tier=st.sampled_from(["direct", "slab", "slab+disk"]), seed=st.integers(0, 1 << 16))
    def enable(self, tier, seed):
        self.folder = tempfile.TemporaryDirectory()
        lanes = _core.HostDriver(schedule="stepped", seed=seed)
        if tier == "direct":
            self.store = _core.SwapStore.direct(lanes, self.folder.name, slice_bytes=16 << 10)
        else:
            directory = self.folder.name if tier == "slab+disk" else ""
            options = {"slab_bytes": POOL_BYTES, "slice_bytes": 8 << 10}
            self.store = _core.SwapStore.slab(lanes, lanes, POOL_BYTES, directory, **options)
        self.has_file = tier != "slab"
        self.at_rest = self.store.stats()["pool_requested_bytes"]
        self.model, self.plain = Chain(), Chain()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(session, "make_engine", lambda device, _: Engine(self.store, device, 64 << 10))
            self.handle = offload.enable(self.model, n_tensors=-1, lb=2, min_tensor_bytes=1)
        with self.handle._enabled.step() as self.round:
            pass  # its hooks are called by hand below
        self.fault = None
        self.held = []

    # -- single tensors -----------------------------------------------------------------------------------------------

    @rule(target=sources, rows=st.integers(2, 300), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1 << 16))
    def make(self, rows, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        return Source(torch.randint(-1000, 1000, (rows, 40), generator=generator).to(dtype))

    @rule(target=saved, source=sources, kind=st.sampled_from(KINDS), conj=st.booleans())
    def pack(self, source, kind, conj):
        if source.tensor is None:
            return multiple()
        tensor = view_of(source.tensor, kind)
        if conj and tensor.is_complex():
            tensor = tensor.conj()
        saved = Saved(self.round.pack(tensor), tensor)
        source.views.append(saved)
        self.held.append(saved)
        COUNTS["packed"] += 1
        return saved

    @rule(saved=saved)
    def unpack(self, saved):
        if saved.packed is None:
            return
        found = self.retry(lambda: self.unpacked(saved))
        if saved.is_stale:
            assert found is None, "nobody noticed the change"
        else:
            assert layout_of(found) == saved.layout
            assert torch.equal(found, saved.clone)
            COUNTS["unpacked"] += 1

    def unpacked(self, saved):
        try:
            return self.round.unpack(saved.packed)
        except RuntimeError as error:
            if CHANGED not in str(error):
                raise
            return None

    @rule(source=sources, whole=st.booleans())
    def write(self, source, whole):
        if source.tensor is None:
            return
        (source.tensor if whole else source.tensor[:1]).add_(1)
        for saved in source.views:
            saved.is_stale = True

    @rule(target=saved, source=sources, kind=st.sampled_from(KINDS))
    def pack_again(self, source, kind):
        """The same bytes with a write between: the second save has the new ones."""
        if source.tensor is None:
            return multiple()
        before = self.pack(source, kind, False)
        self.write(source, True)
        after = self.pack(source, kind, False)
        self.unpack(after)
        return multiple(before, after)

    @rule(source=sources)
    def let_go(self, source):
        source.tensor = None

    @rule(saved=consumes(saved))
    def drop(self, saved):
        saved.packed = None

    # -- graphs -------------------------------------------------------------------------------------------------------

    def begin(self, rows):
        x = torch.linspace(-1, 1, rows * 40).reshape(rows, 40)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        losses = [model(leaf * 2).sum() for model, leaf in zip((self.plain, self.model), leaves, strict=True)]
        expected = torch.autograd.grad(losses[0], [leaves[0], self.plain.weight])
        return Graph(losses[1], leaves[1], expected)

    def walk(self, graph, **options):
        def attempt():
            return torch.autograd.grad(graph.loss, [graph.leaf, self.model.weight], **options)

        found = self.retry(attempt)
        assert all(map(torch.equal, found, graph.expected))
        COUNTS["backwards"] += 1

    @rule(rows=st.sampled_from([1, 100, 250]))
    def step(self, rows):
        self.walk(self.begin(rows), retain_graph=True)

    @rule(target=graphs, rows=st.integers(1, 200))
    def forward(self, rows):
        return self.begin(rows)

    @rule(graph=graphs)
    def backward(self, graph):
        if graph.loss is not None:
            self.walk(graph, retain_graph=True)

    @rule(graph=consumes(graphs))
    def last_backward(self, graph):
        self.walk(graph, retain_graph=True)
        graph.loss = None

    @rule(graph=consumes(graphs))
    def abandon(self, graph):
        graph.loss = None

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    @rule(
        fault=st.sampled_from(FAULTS),
        nth=st.integers(1, 4),
        persistent=st.booleans(),
    )
    def fail_an_io(self, fault, nth, persistent):
        if self.has_file:
            operation, kind, number = fault
            inject_fault(self.store, operation, kind, nth=nth, error_number=number, persistent=persistent)
            COUNTS["faults"] += 1

    @rule()
    def repair(self):
        if self.has_file:
            inject_fault(self.store, "read", "error", nth=0)

    def retry(self, attempt):
        """What `attempt` gives, if need be once the fault has passed."""
        try:
            return attempt()
        except OSError as error:
            told = error.with_traceback(None)
        assert self.has_file
        assert (told.filename, told.errno) == (self.folder.name, errno.EIO)
        assert told.offset >= 0
        self.repair()
        return attempt()

    @rule()
    def exhaust(self):
        """More than the pool holds, at once."""
        sources = [torch.full((POOL_BYTES // 8 // 40, 40), float(number)) for number in range(4)]
        held = [Saved(self.round.pack(tensor), tensor) for tensor in sources]
        del sources
        for saved in reversed(held):
            assert torch.equal(self.retry(lambda saved=saved: self.unpacked(saved)), saved.clone)

    @rule(touches=st.booleans())
    def fork(self, touches):
        pid = os.fork()
        if pid == 0:
            try:
                if touches:
                    self.round.pack(torch.ones(50, 40))
                else:
                    self.held.clear()
                status = 1 if touches else 0
            except RuntimeError as error:
                status = 0 if touches and "does not copy the engine's threads" in str(error) else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        COUNTS["forks"] += 1

    @rule()
    def drain(self):
        self.handle._engine.drain()

    @invariant()
    def counts_are_sane(self):
        stats = self.store.stats()
        assert stats["pool_used_bytes"] <= POOL_BYTES
        engine = self.handle._engine
        assert 0 <= engine.resident.now <= engine.unswapped.now

    def teardown(self):
        if not hasattr(self, "held"):
            return
        for bundle in self.bundles.values():
            bundle.clear()
        for saved in self.held:
            saved.packed = None
        for name in list(vars(self)):
            if isinstance(vars(self)[name], Graph | Saved | Source):
                vars(self)[name] = None
        for graph in self.names_to_values.values():
            if isinstance(graph, Graph):
                graph.loss = None
        engine = self.handle._engine
        engine.drain()
        self.store.quiesce()
        engine.collect()
        stats = self.store.stats()
        assert engine.live_records == 0, stats
        assert (stats["live_tickets"], stats["spill_used_bytes"]) == (0, 0), stats
        assert stats["pool_requested_bytes"] == self.at_rest, stats
        assert (engine.resident.now, engine.unswapped.now, engine.in_flight_bytes) == (0, 0, 0)
        self.handle.disable()
        self.folder.cleanup()


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.only_cpu("stores of the host driver, whose copies are stepped through")
def test_any_order_of_events(is_full, campaign_counts):
    before = COUNTS.copy()
    chosen = settings(
        max_examples=3000 if is_full else 30,
        stateful_step_count=40,
        deadline=None,
        derandomize=not is_full,  # what a short run covers is then no matter of luck
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(SavedTensors, settings=chosen)
    made = COUNTS - before
    assert min(made[what] for what in ("packed", "unpacked", "backwards", "faults", "forks")) > 0, made
    campaign_counts["faults injected"] += made["faults"]
    campaign_counts["events of the stateful test"] += sum(made.values())
