"""The virtual clock, by cases whose answer is known on paper: exact, where the host's own time counts nothing."""

import threading
import time

import pytest
import torch
from twin import sim, virtual_time
from twin.virtual_time import Figures

MIB = 1 << 20
PLAIN = Figures(1e12, 1e11, out_bytes_per_second=MIB / 0.010, in_bytes_per_second=MIB / 0.005)  # 1 MiB: 10 ms and 5 ms


@pytest.fixture(autouse=True)
def undelayed():
    torch.sim.synchronize()
    sim.schedule(0, 0)


def mark():
    return torch.sim.current_stream().record_event(torch.sim.Event(enable_timing=True))


def milliseconds(first, last):
    torch.sim.synchronize()
    return pytest.approx(first.elapsed_time(last), abs=1e-6)


def pinned():
    return torch.empty(MIB, dtype=torch.uint8, pin_memory=True)


def on_device():
    return torch.zeros(MIB, dtype=torch.uint8, device="sim")


def streams():
    made = torch.sim.Stream(), torch.sim.Stream()
    for stream in made:
        stream.wait_stream(torch.sim.current_stream())
    return made


def copies(pairs):
    """Queues each copy on a stream of its own; the milliseconds until all have ended."""
    begin = mark()
    for stream, (to, source) in zip(streams(), pairs, strict=True):
        with torch.sim.stream(stream):
            to.copy_(source, non_blocking=True)
        torch.sim.current_stream().wait_stream(stream)
    return begin, mark()


def test_copies_in_two_directions_overlap():
    out, into, source, target = pinned(), pinned(), on_device(), on_device()
    with virtual_time.on(PLAIN):
        assert milliseconds(*copies([(out, source), (target, into)])) == 10


def test_copies_in_one_direction_do_not():
    hosts, sources = [pinned(), pinned()], [on_device(), on_device()]
    with virtual_time.on(PLAIN):
        assert milliseconds(*copies(zip(hosts, sources, strict=True))) == 20


def test_a_copy_takes_the_gap_before_one_that_waits():
    """Both go out; the first one queued waits for a kernel of 30 ms, and the second one needs not."""
    hosts, sources = [pinned(), pinned()], [on_device(), on_device()]
    with virtual_time.on(PLAIN):
        first, second = streams()
        begin = mark()
        with torch.sim.stream(first):
            torch.sim._sleep(30_000 * sim.CYCLES_PER_MICROSECOND)
            hosts[0].copy_(sources[0], non_blocking=True)
            late = mark()
        with torch.sim.stream(second):
            hosts[1].copy_(sources[1], non_blocking=True)
            early = mark()
        assert milliseconds(begin, early) == 10
        assert milliseconds(begin, late) == 40


def test_a_wait_delays():
    host, source, target = pinned(), on_device(), on_device()
    with virtual_time.on(PLAIN):
        side, _ = streams()
        begin = mark()
        with torch.sim.stream(side):
            target.copy_(host, non_blocking=True)  # 5 ms
        alone = mark()
        torch.sim.current_stream().wait_stream(side)
        host.copy_(source, non_blocking=True)  # 10 ms
        assert milliseconds(begin, alone) == 0
        assert milliseconds(begin, mark()) == 15


def test_every_copy_takes_its_latency():
    hosts, sources = [pinned(), pinned()], [on_device(), on_device()]
    with virtual_time.on(Figures(1e12, 1e11, MIB / 0.010, MIB / 0.005, copy_seconds=1e-3)):
        assert milliseconds(*copies(zip(hosts, sources, strict=True))) == 22


def test_a_chain_bound_by_launches_takes_what_the_host_takes():
    x = torch.zeros(4, device="sim")
    with virtual_time.on(Figures(1e18, 1e18, 1e9, 1e9, kernel_seconds=2e-6, launch_seconds=5e-6)):
        begin = mark()
        for _ in range(10):
            x.add_(1)
        assert milliseconds(begin, mark()) == pytest.approx(0.052, abs=1e-6)


def test_a_chain_bound_by_kernels_takes_what_they_take():
    x = torch.zeros(4, device="sim")
    with virtual_time.on(Figures(1e18, 1e18, 1e9, 1e9, kernel_seconds=2e-3, launch_seconds=5e-6)):
        begin = mark()
        for _ in range(10):
            x.add_(1)
        assert milliseconds(begin, mark()) == pytest.approx(20.005, abs=1e-6)


def test_products_take_their_flops_and_the_rest_its_bytes():
    a, b = torch.zeros(100, 200, device="sim"), torch.zeros(200, 300, device="sim")
    images, weight = torch.zeros(2, 3, 8, 8, device="sim"), torch.zeros(5, 3, 3, 3, device="sim")
    with virtual_time.on(Figures(1e9, 1e30, 1e9, 1e9)):
        begin = mark()
        a @ b
        product = mark()
        torch.nn.functional.conv2d(images, weight)
        convolved = mark()
        assert milliseconds(begin, product) == 2 * 100 * 200 * 300 / 1e6
        assert milliseconds(product, convolved) == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3) / 1e6
    with virtual_time.on(Figures(1e30, 1e9, 1e9, 1e9)):
        begin = mark()
        a + a[:1]
        assert milliseconds(begin, mark()) == (2 * a.nbytes + a[:1].nbytes) / 1e6


def test_the_host_waits_and_reads_the_same_time():
    host, source = pinned(), on_device()
    with virtual_time.on(PLAIN):
        begin = time.perf_counter()
        host.copy_(source, non_blocking=True)
        copied = mark()
        assert not copied.query()
        assert time.perf_counter() == begin
        time.sleep(0.004)
        assert not copied.query()
        copied.synchronize()
        assert copied.query()
        assert time.perf_counter() - begin == pytest.approx(0.010)


def test_the_hosts_own_time_counts_as_much_as_asked():
    def spend():
        begun, spent = time.perf_counter(), time.thread_time()
        while time.thread_time() - spent < 0.05:
            pass
        return time.perf_counter() - begun

    with virtual_time.on(Figures(1e12, 1e11, 1e9, 1e9, host_factor=2.0)):
        assert 0.1 <= spend() < 0.2
    with virtual_time.on(PLAIN):
        assert spend() == 0


def test_threads_wake_in_the_order_of_their_times():
    woken = []
    barrier = threading.Barrier(3)

    def wait(seconds):
        time.perf_counter()  # from here on the clock knows this thread
        barrier.wait()
        time.sleep(seconds)
        woken.append((seconds, time.perf_counter() - begin))

    with virtual_time.on(PLAIN):
        begin = time.perf_counter()
        threads = [threading.Thread(target=wait, args=[each]) for each in (0.3, 0.1, 0.2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert [seconds for seconds, _ in woken] == [0.1, 0.2, 0.3]
    assert [at for _, at in woken] == pytest.approx([0.1, 0.2, 0.3])
