"""Steps that users or libraries have wrapped, and their hooks: called as without offload."""

import functools

import pytest
import torch
from optimizer_state.users_rig import Momentum, On, Scenarios, assert_the_same, everything, make_model, train
from torch import nn
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

scenario = Scenarios()


@scenario
def a_wrapper_of_the_class_that_keeps_its_name(on):
    return wrapped_step(on, functools.wraps)


@scenario
def a_wrapper_of_the_class_that_hides_it(on):
    return wrapped_step(on, lambda _: lambda function: function)


def wrapped_step(on, wraps):
    model = make_model()
    optimizer = AdamW(model.parameters())
    original, seen = AdamW.step, []

    @wraps(original)
    def timed(self, closure=None):
        seen.append((self is optimizer, len(self.param_groups), closure))
        return original(self, closure)

    AdamW.step = timed
    try:
        on(model, optimizer)
        train(model, optimizer, 3)
        return everything(model, optimizer), seen
    finally:
        AdamW.step = original


@scenario
def a_wrapper_within_the_hooks(on):
    """It was there before the first optimizer of its class was made, and it clips."""

    class Clipped(AdamW):
        pass

    seen = []

    def clips(self, closure=None):
        seen.append(self)
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
        return AdamW.step.__wrapped__(self, closure)

    Clipped.step = clips
    model = make_model()
    AdamW(model.parameters())  # the first optimizer of its class wraps `AdamW.step`
    optimizer = Clipped(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 3)
    return everything(model, optimizer), len(seen), all(each is optimizer for each in seen)


@scenario
def a_wrapper_between_two_hooked_steps(on):
    model = make_model()
    AdamW(model.parameters())
    hooked, seen = AdamW.step, []

    def counted(self, closure=None):
        seen.append(len(self.param_groups))
        return hooked(self, closure)

    AdamW.step = counted
    try:
        optimizer = AdamW(model.parameters())  # its class has no hooked step now: torch adds hooks again
        on(model, optimizer)
        train(model, optimizer, 3)
        return everything(model, optimizer), seen
    finally:
        AdamW.step = hooked


@scenario
def hooks_of_all_optimizers(on):
    seen = []
    hooks = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(("pre", len(optimizer.param_groups)))),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(("post", len(optimizer.param_groups)))),
    ]
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 3)
    for hook in hooks:
        hook.remove()
    return everything(model, optimizer), seen


class CallsItsBase(AdamW):
    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.999)
        return result


class CallsItsBaseElsewhere(AdamW):
    def step(self, closure=None):
        return self.inner(closure)

    def inner(self, closure):
        return super().step(closure)


@scenario
def a_step_that_calls_that_of_its_base(on):
    return stepped_with_hook(on, CallsItsBase)


@scenario
def a_step_that_calls_that_of_its_base_in_another_method(on):
    return stepped_with_hook(on, CallsItsBaseElsewhere)


def stepped_with_hook(on, kind):
    AdamW([nn.Parameter(torch.zeros(1))])  # the base has hooks
    model, seen = make_model(), []
    optimizer = kind(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    on(model, optimizer)
    train(model, optimizer, 3)
    return everything(model, optimizer), len(seen)


@scenario
def a_base_that_gets_hooks_later(on):
    class Base(Momentum):
        @torch.no_grad()
        def step(self, closure=None):
            if closure is not None:
                closure()
            for parameter in self.with_gradient:
                momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                parameter.sub_(momentum.add_(parameter.grad), alpha=0.01)

    class Derived(Base):
        def step(self, closure=None):
            return self.inner(closure)

        def inner(self, closure):
            return super().step(closure)

    model, seen = make_model(), []
    optimizer = Derived(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    on(model, optimizer)
    train(model, optimizer, 2)
    Base([nn.Parameter(torch.zeros(1))])
    train(model, optimizer, 2, begin=2)
    return everything(model, optimizer), len(seen)


@pytest.mark.parametrize("function", scenario, ids=lambda function: function.__name__)
def test_steps_that_others_have_wrapped(function, tmp_path):
    assert_the_same(function, tmp_path)


def test_hooks_of_a_step_see_a_stand_in_among_its_arguments(tmp_path):
    """Documented: the first argument of a hook is the optimizer; its `args` hold another object."""
    on, model = On(True, tmp_path), make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    seen = []
    optimizer.register_step_pre_hook(lambda *given: seen.append(given))
    optimizer.register_step_post_hook(lambda *given: seen.append(given))
    train(model, optimizer, 1)
    for first, (stand_in,), kwargs in seen:
        assert first is optimizer
        assert type(stand_in) is AdamW
        assert stand_in.param_groups == []
        assert list(kwargs) == ["closure"]
    on.off()
