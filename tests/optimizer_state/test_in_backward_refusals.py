"""Programs that need gradients, weights or options after backward: refused with what to do, never other bits.

Each guard that refuses one is also left out: the weights then differ from plain training, silently.
"""

import copy
import pickle

import pytest
import torch
from optimizer_state.state_rig import assert_equal
from optimizer_state.users_rig import Momentum, everything, loss_of, make_model
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import offload
from offload.optimizer_state import begun_step, freed_gradient, in_backward
from offload.torch_compat import holders

STEPS = 4


class Program:
    """A training loop of four steps. Subclasses need something that backward has taken away."""

    said = ()  # what the error tells, and what to do

    def __init__(self):
        self.model = self.make()
        self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        self.after()

    def make(self):
        return make_model()

    def after(self):
        pass

    def step(self, number):
        self.optimizer.zero_grad()
        loss_of(self.model, number).backward()
        self.between(number)
        self.optimizer.step()

    def between(self, number):
        pass

    def train(self):
        for number in range(STEPS):
            self.step(number)
        return everything(self.model, self.optimizer)


class Accumulates(Program):
    said = ("gradient accumulation", "step_in_backward=False")

    def between(self, number):
        loss_of(self.model, 10 + number).backward()


class AccumulatesOverSteps(Program):
    said = ("gradient accumulation", "step_in_backward=False")

    def step(self, number):
        loss_of(self.model, number).backward()
        if number % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()


class SkipsAStep(Program):
    said = ("parameter", "call optimizer.step() after each backward pass")

    def step(self, number):
        self.optimizer.zero_grad()
        loss_of(self.model, number).backward()
        if number != 1:
            self.optimizer.step()


class BackwardTwiceOverAGraph(Program):
    said = ("a loss in several backward passes", "step_in_backward=False")

    def step(self, number):
        self.optimizer.zero_grad()
        loss = self.model[0].bias.square().sum()
        loss.backward(retain_graph=True)
        (2 * self.model[0].bias.square().sum()).backward()
        self.optimizer.step()


class CreatesAGraph(Program):
    said = ("use torch.autograd.grad(",)

    def step(self, number):
        self.optimizer.zero_grad()
        loss_of(self.model, number).backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in self.model.parameters())
        penalty.backward()
        self.optimizer.step()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(60, 60)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True).tanh()
        return x


class SharesAmongReentrantCheckpoints(Program):
    said = ("reentrant checkpoints that share a parameter",)

    def make(self):
        torch.manual_seed(0)
        return Twice()

    def step(self, number):
        self.optimizer.zero_grad()
        x = torch.randn(16, 60, generator=torch.Generator().manual_seed(number), requires_grad=True)
        self.model(x).square().mean().backward()
        self.optimizer.step()


class Clips(Program):
    said = ("clipping by the norm of all gradients", "need step_in_backward=False")

    def between(self, number):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class LogsTheNorm(Program):
    said = ("anything else that uses gradients before optimizer.step()",)

    def between(self, number):
        float(nn.utils.get_total_norm([p.grad for p in self.model.parameters()]))


class ReadsAddresses(Program):
    said = ("anything else that uses gradients before optimizer.step()",)

    def between(self, number):
        self.model[0].weight.grad.data_ptr()


class ConvertsToNumpy(Program):
    said = ("anything else that uses gradients before optimizer.step()",)

    def between(self, number):
        self.model[0].weight.grad.numpy()


class KeepsZeros(Program):
    said = ("call zero_grad()",)

    def step(self, number):
        super().step(number)
        self.optimizer.zero_grad(set_to_none=False)


class NeverZeroes(Program):
    said = ("optimizer.zero_grad() after each backward pass",)

    def step(self, number):
        loss_of(self.model, number).backward()
        self.optimizer.step()


class StepsTwice(Program):
    said = ("call zero_grad() before each backward pass",)

    def step(self, number):
        super().step(number)
        self.optimizer.step()


class ChangesTheRate(Program):
    said = ("lr of parameter group 0 changed", "change options before backward")

    def between(self, number):
        self.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)


class FillsTheRate(Program):
    said = ("lr of parameter group 0 changed",)

    def after(self):
        self.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)

    def between(self, number):
        self.optimizer.param_groups[0]["lr"].fill_(0.1 / (number + 1))


class SchedulesFirst(Program):
    said = ("step schedulers after optimizer.step()",)

    def after(self):
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def between(self, number):
        self.scheduler.step()


class ChangesTheRateInAHook(Program):
    said = ("lr of parameter group 0 changed",)

    def step(self, number):
        def change(optimizer, *_):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)

        hook = self.optimizer.register_step_pre_hook(change)
        super().step(number)
        hook.remove()


class DropsAGradient(Program):
    said = ("parameter 0.weight was removed", "requires_grad_(False) before forward")

    def between(self, number):
        self.model[0].weight.grad = None


class ReplacesAGradient(Program):
    said = ("parameter 0.weight was removed or replaced",)

    def between(self, number):
        self.model[0].weight.grad = torch.ones(120, 60)


class ChangesAWeight(Program):
    said = ("parameter 0.weight was changed", "after optimizer.step()")

    def between(self, number):
        with torch.no_grad():
            self.model[0].weight.clamp_(-0.01, 0.01)


class ClearsTheState(Program):
    said = ("group or the state of parameter", "replace it after optimizer.step()")

    def between(self, number):
        self.optimizer.state.clear()


class ChangesTheGroup(Program):
    said = ("group or the state of parameter 4.bias", "replace it after optimizer.step()")

    def after(self):
        self.optimizer = AdamW(
            [{"params": self.model.parameters()}, {"params": [nn.Parameter(torch.ones(1))], "lr": 1}]
        )

    def between(self, number):
        if number == 1:
            first, second = self.optimizer.param_groups
            second["params"].append(first["params"].pop())


class Multiplies(Momentum):
    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            closure()
        for parameter in self.with_gradient:
            parameter.sub_((parameter.grad.reshape(-1, 1) @ torch.full((1, 1), 0.1)).reshape(parameter.shape))


class HalfInAutocast(Program):
    said = ("call both outside of it",)

    def after(self):
        self.optimizer = Multiplies(self.model.parameters())

    def step(self, number):
        self.optimizer.zero_grad()
        with torch.autocast("cpu"):
            loss_of(self.model, number).float().backward()
        self.optimizer.step()


class SharesMemoryLater(Program):
    """Two parameters that become views of the same memory, one of them transposed."""

    said = ("two parameters, of shapes [120, 60] and [60, 120], share memory", "the same Parameter")

    def step(self, number):
        if number == 2:
            self.model[0].weight.data = self.model[2].weight.data.t()
        super().step(number)


PROGRAMS = [Accumulates, AccumulatesOverSteps, SkipsAStep, BackwardTwiceOverAGraph, CreatesAGraph, Clips, LogsTheNorm]
PROGRAMS += [SharesAmongReentrantCheckpoints, ReadsAddresses, ConvertsToNumpy, KeepsZeros, NeverZeroes, StepsTwice]
PROGRAMS += [ChangesTheRate, FillsTheRate, SchedulesFirst, ChangesTheRateInAHook, DropsAGradient, ReplacesAGradient]
PROGRAMS += [ChangesAWeight, ClearsTheState, ChangesTheGroup, HalfInAutocast, SharesMemoryLater]


def enabled(program, folder):
    knobs = {"n_tensors": 0, "spill_dir": folder, "step_in_backward": True}
    return offload.enable(program.model, optimizer=program.optimizer, **knobs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_programs_that_need_more(program, tmp_path):
    program().train()  # plain torch runs it
    stepped = program()
    handle = enabled(stepped, tmp_path)
    with pytest.raises(offload.StepInBackwardError, match="step_in_backward=True") as raised:
        stepped.train()
    assert all(words in str(raised.value) for words in program.said)
    handle.disable()
    for _ in range(2):  # without it, as ever
        stepped.optimizer.zero_grad()
        stepped.step(0)


# -- guards left out --------------------------------------------------------------------------------------------------


def _zeros(like, dtype=None, device=None):
    return torch.zeros_like(like)


def _nothing(*_, **__):
    pass


UNCHECKED = (in_backward.StepInBackward, "_check_first", _nothing)
GUARDS = {
    "a gradient that is gone refuses to be read": ([(begun_step, "FreedGradient", _zeros)], Clips),
    "a gradient that is gone refuses to be added to": ([(begun_step, "FreedGradient", _zeros)], NeverZeroes),
    "one update per step": ([UNCHECKED], SkipsAStep),
    "one update per step, in two passes": ([UNCHECKED, (begun_step, "FreedGradient", _zeros)], Accumulates),
    "one update per step, among checkpoints": (
        [UNCHECKED, (begun_step, "FreedGradient", _zeros)],
        SharesAmongReentrantCheckpoints,
    ),
    "options are compared": ([(begun_step, "_differing", lambda *_: [])], ChangesTheRate),
    "tensors among options are compared": ([(begun_step, "version_of", lambda _: 0)], FillsTheRate),
    "options are compared after all hooks": ([(begun_step, "_differing", lambda *_: [])], ChangesTheRateInAHook),
    "weights are compared": ([(begun_step, "version_of", lambda _: 0)], ChangesAWeight),
    "gradients are still those that went": ([(begun_step.BegunStep, "_check_param", _nothing)], DropsAGradient),
    "states are still those that were used": ([(begun_step, "_state_of", _nothing)], ClearsTheState),
    "parameters are still in their groups": ([(begun_step.BegunStep, "_check_param", _nothing)], ChangesTheGroup),
    "autocast is compared": ([(begun_step, "_in_autocast", _nothing)], HalfInAutocast),
    "memory belongs to one parameter": ([(in_backward, "overlapping", lambda _: iter(()))], SharesMemoryLater),
    "a gradient is used once": ([(in_backward, "params_to_step", lambda *_: [])], StepsTwice),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_is_left_out_is_missed(guard, tmp_path, monkeypatch):
    left_out, program = GUARDS[guard]
    plain = program().train()
    for where, name, instead in left_out:
        monkeypatch.setattr(where, name, instead)
    stepped = program()
    handle = enabled(stepped, tmp_path)
    found = stepped.train()  # no error
    with pytest.raises(AssertionError):
        assert_equal(copy.deepcopy(found), plain)
    handle.disable()


def tied_by_memory(transposed):
    model = make_model()
    model[0].weight.data = model[2].weight.data.t() if transposed else model[2].weight.data.view(120, 60)
    return model


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_parameters_that_share_memory_are_refused_at_enable(transposed, is_split):
    model = tied_by_memory(transposed)
    params = list(model.parameters())
    optimizers = [AdamW(params[:1]), AdamW(params[1:])] if is_split else [AdamW(params)]
    said = "with these optimizers: two" if is_split else "with this AdamW: two"
    with pytest.raises(ValueError, match=f"{said} parameters, of shapes .* share memory.*the same Parameter"):
        offload.enable(model, optimizer=optimizers, step_in_backward=True)


def test_parts_of_one_buffer_and_tied_parameters_share_no_memory(tmp_path):
    found = []
    for is_on in (False, True):
        model = make_model()
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(flat, model.parameters())  # each becomes a view of it
        optimizer = AdamW([*model.parameters()])
        if is_on:
            assert not [*holders.overlapping([*model.parameters(), model[0].weight])]
            offload.enable(model, optimizer=optimizer, step_in_backward=True, n_tensors=0, spill_dir=tmp_path)
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
        found.append(everything(model, optimizer))
    assert_equal(*found)


USES = {
    "add": lambda gone: gone + 1,
    "norm": torch.norm,
    "clone": torch.clone,
    "detach": torch.detach,
    "fill": lambda gone: gone.fill_(0),
    "index": lambda gone: gone[0],
    "compare": lambda gone: torch.equal(gone, gone),
    "list": lambda gone: gone.tolist(),
    "address": lambda gone: gone.data_ptr(),
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_a_gradient_that_is_gone_is_an_error(use):
    gone = freed_gradient.FreedGradient(torch.ones(3, 4))
    with pytest.raises(offload.StepInBackwardError, match="is gone"):
        USES[use](gone)
    assert repr(gone) == str(gone) == "FreedGradient(shape=[3, 4])"
    assert (gone.shape, gone.dtype, gone.is_sparse, gone.requires_grad) == ((3, 4), torch.float32, False, False)


def test_the_storage_of_a_gradient_that_is_gone_has_no_bytes():
    storage = freed_gradient.FreedGradient(torch.ones(3, 4)).untyped_storage()
    assert (storage.nbytes(), storage.device.type) == (0, "cpu")
