"""What programs do with gradients between backward and step, while they are away: the results of plain training."""

import pytest
from optimizer_state.gradient_rig import MOVED, USES, assert_same, gradients
from optimizer_state.state_rig import assert_equal
from optimizer_state.users_rig import both, everything, loss_of, make_model
from some_rows import one_in
from torch.optim import AdamW


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", one_in(2, USES))
def test_uses_between_backward_and_step(name, fused, tmp_path):
    def run(on):
        model = make_model()
        optimizer = AdamW(model.parameters(), fused=fused)
        on(model, optimizer)
        found = []
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            found.append(USES[name](model))
            optimizer.step()
            found.append(gradients(model))
            found.append(USES[name](model))
        return *everything(model, optimizer), gradients(model), found

    assert_same(run, tmp_path)


@pytest.mark.parametrize("name", ["clipped", "arithmetic", "written_through_data", "weights_changed_by_hand"])
def test_beside_parameters_that_leave(name, tmp_path):
    def run(on):
        model = make_model()
        optimizer = AdamW(model.parameters())
        on(model, optimizer)
        found = []
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            found.append(USES[name](model))
            optimizer.step()
            found.append(gradients(model))
        on.off()
        return *everything(model, optimizer), gradients(model), found

    plain, moved, _ = both(run, tmp_path, **MOVED, parameters="all")
    assert_equal(moved, plain)
