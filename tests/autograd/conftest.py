"""The ground that the autograd scenarios stand on: each runs plain and offloaded, on both tiers, under every schedule.

`setup` names the tier and the schedule; `offloaded` enables a model so and compares. With `--device sim` everything is
on the simulated accelerator, and copied by its driver. After each test that passed, with the garbage collector off from
its beginning on, nothing may be left: no record, no ticket, no byte of pool or file.
"""

import gc
import time
import zlib
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import offload
from offload import _core, session
from offload.devices.device import device_of
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
        else:
            driver = device_of(device).driver() if self.tier == "sim" else lanes
            store = _core.SwapStore.slab(
                driver, lanes, self.host_bytes_max, options.spill_dir, slab_bytes=1 << 20, slice_bytes=16 << 10
            )
        return Engine(store, device, self.in_flight_bytes_max)


ON_CPU = (
    Setup("direct", "threads", settles=True),
    Setup("direct", "delays", settles=False, seed=1, in_flight_bytes_max=64 << 10),
    Setup("direct", "stepped", settles=False, seed=2),
    Setup("slab", "threads", settles=True),
    Setup("slab", "delays", settles=False, seed=3, in_flight_bytes_max=64 << 10),
    Setup("slab", "stepped", settles=True, seed=4, host_bytes_max=160 << 10),  # spills
)
ON_SIM = (
    Setup("sim", "delays", settles=True, seed=5, in_flight_bytes_max=64 << 10, host_bytes_max=160 << 10),  # spills
    Setup("sim", "threads", settles=False),
)


ALWAYS = (ON_CPU[0], ON_CPU[5])  # one of each tier, on which tests are shown to miss guards (campaign/mutants.py)
# Where the order of copies and writes is the subject; elsewhere another schedule repeats what the two setups show.
ON_THREE = {
    "test_copies_in_flight",
    "test_graph_lifetimes",
    "test_in_place",
    "test_in_place_after_copies",
    "test_interruptions",
    "test_threads",
}


def runs_by_default(setup, file, test):
    """Each scenario runs on two setups, and those of `ON_THREE` on a third, which the name decides."""
    others = [each for each in ON_CPU if each not in ALWAYS]
    return setup in ALWAYS or (file in ON_THREE and setup == others[zlib.crc32(test.encode()) % len(others)])


def pytest_generate_tests(metafunc):
    if "setup" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--device") == "sim":
        setups = ON_SIM if metafunc.config.getoption("--full") else ON_SIM[:1]
    else:
        file, test = metafunc.definition.path.stem, metafunc.function.__name__
        left_out = pytest.mark.full
        by_default = [runs_by_default(setup, file, test) for setup in ON_CPU]
        setups = [
            setup if runs else pytest.param(setup, marks=left_out)
            for setup, runs in zip(ON_CPU, by_default, strict=True)
        ]
    metafunc.parametrize("setup", setups, ids=str)


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
        if not [*model.parameters(), *model.buffers()]:
            model.register_buffer("its_device", torch.empty(0))
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
                here = [each.detach().clone().to(torch.get_default_device()) for each in inputs]
                leaves = [each.requires_grad_(given.requires_grad) for each, given in zip(here, inputs, strict=True)]
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
            # On an accelerator backward fails in a thread of autograd's own, which drops the failed node after the
            # error has reached the caller: without offload too, up to 4.5 ms later, in 9 of 6,000 calls on a busy
            # machine. The node's ticket and memory go a moment after its record.
            deadline = time.monotonic() + 10
            while any((left := self.what_is_left(handle)).values()) and time.monotonic() < deadline:
                time.sleep(0.001)
                engine.collect()
            assert left == dict.fromkeys(left, 0), engine.store.stats()

    def what_is_left(self, handle):
        engine = handle._engine
        stats = engine.store.stats()
        return {
            "records": engine.live_records,
            "tickets": stats["live_tickets"],
            "bytes in the file": stats["spill_used_bytes"],
            "bytes of the pool": stats["pool_requested_bytes"] - self.pool_bytes_at_rest[id(handle)],
            "bytes on the device": engine.resident.now,
            "bytes not swapped": engine.unswapped.now,
            "bytes in flight": engine.in_flight_bytes,
        }


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


@pytest.fixture(autouse=True)
def one_thread():
    """One thread, so that sums are formed in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def on_the_device(request):
    """What a scenario makes is on the accelerator that is asked for; one marked `only_cpu` says why it cannot be."""
    only_cpu = request.node.get_closest_marker("only_cpu")
    if only_cpu is not None and request.config.getoption("--device") == "sim":
        pytest.skip(only_cpu.args[0])
    torch.set_default_device("sim" if request.config.getoption("--device") == "sim" else None)
    yield
    torch.set_default_device(None)


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
