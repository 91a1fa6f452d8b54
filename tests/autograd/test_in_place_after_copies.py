"""Saved tensors written to while their copy is under way, or after it: the version is watched while anybody could."""

import pytest
import torch

CHANGED = r"modified by an inplace operation: \[.*Float(Tensor|Type).*is at version 1; expected version 0"


def leaf(*shape):
    count = torch.Size(shape).numel()
    return torch.linspace(0.25, 1.75, count).reshape(shape).requires_grad_()


def saved_itself(x):
    between = x * 2
    return between.sin(), between


def saved_by_its_view(x):
    between = x * 2
    return between.sin(), between[3:5]


def saved_by_its_alias(x):
    between = x * 2
    return between.sin(), between.detach()


def a_view_by_its_base(x):
    between = x * 2
    return between.t().sin(), between


def a_small_view_by_its_base(x):
    between = x * 2
    return between[3:5].sin(), between


def a_small_view_by_another(x):
    between = x * 2
    return between[3:5].sin(), between[40:50]


HOLDERS = [
    saved_itself,
    saved_by_its_view,
    saved_by_its_alias,
    a_view_by_its_base,
    a_small_view_by_its_base,
    a_small_view_by_another,
]


@pytest.mark.parametrize("function", HOLDERS, ids=lambda function: function.__name__)
def test_a_write_after_the_copy_is_the_usual_error(offloaded, function):
    """Whoever else holds the storage may write to it, whichever tensor that is."""

    def run(model, step, settle):
        result, holder = model(leaf(60, 50))
        settle()
        with torch.no_grad():
            holder.zero_()
        with pytest.raises(RuntimeError, match=CHANGED):
            result.sum().backward()
        return None

    offloaded.compare(run, function)


@pytest.mark.finds  # the write that nothing orders
@pytest.mark.parametrize("function", HOLDERS, ids=lambda function: function.__name__)
def test_a_write_while_the_copy_is_under_way(offloaded, function):
    """The holder is gone when the copy ends: nobody can write any more, but somebody has."""

    def run(model, step, settle):
        for _ in range(10):
            result, holder = model(leaf(60, 50))
            with torch.no_grad():
                holder.zero_()
            del holder
            settle()
            with pytest.raises(RuntimeError, match=CHANGED):
                result.sum().backward()
        return None

    offloaded.compare(run, function)


def test_two_views_are_saved_and_one_is_changed(offloaded):
    def function(x):
        between = x * 2
        first, second = between[:30], between[30:]
        return first.sin(), second.exp().sin(), first

    def run(model, step, settle):
        first, second, holder = model(leaf(60, 50))
        settle()
        with torch.no_grad():
            holder.zero_()
        results = [torch.isfinite(second.sum()).item()]
        with pytest.raises(RuntimeError, match=CHANGED):
            first.sum().backward()
        return results

    offloaded.compare(run, function)


def test_a_part_with_a_counter_of_its_own_is_changed(offloaded):
    """A write to one of `unsafe_chunk`'s parts is unknown to the others, and harms none of them."""

    def function(x):
        first, second = (x * 2).unsafe_chunk(2, 1)
        return first.clone().sin(), second

    def run(model, step, settle):
        x = leaf(60, 50)
        result, holder = model(x)
        settle()
        with torch.no_grad():
            holder.zero_()
        result.sum().backward()
        return x.grad

    offloaded.compare(run, function)


@pytest.mark.parametrize("drops", [True, False])
def test_nobody_writes(offloaded, drops):
    """Whether the holder is gone before the copy ends, after it, or never."""

    def run(model, step, settle):
        results = []
        for early in (True, False):
            x = leaf(60, 50)
            result, holder = model(x)
            if early and drops:
                del holder
            settle()
            if drops and not early:
                del holder
            for _ in range(2):
                results += torch.autograd.grad(result.sum(), [x], retain_graph=True)
                settle()
        return results

    offloaded.compare(run, saved_itself)


def test_one_whose_data_was_replaced_is_changed(offloaded):
    """It shares the version and none of the memory. Stock says so; the bytes that were saved are right as well."""

    def run(model, step, settle):
        x = leaf(60, 50)
        result, holder = model(x)
        holder.data = torch.zeros(1)
        settle()
        with torch.no_grad():
            holder.add_(1)
        try:
            result.sum().backward()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return None
        assert torch.equal(x.grad, 2 * (2 * leaf(60, 50).detach()).cos())
        return None

    offloaded.compare(run, saved_by_its_alias)
