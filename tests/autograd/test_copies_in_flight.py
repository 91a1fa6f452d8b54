"""Memory that nobody wants any more, while a copy still writes to it: it is held until that copy has ended.

The tests keep every reload target alive themselves, so that a write that comes too late is seen and harms nobody.
"""

import errno
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from faults.inject import inject_fault
from torch import nn

from offload import _core

POISON = 0xAB
SEEDS = range(20)


class Targets:
    """The memory that an engine reloads into, and whether the engine has given it up."""

    def __init__(self, engine):
        self.blocks = []
        engine.new_storage = self.allocate

    def allocate(self, nbytes, _):
        block = np.empty(nbytes, dtype=np.uint8)
        storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        self.blocks.append((storage._weak_ref(), block))
        return storage

    def poison_given_up(self):
        """Overwrite what the engine holds no more; the allocator could have handed it to anybody."""
        given_up = [block for weak, block in self.blocks if torch.UntypedStorage._expired(weak)]
        for block in given_up:
            block[:] = POISON
        return given_up


class Chain(nn.Module):
    """Saves six tensors; a backward hook may raise in the middle."""

    def __init__(self):
        super().__init__()
        self.fails = False

    def forward(self, x):
        for number in range(6):
            x = x.tanh()
            if number == 3:
                x.register_hook(self.check)
        return x

    def check(self, grad):
        if self.fails:
            raise ValueError("as asked")


def enabled_chain(offloaded):
    if offloaded.setup.tier == "direct":
        pytest.skip("a copy of the direct tier owns its target itself")
    model = Chain()
    handle = offloaded.enable(model, lb=8)
    return model, handle, Targets(handle._engine)


def forward(model):
    return model(torch.linspace(-1, 1, 16 * 1024).requires_grad_() * 2)


def assert_untouched(handle, given_up):
    handle._engine.store.quiesce()
    written = [number for number, block in enumerate(given_up) if (block != POISON).any()]
    assert not written, f"{len(written)} of {len(given_up)} blocks were written to after they had been given up"


@pytest.mark.only_cpu("looks into memory itself, which no processor can there")
@pytest.mark.parametrize("end", ["raises", "stops half-way"])
def test_graph_dropped_while_its_tensors_come_back(offloaded, end):
    model, handle, targets = enabled_chain(offloaded)
    for _ in range(3):
        forward(model).sum().backward()
    for _ in range(5):
        out = forward(model)
        handle._engine.drain()
        if end == "raises":
            model.fails = True
            with pytest.raises(ValueError, match="as asked"):
                out.sum().backward()
            model.fails = False
        else:
            torch.autograd.grad(out.sum(), [out])
            assert out.grad_fn._saved_result is not None
        del out
        handle._engine.collect()
        assert_untouched(handle, targets.poison_given_up())
        handle._engine.drain()
    assert len(targets.blocks) >= 5


class TimesBorrowed(torch.autograd.Function):
    """Doubles, and saves the factor in memory that is overwritten as soon as torch lets go of it."""

    @staticmethod
    def forward(ctx, x):
        memory = np.full(4 * x.numel(), POISON, dtype=np.uint8)
        owner = memory[:]
        factor = torch.frombuffer(owner, dtype=torch.float32).fill_(2)
        weakref.finalize(owner, memory.fill, POISON)
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad * factor


@pytest.mark.only_cpu("looks into memory itself, which no processor can there")
def test_a_freed_source_may_be_overwritten(offloaded):
    """Its memory is the allocator's again as soon as the engine lets go: not before the copy has read it."""

    def function(x):
        for _ in range(6):
            x = TimesBorrowed.apply(x)
        return x

    offloaded.differentiate(function, torch.linspace(-1, 1, 16 * 1024).requires_grad_())


class Product(torch.autograd.Function):
    """Doubles, and saves the factor `times` over; `memory` tells whether the factor's memory still exists."""

    memory: ClassVar[list[weakref.ref]] = []

    @staticmethod
    def forward(ctx, x, times):
        owner = np.full(x.numel(), 2, dtype=np.float32)
        Product.memory.append(weakref.ref(owner))
        factor = torch.from_numpy(owner)
        ctx.save_for_backward(*[factor] * times)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[-1], None


@pytest.mark.only_cpu("looks into memory itself, which no processor can there")
@pytest.mark.parametrize("times", [1, 2])
def test_a_source_is_freed_as_its_copy_ends(offloaded, monkeypatch, times):
    monkeypatch.setattr(Product, "memory", [])

    class Products(nn.Module):
        def forward(self, x):
            for _ in range(6):
                x = Product.apply(x, times)
            return x

    model = Products()
    handle = offloaded.enable(model)
    x = torch.linspace(-1, 1, 16 * 1024).requires_grad_()
    out = model(x)
    handle._engine.drain()
    assert handle._engine.live_records == 6
    assert [memory() is None for memory in Product.memory] == [True] * 6
    out.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0**6))


@pytest.mark.only_cpu("looks into memory itself, which no processor can there")
def test_read_that_fails_half_way_through_a_block(offloaded):
    """What has been issued of a block still arrives after the rest of it could not be read."""
    model, handle, targets = enabled_chain(offloaded)
    if offloaded.setup.host_bytes_max > 1 << 20:
        pytest.skip("nothing is spilled")
    out = forward(model)
    handle._engine.drain()
    handle._engine.store.quiesce()
    inject_fault(handle._engine.store, "read", "error", nth=3, error_number=errno.EIO)
    with pytest.raises(OSError, match="offset"):
        out.sum().backward()
    del out
    handle._engine.collect()
    assert_untouched(handle, targets.poison_given_up())


@pytest.mark.only_cpu("a store of the host driver")
@pytest.mark.parametrize("schedule", ["threads", "delays", "stepped"])
@pytest.mark.parametrize("seed", SEEDS)
def test_in_done_means_that_the_bytes_are_there(schedule, seed):
    lanes = _core.HostDriver(schedule=schedule, seed=seed)
    store = _core.SwapStore.slab(lanes, lanes, 1 << 20, slab_bytes=1 << 20, slice_bytes=4096)
    blocks = [_core.HostBlock(40_960, 4096, 0) for _ in range(2)]
    source, target = (np.frombuffer(block, dtype=np.uint8) for block in blocks)
    source[:], target[:] = 7, 0
    ticket = store.swap_out(blocks[0].address, len(source), 0)
    ticket.wait_out(0)
    ticket.prefetch(blocks[1].address, 0, blocks[1])
    for _ in range(10_000):
        if ticket.in_done():
            break
        torch.zeros(1)  # other threads run meanwhile
    else:
        ticket.swap_in(0)
    assert (target == 7).all(), f"seed {seed}"
    ticket.release()
    target[:] = POISON
    store.quiesce()
    assert (target == POISON).all(), f"seed {seed}"
