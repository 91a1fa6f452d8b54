"""PyTorch's operator and module databases with recipes forced: what each reads and makes is dropped if it verifies.

Every differentiable operator and every module runs on its sample inputs, plain and under the engine: recorded, tried,
dropping three times. A fixed tenth of the operators and every module are the short form.
"""

import gc
import warnings
import zlib
from functools import partial
from itertools import islice

import pytest
import torch
from forced import Forced
from test_databases import DTYPES, Call, difference, leaves_of, run, seed_everything
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_map

import offload

SHORT_SHARE = 10
SAMPLES = 3
STEPS = 5  # recorded, tried, dropping three times: the last two follow the first of them
# Sees bytes beside its input's; has no sine; saves a tensor before it is filled.
LEFT_OUT = ("as_strided_partial_views", "chalf", "nn_functional_rrelu")
MODULES_ALWAYS = ("nn_GELU", "nn_BatchNorm2d", "nn_LayerNorm", "nn_LSTM_train_mode")
ALWAYS = ("mul", "sin", "nn_functional_gelu", "nn_functional_silu", "nn_functional_layer_norm", "matmul")


def dtype_of(op):
    """One in which it is differentiable on the CPU; None if there is none."""
    supported = op.supported_backward_dtypes("cpu")
    return next((each for each in (*DTYPES, torch.float32, torch.bfloat16) if each in supported), None)


def pytest_generate_tests(metafunc):
    if "op" in metafunc.fixturenames:
        chosen = [op for op in op_db if op.supports_autograd and dtype_of(op) and op.formatted_name not in LEFT_OUT]
        if not metafunc.config.getoption("--all-databases"):
            names = [op for op in chosen if zlib.crc32(op.formatted_name.encode()) % SHORT_SHARE == 0]
            chosen = [op for op in chosen if op in names or op.formatted_name in ALWAYS]
        metafunc.parametrize("op", chosen, ids=[op.formatted_name for op in chosen])


@pytest.fixture(autouse=True)
def quiet():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    gc.enable()
    torch.set_num_threads(threads)


def is_differentiable(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.layout is torch.strided


def call_between(function, args, kwargs):
    """The function between other operators, so that what it reads and what it makes is saved, and neither is a leaf."""

    def call():
        given = tree_map(lambda leaf: leaf.mul(1) if is_differentiable(leaf) else leaf, (args, kwargs))
        saved = tree_map(lambda leaf: leaf.sin() if is_differentiable(leaf) else None, given)
        made = function(*given[0], **given[1])
        return saved, tree_map(lambda leaf: leaf.sin() if is_differentiable(leaf) else leaf, made)

    return call


def samples_of(op, dtype):
    """Calls, their leaves, and the module that each calls: none here."""
    seed_everything(0)
    for sample in islice(op.sample_inputs_func(op, "cpu", dtype, True), SAMPLES):
        args = (sample.input, *sample.args)

        def function(*args, sample=sample, **kwargs):
            return sample.output_process_fn_grad(op(*args, **kwargs))

        leaves = leaves_of((args, sample.kwargs))
        if leaves:
            yield call_between(function, args, sample.kwargs), leaves, nn.Module()


def samples_of_module(info, dtype):
    """Calls, their leaves, and the module that each calls."""
    seed_everything(0)
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
    for sample in islice((each for each in samples if each.forward_input is not None), SAMPLES):
        constructor, forward = sample.constructor_input, sample.forward_input
        module = info.module_cls(*constructor.args, **constructor.kwargs).to(dtype).train()
        leaves = leaves_of((forward.args, forward.kwargs, list(module.parameters())))
        if leaves:
            yield call_between(module, forward.args, forward.kwargs), leaves, module


def run_from(buffers, module, call, leaves):
    """Results and gradients of one call, and the module's buffers after it; before it they are as given."""
    with torch.no_grad():
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return [*run(call, leaves, lambda: None), [buffer.clone() for buffer in module.buffers()]]


def compare(samples, tmp_path):
    """Compare plain steps with steps that drop everything. Returns the numbers of recomputed tensors and of recipes."""
    recomputed = recipes = 0
    for number, (call, leaves, module) in enumerate(samples):
        step = partial(run_from, [buffer.clone() for buffer in module.buffers()], module)
        plain = [step(call, leaves) for _ in range(3)]
        if any(difference(again, plain[0]) for again in plain[1:]):
            continue
        model = Call(call)
        model.called = module
        model.register_buffer("its_device", torch.empty(0))
        handle = offload.enable(model, n_tensors=-1, lb=2, min_tensor_bytes=1, spill_dir=tmp_path)
        controller = handle._on_device.controller = Forced(handle._on_device)
        for count in range(STEPS):
            differs = difference(step(model, leaves), plain[0])
            assert not differs, f"sample {number}, step {count}: {differs}"
        recomputed += handle._counts.recomputed.tensors
        recipes += sum(len(trial.recipes()) for trial in controller.trials.values())
        model.function = None
        handle._engine.drain()
        assert handle._engine.live_records == 0
        handle.disable()
    assert not recipes or recomputed, "nothing was recomputed"
    return recipes


@pytest.mark.long
def test_operator(op, tmp_path):
    recipes = compare(samples_of(op, dtype_of(op)), tmp_path)
    assert recipes or op.formatted_name not in ALWAYS, "nothing has a recipe"


@pytest.mark.long
@pytest.mark.parametrize("info", module_db, ids=[info.formatted_name for info in module_db])
def test_module(info, tmp_path):
    dtype = next(each for each in (torch.float64, torch.float32) if each in info.dtypes)
    recipes = compare(samples_of_module(info, dtype), tmp_path)
    assert recipes or info.formatted_name not in MODULES_ALWAYS, "nothing has a recipe"
