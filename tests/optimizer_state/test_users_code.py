"""What users do with optimizers, plain and with the state moved: the same weights, states and counts.

Each scenario is a function of `on`, which enables offload for a model and its optimizers, or does nothing.
"""

import copy
import functools
import threading
import weakref
from collections import defaultdict

import pytest
import torch
from optimizer_state.state_rig import assert_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import offload

SCENARIOS = []


def scenario(function):
    SCENARIOS.append(function)
    return function


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 120), nn.GELU(), nn.Linear(120, 60), nn.LayerNorm(60), nn.Linear(60, 10))


def loss_of(model, number):
    return model(torch.randn(16, 60, generator=torch.Generator().manual_seed(number))).square().mean()


def train(model, optimizer, steps, begin=0):
    for number in range(begin, begin + steps):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()


def everything(model, *optimizers):
    return [p.detach().clone() for p in model.parameters()], [copy.deepcopy(each.state_dict()) for each in optimizers]


class On:
    """Enables offload for what a scenario makes; `reports` are those of all models."""

    def __init__(self, is_on, folder):
        self.is_on = is_on
        self.handles = []
        self.knobs = {"n_tensors": 0, "min_tensor_bytes": 1024, "spill_dir": folder, "optimizer_state": True}

    def __call__(self, model, *optimizers):
        if self.is_on:
            self.handles.append(offload.enable(model, optimizer=list(optimizers), **self.knobs))

    def off(self):
        while self.handles:
            self.handles.pop().disable()

    @property
    def counts(self):
        return [counts for handle in self.handles for counts in handle.report().optimizer_state]


def both(function, folder, *given):
    """What a scenario returns without and with state moved, and `on` of the latter."""
    plain = function(On(False, folder), *given)
    on = On(True, folder)
    moved = function(on, *given)
    return plain, moved, on


# -- steps that others have wrapped -----------------------------------------------------------------------------------


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


# -- optimizers of one's own ------------------------------------------------------------------------------------------


class Momentum(Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
        self.prepare()

    def prepare(self):
        pass

    def extra(self):
        pass

    @property
    def with_gradient(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self.extra()
        for parameter in self.with_gradient:
            state = self.state[parameter]
            if "m" not in state:
                state["m"] = torch.zeros_like(parameter)
            state["m"].mul_(0.9).add_(parameter.grad)
            parameter.sub_(state["m"], alpha=self.param_groups[0]["lr"])
        return loss


class CountsInClass(Momentum):
    steps = 0

    def extra(self):
        type(self).steps += 1


class CountsInAListOfItsClass(Momentum):
    norms = []  # noqa: RUF012

    def extra(self):
        self.norms.append(len(self.with_gradient))


class CountsInItsModule(Momentum):
    def extra(self):
        MODULE["steps"] += 1


MODULE = {"steps": 0}


class CountsInAGlobal(Momentum):
    def extra(self):
        global NUMBER
        NUMBER += 1


NUMBER = 0


class AddsToItsClass(Momentum):
    def extra(self):
        type(self).latest = len(self.with_gradient)


class KeepsNorms(Momentum):
    def prepare(self):
        self._norms = []

    def extra(self):
        self._norms.append(len(self.with_gradient))


class CountsInATensor(Momentum):
    def prepare(self):
        self._steps = torch.zeros(())

    def extra(self):
        self._steps += 1


class CountsInTheState(Momentum):
    def extra(self):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1


class CountsInItself(Momentum):
    def prepare(self):
        self.steps = 0

    def extra(self):
        self.steps += 1


class HasADel(Momentum):
    closed = 0

    def __del__(self):
        HasADel.closed += 1


class CountsInstances(Momentum):
    made = 0

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        type(self).made += 1


class NeedsLargeParameters(Momentum):
    def extra(self):
        if any(p.numel() % 10 for p in self.with_gradient):
            raise OddSizeError


class OddSizeError(Exception):
    pass


class UsesAListThatContainsItself(Momentum):
    def extra(self):
        assert ITSELF[0] is ITSELF


ITSELF = []
ITSELF.append(ITSELF)


class NormOfBiases(Momentum):
    def extra(self):
        biases = [p.grad for p in self.with_gradient if p.dim() == 1 and len(p) > 8]
        for gradient in biases:
            gradient.div_(sum(float(each.norm()) ** 2 for each in biases) ** 0.5)


class SharesATensor(Momentum):
    """One tensor under two keys of the state, and one that the optimizer has besides."""

    def prepare(self):
        self.slow = None

    def extra(self):
        params = self.param_groups[0]["params"]
        if self.slow is None:
            self.slow = torch.zeros(5000)
            for parameter in params:
                self.state[parameter]["slow"] = self.slow
        self.slow += 1


OWN = [CountsInClass, CountsInAListOfItsClass, CountsInItsModule, CountsInAGlobal, AddsToItsClass, KeepsNorms]
OWN += [CountsInATensor, CountsInTheState, CountsInItself, HasADel, CountsInstances, NeedsLargeParameters]
OWN += [NormOfBiases, SharesATensor, UsesAListThatContainsItself]
CHUNKED = {CountsInItself, CountsInstances}


def trained_with(on, kind):
    if "latest" in vars(kind):
        del kind.latest
    before = counted(kind)
    model = make_model()
    optimizer = kind(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 4)
    own = {name: value for name, value in vars(optimizer).items() if name.lstrip("_") in ("norms", "steps", "slow")}
    found = everything(model, optimizer), copy.deepcopy(own)
    gone = weakref.ref(optimizer)
    del optimizer
    return *found, [after - each for after, each in zip(counted(kind), before, strict=True)], gone() is None


def counted(kind):
    names = ("steps", "norms", "latest", "closed", "made")
    values = [vars(kind).get(name, 0) for name in names]
    return [MODULE["steps"], NUMBER, *(len(value) if isinstance(value, list) else value for value in values)]


@pytest.mark.parametrize("kind", OWN)
def test_optimizers_of_ones_own(kind, tmp_path):
    plain, moved, on = both(trained_with, tmp_path, kind)
    assert_equal(moved, plain)
    on.off()


@pytest.mark.parametrize("kind", OWN)
def test_which_of_them_are_stepped_in_chunks(kind, tmp_path):
    on, model = On(True, tmp_path), make_model()
    optimizer = kind(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 4)
    [counts] = on.counts
    assert (counts.whole_steps == 0) == (kind in CHUNKED)
    assert counts.tensors > 0
    assert bool(counts.whole_because) == (kind not in CHUNKED)
    on.off()


def test_an_alarm_in_the_trial_is_not_lost(tmp_path):
    import signal

    class Late(Exception):
        pass

    def handler(*_):
        raise Late

    class Alarmed(Momentum):
        def extra(self):
            signal.raise_signal(signal.SIGALRM)

    on, model = On(True, tmp_path), make_model()
    optimizer = Alarmed(model.parameters())
    on(model, optimizer)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Late):
            train(model, optimizer, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    on.off()


# -- where state goes -------------------------------------------------------------------------------------------------


@scenario
def two_models_in_two_threads(on):
    models = [make_model(), make_model()]
    optimizers = [AdamW(model.parameters()) for model in models]
    for pair in zip(models, optimizers, strict=True):
        on(*pair)
    errors = in_threads(train, [(*pair, 20) for pair in zip(models, optimizers, strict=True)])
    return errors, [everything(*pair) for pair in zip(models, optimizers, strict=True)]


@scenario
def two_optimizers_of_a_model_in_two_threads(on):
    model = make_model()
    params = list(model.parameters())
    optimizers = [AdamW(params[::2]), AdamW(params[1::2])]
    on(model, *optimizers)
    errors = []
    for number in range(20):
        model.zero_grad()
        loss_of(model, number).backward()
        errors += in_threads(lambda optimizer: optimizer.step(), [(each,) for each in optimizers])
    return errors, everything(model, *optimizers)


def in_threads(function, arguments):
    errors = []

    def run(given):
        try:
            function(*given)
        except BaseException as error:
            errors.append(repr(error))
            raise

    threads = [threading.Thread(target=run, args=(given,)) for given in arguments]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return errors


@scenario
def an_optimizer_for_each_parameter_that_steps_in_backward(on):
    model = make_model()
    optimizers = {parameter: AdamW([parameter]) for parameter in model.parameters()}
    on(model, *optimizers.values())

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for number in range(4):
        loss_of(model, number).backward()
    return everything(model, *optimizers.values())


@scenario
def a_parameter_twice_in_a_group(on):
    model = make_model()
    params = list(model.parameters())
    optimizer = torch.optim.SGD([*params, params[0]], lr=0.1, momentum=0.9)
    on(model, optimizer)
    train(model, optimizer, 3)
    return everything(model, optimizer)


@scenario
def state_that_is_moved_to_another_parameter(on):
    """As programs do that add and remove points."""
    model = make_model()
    optimizer = AdamW([{"params": [p]} for p in model.parameters()])
    on(model, optimizer)
    train(model, optimizer, 2)
    group = optimizer.param_groups[0]
    [old] = group["params"]
    state = optimizer.state.pop(old)
    state["exp_avg"] = state["exp_avg"] * 1
    state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
    model[0].weight = nn.Parameter(old.detach().clone())
    group["params"] = [model[0].weight]
    optimizer.state[model[0].weight] = state
    gone = weakref.ref(old)
    del old, state
    optimizer.zero_grad()
    train(model, optimizer, 2, begin=2)
    return everything(model, optimizer), gone() is None


@scenario
def an_optimizer_around_another_with_the_same_state(on):
    class Around(Optimizer):
        def __init__(self, inner):
            self.inner, self.defaults = inner, inner.defaults
            self.param_groups, self.state = inner.param_groups, inner.state
            Optimizer.__setstate__(self, {})

        def step(self, closure=None):
            return self.inner.step(closure)

    found = []
    for is_first in (True, False):
        model = make_model()
        inner = AdamW(model.parameters())
        if is_first:
            on(model, inner)
        optimizer = Around(inner)
        if not is_first:
            on(model, inner)
        train(model, optimizer, 3)
        found.append((everything(model, optimizer), everything(model, inner)))
        on.off()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(60, 60))]})
        inner.param_groups[-1]["params"][0].sum().backward()
        inner.step()
        found.append((everything(model, optimizer), everything(model, inner)))
        on(model, inner)
        inner.step()
        found.append((everything(model, optimizer), everything(model, inner)))
    return found


@scenario
def state_in_shared_memory(on):
    model = make_model()
    optimizer = torch.optim.Adagrad(model.parameters())
    optimizer.share_memory()
    on(model, optimizer)
    train(model, optimizer, 2)
    return everything(model, optimizer), [optimizer.state[p]["sum"].is_shared() for p in model.parameters()]


@scenario
def state_that_is_cleared(on):
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 2)
    optimizer.state.clear()
    train(model, optimizer, 2, begin=2)
    return everything(model, optimizer)


@scenario
def state_that_is_joined_with_another(on):
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 2)
    return list((optimizer.state | {}).values()), list((defaultdict(dict) | optimizer.state).values())


@scenario
def a_tensor_that_the_program_holds(on):
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 2)
    held = optimizer.state[model[0].weight]["exp_avg"]
    found = []
    for number in range(2, 5):
        train(model, optimizer, 1, begin=number)
        found.append(held.clone())
    return found, everything(model, optimizer)


@scenario
def hooks_that_change_the_state_as_it_is_saved(on):
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)

    def double(self):
        for _, state in self.state.items():
            state["exp_avg"].mul_(2)
        for parameter in model.parameters():
            self.state[parameter]["exp_avg_sq"].mul_(2)

    def sums(self, state_dict):
        return {**state_dict, "sums": [float(state["exp_avg"].sum()) for state in state_dict["state"].values()]}

    train(model, optimizer, 2)
    optimizer.register_state_dict_pre_hook(double)
    optimizer.register_state_dict_post_hook(sums)
    found = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2)
    return found, everything(model, optimizer)


@scenario
def loaded_into_another_optimizer(on):
    model, other = make_model(), make_model()
    optimizers = AdamW(model.parameters()), AdamW(other.parameters())
    on(model, optimizers[0])
    train(model, optimizers[0], 2)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))  # without a copy, torch's share tensors
    train(other, optimizers[1], 2)
    train(model, optimizers[0], 1)
    return everything(model, optimizers[0]), everything(other, optimizers[1])


@scenario
def a_distributed_checkpoint(on):
    model, other = make_model(), make_model()
    optimizer, resumed = AdamW(model.parameters()), AdamW(other.parameters())
    on(model, optimizer)
    train(model, optimizer, 2)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    train(model, optimizer, 1)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved))
    train(model, optimizer, 2)
    on(other, resumed)
    set_optimizer_state_dict(other, resumed, copy.deepcopy(saved))
    train(other, resumed, 2)
    return everything(model, optimizer), everything(other, resumed)


@scenario
def a_checkpoint_that_a_closure_loads(on):
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2)

    def closure():
        optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.zero_grad()
        loss = loss_of(model, 9)
        loss.backward()
        return loss

    loss = optimizer.step(closure).item()
    train(model, optimizer, 2, begin=5)
    return everything(model, optimizer), loss


@scenario
def disabled_within_a_step(on):
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 3)
        loss.backward()
        on.off()
        return loss

    optimizer.step(closure)
    on(model, optimizer)
    hook = optimizer.register_step_pre_hook(lambda *_: on.off())
    train(model, optimizer, 1, begin=2)
    hook.remove()
    train(model, optimizer, 2, begin=3)
    return everything(model, optimizer)


# -- kinds of tensors, and modes --------------------------------------------------------------------------------------


@scenario
def read_and_saved_in_inference_mode(on):
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 2)
    with torch.inference_mode():
        norms = [float(optimizer.state[p]["exp_avg"].norm()) for p in model.parameters()]
        optimizer.state_dict()
    train(model, optimizer, 2, begin=2)
    return everything(model, optimizer), norms


@scenario
def sparse_gradients_with_momentum(on):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 60, sparse=True), nn.Linear(60, 60))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    on(model, optimizer)
    for number in range(4):
        optimizer.zero_grad()
        model(torch.tensor([1, 2, 3 + number])).square().mean().backward()
        optimizer.step()
    state_dict = optimizer.state_dict()
    for state in state_dict["state"].values():
        state["momentum_buffer"] = state["momentum_buffer"].to_dense()
    return [p.detach() for p in model.parameters()], state_dict


@scenario
def sparse_adam(on):
    torch.manual_seed(0)
    model = nn.Embedding(100, 60, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    on(model, optimizer)
    for number in range(4):
        optimizer.zero_grad()
        model(torch.tensor([1, 2, 3 + number])).square().mean().backward()
        optimizer.step()
    return everything(model, optimizer)


@scenario
def complex_parameters(on):
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(60, 60, dtype=torch.complex64))
    optimizer = AdamW(model.parameters(), amsgrad=True, foreach=True)
    on(model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model.weight.abs().square().mean().backward()
        optimizer.step()
    return everything(model, optimizer)


@scenario
def parameters_that_are_frozen_in_turn(on):
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    for number in range(8):
        for n, parameter in enumerate(model.parameters()):
            parameter.requires_grad_((number + n) % 3 != 0)
        train(model, optimizer, 1, begin=number)
    return everything(model, optimizer)


@scenario
def a_default_device(on):
    model = make_model()
    optimizer = Momentum(model.parameters())
    on(model, optimizer)
    loss_of(model, 0).backward()
    with torch.device("meta"):
        optimizer.step()
    return everything(model, optimizer)


@scenario
def sharpness_aware_minimization(on):
    class Sam(Optimizer):
        def __init__(self, params):
            super().__init__(params, {"rho": 0.05})
            self.base = AdamW(self.param_groups, lr=0.01)
            self.param_groups = self.base.param_groups

        @torch.no_grad()
        def step(self, closure=None):
            params = [p for group in self.param_groups for p in group["params"]]
            torch.enable_grad()(closure)()
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            for parameter in params:
                self.state[parameter]["old"] = parameter.data.clone()
                parameter.add_(parameter.grad * 0.05 / norm)
            torch.enable_grad()(closure)()
            for parameter in params:
                parameter.data = self.state[parameter]["old"]
            self.base.step()

    found = []
    for which in (0, 1, 2):
        model = make_model()
        optimizer = Sam(model.parameters())
        on(model, *([optimizer], [optimizer.base], [optimizer, optimizer.base])[which])
        for number in range(3):

            def closure(model=model, optimizer=optimizer, number=number):
                optimizer.zero_grad()
                loss_of(model, number).backward()

            optimizer.step(closure)
        found.append(everything(model, optimizer, optimizer.base))
    return found


@pytest.mark.parametrize("function", SCENARIOS, ids=lambda function: function.__name__)
def test_plain_and_moved_are_the_same(function, tmp_path):
    plain, moved, on = both(function, tmp_path)
    assert_equal(moved, plain)
    on.off()


# -- what is not as without offload -----------------------------------------------------------------------------------


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


def test_one_bound_for_the_writes_of_all_optimizers(tmp_path, monkeypatch):
    from offload.optimizer_state import mover, write_behind

    most = []
    wait = write_behind.WriteBehind.wait

    def watched(self, engine, nbytes_max):
        wait(self, engine, nbytes_max)
        most.append(sum(each.in_flight_bytes for each in self._writing))

    monkeypatch.setattr(write_behind.WriteBehind, "wait", watched)
    on, model = On(True, tmp_path), make_model()
    optimizers = [AdamW([p]) for p in model.parameters()]
    on(model, *optimizers)
    largest = max(p.nbytes for p in model.parameters())
    for number in range(4):
        model.zero_grad()
        loss_of(model, number).backward()
        for each in optimizers:
            each.step()
    assert 0 < max(most) <= mover.BEHIND_BYTES + largest
    on.off()
