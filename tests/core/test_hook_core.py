"""HookCore by itself: what it counts, what it refuses, and that nothing of it outlives its last reference."""

import gc
import weakref
from collections import defaultdict

import pytest
import torch

from offload import _core
from offload.runtime.engine import Engine


class Hooks(_core.HookCore):
    def __init__(self, min_nbytes=100):
        self.counts = defaultdict(_core.Count)
        lanes = _core.HostDriver(schedule="stepped")
        self.store = _core.SwapStore.slab(lanes, lanes, 1 << 20)
        self.engine = Engine(self.store, torch.device("cpu"))
        self.asked = []
        super().__init__(min_nbytes, self.counts, self.engine)

    def pack_candidate(self, tensor, index, nbytes):
        self.asked.append(("pack", index, nbytes))
        return tensor

    def unpack_swapped(self, packed):
        self.asked.append("unpack")
        return packed

    def unpack_watched(self, kept):
        self.asked.append(("watched", kept.index))
        return self.checked(kept)

    def refuse(self, kept):
        raise RuntimeError(f"changed since version {kept.version}")


class Subclass(torch.Tensor):
    pass


class Observer:
    def watches(self, index):
        return True


def test_small_tensors_and_parameters_are_counted_and_come_back():
    hooks, small, parameter = Hooks(), torch.zeros(3), torch.nn.Parameter(torch.zeros(50))
    packed = [hooks.pack(small), hooks.pack(parameter), hooks.pack(parameter.t())]
    assert [type(each) for each in packed] == [_core.KeptTensor] * 3
    assert hooks.unpack(packed[0]) is small
    assert hooks.unpack(packed[1]) is parameter
    assert dict(hooks.counts) == {"small": _core.Count(1, 12), "parameter": _core.Count(2, 400)}
    assert hooks.asked == []


def test_what_python_is_asked():
    hooks, large = Hooks(), torch.zeros(50)
    assert hooks.unpack(hooks.pack(large)) is large
    assert hooks.asked == [("pack", 0, 200), "unpack"]


def test_other_kinds_stay():
    hooks = Hooks()
    for tensor in (torch.eye(3).to_sparse(), Subclass(torch.zeros(3))):
        assert hooks.unpack(hooks.pack(tensor)) is tensor
    assert hooks.counts == {"unsupported kind": _core.Count(2, 0)}


def test_a_view_of_a_small_tensor_is_looked_at():
    hooks = Hooks()
    hooks.pack(torch.zeros(50)[:2])
    assert hooks.asked == [("pack", 0, 8)]


def test_history_is_left_behind_and_versions_are_checked():
    hooks, x = Hooks(), torch.zeros(3, requires_grad=True)
    y = x * 2
    packed = hooks.pack(y)
    assert hooks.unpack(packed).grad_fn is None
    assert hooks.unpack(packed).data_ptr() == y.data_ptr()
    y.add_(1)
    with pytest.raises(RuntimeError, match="changed since version 0"):
        hooks.unpack(packed)


def test_a_cursor_decides_while_nothing_waits():
    hooks, table, x = Hooks(), _core.PackTable(), torch.zeros(50)
    for index in range(2):
        table.keep(index, 200)
        table.begin_node(index, index + 1)
        table.watch(index, 4 - index)
    cursor = _core.ScheduleCursor(table)
    cursor.next_due = 10
    _core.follow(hooks, Observer(), cursor, "kept by plan")
    packed = [hooks.pack(x), hooks.pack(x)]
    assert cursor.node == 2
    assert hooks.unpack(packed[1]) is x
    assert (cursor.node, hooks.asked) == (3, [])
    (key, _), saved = hooks.engine.look(x, x.nbytes), []
    saved.append(hooks.engine.swap_out(x, key, 0))
    assert hooks.engine.sources_held == 1
    assert hooks.unpack(packed[0]) is x
    assert hooks.asked == [("watched", 0)]
    assert hooks.counts == {"kept by plan": _core.Count(2, 400)}


def test_a_small_tensor_of_another_size_than_in_earlier_steps_is_looked_at():
    hooks, table, large = Hooks(), _core.PackTable(), torch.zeros(50)
    for tensor in (torch.zeros(3), torch.zeros(3), large[:2]):
        _core.follow(hooks, Observer(), _core.ScheduleCursor(table), "kept by plan")
        hooks.pack(tensor)
    assert hooks.counts == {"small": _core.Count(2, 24)}
    assert hooks.asked == [("pack", 0, 8)]


def test_what_it_refuses():
    with pytest.raises(RuntimeError, match="__init__"):
        _core.HookCore.__new__(_core.HookCore).pack(torch.zeros(1))
    with pytest.raises(TypeError, match="HookCore"):
        _core.follow(object(), Observer(), None, "")
    with pytest.raises(TypeError, match="KeptTensor"):
        Hooks().checked(torch.zeros(1))
    with pytest.raises(AttributeError):
        _core.KeptTensor.tensor.__set__(Hooks().pack(torch.zeros(1)), 1)


def test_a_circle_through_its_observer_is_collected():
    hooks, observer = Hooks(), Observer()
    observer.hooks = hooks
    _core.follow(hooks, observer, None, "")
    gone = weakref.ref(hooks)
    del hooks, observer
    gc.collect()
    assert gone() is None


def test_a_gauge_knows_its_peak():
    gauge = _core.Gauge()
    gauge.add(5)
    gauge.add(-3)
    assert (gauge.now, gauge.peak) == (2, 5)
    with pytest.raises(TypeError):
        gauge.add("1")
    meter = _core.ActivationMeter(_core.NodeBytes((10, 20)), gauge, _core.Gauge(), True)
    meter.weigh(1)
    meter.weigh(0, 100)
    meter.weigh(-1, 1000)
    assert meter.peak_bytes == 112
    del gauge
    meter.weigh(1, 200)
    assert meter.peak_bytes == 222
    with pytest.raises(TypeError, match="Gauge"):
        _core.ActivationMeter(_core.NodeBytes((1,)), object(), _core.Gauge(), True)
