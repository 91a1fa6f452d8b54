"""What graph nodes hold of swapped tensors: who keeps it alive, what may stand in for it, and how tensors are made."""

import gc
import weakref

import pytest
import torch
from torch import nn

import offload
from offload import _core
from offload.runtime.engine import Engine
from offload.torch_compat.tensors import set_interface


@pytest.fixture
def without_dlpack(monkeypatch):
    """A torch that does not offer DLPack's C interface."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("as all of this torch's tests do")
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert not set_interface()
    yield
    monkeypatch.undo()
    assert set_interface()


def views(x):
    """Saved whole, in part, transposed, expanded, of other types, negated and conjugated."""
    y, c = x * 2, torch.complex(x * 2, x * 3)
    z = y.to(torch.bfloat16)
    results = [y.sin(), y[3:].exp(), y.t().tanh(), y[5:9].cos(), z.sin(), (c.conj() * 2).abs(), c.conj().imag.sin()]
    results += [(y[:1] * 2).expand(7, -1).cos(), y[0, 0].exp(), (y * 3).double().sin()]
    return [each.sum() for each in results]


@pytest.mark.only_cpu("torch lets a tensor of its own backends alone take the data of a conjugate")
def test_with_dlpack(offloaded):
    offloaded.differentiate(views, torch.linspace(0.1, 1, 3000).reshape(60, 50).requires_grad_(), again=True)


@pytest.mark.only_cpu("torch lets a tensor of its own backends alone take the data of a conjugate")
def test_without_dlpack(offloaded, without_dlpack):
    offloaded.differentiate(views, torch.linspace(0.1, 1, 3000).reshape(60, 50).requires_grad_(), again=True)


def twice(offloaded):
    """What comes back is saved again, under a version of its own."""

    def run(model, step, settle):
        x = torch.linspace(0.1, 1, 3000).reshape(60, 50).requires_grad_()
        with step():
            gradient = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
            settle()
            loss = gradient.square().sum()
        settle()
        loss.backward()
        return gradient.detach(), x.grad

    offloaded.compare(run, lambda x: (x * 2).sin()[1:].exp() * (x * 3).t().cos().t()[1:] * (x * 5).tanh()[:-1])


def test_saved_again(offloaded):
    twice(offloaded)


def test_saved_again_without_dlpack(offloaded, without_dlpack):
    twice(offloaded)


def test_a_session_that_is_dropped_is_freed_without_a_collection(offloaded):
    """Not disabled, its graph alive: the last reference to the graph frees the engine and its store."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.linspace(-1, 1, 4096).reshape(64, 64)
    handle = offloaded.enable(model)
    for _ in range(3):
        model(x).sum().backward()
    loss = model(x).sum()
    assert not gc.isenabled()
    gone = [weakref.ref(handle._engine), weakref.ref(handle._engine.store)]
    offloaded.handles.clear()
    del handle, model
    loss.backward()
    del loss
    assert [reference() for reference in gone] == [None, None]


class Recomputed:
    """Stands in for a swapped storage: its bytes are made anew."""

    def __init__(self, tensor):
        self.views = 0
        self.key = (0, 0, 0, tensor.nbytes, 0)
        self._tensor = tensor.clone()

    def add_view(self):
        self.views += 1

    def empty(self, dtype):
        return torch.empty(0, dtype=dtype)

    def swap_in(self):
        return self._tensor.clone().untyped_storage(), 0


@pytest.mark.only_cpu("makes its memory itself")
def test_what_a_view_is_of_may_be_an_object_of_pythons():
    tensor = torch.arange(12.0).reshape(3, 4)
    record = Recomputed(tensor)
    view, other = _core.view_of(tensor, record, 5), _core.view_of(tensor[1:].t(), record, 6)
    assert (record.views, view.index, other.index) == (2, 5, 6)
    assert torch.equal(view.restore(), tensor)
    restored = other.restore()
    assert torch.equal(restored, tensor[1:].t())
    assert (restored.stride(), restored.storage_offset()) == ((1, 4), 4)
    assert weakref.ref(record)() is record
    tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"\[torch.FloatTensor \[3, 4\]\] is at version 1; expected version 0"):
        view.restore()
    with pytest.raises(AttributeError):
        _core.view_of(tensor, object(), 0)
    with pytest.raises(TypeError, match="view_of takes"):
        _core.view_of(tensor, record)


@pytest.mark.only_cpu("a store of the host driver")
def test_a_record_knows_what_it_has(tmp_path):
    engine = Engine(_core.SwapStore.direct(_core.HostDriver(), str(tmp_path)), torch.device("cpu"))
    tensor = torch.arange(4096.0)
    key, known = engine.look(tensor, tensor.nbytes)
    assert known is None
    saved = engine.swap_out(tensor, key, 0)
    assert engine.look(tensor[1:], tensor.nbytes - 4) == (key, saved)
    assert (saved.key, saved.nbytes, saved.views) == (key, tensor.nbytes, 0)
    view = _core.view_of(tensor, saved, 0)
    del tensor
    saved.wait_copied_out()
    assert saved.is_swapped_out
    assert saved.prefetch()
    assert not saved.prefetch()
    assert torch.equal(view.restore(), torch.arange(4096.0))
    assert saved.is_swapped_out, "all of its views have been served"
    alive = weakref.ref(saved)
    del saved
    assert engine.live_storages() == [alive()]
    del view
    assert alive() is None
    assert (engine.live_records, engine.store.stats()["live_tickets"]) == (0, 0)
    with pytest.raises(TypeError, match="key that look returned"):
        engine.swap_out(torch.zeros(5), (1, 2), 0)
    with pytest.raises(RuntimeError, match="__init__"):
        _core.EngineCore.__new__(_core.EngineCore).collect()
    with pytest.raises(TypeError, match="SwapStore"):
        Engine.__init__(engine, offload, torch.device("cpu"))


@pytest.mark.only_cpu("a store of the host driver")
def test_a_source_that_backward_has_used_stays(tmp_path):
    """What a kernel writes to it while it is copied is not in the copy, or only in part."""
    driver = _core.HostDriver(schedule="stepped")
    engine = Engine(_core.SwapStore.direct(driver, str(tmp_path)), torch.device("cpu"))
    tensor = torch.arange(4096.0)
    key, _ = engine.look(tensor, tensor.nbytes)
    saved = engine.swap_out(tensor, key, 0)
    view, address = _core.view_of(tensor, saved, 0), tensor.data_ptr()
    del tensor
    view.restore().numpy().fill(1)  # as a kernel does, which counts no version; the copy has not begun
    saved.wait_copied_out()
    assert not saved.is_swapped_out
    assert not saved.prefetch()
    again = view.restore()
    assert (again.data_ptr(), again.sum().item()) == (address, 4096)
    assert engine.resident.now == again.nbytes
    del view, saved, again
    assert (engine.resident.now, engine.live_records, engine.store.stats()["live_tickets"]) == (0, 0, 0)


@pytest.mark.only_cpu("oneDNN's kernel")
def test_two_backward_passes_over_an_lstm(offloaded):
    """Its backward writes to the workspace that forward has saved."""
    torch.manual_seed(0)
    lstm = nn.LSTM(64, 128, 2, batch_first=True)
    inputs = [torch.randn(4, 20, 64) for _ in range(4)]

    def run(model, step, settle):
        found = []
        for x in inputs:
            y, _ = model(x)
            for loss in (y.square().mean(), y.abs().mean()):
                found += torch.autograd.grad(loss, list(lstm.parameters()), retain_graph=True)
        return found

    offloaded.compare(run, lambda x: lstm(x))
