"""`handle.step()` around parts of a model: a loop that never calls the model itself follows a plan too."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import offload
from offload.control.enabled_model import EnabledModel

STEPS = 6


class Coder(nn.Module):
    """A model that is used through its parts, and through its forward in some loops."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*[each for _ in range(3) for each in (nn.Linear(64, 64), nn.Tanh())])
        self.decoder = nn.Sequential(*[each for _ in range(3) for each in (nn.Linear(64, 64), nn.Tanh())])

    def forward(self, x):
        return self.decoder(self.encoder(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Coder()


def by_parts(model, x):
    return model.decoder(model.encoder(x)).square().mean()


def as_a_whole(model, x):
    return model(x).square().mean()


def batches(rows=(256,)):
    made = torch.Generator().manual_seed(1)
    return [torch.randn(rows[step % len(rows)], 64, generator=made) for step in range(STEPS)]


def train(model, handle, losses, given):
    """Losses and gradients of each step."""
    found = []
    for step, x in enumerate(given):
        if handle is None:
            loss = losses[step % len(losses)](model, x)
        else:
            with handle.step():
                loss = losses[step % len(losses)](model, x)
        loss.backward()
        found.append((loss.detach().clone(), *(each.grad.clone() for each in model.parameters())))
        model.zero_grad()
    return found


def are_equal(found, expected):
    return all(
        torch.equal(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
    )


def enabled(model, **asked):
    return offload.enable(model, **{"memory_limit": "1GiB", "min_tensor_bytes": 1 << 10, **asked})


PLANS = [
    ({"memory_limit": "1GiB"}, {"nothing to swap"}),
    ({"memory_limit": None}, {"nothing to swap", "planned"}),  # as the default slowdown allows on a busy machine
    ({"memory_limit": "700KiB"}, {"planned"}),
]


@pytest.mark.parametrize(("asked", "kinds"), PLANS, ids=["a large limit", "default", "a small limit"])
def test_steps_that_call_only_parts_follow_a_plan(model, asked, kinds):
    expected = train(deepcopy(model), None, [by_parts], batches())
    with enabled(model, **asked) as handle:
        assert are_equal(train(model, handle, [by_parts], batches()), expected)
        assert handle.report().verdict.kind in kinds
        assert handle.report().to_dict()["steps"] == STEPS - 1, "the first one is not yet known to be a step"


def test_a_batch_of_another_shape_deviates_and_keeps_its_bits(model):
    given = batches((256, 128, 320))
    expected = train(deepcopy(model), None, [by_parts], given)
    with enabled(model) as handle:
        assert are_equal(train(model, handle, [by_parts], given), expected)


@pytest.mark.parametrize("losses", [[by_parts, as_a_whole], [as_a_whole, by_parts], [by_parts, by_parts, as_a_whole]])
def test_shapes_choose_the_plan_where_the_model_itself_is_called_too(model, losses):
    expected = train(deepcopy(model), None, losses, batches())
    with enabled(model) as handle:
        assert are_equal(train(model, handle, losses, batches()), expected)
        signatures = list(handle._enabled.on_device.controller.states)
        assert [each.shapes for each in signatures if each.shapes] == [((256, 64),)]


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_block_around_the_loss_alone_is_no_step(model, is_guarded, monkeypatch):
    """The model was called before it, and has begun the step."""
    given = batches()
    with enabled(model) as handle:
        if not is_guarded:
            monkeypatch.setattr(EnabledModel, "calls_parts", property(lambda _: True, lambda *_: None), raising=False)
        for x in given:
            output = model(x)
            with handle.step():
                loss = output.square().mean()
            loss.backward()
        assert (handle.report().to_dict()["steps"] == STEPS) is is_guarded
