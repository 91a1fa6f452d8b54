"""The ground that the autograd scenarios stand on: each runs plain and offloaded, on both tiers, under every schedule.

`setup` names the tier and the schedule; `offloaded` enables a model so and compares. After each test that passed, with
the garbage collector off since its beginning, nothing may be left: no record, no ticket, no byte of pool or file.
"""

import gc
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from twin.double import the_double

import offload
from offload import _core, session
from offload.runtime.engine import Engine

REPORT = pytest.StashKey[pytest.TestReport]()


@dataclass(frozen=True)
class Setup:
    """Where swapped bytes go, in which order the copies run, and whether they may race with backward."""

    tier: str
    schedule: str
    settles: bool  # settle() waits for every copy: the bytes really make the way there and back
    seed: int = 0
    in_flight_bytes_max: int | None = None
    host_bytes_max: int = 8 << 20

    def __str__(self):
        return f"{self.tier}-{self.schedule}{self.seed}-{'settled' if self.settles else 'racing'}"

    def make_engine(self, device, options):
        lanes = _core.HostDriver(schedule=self.schedule, seed=self.seed)
        if self.tier == "direct":
            store = _core.SwapStore.direct(lanes, options.spill_dir)
        elif self.tier == "cuda":
            driver = the_double().driver()
            store = _core.SwapStore.slab(
                driver, lanes, self.host_bytes_max, options.spill_dir, slab_bytes=1 << 20, slice_bytes=16 << 10
            )
        else:
            store = _core.SwapStore.slab(
                lanes, lanes, self.host_bytes_max, options.spill_dir, slab_bytes=1 << 20, slice_bytes=16 << 10
            )
        return Engine(store, device, self.in_flight_bytes_max)


SETUPS = (
    Setup("direct", "threads", settles=True),
    Setup("direct", "delays", settles=False, seed=1, in_flight_bytes_max=64 << 10),
    Setup("direct", "stepped", settles=False, seed=2),
    Setup("slab", "threads", settles=True),
    Setup("slab", "delays", settles=False, seed=3, in_flight_bytes_max=64 << 10),
    Setup("slab", "stepped", settles=True, seed=4, host_bytes_max=160 << 10),  # spills
    Setup("cuda", "threads", settles=False, seed=5),  # the CUDA driver, over the double of libcuda
)


class Calls(nn.Module):
    """A module whose forward is any function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def assert_same(found, expected):
    """Two results are equal to the last bit: structure, shapes, types and values (NaN equals NaN)."""
    found_leaves, found_spec = tree_flatten(found)
    expected_leaves, expected_spec = tree_flatten(expected)
    assert found_spec == expected_spec
    for number, (a, b) in enumerate(zip(found_leaves, expected_leaves, strict=True)):
        if not isinstance(b, torch.Tensor):
            assert a == b, f"leaf {number}"
            continue
        assert (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout), f"leaf {number}"
        assert torch.equal(torch.isnan(a), torch.isnan(b)), f"leaf {number}: NaN elsewhere"
        other = (torch.nan_to_num(a) != torch.nan_to_num(b)).sum().item()
        assert other == 0, f"leaf {number}: {other} of {a.numel()} elements differ"


class Offloaded:
    """Enables models on one setup, and answers for what they leave behind."""

    def __init__(self, setup, monkeypatch, spill_dir):
        self.setup = setup
        self.spill_dir = spill_dir
        self.handles = []
        self.pool_bytes_at_rest = {}
        monkeypatch.setattr(session, "make_engine", setup.make_engine)

    def enable(self, model, **options):
        options = {"n_tensors": -1, "lb": 2, "min_tensor_bytes": 1, "spill_dir": self.spill_dir} | options
        handle = offload.enable(model, **options)
        self.handles.append(handle)
        self.pool_bytes_at_rest[id(handle)] = handle._engine.store.stats()["pool_requested_bytes"]
        return handle

    def settle(self):
        """Wait until what was saved has left, where the setup wants that; else let the copies race."""
        if self.setup.settles:
            for handle in self.handles:
                handle._engine.drain()

    def compare(self, run, function=None, make=None, swaps=True, **options):
        """Run `run(model, step, settle)` plain and offloaded, both from the same seed, and want the same results."""
        results = []
        for offloaded in (False, True):
            torch.manual_seed(0)
            model = make() if make is not None else Calls(function)
            handle = self.enable(model, **options) if offloaded else None
            step = handle.step if offloaded else nullcontext
            results.append(run(model, step, self.settle if offloaded else lambda: None))
        assert_same(results[1], results[0])
        if swaps is not None:
            assert (handle.report().swapped.tensors > 0) == swaps, str(handle.report())
        return handle

    def differentiate(self, function, *inputs, swaps=True, again=False, **options):
        """Compare outputs and gradients of a function of `inputs`; `again`: over a second, scheduled step too."""

        def run(model, step, settle):
            results = []
            for _ in range(2 if again else 1):
                leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
                loss = sum_of(model(*leaves))
                settle()
                loss.backward()
                results.append((loss.detach(), [leaf.grad for leaf in leaves if leaf.requires_grad]))
            return results

        return self.compare(run, function, swaps=swaps, **options)

    def check_nothing_left(self):
        for handle in self.handles:
            engine = handle._engine
            engine.drain()
            engine.store.quiesce()
            engine.collect()
            stats = engine.store.stats()
            assert engine.live_records == 0, stats
            assert stats["live_tickets"] == 0, stats
            assert stats["spill_used_bytes"] == 0, stats
            assert stats["pool_requested_bytes"] == self.pool_bytes_at_rest[id(handle)], stats
            assert (engine.resident.now, engine.unswapped.now, engine.in_flight_bytes) == (0, 0, 0)
        if self.setup.tier == "cuda":
            assert the_double().first_violation == ""


def sum_of(outputs):
    """A real scalar that depends on every element of every output, each with a weight of its own."""
    total = 0
    for output in tree_flatten(outputs)[0]:
        real = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
        weights = torch.arange(1, real.numel() + 1, dtype=torch.float64).reshape(real.shape)
        total = total + (real.double() * weights).sum()
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        item.stash[REPORT] = report
    return report


@pytest.fixture(scope="session", autouse=True)
def frozen_imports():
    """What imports left behind never dies; the collector need not look at it before every test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread():
    """One thread, so that sums are formed in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=SETUPS, ids=str)
def setup(request):
    return request.param


@pytest.fixture
def offloaded(request, setup, monkeypatch, tmp_path):
    gc.collect()
    gc.disable()
    try:
        lent = Offloaded(setup, monkeypatch, tmp_path)
        yield lent
        if REPORT in request.node.stash and request.node.stash[REPORT].passed:
            lent.check_nothing_left()
    finally:
        gc.enable()
