"""An enabled module is still the module it was: evaluated, transformed, run in other shapes."""

import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


class Net(nn.Module):
    """Linear layers whose path depends on the input, at module level so that it can be pickled."""

    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.BatchNorm1d(width))
        self.third = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x, detour=False):
        x = self.first(x)
        if detour:
            x = self.third(x).exp()
        return self.third(self.second(x))


def train(model, step, settle, shapes=((16, 64),) * 3, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for shape in shapes:
        optimizer.zero_grad()
        loss = model(torch.randn(*shape), **arguments).square().mean()
        settle()
        loss.backward()
        results.append(gradients(model) if not arguments else loss.detach())
        optimizer.step()
    return results


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
def test_nothing_is_packed_where_nobody_trains(offloaded, mode):
    model = Net()
    handle = offloaded.enable(model)
    x = torch.randn(16, 64)
    if mode == "eval":
        model.eval()
        result = model(x)
        assert result.requires_grad
        result.sum().backward()
    else:
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            assert not model(x).requires_grad
    about = handle.report()
    assert (about.steps, about.swapped.tensors, about.kept) == (0, 0, {})
    assert any("NOTHING WAS SWAPPED: no training step has run yet" in note for note in about.notes)


def test_evaluation_between_training_steps(offloaded):
    def run(model, step, settle):
        results = train(model, step, settle)
        model.eval()
        with torch.no_grad():
            results.append([model(torch.randn(5, 64))])
        model.train()
        return results + train(model, step, settle)

    assert offloaded.compare(run, make=Net).report().steps == 6


def test_changed_shapes(offloaded):
    offloaded.compare(lambda *args: train(*args, shapes=[(16, 64), (7, 64), (31, 64), (7, 64), (16, 64)]), make=Net)


def test_ragged_last_batch(offloaded):
    """Each shape has a schedule of its own: neither costs the other its prefetches."""
    shapes = [(16, 64), (16, 64), (5, 64)] * 3
    handle = offloaded.compare(lambda *args: train(*args, shapes=shapes), make=Net)
    assert len(handle._controller.schedules) == 2
    if offloaded.setup.settles:
        assert handle.report().prefetched > 0


def test_another_branch(offloaded):
    """The signature is the same, what is saved is not: the step is right, and is recorded anew."""

    def run(model, step, settle):
        results = []
        for detour in (False, False, True, True, False, True, False, False):
            model.zero_grad()
            model.detour = detour
            loss = model(torch.randn(16, 64)).square().mean()
            settle()
            loss.backward()
            results.append(gradients(model))
        return results

    class Branches(Net):
        detour = False

        def forward(self, x):
            return super().forward(x, self.detour)

    offloaded.compare(run, make=Branches)


def test_keyword_arguments_and_structures(offloaded):
    class Structured(Net):
        def forward(self, batch, *, scale):
            return {"out": super().forward(batch["x"]) * scale, "aux": [batch["y"].exp() * self.first.bias]}

    def run(model, step, settle):
        results = []
        for _ in range(3):
            model.zero_grad()
            out = model({"x": torch.randn(16, 64), "y": torch.randn(16, 64)}, scale=torch.tensor(2.0))
            settle()
            (out["out"].sum() + out["aux"][0].sum()).backward()
            results.append(gradients(model))
        return results

    offloaded.compare(run, make=Structured)


def test_step_covers_the_loss(offloaded):
    def run(model, step, settle):
        results = []
        for _ in range(3):
            model.zero_grad()
            with step():
                loss = nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.arange(32))
            settle()
            loss.backward()
            results.append((loss.detach(), gradients(model)))
        return results

    covered = offloaded.compare(run, make=Net).report()

    def run_without(model, step, settle):
        model.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.arange(32)).backward()
        return gradients(model)

    bare = offloaded.compare(run_without, make=Net).report()
    assert covered.swapped.tensors / 3 > bare.swapped.tensors, "the loss saves its log-softmax"
    assert covered.steps == 3


def test_two_forwards_in_one_step(offloaded):
    def run(model, step, settle):
        results = []
        for _ in range(3):
            model.zero_grad()
            with step():
                loss = (model(torch.randn(16, 64)) - model(torch.randn(5, 64)).mean(0)).square().mean()
            settle()
            loss.backward()
            results.append(gradients(model))
        return results

    assert offloaded.compare(run, make=Net).report().steps == 3


def test_recursive_forward(offloaded):
    class Recursive(Net):
        depth = 0

        def forward(self, x):
            self.depth += 1
            try:
                return self(x * 0.5) + super().forward(x) if self.depth < 4 else super().forward(x)
            finally:
                self.depth -= 1

    offloaded.compare(train, make=Recursive)


def test_exclude(offloaded):
    handle = offloaded.compare(train, make=Net, exclude=("second",))
    about = handle.report()
    assert about.kept["excluded"].tensors == 3 * 5, "three inputs, and the normalisation's mean and deviation"
    assert about.swapped.tensors > 0
    everything = offloaded.compare(train, make=Net, exclude=("first", "second", "third"), swaps=False)
    assert any("NOTHING WAS SWAPPED" in note for note in everything.report().notes)


def test_model_dropped_while_enabled(offloaded):
    model = Net()
    handle = offloaded.enable(model)
    loss = model(torch.randn(16, 64)).square().mean()
    parameters = list(model.parameters())
    del model
    assert handle._enabled.model is None, "the session must not keep the model alive"
    loss.backward()
    assert all(parameter.grad is not None for parameter in parameters)


def test_forward_mode(offloaded):
    def run(model, step, settle):
        x, tangent = torch.randn(16, 64), torch.randn(16, 64)
        with forward_ad.dual_level():
            with step():
                out = model(forward_ad.make_dual(x, tangent))
            primal, change = forward_ad.unpack_dual(out)
            settle()
            model.zero_grad()
            change.square().sum().backward()  # forward over reverse: differentiates the tangent
            return primal.detach().clone(), change.detach().clone(), [model[0].weight.grad, model[2].weight.grad]

    offloaded.compare(run, make=lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))


def test_jvp(offloaded):
    def run(model, step, settle):
        x, tangent = torch.randn(16, 64), torch.randn(16, 64)
        out, change = torch.func.jvp(lambda x: model(x), (x,), (tangent,))
        return out.detach().clone(), change.detach().clone()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        offloaded.compare(run, make=lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh()), swaps=None)


def test_vmap(offloaded):
    def run(model, step, settle):
        results = []
        for _ in range(3):
            model.zero_grad()
            out = torch.vmap(model)(torch.randn(6, 16, 64))
            settle()
            out.square().sum().backward()
            results.append(gradients(model))
        return results

    handle = offloaded.compare(
        run, make=lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), swaps=None
    )
    assert handle.report().steps == 0  # what a transform runs is no step


def test_functional_call_with_other_parameters(offloaded):
    """Parameters given from outside are held by the caller: they stay, and get the gradients."""

    def run(model, step, settle):
        results = []
        for _ in range(3):
            others = {name: torch.randn_like(value).requires_grad_() for name, value in model.named_parameters()}
            loss = torch.func.functional_call(model, others, (torch.randn(16, 64),)).square().mean()
            settle()
            results.append(torch.autograd.grad(loss, list(others.values())))
        return results

    handle = offloaded.compare(run, make=Net)
    assert handle.report().kept["parameter"].tensors >= 3 * 4


def test_parameters_replaced_between_steps(offloaded):
    def run(model, step, settle):
        results = train(model, step, settle)
        model.first = nn.Linear(64, 64)
        model.second[1].weight = nn.Parameter(torch.randn(64, 64))
        return results + train(model, step, settle)

    offloaded.compare(run, make=Net)


def test_frozen_parameters_and_buffers_stay(offloaded):
    class Frozen(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.rand(16, 64))
            for parameter in self.second.parameters():
                parameter.requires_grad_(False)

        def forward(self, x):
            return super().forward(x) * self.mask

    def run(model, step, settle):
        results = []
        for _ in range(3):
            model.zero_grad()
            loss = model(torch.randn(16, 64)).sum()
            settle()
            loss.backward()
            results.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        return results

    handle = offloaded.compare(run, make=Frozen)
    assert handle.report().kept["parameter"].tensors >= 3 * 5


def test_autocast(offloaded):
    def run(model, step, settle):
        results = []
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(16, 64)).square().mean()
            settle()
            loss.backward()
            results.append(gradients(model))
        return results

    offloaded.compare(run, make=Net)


def test_saved_tensor_hooks_of_the_user_inside(offloaded):
    def run(model, step, settle):
        packs = []

        def pack(tensor):
            packs.append(tensor.shape)
            return tensor * 1

        inner = model.third.forward

        def forward(x):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return inner(x)

        model.third.forward = forward
        results = train(model, step, settle)
        del model.third.forward
        return results, packs

    offloaded.compare(run, make=Net)


def test_entering_where_hooks_are_forbidden_is_the_usual_error(offloaded):
    model = Net()
    offloaded.enable(model)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
    ):
        model(torch.randn(16, 64))
    loss = model(torch.randn(16, 64)).sum()
    loss.backward()
    assert offloaded.handles[0].report().swapped.tensors > 0


def test_instance_with_a_forward_of_its_own(offloaded):
    def make():
        model = Net()
        plain = model.forward
        model.forward = lambda x: plain(x * 2)
        return model

    offloaded.compare(train, make=make)
    model = Net()
    own = model.forward = lambda x: x
    handle = offloaded.enable(model)
    handle.disable()
    assert model.__dict__["forward"] is own
