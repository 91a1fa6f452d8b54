"""Saved tensors written to after they were saved: autograd's usual error or the values at that time, never a mix."""

import threading
import warnings

import pytest
import torch
from torch import nn

CHANGED = r"modified by an inplace operation: \[.*Float(Tensor|Type).*is at version 1; expected version 0"


def is_usual_error(error):
    return "modified by an inplace operation" in str(error)


def leaf(*shape):
    count = torch.Size(shape).numel()
    return torch.linspace(0.25, 1.75, count).reshape(shape).requires_grad_()


def save_input_then_add(x):
    between = x * 2
    result = between.sin()
    between.add_(1)
    return result


def save_output_then_add(x):
    result = (x * 2).exp()
    result.add_(1)
    return result


def save_whole_then_write_to_view(x):
    between = x * 2
    result = between.sin()
    between[3:5].zero_()
    return result


def save_view_then_write_to_whole(x):
    between = x * 2
    result = between[3:5].sin()
    between.zero_()
    return result


def save_transposed_then_write(x):
    between = x * 2
    result = between.t().sin()
    between.mul_(3)
    return result


def save_detached_then_write_to_original(x):
    between = x * 2
    result = between.detach() * x
    between.mul_(3)
    return result


def save_index_then_write(x):
    between = x * 2
    result = between.sin()
    between[0, 0] = 5
    return result


def save_conj_then_write(x):
    between = torch.complex(x * 2, x)
    result = between.conj().sin().real
    between.mul_(3)
    return result


WRITES = [
    save_input_then_add,
    save_output_then_add,
    save_whole_then_write_to_view,
    save_view_then_write_to_whole,
    save_transposed_then_write,
    save_detached_then_write_to_original,
    save_index_then_write,
]


@pytest.mark.finds  # the write that nothing orders: who would read what was copied gets the error instead
@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
def test_write_after_save_is_the_usual_error(offloaded, function):
    def run(model, step, settle):
        x = leaf(60, 50)
        result = model(x)
        settle()
        with pytest.raises(RuntimeError, match=CHANGED):
            result.sum().backward()
        return x.grad

    offloaded.compare(run, function)


@pytest.mark.finds  # as above
@pytest.mark.parametrize("detects", [False, True], ids=["usual", "anomaly detection"])
def test_the_error_names_the_node_and_a_hint_that_helps(offloaded, detects):
    def run(model, step, settle):
        with torch.autograd.set_detect_anomaly(detects, check_nan=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: the backtrace of the operation
            result = model(leaf(60, 50)).sum()
            settle()
            try:
                result.backward()
            except RuntimeError as error:
                said.append(str(error))

    said: list[str] = []
    offloaded.compare(run, save_output_then_add)
    assert len(said) == 2
    assert any(", which ExpBackward0 needs, is at version 1" in text for text in said)
    assert all(("Hint: enable anomaly detection" in text) != detects for text in said)
    assert all(("Hint: the backtrace further above" in text) == detects for text in said)


@pytest.mark.finds  # the write that nothing orders
@pytest.mark.parametrize("by", ["this thread", "another thread"])
def test_write_that_races_with_the_copy_out(offloaded, by):
    """The copy may hold a mix of old and new bytes by then: nobody ever gets them."""

    def function(x):
        between = x * 2
        result = between.sin()
        writer = threading.Thread(target=between.detach().fill_, args=(7,))
        if by == "another thread":
            writer.start()
            writer.join()
        else:
            between.detach().fill_(7)
        return result, between

    def run(model, step, settle):
        results = []
        for _ in range(20):
            x = leaf(50, 500)
            written, now = model(x)
            settle()
            with pytest.raises(RuntimeError, match=CHANGED):
                written.sum().backward()
            results.append(now.detach().clone())
        return results

    offloaded.compare(run, function)


@pytest.mark.only_cpu("torch lets a tensor of its own backends alone take the data of a conjugate")
def test_write_to_what_conj_shares_is_the_usual_error(offloaded):
    def run(model, step, settle):
        result = model(leaf(60, 50))
        settle()
        with pytest.raises(RuntimeError, match=r"ComplexFloat.*is at version 1; expected version 0"):
            result.sum().backward()
        return None

    offloaded.compare(run, save_conj_then_write)


@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
def test_tensors_that_pass_through_are_watched_too(offloaded, function):
    def run(model, step, settle):
        result = model(leaf(60, 50))
        with pytest.raises(RuntimeError, match=CHANGED):
            result.sum().backward()
        return None

    handle = offloaded.compare(run, function, swaps=False, min_tensor_bytes="1MiB")
    assert handle.report().kept["small"].tensors > 0


def test_parameter_changed_between_forward_and_backward_is_the_usual_error(offloaded):
    def run(model, step, settle):
        result = model(leaf(60, 50))
        with torch.no_grad():
            model[2].weight.mul_(2)
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation: .* is at version 2; expected version 1"
        ):
            result.sum().backward()
        return None

    offloaded.compare(run, make=lambda: nn.Sequential(nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 50)))


@pytest.mark.finds  # the write that nothing orders
def test_saved_written_to_and_saved_again(offloaded):
    """Two versions of one storage are two copies; the first one's owner is told, the second one's is served."""

    def run(model, step, settle):
        results = []
        for _ in range(2):
            x = leaf(60, 50)
            first, second = model(x)
            settle()
            results += torch.autograd.grad(second.sum(), [x], retain_graph=True)
            with pytest.raises(RuntimeError, match=CHANGED):
                first.sum().backward()
        return results

    def function(x):
        between = x * 2
        detached = between.detach()
        first = detached * x
        detached.add_(1)
        return first, detached * x

    handle = offloaded.compare(run, function)
    assert handle.report().swapped.tensors >= 4


def test_chain_of_in_place_operations(offloaded):
    """In-place operations that save their results, on one storage with a version each."""

    def run(model, step, settle):
        results = []
        for _ in range(3):
            x = leaf(60, 50)
            loss = model(x).sum()
            settle()
            loss.backward()
            results.append(x.grad)
        return results

    offloaded.compare(run, lambda x: (x * 2).relu_().mul(2).sigmoid_().mul(3).exp_().mul(4).tanh_())


def in_place_on_unsafe_chunks(x):
    first, second, third = (x * 2).unsafe_chunk(3, dim=1)
    return first.sigmoid_() * 2, second.tanh_() * 3, third.exp_() * 4


def in_place_on_unsafe_split(x):
    first, second = (x * 2).unsafe_split(30, dim=0)
    return first.sigmoid_() * second.exp_()


@pytest.mark.parametrize(
    "function", [in_place_on_unsafe_chunks, in_place_on_unsafe_split], ids=lambda function: function.__name__
)
def test_views_with_version_counters_of_their_own(offloaded, function):
    """unsafe_chunk's results share a storage and count versions apart: equal versions are not equal bytes."""
    offloaded.differentiate(function, leaf(60, 60), swaps=None, again=True)


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(offloaded, make):
    def run(model, step, settle):
        results = []
        for _ in range(2):
            model.zero_grad()
            state = None
            with step():
                for _ in range(3):
                    state = model(torch.randn(8, 16), state)
            settle()
            torch.stack(list(state) if isinstance(state, tuple) else [state]).square().sum().backward()
            results.append([parameter.grad.clone() for parameter in model.parameters()])
        return results

    offloaded.compare(run, make=lambda: make(16, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_recurrent_layers(offloaded, make, dtype):
    def run(model, step, settle):
        results = []
        for _ in range(2):
            model.zero_grad()
            output, _ = model(torch.randn(5, 8, 16, dtype=dtype))
            settle()
            output.square().sum().backward()
            results.append([parameter.grad.clone() for parameter in model.parameters()])
        return results

    offloaded.compare(run, make=lambda: make(16, 32, num_layers=2).to(dtype))


def test_parameter_whose_data_is_replaced_before_backward(offloaded):
    """A convolution saves the parameter itself: stock autograd sees its new data."""

    def run(model, step, settle):
        x = torch.randn(2, 3, 20, 20).requires_grad_()
        result = model(x.exp())
        settle()
        model.weight.data = model.weight.data * 2
        result.sum().backward()
        return x.grad

    offloaded.compare(run, make=lambda: nn.Conv2d(3, 8, 3))


@pytest.mark.parametrize("scribbles_first", [False, True])
def test_backward_that_writes_to_a_saved_tensor(offloaded, scribbles_first):
    """Stock says so to whoever saved the same tensor. Here: that error, or the bytes that were saved."""

    class Scribble(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            x.mul_(100)
            return grad * 2

    def function(x):
        between = x * 2
        results = (between.sin, lambda: Scribble.apply(between))
        return [result() for result in (results[::-1] if scribbles_first else results)]

    def run(model, step, settle):
        x = leaf(60, 50)
        results = model(x)
        settle()
        try:
            sum(result.sum() for result in results).backward()
        except RuntimeError as error:
            if not is_usual_error(error):
                raise
            x = leaf(60, 50)
            between = x * 2
            (between.sin().sum() + (between * 2).sum()).backward()
        return x.grad

    offloaded.compare(run, function)


def test_retained_graph_whose_backward_writes_to_a_saved_tensor(offloaded):
    """Stock raises in the second walk; served from the copy, the second walk may also be right."""

    class Halve(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.mul_(2)

    def run(model, step, settle):
        x = leaf(60, 50)
        result = model(x).sum()
        settle()
        first = torch.autograd.grad(result, x, retain_graph=True)[0]
        settle()
        try:
            second = torch.autograd.grad(result, x)[0]
        except RuntimeError as error:
            if not is_usual_error(error):
                raise
        else:
            assert torch.equal(first, second)
        return first

    offloaded.compare(run, lambda x: Halve.apply(x * 3))


def test_freed_addresses_that_come_back_are_other_tensors(offloaded):
    """Within one forward, freed storages' addresses recur; no later tensor may be taken for an earlier one."""

    def function(x):
        total = x * 0
        for number in range(40):
            total = total + ((x * number).sin() * (x + number)).detach() * x
        return total

    handle = offloaded.differentiate(function, leaf(60, 50), again=True)
    assert handle.report().deduplicated.tensors == 0


def test_view_of_an_untracked_part_stays(offloaded):
    """What `unsafe_chunk` cuts off may be written unseen while it is copied; a view of it too."""

    def function(x):
        first, second = (x * 2).unsafe_chunk(2, 1)
        result = first.t().tanh() * first.t()
        second.sigmoid_()
        return result

    offloaded.differentiate(function, leaf(60, 50), swaps=None)
