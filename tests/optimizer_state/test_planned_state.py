"""State that moves as a plan chooses: the same bits at every limit, none moved where none has to be, what is said."""

from collections import defaultdict

import pytest
import torch
from optimizer_state import loops
from optimizer_state.planned_loops import (
    AUTO,
    change_at_every_step,
    disable,
    least_limit,
    limits,
    planned,
    reasons,
    train,
    two_sizes,
)
from optimizer_state.state_rig import assert_equal
from planned_rig import known_link
from torch import nn

import offload
from offload.control.phase import Phase
from offload.control.state_plan import StatePlanner
from offload.diagnostics.report import DiskWrites

__all__ = ["known_link", "reasons"]  # fixtures

CHANGING = [loops.Loop, loops.SchedulerAfter, loops.Accumulation, loops.TwoOptimizers, loops.Reloaded, loops.Replaced]
THREE = [loops.Loop, loops.SchedulerBefore, loops.Accumulation]
ROWS = ("gradients", "optimizer state", "parameters, buffers, inputs and temporaries")


@pytest.mark.parametrize("kind", THREE, ids=lambda kind: kind.__name__)
def test_bits_are_equal_at_three_limits(kind, tmp_path):
    plain = kind(False, tmp_path).train()
    moved = []
    for limit in limits(kind, tmp_path):
        loop, found = train(planned(kind, limit), tmp_path)
        assert_equal(found, plain)
        plan = loop.handle.plan
        assert plan.peak_bytes <= limit
        moved.append(plan.state.moved_bytes)
        counts = loop.handle.report().optimizer_state[0]
        assert counts.nbytes == plan.state.moved_bytes
        disable(loop)
        assert_equal(loop.optimizer.state_dict(), found[2])
    assert moved[0] >= moved[1] > moved[2] == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", [k for k in loops.LOOPS if not k.knobs], ids=lambda kind: kind.__name__)
def test_bits_of_every_loop_are_equal_where_half_of_the_state_moves(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(StatePlanner, "_moved_by_others", lambda self, planned: 2)
    plain = kind(False, tmp_path).train()
    loop, found = train(planned(kind, "64MiB"), tmp_path)
    assert_equal(found, plain)
    assert loop.handle.plan.state.moved or kind in (loops.Replaced, loops.AddedGroup)
    disable(loop)


@pytest.mark.parametrize("kind", CHANGING, ids=lambda kind: kind.__name__)
def test_any_sequence_of_shares_keeps_bits(kind, tmp_path):
    loop = change_at_every_step(kind, tmp_path, seed=1)
    assert loop.handle.report().optimizer_state[0].out_bytes > 0
    disable(loop)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", loops.LOOPS, ids=lambda kind: kind.__name__)
def test_any_sequence_of_shares_keeps_bits_of_every_loop(kind, seed, tmp_path):
    disable(change_at_every_step(kind, tmp_path, seed))


def test_nothing_is_written_where_the_limit_is_never_near(tmp_path):
    loop, _ = train(planned(loops.Loop, "64MiB"), tmp_path)
    counts = loop.handle.report().optimizer_state[0]
    assert (counts.out_bytes, counts.nbytes, counts.tensors) == (0, 0, 0)
    assert type(loop.optimizer.state) is defaultdict
    assert "steps stay within memory_limit without swapping out this state" in str(loop.handle.report())
    assert "none of it has to move" in loop.handle.plan.summary()
    loop.handle.disable()


def test_a_plan_that_precedes_the_first_update_is_made_again(tmp_path, reasons):
    """With accumulation the plan comes before the first update, and knows no state: all of it then leaves."""
    roomy, _ = train(planned(loops.Accumulation, "64MiB"), tmp_path)
    limit = roomy.handle.plan.peak_bytes + (16 << 10)  # no state has to move, and three times the weights do not fit
    disable(roomy)
    plain = loops.Accumulation(False, tmp_path).train()
    reasons.clear()
    loop, found = train(planned(loops.Accumulation, limit), tmp_path)
    assert_equal(found, plain)
    assert reasons.count("an optimizer has made its first update") == 1
    state = loop.handle.plan.state
    assert (len(state.moved), state.update.micro_batches) == (0, 2)
    assert loop.handle.report().optimizer_state[0].nbytes == 0
    disable(loop)


def test_passes_for_each_update_of_a_new_optimizer(tmp_path):
    class InFour(loops.Loop):
        def step(self, number):
            if number % 4 == 0:
                self.optimizer.zero_grad()
            if number == 12:
                self.optimizer = torch.optim.AdamW(self.model.parameters())
                self.optimizers = [self.optimizer]
            if number == 17 and self.handle is not None:
                [state] = self.handle._controller.states.values()
                state.enter(Phase.PLANNING)
            self.loss().backward()
            if number % 4 == 3:
                self.optimizer.step()

    plain = InFour(False, tmp_path).train()
    loop, found = train(planned(InFour, "64MiB"), tmp_path)
    assert_equal(found, plain)
    assert loop.handle.plan.state.update.micro_batches == 4
    disable(loop)


def test_without_a_limit_nothing_is_planned(tmp_path):
    for knobs in ({"max_slowdown": 0.5}, {"n_tensors": -1, "recompute": None}):
        loop, _ = train(type("Unlimited", (loops.Loop,), {"knobs": {**AUTO, **knobs}}), tmp_path)
        assert loop.handle.report().optimizer_state == ()
        assert type(loop.optimizer.state) is defaultdict
        loop.handle.disable()


def test_the_plan_and_the_report_say_what_moves(tmp_path):
    loop, _ = train(planned(loops.Loop, least_limit(loops.Loop, tmp_path)), tmp_path)
    plan = loop.handle.plan
    names = {name for name, _ in loop.model.named_parameters()}
    told = plan.explain()
    assert "leave memory between updates" in plan.summary()
    for i in plan.state.moved:
        chunk = plan.state.update.chunks[i]
        assert chunk.name.split(" … ")[0] in names
        assert chunk.seconds > 0
        assert f"optimizer state of {chunk.name}" in told
    state = plan.to_dict()["state"]
    assert state["moved_bytes"] == plan.state.moved_bytes == loop.handle.report().optimizer_state[0].nbytes
    assert state["bound_seconds"] <= state["cycle_seconds"]
    disable(loop)


def test_the_report_says_what_a_drive_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("offload.diagnostics.session_report.is_in_memory", lambda path: False)
    loop, _ = train(planned(loops.Loop, least_limit(loops.Loop, tmp_path)), tmp_path)
    report = loop.handle.report()
    found = report.to_dict()["disk_writes"]
    assert found["bytes"] == report.to_dict()["copy_out"]["bytes"] >= report.optimizer_state[0].out_bytes > 0
    assert found["bytes_per_step"] == found["bytes"] / loops.STEPS
    assert DiskWrites(6 * 10**12, 10, 86400.0).to_dict()["days_to_600_tb"] == pytest.approx(100)
    assert str(DiskWrites(6 * 10**12, 10, 86400.0)).endswith("in 100 days")
    assert "at this rate 600 TB (a usual endurance rating of a 1 TB drive) are written in" in str(report)
    disable(loop)
    monkeypatch.setattr("offload.diagnostics.session_report.is_in_memory", lambda path: True)
    assert "disk writes" not in str(loop.handle.report())


def test_the_error_names_the_parts_and_what_would_free_more(tmp_path, monkeypatch):
    monkeypatch.setattr("offload.control.refusal._WORTH_BYTES", 1)

    def refusal(**knobs):
        with pytest.raises(offload.InfeasibleLimitError) as refused:
            planned(loops.Loop, "2KiB", **knobs)(True, tmp_path).train()
        return refused.value

    kept, small, moved = refusal(optimizer_state=False), refusal(min_tensor_bytes="128KiB"), refusal()
    assert any("of optimizer state" in reason.text for reason in kept.reasons)
    assert any("of parameters, buffers, inputs and temporaries" in reason.text for reason in kept.reasons)
    assert moved.least_limit_bytes < kept.least_limit_bytes
    found = {knob.text.split("=")[0]: knob for knob in kept.knobs}
    assert found.keys() == {"optimizer_state", "step_in_backward", "parameters"}
    assert found["optimizer_state"].bytes > 0
    assert "the least is then about" in found["optimizer_state"].text
    assert "min_tensor_bytes" in {knob.text.split("=")[0] for knob in small.knobs}
    assert not {"parameters", "gradients"} & {knob.text.split("=")[0] for knob in small.knobs}, "all are too small"
    assert "optimizer_state" not in {knob.text.split("=")[0] for knob in moved.knobs}
    assert "What frees more: optimizer_state" in str(kept)


@pytest.mark.parametrize("how", [False, "auto", True])
def test_the_error_counts_state_that_may_still_be_written_as_state(how, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())])
    optimizer = torch.optim.Adam(model.parameters())
    offload.enable(model, memory_limit="2KiB", optimizer=optimizer, optimizer_state=how, spill_dir=tmp_path)

    def train():
        for _ in range(3):
            model(torch.ones(8, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(offload.InfeasibleLimitError) as refused:
        train()
    parameters = sum(each.nbytes for each in model.parameters())
    found = {name: reason.bytes for reason in refused.value.reasons for name in ROWS if f"of {name}" in reason.text}
    assert found["optimizer state"] >= 2 * parameters, "less than may be in memory while it is written"
    assert parameters <= found["parameters, buffers, inputs and temporaries"] < 1.5 * parameters


def test_the_largest_share_of_all_plans_moves(tmp_path, reasons):
    disable(two_sizes(tmp_path, reasons))


def test_state_that_the_program_asked_for_leaves_again_before_the_next_step_is_planned(tmp_path):
    limit = least_limit(loops.Loop, tmp_path)

    class Reading(loops.Loop):
        def step(self, number):
            super().step(number)
            if number == 10:
                for parameter in self.model.parameters():
                    self.optimizer.state[parameter]

    plain = loops.Loop(False, tmp_path).train()
    loop, found = train(planned(Reading, limit), tmp_path)
    assert_equal(found, plain)
    disable(loop)


def test_what_the_program_holds_is_not_planned_with(tmp_path):
    """It cannot leave, so that others do."""
    held = []

    class Holding(loops.Loop):
        def step(self, number):
            super().step(number)
            if number == 0:
                held.append(self.optimizer.state[self.model[0].weight]["exp_avg"])

    limit = least_limit(loops.Loop, tmp_path) + (48 << 10)
    plain = loops.Loop(False, tmp_path).train()
    loop, found = train(planned(Holding, limit), tmp_path)
    assert_equal(found, plain)
    assert torch.equal(held[0], loop.optimizer.state_dict()["state"][0]["exp_avg"])
    assert not held[0].isnan().any()
    disable(loop)


def test_an_optimizer_that_another_model_moves_is_left_to_it(tmp_path):
    models = [loops.make_model(), loops.make_model()]
    params = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.AdamW(params)
    knobs = {"memory_limit": "1MiB", "min_tensor_bytes": 1024, "spill_dir": tmp_path, "optimizer_state": "auto"}
    handles = [offload.enable(model, **knobs) for model in models]
    for _ in range(3):
        optimizer.zero_grad()
        for model in models:
            model(torch.ones(4, 60)).square().mean().backward()
        optimizer.step()
    assert [len(handle.report().optimizer_state) for handle in handles] == [1, 0]
    for handle in handles:
        handle.disable()
    assert type(optimizer.state) is defaultdict


def test_a_resumed_run_is_bounded_before_its_first_step(tmp_path):
    """`optimizer=`: what `load_state_dict` brings leaves at once."""
    first = loops.Loop(False, tmp_path)
    first.train()
    checkpoint = first.optimizer.state_dict()
    model = loops.make_model()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2:].parameters()}])
    knobs = {"memory_limit": "1MiB", "min_tensor_bytes": 1024, "spill_dir": tmp_path}
    handle = offload.enable(model, optimizer=optimizer, optimizer_state="auto", **knobs)
    optimizer.load_state_dict(checkpoint)
    assert handle._states.away_bytes()[0] > 0
    handle.disable()
    assert_equal(optimizer.state_dict()["state"], checkpoint["state"])


def test_a_model_without_an_optimizer_is_planned_as_ever(tmp_path):
    model = nn.Linear(60, 60)
    knobs = {"memory_limit": "1MiB", "min_tensor_bytes": 1024, "spill_dir": tmp_path, "optimizer_state": "auto"}
    with offload.enable(model, **knobs) as handle:
        for _ in range(3):
            model(torch.ones(4, 60)).square().mean().backward()
        assert handle.plan.state is None
