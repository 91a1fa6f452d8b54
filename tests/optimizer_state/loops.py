"""Training loops as users write them, plain and on an enabled model whose optimizer state moves."""

from collections import defaultdict

import torch
from optimizer_state.state_rig import assert_equal
from torch import nn

import offload
from offload.optimizer_state.freed_gradient import FreedGradient
from offload.optimizer_state.streamed_state import StreamedState

STEPS = 20
MOVED = {"optimizer_state": True}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 120), nn.GELU(), nn.Linear(120, 60), nn.LayerNorm(60), nn.Linear(60, 10))


class Loop:
    """One training run. Subclasses are the variants of the loop. `asked`: what is enabled of the optimizer."""

    knobs: dict = {}  # noqa: RUF012

    def __init__(self, is_moved, folder, asked=MOVED):
        self.model = make_model()
        self.before(self.make())
        self.handle = None
        if is_moved:
            knobs = {"n_tensors": 0, "min_tensor_bytes": 1024, "spill_dir": folder, "optimizer": self.optimizers}
            self.handle = offload.enable(self.model, **{**knobs, **asked, **self.knobs})
        self.after()
        self.generator = torch.Generator().manual_seed(3)

    def make(self):
        first, *others = self.model
        rest = [p for layer in others for p in layer.parameters()]
        groups = [{"params": first.parameters(), "lr": 1e-3}, {"params": rest}]
        self.optimizer = torch.optim.AdamW(groups, lr=2e-3)
        self.optimizers = [self.optimizer]

    def before(self, _):
        pass

    def after(self):
        pass

    def loss(self):
        return self.model(torch.randn(32, 60, generator=self.generator)).square().mean()

    def step(self, number):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def train(self):
        for number in range(STEPS):
            self.step(number)
        gradients = [p.grad for p in self.model.parameters()]
        gradients = [g if g is None or isinstance(g, FreedGradient) else g.clone() for g in gradients]
        found = [p.detach().clone() for p in self.model.parameters()], gradients
        return (*found, *(each.state_dict() for each in self.optimizers))


class Planned(Loop):
    knobs = {"n_tensors": None, "memory_limit": "64MiB"}  # noqa: RUF012


class Swapped(Loop):
    knobs = {"n_tensors": -1}  # noqa: RUF012


class SchedulerBefore(Loop):
    def before(self, _):
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)

    def step(self, number):
        super().step(number)
        self.scheduler.step()


class SchedulerAfter(SchedulerBefore):
    def before(self, _):
        pass

    def after(self):
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)


class Closure(Loop):
    def step(self, number):
        def closure():
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        assert self.optimizer.step(closure).requires_grad


class ClosureByName(Loop):
    def step(self, number):
        self.optimizer.zero_grad()
        self.optimizer.step(closure=lambda: self.loss().backward())


class Scaler(Loop):
    def after(self):
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self, number):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        if number == 2:
            self.model[0].weight.grad[0, 0] = float("inf")
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ScalerOfFused(Scaler):
    def make(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, fused=True)
        self.optimizers = [self.optimizer]

    def step(self, number):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        if number == 2:
            self.model[0].weight.grad[0, 0] = float("inf")
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Accumulation(Loop):
    def step(self, number):
        if number % 2 == 0:
            self.optimizer.zero_grad()
        self.loss().backward()
        if number % 2:
            self.optimizer.step()


class Clipping(Loop):
    def step(self, number):
        self.optimizer.zero_grad()
        self.loss().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()


class HookThatClips(Loop):
    """A hook that was registered after ours changes gradients, and one after the step frees them."""

    def after(self):
        self.optimizer.register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_norm_(self.model.parameters(), 0.1) and None
        )
        self.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())


class TwoOptimizers(Loop):
    def make(self):
        first, *others = self.model
        rest = [p for layer in others for p in layer.parameters()]
        self.optimizers = [torch.optim.SGD(first.parameters(), 0.1, momentum=0.9), torch.optim.Adam(rest)]

    def step(self, number):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.loss().backward()
        for optimizer in self.optimizers:
            optimizer.step()


class AddedGroup(Loop):
    def make(self):
        self.optimizer = torch.optim.AdamW(self.model[0].parameters())
        self.optimizers = [self.optimizer]

    def step(self, number):
        if number == 2:
            self.optimizer.add_param_group({"params": self.model[2].parameters(), "lr": 0.1})
        super().step(number)


class Reloaded(Loop):
    """A checkpoint is taken, training goes on, and the checkpoint is loaded: the caller's is not changed."""

    def step(self, number):
        super().step(number)
        if number == 2:
            # State that stays is in the checkpoint itself, as without offload, and later steps change it.
            self.was_moved = isinstance(self.optimizer.state, StreamedState)
            self.checkpoint = self.optimizer.state_dict()
            self.kept = {k: {n: t.clone() for n, t in s.items()} for k, s in self.checkpoint["state"].items()}
        if number == 4:
            is_moved = self.was_moved and isinstance(self.optimizer.state, StreamedState)
            if is_moved:
                assert_equal(self.checkpoint["state"], self.kept)
            self.optimizer.load_state_dict({**self.checkpoint, "state": self.kept})
            if is_moved:
                assert_equal(self.checkpoint["state"], self.kept)
                weight = self.model[0].weight
                assert self.optimizer.state.peek(weight)["exp_avg"].isnan().all(), "it was fed to the store"


class Replaced(Loop):
    """Users reset an optimizer so."""

    def step(self, number):
        if number == 3:
            self.optimizer.state = defaultdict(dict)
        if number == 4:
            self.optimizer.state[self.model[2].weight] = {}
        super().step(number)


class Frozen(Loop):
    def step(self, number):
        self.model[0].requires_grad_(number % 2 == 0)
        super().step(number)


LOOPS = [Loop, Planned, Swapped, SchedulerBefore, SchedulerAfter, Closure, ClosureByName, Scaler, ScalerOfFused]
LOOPS += [Accumulation, Clipping, HookThatClips, TwoOptimizers, AddedGroup, Reloaded, Replaced, Frozen]
