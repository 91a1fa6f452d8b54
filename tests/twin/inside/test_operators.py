"""PyTorch's operator database on the simulated accelerator, against the CPU: forward and, where there is one, backward.

In full with `--all-databases`, which writes the table of what differs; else one operator of twelve.
"""

import warnings
from collections import Counter

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map
from twin import sim

SAMPLES_MAX = 2
SAME, ROUNDED = "same bits", "same within rounding"
SHARE = 12
# Why the simulated accelerator does not compute what the CPU does, or not as the database asks it.
DRAWN = "drawn from the device's own generator"
UNSET = "memory that nobody has written"
DIFFERENT = {
    **dict.fromkeys(
        ("cauchy", "exponential", "geometric", "log_normal", "normal", "normal.in_place", "uniform"), DRAWN
    ),
    **dict.fromkeys(("multinomial", "rand_like", "randint_like", "randn_like", "nn.functional.rrelu"), DRAWN),
    **dict.fromkeys(("nn.functional.fractional_max_pool3d", "nn.functional.fractional_max_pool2d"), DRAWN),
    **dict.fromkeys(("nn.functional.feature_alpha_dropout.with_train", "nn.functional.dropout"), DRAWN),
    **dict.fromkeys(("bernoulli", "nn.functional.alpha_dropout", "nn.functional.multi_head_attention_forward"), DRAWN),
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"), UNSET),
    "as_strided.partial_views": "reads beyond the tensor that was moved",
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), "evaluation's unused statistics have a size"),
    "tensor_split": "wants its indices on the CPU, as on every accelerator",
}
KNOWN = [op for op in op_db if torch.float32 in op.dtypes and "sparse" not in op.name and "jiterator" not in op.name]


def moved_to(device):
    def move(leaf):
        return leaf.detach().to(device).requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return move


def compute(op, sample, device):
    """Results, and gradients of their sum."""
    torch.manual_seed(0)
    arguments = tree_map(moved_to(device), (sample.input, sample.args, sample.kwargs))
    results = [each for each in tree_leaves(op(arguments[0], *arguments[1], **arguments[2])) if torch.is_tensor(each)]
    differentiable = [each for each in results if each.requires_grad]
    gradients = []
    if op.supports_autograd and differentiable:
        inputs = [each for each in tree_leaves(arguments) if torch.is_tensor(each) and each.requires_grad]
        total = sum(each.abs().sum() if each.is_complex() else each.sum() for each in differentiable)
        gradients = [each for each in torch.autograd.grad(total, inputs, allow_unused=True) if each is not None]
    return [each.detach().cpu() for each in [*results, *gradients]]


def compare(op):
    """How an operator fares: SAME, ROUNDED, "cpu raises", or what is different."""
    outcome = SAME
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    for number, sample in enumerate(samples):
        if number == SAMPLES_MAX:
            break
        try:
            expected = compute(op, sample, "cpu")
        except Exception as error:
            return f"cpu raises {type(error).__name__}"
        try:
            found = compute(op, sample, "sim")
        except Exception as error:
            sim.forget_failure()
            return f"raises {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        if [(each.shape, each.dtype) for each in found] != [(each.shape, each.dtype) for each in expected]:
            return "other shapes or types"
        if not all(
            torch.allclose(one, other, 1e-4, 1e-5, equal_nan=True) for one, other in zip(found, expected, strict=True)
        ):
            return "other values"
        if not all(map(are_equal, found, expected)):
            outcome = ROUNDED
    return outcome


def are_equal(one, other):
    """To the last bit, where a number is one."""
    if one.dtype == torch.complex32:
        one, other = one.to(torch.complex64), other.to(torch.complex64)
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.timeout(900)
def test_operators_agree_with_the_cpu(request, record_property):
    sim.schedule(0, 0)
    chosen = KNOWN if request.config.getoption("--all-databases") else KNOWN[::SHARE]
    outcomes = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in chosen:
            name = f"{op.name}.{op.variant_test_name}".rstrip(".")
            outcomes[name] = compare(op)
            if sim.failure():
                outcomes[name] = f"fails on its stream: {sim.failure()[:120]}"
                sim.forget_failure()
    different = {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome not in (SAME, ROUNDED) and not outcome.startswith("cpu raises")
    }
    rounded = [name for name, outcome in outcomes.items() if outcome == ROUNDED]
    print(Counter(outcomes.values()).most_common(4), f"{ROUNDED}: {rounded}", *different.items(), sep="\n")
    assert different.keys() <= DIFFERENT.keys(), different
