"""Every kind of tensor that autograd saves: what can move moves whole, what cannot stays, gradients are the same."""

import gc

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor


def ramp(*shape, dtype=torch.float32):
    """Distinct values, none of them zero, as a leaf that wants a gradient."""
    count = torch.Size(shape).numel()
    values = torch.linspace(0.25, 1.75, max(count, 1), dtype=torch.float64)[:count].reshape(shape)
    if dtype.is_complex:
        values = torch.complex(values, values.flip(0) if shape else values)
    return values.to(dtype).requires_grad_()


FUNCTIONS = {
    "0-dim": (lambda x: (x * 2).exp(), [ramp()]),
    "one element": (lambda x: (x * 2).exp(), [ramp(1)]),
    "odd length": (lambda x: (x * 2).sin(), [ramp(1031)]),
    "expanded": (lambda x: (x * 2).expand(6, 1700).sin(), [ramp(1700)]),
    "expanded 0-dim": (lambda x: (x * 2).expand(9, 5).sin(), [ramp()]),
    "transposed": (lambda x: (x * 2).t().sin(), [ramp(120, 31)]),
    "every other": (lambda x: (x * 2)[::2, 1::3].sin(), [ramp(120, 31)]),
    "flipped": (lambda x: (x * 2).flip(0).sin(), [ramp(120, 31)]),
    "channels_last": (
        lambda x: (x * 2).contiguous(memory_format=torch.channels_last).sin().exp(),
        [ramp(4, 3, 10, 11)],
    ),
    "channels_last_3d": (
        lambda x: (x * 2).contiguous(memory_format=torch.channels_last_3d).sin().exp(),
        [ramp(4, 3, 2, 5, 11)],
    ),
    "stride of a dimension of one": (
        lambda x: (x * 2).as_strided((60, 1, 50), (50, 7777, 1)).sin(),
        [ramp(60, 50)],
    ),
    "windows that overlap": (lambda x: (x * 2).unfold(0, 5, 2).sin(), [ramp(1063)]),
    "complex64": (lambda x: (x * 2).sin(), [ramp(50, 70, dtype=torch.complex64)]),
    "complex128": (lambda x: (x * (1 + 2j)).exp() * x, [ramp(50, 70, dtype=torch.complex128)]),
    "conj": (lambda x: (x * 2).conj().sin(), [ramp(50, 70, dtype=torch.complex64)]),
    "neg": (lambda x: (x * 2).conj().imag.sin(), [ramp(50, 70, dtype=torch.complex64)]),
    "conj of a slice": (lambda x: (x * 2)[1:3].conj().sin(), [ramp(50, 70, dtype=torch.complex64)]),
    "real of complex": (lambda x: (x * 2).real.sin() + (x * 3).imag.exp(), [ramp(50, 70, dtype=torch.complex64)]),
    "real seen as complex": (lambda x: torch.view_as_complex(x * 2).sin(), [ramp(50, 70, 2)]),
    "bfloat16": (lambda x: (x * 2).sin().exp(), [ramp(3301, dtype=torch.bfloat16)]),
    "float16": (lambda x: (x * 2).sin().exp(), [ramp(3301, dtype=torch.float16)]),
    "bool mask": (lambda x: torch.where((x * 2) > 1.5, x.sin(), x.exp()), [ramp(50, 70)]),
    "masked_select": (lambda x: (x * 2).masked_select(x > 1), [ramp(50, 70)]),
    "integer index": (lambda x: (x * 2)[torch.tensor([3, 1, 3, 0])], [ramp(50, 70)]),
    "gather": (lambda x: (x * 2).gather(1, (x * 3).long() % 70).sin(), [ramp(50, 70)]),
    "max with indices": (lambda x: (x * 2).sin().max(dim=1)[0], [ramp(50, 70)]),
    "dropout": (lambda x: nn.functional.dropout(x * 2, 0.3), [ramp(50, 70)]),
    "two outputs of one storage": (lambda x: [each.sin() for each in (x * 2).split(30)], [ramp(100, 70)]),
    "another dtype's view": (
        lambda x: (x * 2).sin() * ((x * 3).detach().view(torch.int32).view(torch.float32)),
        [ramp(50, 80)],
    ),
}


CONJUGATES = pytest.mark.only_cpu("torch lets a tensor of its own backends alone take the data of a conjugate")
LAZY = ("conj", "neg", "conj of a slice")


@pytest.mark.parametrize("name", [pytest.param(name, marks=CONJUGATES) if name in LAZY else name for name in FUNCTIONS])
def test_gradients_are_bit_equal(offloaded, name):
    function, inputs = FUNCTIONS[name]
    offloaded.differentiate(function, *inputs, again=True)


def test_zero_size(offloaded):
    handle = offloaded.differentiate(lambda x: (x * 2).sin().exp(), ramp(0, 5), swaps=False)
    assert handle.report().kept["small"].tensors == 2


def test_zero_size_view_with_strides_that_reach_beyond_its_storage(offloaded):
    def function(x):
        return (x * 2).as_strided((5, 0), (2, 1), 50).sin().sum() + (x * 3).sin().sum()

    handle = offloaded.differentiate(function, ramp(50))
    assert handle.report().swapped.nbytes == 200  # the input of the second sine, and nothing of the empty view


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_saved_by_a_custom_function(offloaded, dtype):
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.to(dtype))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (rounded,) = ctx.saved_tensors
            assert rounded.dtype == dtype
            return grad * rounded.to(torch.float32)

    handle = offloaded.differentiate(lambda x: Rounded.apply(x * 3), ramp(50, 70))
    assert handle.report().swapped.nbytes == 3500


def test_views_of_one_storage_are_copied_once(offloaded):
    def function(x):
        whole = x * 2
        return whole.sin(), whole.t().cos(), whole[:90].sin(), whole.reshape(-1).exp()

    handle = offloaded.differentiate(function, ramp(100, 70))
    about = handle.report()
    # x * 2 and what exp returns. The slice is nine tenths of its storage, hence the storage.
    assert (about.swapped.tensors, about.swapped.nbytes) == (2, 28000 + 28000)
    assert (about.deduplicated.tensors, about.deduplicated.nbytes) == (2, 28000 + 25200)


def test_a_slice_that_is_copied_with_its_storage_keeps_its_offset(offloaded):
    handle = offloaded.differentiate(lambda x: ((x * 2)[30:].sin(), (x * 3)[10:, 5:].cos()), ramp(100, 70))
    assert handle.report().swapped.tensors == 2


def test_views_come_back_onto_one_storage(offloaded):
    seen = []

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a.sum() + b.sum()

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            seen.append((a.untyped_storage()._cdata == b.untyped_storage()._cdata, a.stride(), b.stride()))
            return grad * a, grad * b

    def function(x):
        whole = x * 2
        return Both.apply(whole, whole.t())

    offloaded.differentiate(function, ramp(100, 70))
    assert seen == [(True, (70, 1), (1, 70))] * 2


def test_views_share_a_storage_whether_or_not_it_leaves_between_them(offloaded):
    """Backward may begin before the storage has left: then the first view is on the source, and so is the second."""
    seen, handles = [], []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a.sum()

        @staticmethod
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            seen.append(a)
            handles[0]._engine.drain()  # what is still on its way out leaves now
            return grad * a

    class Twice(nn.Module):
        def forward(self, whole):
            return Saves.apply(whole) + Saves.apply(whole.t())

    model = Twice()
    handles.append(offloaded.enable(model))
    for part in (slice(None), slice(60, 90)):  # a whole storage, and a span of one
        whole = (ramp(100, 70) * 2)[part]
        model(whole).backward()
        second, first = seen
        assert torch.equal(first, whole)
        assert torch.equal(second, whole.t())
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
        seen.clear()
        del first, second


def test_engine_may_be_drained_while_a_view_comes_back(offloaded):
    """By a signal's handler or by what the collector runs, in the middle of an unpack and in the same thread."""
    drained = []

    def drain(phase, _):
        drained.extend(handle._engine.drain() for handle in offloaded.handles if phase == "start")

    threshold = gc.get_threshold()
    gc.callbacks.append(drain)
    gc.set_threshold(1)  # with almost every object that is made
    gc.enable()
    try:
        offloaded.differentiate(lambda x: (x * 2).sin() + (x * 2).t().exp().t(), ramp(100, 70), again=True)
    finally:
        gc.disable()
        gc.set_threshold(*threshold)
        gc.callbacks.remove(drain)
    assert len(drained) >= 100


@pytest.mark.parametrize("begin", [0, 1, 6000, 9000])
def test_small_view_of_a_larger_storage_is_copied_as_the_view(offloaded, begin):
    def function(x):
        return (x * 2)[begin : begin + 1000].sin()

    handle = offloaded.differentiate(function, ramp(10000), again=True)
    assert (handle.report().swapped.tensors, handle.report().swapped.nbytes) == (2, 8000)


@pytest.mark.parametrize("begin", [0, 6000])
def test_small_strided_view_of_a_larger_storage(offloaded, begin):
    def function(x):
        return (x * 2)[begin : begin + 4000 : 4].reshape(50, 20).t().sin()

    handle = offloaded.differentiate(function, ramp(10000), again=True)
    assert handle.report().swapped.nbytes == 2 * 3997 * 4


def test_slice_of_a_data_set_moves_the_slice_only(offloaded):
    data = torch.linspace(0, 1, 64 * 1024).reshape(1024, 64)

    def function(x):
        return data[512:520] * x

    handle = offloaded.differentiate(function, ramp(8, 64))
    assert handle.report().swapped.nbytes == 8 * 64 * 4


def test_overlapping_windows_of_a_small_part(offloaded):
    def function(x):
        return (x * 2)[7000:8000].unfold(0, 5, 1).sin()

    handle = offloaded.differentiate(function, ramp(10000))
    assert handle.report().swapped.nbytes == 4000


@pytest.mark.only_cpu("the simulated accelerator has no sparse kernels")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_passes_through(offloaded, layout):
    dense = torch.eye(60)
    sparse = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()

    def function(x):
        return torch.sparse.mm(sparse, x * 2).sin()

    handle = offloaded.differentiate(function, ramp(60, 50))
    assert handle.report().kept["unsupported kind"].tensors == 1


def test_nested_passes_through(offloaded):
    def function(x):
        pieces = torch.nested.as_nested_tensor([x[:20] * 2, x[20:] * 3], layout=torch.jagged)
        return pieces.sin().values()

    handle = offloaded.differentiate(function, ramp(60, 50), swaps=False)
    assert handle.report().kept["unsupported kind"].tensors >= 1


@pytest.mark.only_cpu("oneDNN's tensors are the CPU's")
def test_mkldnn_passes_through(offloaded):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")

    def function(x):
        return torch.relu((x * 2).to_mkldnn()).to_dense()

    handle = offloaded.differentiate(function, ramp(60, 50), swaps=None)
    assert handle.report().kept["unsupported kind"].tensors >= 1


class Tagged(torch.Tensor):
    """A subclass that says so."""


def test_subclass_passes_through(offloaded):
    def function(x):
        return (x * 2).as_subclass(Tagged).sin().exp().as_subclass(torch.Tensor)

    # What exp returns is saved before it becomes a Tagged, hence moves.
    handle = offloaded.differentiate(function, ramp(60, 50))
    assert handle.report().kept["unsupported kind"].tensors == 1


def test_wrapper_subclass_passes_through(offloaded):
    def run(model, step, settle):
        x = TwoTensor(ramp(60, 50).detach(), ramp(60, 50).detach() * 2).requires_grad_()
        with step():
            y = model(x)
        settle()
        y.sum().backward()
        return x.grad.a, x.grad.b

    handle = offloaded.compare(run, lambda x: (x * 2).sin().exp(), swaps=False)
    assert handle.report().kept["unsupported kind"].tensors == 2


def test_zero_tensor_of_forward_mode(offloaded):
    """Forward mode's symbolic zeros have a shape and no bytes."""

    def function(x):
        zero = torch._efficientzerotensor(x.shape)
        return (x * 2).sin() * zero + (x * 2).cos()

    offloaded.differentiate(function, ramp(60, 50))


def test_custom_function_that_saves_inputs_outputs_and_neither(offloaded):
    class Everything(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            result, between = x * scale, x + 1
            ctx.save_for_backward(x, result, between, None)
            ctx.scale = scale
            return result

        @staticmethod
        def backward(ctx, grad):
            x, result, between, nothing = ctx.saved_tensors
            assert nothing is None
            return grad * (x + result * ctx.scale + between), None

    offloaded.differentiate(lambda x: Everything.apply(x * 2, 3.0).sin(), ramp(60, 50), again=True)


def test_saved_tensors_read_three_times(offloaded):
    class Thrice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x.t())
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            total = grad
            for factor in (1, 2, 3):
                a, b = ctx.saved_tensors
                total = total + factor * a * b.t()
            return total

    offloaded.differentiate(lambda x: Thrice.apply(x * 3).sin(), ramp(60, 50), again=True)


def test_attributes_of_a_node_read_from_outside(offloaded):
    def run(model, step, settle):
        x = ramp(60, 50)
        with step():
            y = model(x)
        settle()
        saved = [y.grad_fn._saved_result.clone() for _ in range(3)]
        y.sum().backward()
        return saved, x.grad

    offloaded.compare(run, lambda x: (x * 2).exp())
