"""Failing reads and Ctrl-C while optimizer state is copied in forward and backward: nothing is lost."""

import errno
import sys

import pytest
from faults.inject import inject_fault
from optimizer_state import loops
from optimizer_state.overlap_rig import coming, wide_overlap
from optimizer_state.planned_loops import disable, planned, reasons, train
from optimizer_state.state_rig import assert_equal
from optimizer_state.test_interrupts import Interrupt
from planned_rig import known_link

import offload

__all__ = ["known_link", "reasons", "wide_overlap"]  # fixtures

FAILS_AT = 10  # a step whose copies overlap
FILES = ("in_passes.py", "read_ahead.py", "write_behind.py", "state_tensor.py")


class OurLines(Interrupt):
    """Counts only lines of the files that copy state in forward and backward."""

    def calls(self, frame, event, _):
        return self.lines if frame.f_code.co_filename.endswith(FILES) else None


def interrupted_at(line):
    """A loop in which Ctrl-C ends forward or backward at this line. They are then run again with the same data."""

    class Interrupted(loops.Loop):
        left = 0  # lines that were still to run when backward ended

        def step(self, number):
            if number == FAILS_AT and self.handle is not None:
                before, trace = self.generator.get_state(), OurLines(line)
                self.optimizer.zero_grad()
                sys.settrace(trace.calls)
                try:
                    self.loss().backward()
                except KeyboardInterrupt:
                    assert trace.left == 0
                finally:
                    sys.settrace(None)
                self.left = trace.left
                self.generator.set_state(before)
            super().step(number)

    return Interrupted


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.full)])
def test_an_interrupt_at_any_line(stride, tmp_path, wide_overlap):
    plain, line, rows = loops.Loop(False, tmp_path).train(), 1, 0
    while True:
        loop, found = train(planned(interrupted_at(line), "64MiB"), tmp_path)
        assert_equal(found, plain)
        assert loop.handle.report().optimizer_state[0].early_bytes > 0
        disable(loop)
        if loop.left > 0:  # backward ended before this line
            break
        line, rows = line + stride, rows + 1
    assert rows > 5


@pytest.mark.parametrize("kind", ["error", "wrong_block"])
def test_a_read_in_backward_that_fails_is_told_in_the_update(kind, tmp_path, wide_overlap):
    class Failing(loops.Loop):
        def step(self, number):
            if number != FAILS_AT or self.handle is None:
                super().step(number)
                return
            store = self.optimizer.state.engine.store
            self.optimizer.state.engine.drain()
            inject_fault(store, "read", kind, 1, errno.EIO, persistent=True)
            self.optimizer.zero_grad()
            self.loss().backward()
            with pytest.raises(offload.OptimizerStateError, match=r"0\.weight cannot be read back"):
                self.optimizer.step()
            assert not coming(self)
            inject_fault(store, "read", kind, 0)
            self.optimizer.step()

    plain = loops.Loop(False, tmp_path).train()
    loop, found = train(planned(Failing, "64MiB"), tmp_path)
    assert_equal(found, plain)
    loop.handle.disable()
