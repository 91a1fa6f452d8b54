"""The store on an accelerator: every ordering edge of its copies, its limit, and the caller's context.

Slowness is made on purpose: `sleep` holds a stream up, so that an ordering edge that is missing
shows as wrong bytes and not once in a thousand runs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from accelerator import KIND, LIBRARY, current_context, gpu, stream_handle
from gpu_rig import LONG_IF_SIMULATED, MIB, POISON, cuda, sleep, sleep_on  # noqa: F401
from torch import Tensor

import offload
from offload import _core

pytestmark = pytest.mark.gpu


def make_store(host_bytes_max: int = 256 * MIB, **options: Any) -> _core.SwapStore:
    lanes = _core.HostDriver()
    return _core.SwapStore.slab(_core.cuda_driver(0, LIBRARY), lanes, host_bytes_max, **options)


def pattern(nbytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(KIND).manual_seed(seed)
    return torch.randint(256, (nbytes,), generator=generator, dtype=torch.uint8, device=KIND)


def poison(nbytes: int) -> Tensor:
    return torch.full((nbytes,), POISON, dtype=torch.uint8, device=KIND)


SLOW = ["producer", "copy-out", "reader", "copy-in", "nothing"]
LARGE = 80 * MIB


@pytest.mark.parametrize(
    ("nbytes", "slow"),
    [
        pytest.param(nbytes, slow, marks=[LONG_IF_SIMULATED] if nbytes == LARGE and slow != "copy-in" else [])
        for nbytes in (1, 4096, 5_000_003, LARGE)
        for slow in SLOW
    ],
)
def test_bytes_come_back_whatever_is_slow(nbytes: int, slow: str) -> None:
    store, side = make_store(), gpu.Stream()
    expected, source, target = pattern(nbytes), torch.zeros_like(pattern(nbytes)), poison(nbytes)
    seen = torch.empty_like(target)
    gpu.synchronize()
    if slow == "producer":
        sleep()
    source.copy_(expected)
    if slow == "copy-out":
        sleep_on(side)
        store.swap_out(seen.data_ptr(), 1, stream_handle(side))  # the copy stream waits for this one's producer
    ticket = store.swap_out(source.data_ptr(), nbytes, stream_handle())
    ticket.wait_out(stream_handle())
    source.fill_(POISON)  # queued at once, and only right after the copy-out
    if slow == "reader":
        sleep()
    seen.copy_(target)  # the target's last reader, before the copy-in
    if slow == "copy-in":
        sleep_on(side)
    ticket.prefetch(target.data_ptr(), stream_handle(side if slow == "copy-in" else None))
    ticket.swap_in(stream_handle())
    returned = target.clone()
    assert torch.equal(returned, expected)
    assert bool((seen == POISON).all())
    assert bool((source == POISON).all())


def test_a_pinned_block_is_reused_only_after_its_last_copy() -> None:
    nbytes = 8 * MIB
    store = make_store(host_bytes_max=nbytes, slab_bytes=nbytes)  # room for one block
    side = gpu.Stream()
    first, second = pattern(nbytes, 1), pattern(nbytes, 2)
    target = poison(nbytes)
    ticket = store.swap_out(first.data_ptr(), nbytes, stream_handle())
    ticket.wait_out(stream_handle())
    gpu.synchronize()
    sleep_on(side)
    ticket.prefetch(target.data_ptr(), stream_handle(side))
    ticket.swap_in(stream_handle())
    ticket.release()  # while the copy-in still waits for the sleeper
    other = store.swap_out(second.data_ptr(), nbytes, stream_handle())
    assert torch.equal(target, first)
    for _ in range(2):  # a retained graph brings the same bytes back again
        target.fill_(POISON)
        other.prefetch(target.data_ptr(), stream_handle())
        other.swap_in(stream_handle())
        assert torch.equal(target, second)


def test_an_exhausted_pool_names_the_numbers() -> None:
    store = make_store(host_bytes_max=4 * MIB)
    source = pattern(3 * MIB)
    ticket = store.swap_out(source.data_ptr(), source.nbytes, stream_handle())
    with pytest.raises(offload.PoolExhausted, match=r"asked 3145728 bytes, \d+ free of 4194304"):
        store.swap_out(source.data_ptr(), source.nbytes, stream_handle())
    ticket.release()
    store.quiesce()
    assert store.stats()["pool_used_bytes"] == 0
    assert store.trim() == 4 * MIB


@pytest.mark.parametrize("thread", ["main", "new"])
def test_the_current_context_stays(thread: str) -> None:
    source, target = pattern(4096), poison(4096)
    gpu.synchronize()

    def use() -> None:
        before = current_context()
        store = make_store()
        ticket = store.swap_out(source.data_ptr(), 4096, 0)
        ticket.wait_out(0)
        ticket.prefetch(target.data_ptr(), 0)
        ticket.swap_in(0)
        store.quiesce()
        del ticket, store
        assert current_context() == before

    if thread == "main":
        use()
    else:
        with ThreadPoolExecutor(1) as pool:  # such a thread has no context of its own
            pool.submit(use).result()
    assert torch.equal(source, target)
