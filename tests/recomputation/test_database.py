"""PyTorch's operator database with recipes forced: what each operator reads and makes is dropped wherever it verifies.

Every differentiable operator runs on its sample inputs, plain and under the engine: recorded, tried, dropping twice.
The whole takes minutes; a fixed tenth of it is the short form.
"""

import gc
import warnings
import zlib
from itertools import islice

import pytest
import torch
from forced import Forced
from test_databases import DTYPES, Call, difference, leaves_of, run, seed_everything
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map

import offload

SHORT_SHARE = 10
SAMPLES = 3
STEPS = 5  # recorded, tried, dropping three times: the last two follow the first of them
# Sees bytes beside its input's; has no sine; saves a tensor before it is filled.
LEFT_OUT = ("as_strided_partial_views", "chalf", "nn_functional_rrelu")
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


def call_of(op, sample):
    """The operator between two others, so that what it reads and what it makes is saved, and neither is a leaf."""

    def call():
        given = tree_map(
            lambda leaf: leaf.mul(1) if is_differentiable(leaf) else leaf, (sample.input, sample.args, sample.kwargs)
        )
        made = sample.output_process_fn_grad(op(given[0], *given[1], **given[2]))
        return tree_map(lambda leaf: leaf.sin() if is_differentiable(leaf) else leaf, made)

    return call


def samples_of(op, dtype):
    seed_everything(0)
    for sample in islice(op.sample_inputs_func(op, "cpu", dtype, True), SAMPLES):
        leaves = leaves_of((sample.input, sample.args, sample.kwargs))
        if leaves:
            yield call_of(op, sample), leaves


@pytest.mark.long
def test_operator(op, tmp_path):
    recomputed = recipes = 0
    for number, (call, leaves) in enumerate(samples_of(op, dtype_of(op))):
        plain = [run(call, leaves, lambda: None) for _ in range(3)]
        if any(difference(again, plain[0]) for again in plain[1:]):
            continue
        model = Call(call)
        model.register_buffer("its_device", torch.empty(0))
        handle = offload.enable(model, n_tensors=-1, lb=2, min_tensor_bytes=1, spill_dir=tmp_path)
        controller = handle._on_device.controller = Forced(handle._on_device)
        for step in range(STEPS):
            differs = difference(run(model, leaves, lambda: None), plain[0])
            assert not differs, f"sample {number}, step {step}: {differs}"
        recomputed += handle._counts.recomputed.tensors
        recipes += sum(len(trial.recipes()) for trial in controller.trials.values())
        model.function = None
        handle._engine.drain()
        assert handle._engine.live_records == 0
        handle.disable()
    assert not recipes or recomputed, "nothing was recomputed"
    assert recipes or op.formatted_name not in ALWAYS, "nothing has a recipe"
