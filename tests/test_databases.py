"""PyTorch's own operator and module databases under the engine's hooks: bit-equal, as packed, and nothing left.

Every differentiable operator of `op_db` and every module of `module_db` runs forward and backward on its sample inputs,
plain and with every storage of a byte or more swapped, twice: recorded and scheduled. Results and gradients must be the
same to the last bit; what unpack returns must have the shape, strides, type and lazy bits that pack was given; and with
the garbage collector off no record or ticket may be left. A case that differs between two plain runs, or under stock
hooks that copy, is left out, counted and listed at the end of the run.

By default a fixed quick subset runs. The whole:

    pytest tests/test_databases.py --all-databases        (or OFFLOAD_ALL_DATABASES=1)
"""

import gc
import random
import warnings
import zlib
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_map

import offload
from offload.control import enabled_model
from offload.runtime import hooks

QUICK_SHARE = 6  # every sixth operator and module
FULL_SHARE = 3  # with `--full` every third
QUICK_SAMPLES = 3
PLAIN_RUNS_MAX = 200
DTYPES = (torch.float64, torch.complex128)


class Call(nn.Module):
    """A module whose forward is any function of no arguments."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self):
        return self.function()


def looks(tensor):
    """What a tensor shows besides its bytes."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.shape, tensor.dtype, tensor.layout
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


class WatchedRound(hooks.StepHooks):
    """Compares what comes out of unpack with what went into pack."""

    def pack(self, tensor):
        return super().pack(tensor), looks(tensor)

    def unpack(self, packed):
        inner, before = packed
        tensor = super().unpack(inner)
        assert looks(tensor) == before, f"saved as {before}, came back as {looks(tensor)}"
        return tensor


def as_bits(tensor):
    """The bits of a tensor in its logical order; NaN equals NaN, and no zero equals another."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    packed = torch.empty(dense.numel(), dtype=dense.dtype)
    packed.copy_(dense.detach().reshape(-1))  # a "contiguous" tensor may have an odd stride
    return packed.view(torch.uint8)


def difference(found, expected):
    """Where two results differ; "" where they are the same to the last bit."""
    found_leaves, found_spec = tree_flatten(found)
    expected_leaves, expected_spec = tree_flatten(expected)
    if found_spec != expected_spec:
        return "another structure"
    for number, (a, b) in enumerate(zip(found_leaves, expected_leaves, strict=True)):
        if not isinstance(b, torch.Tensor):
            continue
        if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
            return f"leaf {number}: another kind"
        if a.is_nested:
            a, b = a.values(), b.values()
        if not torch.equal(as_bits(a), as_bits(b)):
            return f"leaf {number}: other bits"
    return ""


def leaves_of(arguments):
    return [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def run(call, leaves, settle):
    """Results and gradients of one call, from a seed."""
    seed_everything(0)
    results = call()
    outputs = [out for out in tree_flatten(results)[0] if isinstance(out, torch.Tensor) and out.requires_grad]
    settle()
    if not outputs:
        return [results, None]
    seed_everything(1)
    weights = [torch.randn_like(out) for out in outputs]
    return [tree_map(detached, results), torch.autograd.grad(outputs, leaves, weights, allow_unused=True)]


def detached(leaf):
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def compare(make_calls, enabled, settle):
    """Run every call plain twice and offloaded twice. Returns how many were the same, and how many vary without hooks.

    `make_calls` gives fresh calls, each with the leaves that it depends on. Some libraries' results depend on where
    memory happens to be, and some operators save a tensor before they fill it: where an offloaded result differs,
    several more plain runs, and runs with stock hooks that copy, may show that those do too.
    """

    def run_all(wrap, settle):
        for call, leaves in make_calls():
            yield run(wrap(call), leaves, settle) if leaves else None

    def plain():
        return run_all(lambda call: call, lambda: None)

    def copied():
        with saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            yield from plain()

    expected = list(plain())
    steady = [not difference(again, first) for again, first in zip(plain(), expected, strict=True)]
    for _ in range(2):
        for number, result in enumerate(run_all(enabled, settle)):
            differs = difference(result, expected[number])
            if differs and steady[number]:
                steady[number] = is_steady(plain, expected, number) and is_steady(copied, expected, number)
                assert not steady[number], f"sample {number}: {differs}"
    compared = sum(result is not None and same for result, same in zip(expected, steady, strict=True))
    return compared, steady.count(False)


def is_steady(again, expected, number):
    """Whether more runs, with other memory in use meanwhile, all give what the first one gave."""
    in_the_way = []
    for attempt in range(PLAIN_RUNS_MAX):
        in_the_way = [*in_the_way[:: 1 + (attempt % 3 == 0)], torch.empty(17 * attempt % 4099 + 1)]
        if difference(next(islice(again(), number, None)), expected[number]):
            return False
    return True


class Case:
    """One operator or module with the engine on: swaps all that can move, and must leave nothing."""

    def __init__(self, tmp_path):
        self.model = Call(None)
        self.handle = offload.enable(self.model, n_tensors=-1, lb=2, min_tensor_bytes=1, spill_dir=tmp_path)

    def enabled(self, call):
        self.model.function = call
        return self.model

    def settle(self):
        self.handle._engine.drain()

    def compare(self, make_calls):
        return compare(make_calls, self.enabled, self.settle)

    def check_nothing_left(self):
        self.model.function = None
        engine = self.handle._engine
        engine.drain()
        assert engine.live_records == 0
        assert engine.store.stats()["live_tickets"] == 0
        assert engine.store.stats()["spill_used_bytes"] == 0
        self.handle.disable()


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(enabled_model, "StepHooks", WatchedRound)
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    gc.enable()
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc):
    everything = metafunc.config.getoption("--all-databases")
    differentiable = [op for op in op_db if op.supports_autograd]
    for argument, entries in (("op", differentiable), ("info", module_db)):
        if argument in metafunc.fixturenames:
            numbers = {entry.formatted_name: zlib.crc32(entry.formatted_name.encode()) for entry in entries}
            chosen = [entry for entry in entries if everything or numbers[entry.formatted_name] % FULL_SHARE == 0]
            marked = [
                entry
                if everything or numbers[entry.formatted_name] % QUICK_SHARE == 0
                else pytest.param(entry, marks=pytest.mark.full)
                for entry in chosen
            ]
            metafunc.parametrize(argument, marked, ids=[entry.formatted_name for entry in chosen])


@pytest.fixture
def samples_max(request):
    return None if request.config.getoption("--all-databases") else QUICK_SAMPLES


def count(tally, database, name, case, dtypes, make_calls):
    """Compare one case, and put its name on the list of how that ended."""
    outcomes = tally.setdefault(database, {})
    try:
        results = [case.compare(partial(make_calls, dtype)) for dtype in dtypes]
        case.check_nothing_left()
    except BaseException:
        outcomes.setdefault("FAILED", []).append(name)
        raise
    compared, varying = (sum(column) for column in zip(*results, strict=True))
    if varying:
        outcomes.setdefault("some samples vary without the engine too", []).append(name)
    outcomes.setdefault("bit-equal" if compared else "nothing to compare", []).append(name)
    if not compared:
        pytest.skip("varies without the engine" if varying else "no differentiable sample")


def test_operator(op, samples_max, tally, tmp_path):
    supported = op.supported_backward_dtypes("cpu")
    dtypes = [dtype for dtype in DTYPES if dtype in supported]
    dtypes = dtypes or [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if dtype in supported][:1]
    if not dtypes:
        tally.setdefault("operators", {}).setdefault("not differentiable on this device", []).append(op.formatted_name)
        pytest.skip("not differentiable on this device")

    def make_calls(dtype):
        seed_everything(0)
        # Not op.sample_inputs: that looks its caller's source up, a tenth of a second each time.
        for sample in list(islice(op.sample_inputs_func(op, "cpu", dtype, True), samples_max)):

            def call(sample=sample):
                return sample.output_process_fn_grad(op(sample.input, *sample.args, **sample.kwargs))

            yield call, leaves_of((sample.input, sample.args, sample.kwargs))

    case = Case(tmp_path)
    count(tally, "operators", op.formatted_name, case, dtypes, make_calls)
    assert case.handle._engine.live_records == 0


def test_module(info, samples_max, tally, tmp_path):
    def make_calls(dtype):
        seed_everything(0)
        samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
        for sample in list(islice(samples, samples_max)):
            constructor, forward = sample.constructor_input, sample.forward_input
            if forward is None:
                continue
            module = info.module_cls(*constructor.args, **constructor.kwargs).to(dtype).train()

            def call(module=module, forward=forward):
                return module(*forward.args, **forward.kwargs)

            yield (
                call,
                leaves_of((forward.args, forward.kwargs))
                + [parameter for parameter in module.parameters() if parameter.requires_grad],
            )

    case = Case(tmp_path)
    dtypes = [dtype for dtype in (torch.float32, torch.float64) if dtype in info.dtypes]
    count(tally, "modules", info.formatted_name, case, dtypes, make_calls)
    assert case.handle._engine.live_records == 0
