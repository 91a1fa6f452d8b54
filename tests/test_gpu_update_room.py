"""An update of state that stays in memory keeps `memory_limit`, the temporaries of foreach kernels included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    monkeypatch.setattr(mover, "CHUNK_BYTES", 2 << 20)  # until there is a plan, state moves


def adamw(**options: Any) -> Make:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


class Training:
    """A few steps; `peaks`: the most bytes allocated in each update, `held`: those allocated before it."""

    def __init__(self, make: Make, limit_bytes: int | None, *, closure: bool = False, steps: int = STEPS) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(KIND)
        optimizer = make(model.parameters())
        self.peaks: list[int] = []
        self.held: list[int] = []
        self.found: list[Tensor] = []
        handle = None
        if limit_bytes is not None:
            handle = offload.enable(model, memory_limit=limit_bytes, min_tensor_bytes="16KiB")

        def evaluate(number: int) -> Tensor:
            optimizer.zero_grad()
            x = torch.randn((16, WIDTH), generator=torch.Generator().manual_seed(number)).to(KIND)
            loss = model(x).square().mean()
            loss.backward()
            self.held.append(gpu.memory_allocated())
            gpu.reset_peak_memory_stats()
            return loss.detach()

        for number in range(steps):
            if closure:
                self.found.append(optimizer.step(lambda number=number: evaluate(number)))
            else:
                self.found.append(evaluate(number))
                optimizer.step()
            self.peaks.append(gpu.max_memory_allocated())
        state = optimizer.state_dict()["state"].values()
        self.found += [*model.parameters(), *(value for each in state for value in each.values())]
        self.found = [each.detach().cpu().clone() for each in self.found]
        if handle is not None:
            self.report = handle.report()
            self.counts = self.report.optimizer_state[0]
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


@pytest.mark.parametrize(
    ("make", "spare_bytes"),
    [(adamw(foreach=False), 0), (adamw(), (update_room.TEMPORARIES_MOST + 2) * PARAMETER_BYTES)],
)
def test_it_is_divided_only_where_its_temporaries_might_exceed_the_limit(make: Make, spare_bytes: int) -> None:
    plain = Training(adamw(), None)
    own = Training(make, limit_of(plain) + spare_bytes)
    assert own.counts.divided_steps == 0
    assert max(own.peaks) <= limit_of(plain) + spare_bytes


def test_of_a_step_that_cannot_be_divided_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, behind = Training(adamw(), None), torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]
    replaced = torch.optim.Optimizer.profile_hook_step(lambda self, closure=None: behind(self, closure))
    monkeypatch.setattr(torch.optim.AdamW, "step", replaced)
    own = Training(adamw(), limit_of(plain))
    assert all(map(torch.equal, own.found, plain.found))
    assert (own.counts.divided_steps, own.counts.undivided_because[:23]) == (0, "its class's step has be")
    assert "its step cannot be divided: its class's step has been replaced" in str(own.report)
    assert max(own.peaks) > limit_of(plain)
