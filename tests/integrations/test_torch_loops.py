"""Hand-written loops: mixed precision with a loss scaler, checkpointing of both kinds, function transforms."""

import inspect
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_rig import KNOBS, Blocks, assert_same, batch, make_blocks, train

import offload
from offload.control.device_session import TRANSFORMED
from offload.runtime.refusals import FUNCTION_TRANSFORMS

STEPS = 4
RESPECT = "respect_saved_tensors_hooks"  # of torch's checkpoint


# -- mixed precision --------------------------------------------------------------------------------------------------


def train_scaled(model, around, dtype, overflow_at=None):
    """Gradients, scale and parameters of every step of autocast and GradScaler, with unscaling and clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for number in range(STEPS):
        optimizer.zero_grad()
        with around(), torch.autocast("cpu", dtype=dtype):
            loss = model(batch(number)).square().mean()
        if number == overflow_at:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = [parameter.grad.nan_to_num(7.0) for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        results.append([torch.tensor(scaler.get_scale()), *gradients, *weights])
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("overflow_at", [None, 1])
def test_autocast_with_grad_scaler(dtype, overflow_at):
    """A step that overflows is skipped by the scaler in both runs alike."""
    expected = train_scaled(make_blocks(), nullcontext, dtype, overflow_at)
    model = make_blocks()
    with offload.enable(model, **KNOBS) as handle:
        assert_same(train_scaled(model, handle.step, dtype, overflow_at), expected)
        about = handle.report()
    assert about.steps == STEPS
    assert about.swapped.tensors >= 10 * STEPS
    scales = [float(step[0]) for step in expected]
    assert (min(scales) < 1024.0) == (overflow_at is not None), "the overflow was one"


def test_autocast_copies_of_weights_move_with_what_uses_them():
    """Under autocast a layer saves a low-precision copy of its weight: an activation like any other."""
    model = make_blocks()
    with offload.enable(model, **KNOBS) as handle, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch(0)).square().mean()
    weights = sum(p.numel() * 2 for name, p in model.named_parameters() if "weight" in name and p.dim() == 2)
    assert handle.report().swapped.nbytes > weights
    loss.backward()
    del loss
    assert handle._engine.live_records == 0


def test_autocast_on_and_off_are_two_signatures():
    def run(model, settle=lambda: None):
        results = []
        for number in range(6):
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 0):
                loss = model(batch(number)).square().mean()
            settle()
            loss.backward()
            results.append([parameter.grad.clone() for parameter in model.parameters()])
        return results

    expected = run(make_blocks())
    model = make_blocks()
    with offload.enable(model, **KNOBS) as handle:
        assert_same(run(model, handle._engine.drain), expected)  # what has not left is taken back, not prefetched
        assert handle.report().prefetched > 0, "neither made the other's schedule useless"


# -- checkpointing ----------------------------------------------------------------------------------------------------


class Checkpointed(Blocks):
    """Every other block is recomputed in backward."""

    def __init__(self, use_reentrant):
        super().__init__(count=4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x * 1.0 if x.requires_grad else x.requires_grad_() * 1.0
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if number % 2 == 0 else block(x)
        return self.head(x)


def make_checkpointed(use_reentrant):
    torch.manual_seed(0)
    return Checkpointed(use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointed_blocks_inside_of_the_model(use_reentrant):
    make = partial(make_checkpointed, use_reentrant)
    model = make()
    expected = train(model, model, STEPS)
    model = make()
    with offload.enable(model, **KNOBS) as handle:
        assert_same(train(model, model, STEPS), expected)
        about = handle.report()
    plain = Blocks(count=4)
    with offload.enable(plain, **KNOBS) as other:
        train(plain, plain, STEPS)
    assert about.steps == STEPS
    assert 0 < about.swapped.tensors < other.report().swapped.tensors, "recomputed blocks save no more than their input"
    assert handle._engine.live_records == 0


def keep_products(context, operator, *_, **__):
    is_product = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class SelectivelyCheckpointed(Blocks):
    """The blocks keep the results of matrix products for backward, and recompute all others."""

    def __init__(self, how):
        super().__init__()
        self.how = {"context_fn": partial(create_selective_checkpoint_contexts, keep_products), **how}

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.how)
        return self.head(x)


@pytest.mark.parametrize("knobs", [KNOBS, {"preset": "smallest", "min_tensor_bytes": 1}], ids=["by hand", "by plan"])
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
def test_selectively_checkpointed_blocks(knobs):
    """From torch 2.14 on, what they keep can be passed to hooks too, and is then swapped."""
    is_known = RESPECT in inspect.signature(checkpoint).parameters
    swapped = []
    for how in [{}, {RESPECT: True}] if is_known else [{}]:
        found = []
        for is_on in (False, True):
            torch.manual_seed(0)
            model = SelectivelyCheckpointed(how)
            with offload.enable(model, **knobs) if is_on else nullcontext() as handle:
                found.append(train(model, model, 8))
                if handle is not None:
                    report = handle.report()
                    swapped.append(report.swapped.tensors / report.steps)
                    assert handle._engine.live_records == 0
        assert_same(*found)
    assert swapped[0] > 0
    assert not is_known or swapped[1] > swapped[0]


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_enabled_model_inside_of_a_checkpoint(use_reentrant):
    """Without reentry the hooks of the checkpoint are the innermost: nothing may be swapped, and the report says so."""

    def trained(model):
        def call(x):
            return checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)

        return train(call, model, STEPS)

    expected = trained(make_blocks())
    model = make_blocks()
    with offload.enable(model, **KNOBS) as handle:
        assert_same(trained(model), expected)
        about = handle.report()
    if use_reentrant:  # its recomputation in backward is a forward like any other
        assert (about.steps, about.swapped.tensors > 0) == (STEPS, True)
    else:
        assert (about.steps, about.swapped.tensors) == (0, 0)
        assert any("NOTHING WAS SWAPPED" in note and "checkpoint" in note for note in about.notes)
    assert handle._engine.live_records == 0


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_within_a_step(use_reentrant):
    """`step` covers the call of the checkpoint, and what it saves itself: its input."""

    def trained(model, around):
        results = []
        for number in range(STEPS):
            model.zero_grad()
            with around():
                x = batch(number).requires_grad_() * 2
                loss = checkpoint(model, x, use_reentrant=use_reentrant).square().mean()
            loss.backward()
            results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        return results

    expected = trained(make_blocks(), nullcontext)
    model = make_blocks()
    with offload.enable(model, **KNOBS) as handle:
        assert_same(trained(model, handle.step), expected)
        assert handle.report().swapped.tensors > 0
    assert handle._engine.live_records == 0


# -- torch.func -------------------------------------------------------------------------------------------------------


def enabled_blocks():
    model = make_blocks()
    return model, offload.enable(model, **KNOBS)


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda each: model(each).sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(4, 8))[0],
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "hessian": lambda model, x: torch.func.hessian(lambda each: model(each).square().sum())(x[0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("why", ["within the step", "parameters move"])
def test_transforms_that_forbid_hooks_say_what_to_do(name, why):
    model = make_blocks()
    handle = offload.enable(model, **KNOBS, parameters="all" if why == "parameters move" else False)
    x = batch(0, rows=4)
    around = handle.step() if why == "within the step" else nullcontext()
    with pytest.raises(RuntimeError, match=r"call offload\.disable\(model\) before them") as raised, around:
        TRANSFORMS[name](model, x)
    assert FUNCTION_TRANSFORMS in str(raised.value)
    assert "Please open an issue" not in str(raised.value)
    # Nothing is left entered, and the remedy is one.
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    found = train(model, model, 1)
    assert handle.report().swapped.tensors > 0
    model.zero_grad()
    offload.disable(model)
    assert torch.isfinite(TRANSFORMS[name](model, x)).all()
    assert_same(found, train(*[make_blocks()] * 2, 1))


def test_transform_inside_of_the_model_says_what_to_do():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Linear(64, 1)

        def forward(self, x):
            return torch.func.grad(lambda each: self.energy(each).sin().sum())(x)

    model = Forces()
    with (
        offload.enable(model, **KNOBS),
        pytest.raises(RuntimeError, match=r"or use torch\.autograd\.grad \(with create_graph=True"),
    ):
        model(batch(0))


def test_remedy_of_autograd_grad_works():
    def trained(model):
        results = []
        for number in range(3):
            model.zero_grad()
            x = batch(number).requires_grad_()
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            slope.square().mean().backward()
            results.append([slope.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        return results

    expected = trained(make_blocks())
    model, handle = enabled_blocks()
    assert_same(trained(model), expected)
    assert handle.report().swapped.tensors > 0
    handle.disable()


def named(model, factor=1.0):
    """Copies of the parameters, by name."""
    return {name: parameter.detach() * factor for name, parameter in model.named_parameters()}


def ensemble(model, x):
    """The gradients of two models that are trained as one."""
    both = {name: torch.stack([value, value * 0.5]).requires_grad_() for name, value in named(model).items()}
    torch.vmap(lambda each: functional_call(model, each, (x,)))(both).square().mean().backward()
    return [value.grad for value in both.values()]


def forward_over_reverse(model, x):
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        loss = out.tangent.square().sum()
        return [*out, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)]


TRANSFORMS_THAT_WORK = {
    **TRANSFORMS,
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "jvp over parameters": lambda model, x: torch.func.jvp(
        lambda each: functional_call(model, each, (x,)), (dict(model.named_parameters()),), (named(model, 0.5),)
    ),
    "vmap": lambda model, x: torch.vmap(model)(x),
    "vmap over parameters": ensemble,
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x[0]),
    "grad over parameters": lambda model, x: torch.func.grad(
        lambda each: functional_call(model, each, (x,)).square().sum()
    )(dict(model.named_parameters())),
    "functional_call": lambda model, x: functional_call(model, named(model, 0.5), (x,)),
    "autograd.functional.jvp": lambda model, x: torch.autograd.functional.jvp(model, x, torch.ones_like(x)),
    "forward_ad": forward_over_reverse,
}
TRANSFORMED_AT = 0, 1, 5  # before these steps of a training


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMS_THAT_WORK)
@pytest.mark.parametrize("knobs", [{}, {"memory_limit": "1GiB"}, {"n_tensors": -1}], ids=str)
def test_transforms_that_work(name, knobs):
    """At a model's first step, its second one, and one that follows a plan. The training goes on as without them."""

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = []
        for number in range(8):
            optimizer.zero_grad()
            if number in TRANSFORMED_AT:
                results.append(TRANSFORMS_THAT_WORK[name](model, batch(number, rows=4)))
            loss = model(batch(number)).square().mean()
            loss.backward()
            results.append(loss.detach())
            optimizer.step()
        return tree_leaves([results, list(model.parameters())])

    expected = run(make_blocks())
    model = make_blocks()
    with offload.enable(model, min_tensor_bytes="1KiB", **knobs) as handle:
        assert_same([run(model)], [expected])
        is_transform = name not in ("functional_call", "autograd.functional.jvp", "forward_ad")
        assert handle.report().steps == 8 + (0 if is_transform else len(TRANSFORMED_AT))


@pytest.mark.filterwarnings("ignore")
def test_a_transform_leaves_a_step_to_its_program(caplog):
    """`handle.step()` in a transform begins no step; that nothing is swapped is said once."""
    model, handle = enabled_blocks()

    def within(each):
        with handle.step():
            return model(each)

    x = batch(0, rows=4)
    expected = TRANSFORMS["grad"](make_blocks(), x)
    assert torch.equal(TRANSFORMS["grad"](within, x), expected)
    assert torch.equal(TRANSFORMS["grad"](model, x), expected)
    assert [record.getMessage() for record in caplog.records] == [TRANSFORMED]
    assert handle.report().steps == 0
    handle.disable()


@pytest.mark.filterwarnings("ignore")
def test_transforms_within_a_step(caplog):
    """The step's hooks see the tensors that the transform saves, while the model has the transform's parameters."""

    def run(model, around):
        both = {name: torch.stack([value, value * 0.5]).requires_grad_() for name, value in named(model).items()}
        found = []
        for number in range(STEPS):
            with around():
                out = torch.vmap(lambda each, x: functional_call(model, each, (x,)), (0, None))(both, batch(number))
                loss = out.square().mean()
            found.append([loss.detach(), *torch.autograd.grad(loss, list(both.values()))])
        return found

    expected = run(make_blocks(), nullcontext)
    for knobs in ({}, {"n_tensors": -1}):
        model = make_blocks()
        with offload.enable(model, min_tensor_bytes="1KiB", **knobs) as handle:
            assert_same(run(model, handle.step), expected)
            assert handle.report().swapped.tensors > 0
    assert not caplog.records
