"""Training loops whose state moves as a plan chooses, or as a sequence of shares says."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from optimizer_state import loops
from optimizer_state.state_rig import assert_equal
from torch import nn

import offload
from offload.control.limits import LIMITS
from offload.control.phase import SignatureState
from offload.optimizer_state.movers import StateMovers
from offload.optimizer_state.share import Share
from offload.optimizer_state.streamed_state import StreamedState

AUTO = {"n_tensors": None, "optimizer": None, "optimizer_state": "auto", "recompute": False}


def planned(kind, limit, **knobs):
    """A variant of a loop whose state moves as a plan with this limit chooses."""
    return type(kind.__name__, (kind,), {"knobs": {**AUTO, "memory_limit": limit, **knobs}})


def least_limit(kind, folder):
    """The limit that errors name as the least, which a first update may raise: until then no state is known."""
    limit = 2 << 10
    for _ in range(5):
        loop = planned(kind, limit)(True, folder)
        try:
            loop.train()
            return limit
        except offload.InfeasibleLimitError as error:
            limit = error.least_limit_bytes
        finally:
            loop.handle.disable()
    raise AssertionError("the least limit does not work")


def limits(kind, folder):
    """The least that works, one between that and all in memory, and a limit that is never near."""
    least = least_limit(kind, folder)
    return least, least + (12 << 10), 64 << 20


def train(kind, folder):
    loop = kind(True, folder)
    found = loop.train()
    return loop, found


def disable(loop):
    loop.handle.disable()
    assert not any(isinstance(each.state, StreamedState) for each in loop.optimizers)


def change_at_every_step(kind, folder, seed, follow=StateMovers.follow):
    """Train with another share at each step boundary; any sequence of them is allowed."""
    chosen = random.Random(seed)

    class Changing(kind):
        def step(self, number):
            if self.handle is not None:
                params = list(self.model.parameters())
                follow(self.handle._states, chosen.sample(params, chosen.choice([0, 1, 3, len(params)])))
            super().step(number)

    plain = kind(False, folder).train()
    loop, found = train(Changing, folder)
    assert_equal(found, plain)
    return loop


class Two(loops.Loop):
    """Batches of two sizes in turn, each with a plan of its own; the large one comes first."""

    rows = (1024, 8)
    turn = 0

    def loss(self):
        self.turn += 1
        return self.model(torch.randn(self.rows[self.turn % 2 - 1], 60, generator=self.generator)).square().mean()


def two_sizes(folder, phases):
    """The largest share of both plans moves, so that neither is made again for the other."""
    plain = Two(False, folder).train()
    limit = max(least_limit(Two, folder), least_limit(type("Large", (Two,), {"rows": (1024, 1024)}), folder))
    phases.clear()
    loop, found = train(planned(Two, limit), folder)
    assert_equal(found, plain)
    states = loop.handle._controller.states.values()
    assert len(states) == 2
    plans = [state.planned.plan for state in states]
    assert max(plan.peak_bytes for plan in plans) <= limit
    assert 0 < max(plan.state.moved_bytes for plan in plans) == loop.handle.report().optimizer_state[0].nbytes
    assert not any("more memory" in why for why in phases)
    return loop


@pytest.fixture
def reasons(monkeypatch):
    """Why phases changed. No plan is made because of measured times."""
    monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, replans=0))
    found = []
    enter = SignatureState.enter

    def noting(self, phase, why=""):
        found.append(why)
        enter(self, phase, why)

    monkeypatch.setattr(SignatureState, "enter", noting)
    return found


def present_bytes(loop):
    """State in memory: what the optimizer's tensors hold, what is being read, and what is still being written."""
    movers = loop.handle._states._alive()
    raw = [value for mover in movers for state in dict.values(mover.optimizer.state) for value in state.values()]
    there = sum(value.untyped_storage().nbytes() for value in raw if value.nbytes >= 1024)
    tensors = [each for mover in movers if mover._state for each in mover._state.tensors.values()]
    coming = sum(each.nbytes for every in tensors for each in every if each._is_coming)
    for mover in movers:
        mover.engine.collect()
    return there + coming + sum(mover.engine.in_flight_bytes for mover in movers)


def memory_as_planned(folder, phases):
    """A part of the state moves, and its memory is at no moment more than the plan says."""
    plain = Wide(False, folder).train()
    limit = least_limit(Wide, folder) + (120 << 10)
    phases.clear()
    loop = planned(Wide, limit)(True, folder)
    timed, found = Share.timed, {"update": 0, "between": 0}

    def look(when):
        if not loop.is_first:
            found[when] = max(found[when], present_bytes(loop))

    def looking(self, chunk):
        look("update")
        return timed(self, chunk)

    loop.model.register_forward_hook(lambda *_: look("between"))
    with mock.patch.object(Share, "timed", looking):
        assert_equal(loop.train(), plain)
    state = loop.handle.plan.state
    assert 0 < len(state.moved) < len(state.update.chunks)
    assert loop.handle.report().optimizer_state[0].nbytes == state.moved_bytes
    assert 0 < found["between"] <= state.between_bytes + SLACK
    assert found["between"] < found["update"] <= state.update_bytes + SLACK
    assert sum("more memory" in why for why in phases) <= 1
    return loop


SLACK = 4 << 10  # storages of one number for each tensor that is away, and biases


class Wide(loops.Loop):
    """A dozen layers with equal state."""

    is_first = True

    def make(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(60, 60), nn.GELU())])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.optimizers = [self.optimizer]

    def step(self, number):
        self.is_first = number < 2
        super().step(number)
