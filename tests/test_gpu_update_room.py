"""An update of state that stays in memory keeps `memory_limit`, the temporaries of foreach kernels included."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from accelerator import KIND, gpu
from gpu_rig import assert_nothing_left, cuda  # noqa: F401
from torch import Tensor, nn

import offload
from offload.optimizer_state import mover, update_room

pytestmark = pytest.mark.gpu

WIDTH, LAYERS, STEPS = 512, 8, 4
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4
Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_room, "_CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(mover, "CHUNK_BYTES", 1 << 20)  # until there is a plan, state moves
    monkeypatch.setattr(mover, "AHEAD_BYTES", 1 << 20)
    monkeypatch.setattr(mover, "BEHIND_BYTES", 1 << 20)


def adamw(**options: Any) -> Make:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


class Training:
    """A few steps; `peaks`: the most bytes allocated in each update, `held`: those allocated before it."""

    def __init__(
        self,
        make: Make,
        limit_bytes: int | None,
        *,
        closure: bool = False,
        compiled: bool = False,
        rows: Sequence[int] = (16,) * STEPS,
    ) -> None:
        gc.collect()  # what earlier tests have left would be in the peaks of one training and not of the next
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(KIND)
        optimizer = make(model.parameters())
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        self.peaks: list[int] = []
        self.held: list[int] = []
        self.found: list[Tensor] = []
        handle = None
        if limit_bytes is not None:
            handle = offload.enable(model, memory_limit=limit_bytes, min_tensor_bytes="16KiB")

        def evaluate(number: int) -> Tensor:
            optimizer.zero_grad()
            x = torch.randn((rows[number], WIDTH), generator=torch.Generator().manual_seed(number)).to(KIND)
            loss = model(x).square().mean()
            loss.backward()
            self.held.append(gpu.memory_allocated())
            gpu.reset_peak_memory_stats()
            return loss.detach()

        for number in range(len(rows)):
            if closure:
                self.found.append(step(lambda number=number: evaluate(number)))
            else:
                self.found.append(evaluate(number))
                step()
            self.peaks.append(gpu.max_memory_allocated())
        state = optimizer.state_dict()["state"].values()
        self.found += [*model.parameters(), *(value for each in state for value in each.values())]
        self.found = [each.detach().cpu().clone() for each in self.found]
        if handle is not None:
            self.report = handle.report()
            self.counts = self.report.optimizer_state[0]
            self.plan = handle.plan
            handle.disable()
            assert_nothing_left(handle)


def limit_of(plain: Training) -> int:
    """A limit that the update of plain training exceeds, by its temporaries alone."""
    limit = plain.held[-1] + PARAMETER_BYTES // 2
    assert max(plain.peaks) > limit
    return limit


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("make", [adamw(), adamw(foreach=True, amsgrad=True)], ids=["by default", "foreach"])
def test_a_divided_update_keeps_the_limit_and_the_bits(make: Make, closure: bool) -> None:
    plain = Training(make, None, closure=closure)
    own = Training(make, limit_of(plain), closure=closure)
    assert max(own.peaks) <= limit_of(plain)
    assert all(map(torch.equal, own.found, plain.found))
    assert len(own.found) == len(plain.found)
    assert own.counts.divided_steps > 0
    assert "steps of AdamW were divided" in str(own.report)


def test_an_undivided_update_exceeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant."""
    plain = Training(adamw(), None)
    monkeypatch.setattr(update_room.UpdateRoom, "chunk_bytes", lambda *_, **__: None)
    assert max(Training(adamw(), limit_of(plain)).peaks) > limit_of(plain)


NOTHING_TO_DIVIDE: dict[str, Make] = {
    "single tensors": adamw(foreach=False),
    "fused is given": adamw(fused=False),
    "a tensor as rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-3)),
    "no decay": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}


@pytest.mark.parametrize("make", NOTHING_TO_DIVIDE.values(), ids=NOTHING_TO_DIVIDE)
def test_a_step_without_foreach_temporaries_is_not_divided(make: Make) -> None:
    limit = limit_of(Training(adamw(), None))
    own = Training(make, limit)
    assert own.counts.divided_steps == 0
    assert max(own.peaks) <= limit


def test_a_step_is_not_divided_where_there_is_room() -> None:
    limit = limit_of(Training(adamw(), None)) + (update_room.TEMPORARIES_MOST + 2) * PARAMETER_BYTES
    own = Training(adamw(), limit)
    assert own.counts.divided_steps == 0
    assert max(own.peaks) <= limit


def test_a_compiled_step_is_divided_uncompiled() -> None:
    plain = Training(adamw(), None)
    own = Training(adamw(), limit_of(plain), compiled=True)
    assert own.counts.divided_steps > 0
    assert max(own.peaks) <= limit_of(plain)
    assert all(map(torch.equal, own.found, plain.found))


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_plan_made_in_the_closure_of_a_divided_step_moves_state(
    is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the guard, the step's stand-in holds the state, which then stays: the limit is refused."""
    if not is_guarded:
        stand_in = mover.stepping_nothing
        monkeypatch.setattr(mover, "stepping_nothing", lambda optimizer, **_: stand_in(optimizer))
    rows = (16,) * STEPS + (511,) * STEPS
    plain = Training(adamw(), None, closure=True, rows=rows)
    limit = max(plain.held) + PARAMETER_BYTES * 3 // 40  # room for steps of 511 rows only without part of the state
    if not is_guarded:
        with pytest.raises(offload.InfeasibleLimitError):
            Training(adamw(), limit, closure=True, rows=rows)
        return
    own = Training(adamw(), limit, closure=True, rows=rows)
    assert all(map(torch.equal, own.found, plain.found))
    assert own.counts.divided_steps > 0
    assert own.plan.state.moved


def test_of_a_step_that_cannot_be_divided_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, behind = Training(adamw(), None), torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]
    replaced = torch.optim.Optimizer.profile_hook_step(lambda self, closure=None: behind(self, closure))
    monkeypatch.setattr(torch.optim.AdamW, "step", replaced)
    own = Training(adamw(), limit_of(plain))
    assert all(map(torch.equal, own.found, plain.found))
    assert (own.counts.divided_steps, own.counts.undivided_because[:23]) == (0, "its class's step has be")
    assert "its step cannot be divided: its class's step has been replaced" in str(own.report)
    assert max(own.peaks) > limit_of(plain)
