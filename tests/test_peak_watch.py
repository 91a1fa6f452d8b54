"""With `memory_limit`, a loss outside of the model that begins to need more memory is noticed by the device's peak."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from forked_python import run_python
from planned_rig import assert_equal, enabled, known_link  # noqa: F401
from torch import nn

from offload.control import peak_watch
from offload.control.limits import LIMITS
from offload.control.peak_watch import PeakWatch

MIB = 1 << 20
LIMIT_BYTES = 100 * MIB


@pytest.fixture
def peak(monkeypatch):
    """The device's peak, which a test sets."""
    found = mock.Mock(return_value=0)
    monkeypatch.setattr(peak_watch, "peak_bytes", found)
    return found


def growths(device, peak, peaks, limit_bytes=LIMIT_BYTES):
    """For each step whether growth is noticed. `peaks`, in MiB: before the first step, then after each step."""
    watch, found = PeakWatch(torch.device(device), limit_bytes, LIMITS), []
    for after in peaks:
        peak.return_value = after * MIB
        found.append(watch.has_grown())
        watch.begin()
    return found[1:]


def test_on_the_cpu_only_a_large_growth_counts(peak):
    """16 MiB, or 5 % of the limit if that is more."""
    assert growths("cpu", peak, [500, 500, 516, 533, 533]) == [False, False, True, False]
    assert growths("cpu", peak, [500, 550, 601], 1000 * MIB) == [False, True]


def test_on_an_accelerator_a_peak_counts_that_is_above_the_limit(peak):
    assert growths("cuda", peak, [50, 104, 106, 106, 110, 112]) == [False, True, False, False, True]


def test_a_peak_that_the_program_resets_is_noticed_once(peak):
    assert growths("cuda", peak, [20, 130, 20, 134, 20, 136]) == [True, False, False, False, True]


def test_it_is_noticed_a_few_times_only(peak):
    assert growths("cpu", peak, [0, 100, 200, 300, 400, 500]) == [True, True, True, False, False]


def test_the_peak_is_read_once_between_two_steps(peak):
    growths("cuda", peak, [20, 30, 40])
    assert peak.call_count == 3


def test_without_a_limit_the_peak_is_not_read(peak):
    assert growths("cpu", peak, [0, 500], None) == [False]
    assert not peak.called


def test_a_step_that_is_not_watched_may_need_more(peak):
    watch = PeakWatch(torch.device("cpu"), LIMIT_BYTES, LIMITS)
    watch.begin()
    assert not watch.has_grown()
    peak.return_value = 500 * MIB
    assert not watch.has_grown()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(8) for each in (nn.Linear(128, 128), nn.GELU())])


def train(model, sizes, noticed=lambda number: None):
    """Losses and gradients of steps with these numbers of rows."""
    found = []
    for number, rows in enumerate(sizes):
        x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        noticed(number)
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters())]
    return found


@pytest.mark.parametrize("is_left_out", [False, True])
def test_every_shape_is_profiled_again(is_left_out, monkeypatch, tmp_path, peak, caplog):
    """Also those that borrow a plan. Left out: nothing is watched."""
    if is_left_out:
        monkeypatch.setattr(PeakWatch, "begin", lambda _: None)
    monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, borrow_from=2, replans=0))
    sizes = [512, 768] * 8 + [640] * 2 + [512, 768, 640] * 2
    grows_in = 17  # a step of 640 rows, which follows the plan of 768
    expected = train(make_model(), sizes)

    def noticed(number):
        peak.return_value = 64 * MIB if number > grows_in else 0

    model = make_model()
    with (
        enabled(model, spill_dir=tmp_path, recompute=False, memory_limit=5 * MIB) as handle,
        caplog.at_level(logging.INFO, "offload"),
    ):
        found = train(model, sizes, noticed)
        counts = handle._counts
    assert_equal(found, expected)
    assert ("each step is profiled again" in caplog.text) != is_left_out
    assert counts.profiled_steps == (2 if is_left_out else 4)
    assert counts.borrowed_steps == 4


SCRIPT = """
import json, sys
sys.path.insert(0, {folder!r})
from dataclasses import replace
import torch, offload
from live_bytes import Peak, tell_blocks_of_all
from offload import handle as making
from torch import nn
from offload.control.peak_watch import PeakWatch

if {is_left_out}:
    PeakWatch.begin = lambda _: None
making.LIMITS = replace(making.LIMITS, replans=0)
tell_blocks_of_all()
torch.manual_seed(0)
model = nn.Sequential(*[each for _ in range(8) for each in (nn.Linear(128, 128), nn.GELU())])
held_bytes = 2 * sum(each.nbytes for each in model.parameters())
peaks = []
with offload.enable(model, memory_limit={limit_bytes}, recompute=False) as handle:
    for number in range(24):
        model.zero_grad(set_to_none=False)

        def step():
            y = model(torch.randn(16384, 128))
            loss = y.square().mean()
            if number >= 12:
                loss = loss + sum(torch.relu(y + shift).square().mean() for shift in range(6))
            loss.backward()

        if number in (11, 12, 23):
            peak = Peak()
            with peak.watch():
                step()
            peaks.append(held_bytes + peak.nbytes)
        else:
            step()
    print(json.dumps([peaks, handle._counts.profiled_steps]))
"""


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_limit_is_kept_again_after_a_loss_has_begun_to_need_more(is_left_out):
    """In a fresh process, whose resident set has not been larger before. Left out: it is exceeded from then on."""
    folder, limit_bytes = str(Path(__file__).parent), 120 * MIB
    ran = run_python("-c", SCRIPT.format(folder=folder, is_left_out=is_left_out, limit_bytes=limit_bytes))
    assert ran.returncode == 0, ran.stderr
    (before, grown, after), profiled = json.loads(ran.stdout)
    assert before <= 1.01 * limit_bytes
    assert grown > 1.2 * limit_bytes
    assert (after <= 1.01 * limit_bytes) != is_left_out
    assert profiled == (1 if is_left_out else 2)
