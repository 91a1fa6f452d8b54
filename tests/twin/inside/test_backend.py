"""What torch expects of an accelerator beside its operators: memory, random numbers, precision, devices, errors."""

import io

import pytest
import torch
from torch import nn
from twin import sim

MIB = 1 << 20


def test_random_numbers_follow_seed_and_state():
    torch.manual_seed(3)
    first, state = torch.rand(5, device="sim"), torch.sim.get_rng_state()
    second = torch.rand(5, device="sim")
    assert not torch.equal(first, second)
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="sim"), second)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5, device="sim"), first)
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.rand(5, device="sim")
    assert torch.equal(torch.rand(5, device="sim"), second)


def test_a_generator_of_its_own():
    draw = lambda seed: torch.rand(5, device="sim", generator=torch.Generator("sim").manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_chooses_precision_by_operator(dtype):
    model, x = nn.Linear(8, 8, device="sim"), torch.randn(4, 8, device="sim")
    with torch.autocast("sim", dtype=dtype):
        y = model(x)
        assert (y.dtype, y.softmax(-1).dtype, y.exp().dtype, (y * y).dtype) == (
            dtype,
            torch.float32,
            torch.float32,
            dtype,
        )
        assert torch.addcmul(y, y, x).dtype == torch.float32
        nn.functional.mse_loss(y, x).backward()
    assert model.weight.grad.dtype == torch.float32
    by_hand = nn.functional.linear(x.to(dtype), model.weight.to(dtype), model.bias.to(dtype))
    assert torch.equal(y, by_hand)


def test_saved_tensors_come_back_where_they_were():
    file, model = io.BytesIO(), nn.Linear(8, 8, device="sim:1")
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["weight"].device == torch.device("sim", 1)
    assert torch.equal(loaded["weight"], model.weight)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu")["bias"], model.bias.cpu())


def test_events_tell_what_lies_between():
    first, second, never = (torch.sim.Event(enable_timing=True) for _ in range(3))
    first.record()
    torch.sim._sleep(3_000_000)  # 2 ms
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= 2
    with pytest.raises((RuntimeError, ValueError), match="recorded"):
        first.elapsed_time(never)


def test_two_devices_have_their_own_memory_and_streams():
    x, y = torch.arange(5.0, device="sim:0"), torch.arange(5.0, device="sim:1")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + y
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(5)
    with torch.sim.device(1):
        assert torch.ones(1, device="sim").device == torch.device("sim", 1)
        assert torch.sim.current_stream().device_index == 1
    assert torch.equal((x + 1).to("sim:1"), y + 1)
    assert (x * torch.tensor(2)).device == x.device


def test_copies_between_devices_are_ordered_on_both():
    for seed in range(3):
        sim.schedule(seed, 500)
        for number in range(5):
            x = torch.full((1 << 14,), float(number), device="sim:0").add_(1)
            y = x.to("sim:1", non_blocking=True)
            x.fill_(-1)
            assert bool((y == number + 1).all())


def test_segments_are_split_joined_and_given_back():
    torch.sim.synchronize()
    torch.sim.empty_cache()
    before = torch.sim.memory_stats()
    large = [torch.empty(3 * MIB, dtype=torch.uint8, device="sim") for _ in range(4)]  # one segment of 20 MiB
    stats = torch.sim.memory_stats()
    assert stats["segment.all.current"] - before["segment.all.current"] == 1
    assert stats["reserved_bytes.all.current"] - before["reserved_bytes.all.current"] == 20 * MIB
    assert stats["allocated_bytes.all.current"] - before["allocated_bytes.all.current"] == 12 * MIB
    places = [each.data_ptr() for each in large]
    del large[1], large[1]  # neighbours: joined
    both = torch.empty(6 * MIB, dtype=torch.uint8, device="sim")
    assert both.data_ptr() == places[1]
    del both
    assert torch.sim.memory_stats()["inactive_split_bytes.all.current"] >= 6 * MIB
    torch.sim.empty_cache()  # part of it is in use
    assert torch.sim.memory_reserved() - before["reserved_bytes.all.current"] == 20 * MIB
    large.clear()
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() == before["reserved_bytes.all.current"]


def test_memory_of_a_stream_goes_back_to_it():
    side = torch.sim.Stream()
    x = torch.empty(1000, device="sim")
    place = x.data_ptr()
    del x
    with torch.sim.stream(side):
        assert torch.empty(1000, device="sim").data_ptr() != place
    assert torch.empty(1000, device="sim").data_ptr() == place


def test_memory_runs_out():
    torch.sim.empty_cache()
    sim.limit_memory(torch.sim.memory_reserved() + 64 * MIB)
    kept = torch.empty(40 * MIB, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 40\.00 MiB"):
        torch.empty(40 * MIB, dtype=torch.uint8, device="sim")
    assert torch.sim.memory_stats()["num_ooms"] >= 1
    del kept  # what is cached for one size serves another
    torch.empty(60 * MIB, dtype=torch.uint8, device="sim")


def test_the_nth_allocation_fails_once():
    sim.fail_allocation(2)
    torch.empty(1, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="sim")
    torch.empty(1, device="sim")


def test_pinned_memory_runs_out():
    sim.limit_pinned(sim.pinned_bytes() + MIB)
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True)
    assert torch.empty(MIB // 2, dtype=torch.uint8, pin_memory=True).is_pinned()


def test_work_that_fails_fails_everything_after_it():
    indices, table = torch.tensor([5, 100], device="sim"), torch.ones(10, 3, device="sim")
    torch.sim.synchronize()
    sim.hold_streams(True)
    found = nn.functional.embedding(indices, table)  # queued, without an error
    sim.hold_streams(False)
    with pytest.raises(RuntimeError, match="index out of range"):
        found.cpu()
    for call in (torch.sim.synchronize, lambda: torch.ones(3, device="sim")):
        with pytest.raises(RuntimeError, match="work on a stream has failed"):
            call()


def test_a_stream_that_is_captured_says_so():
    side = torch.sim.Stream()
    sim.set_capturing(side, True)
    with torch.sim.stream(side):
        assert torch.sim.is_current_stream_capturing()
    assert not torch.sim.is_current_stream_capturing()
    sim.set_capturing(side, False)


def test_pinned_batches_of_a_loader():
    loader = torch.utils.data.DataLoader([torch.ones(2)] * 4, batch_size=2, pin_memory=True)
    assert next(iter(loader)).is_pinned()
