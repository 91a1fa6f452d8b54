"""Every I/O of two training steps fails, one after another: typed errors, whole graphs, counters at zero.

A write or an allocation that fails costs no more than the memory of what stays. A read that fails is an error in
backward that names file, offset and errno; the parameters are as they were, and a second backward is right.
"""

import errno

import pytest
import torch
from faults.inject import inject_fault, truncate
from torch import nn
from twin.double import the_double

import offload
from offload import _core, session
from offload.runtime.engine import Engine

OPERATIONS_MAX = 200
CASES = [
    *(("allocate", "error", number) for number in (errno.ENOSPC, errno.EIO, errno.EINTR)),
    *(("write", "error", number) for number in (errno.ENOSPC, errno.EIO, errno.EINTR)),
    ("write", "short_transfer", 0),
    *(("read", "error", number) for number in (errno.EIO, errno.EINTR)),
    ("read", "short_transfer", 0),
    ("read", "wrong_block", 0),
]
# Of what stays failing, an operation's other errors go the same way.
PERSISTENT = [
    ("allocate", "error", errno.ENOSPC),
    ("write", "error", errno.ENOSPC),
    ("read", "error", errno.EIO),
    ("read", "wrong_block", 0),
]
COUNTED = {}  # how many operations the two steps have, by setup and operation


def rows():
    """Each case once and each persistent; those that repeat another with another number are for `--full`."""
    for persistent in (False, True):
        for case in CASES:
            marks = [pytest.mark.full] if persistent and case not in PERSISTENT else []
            named = "-".join([*map(str, case), "persistent" if persistent else "transient"])
            yield pytest.param(*case, persistent, marks=marks, id=named)


def new_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8))


def loss_of(model, number):
    batch = torch.linspace(-1, 1, 128 * 64).reshape(128, 64).add(number).sin()
    return model(batch).square().mean()


def snapshot(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def are_equal(found, expected):
    return all(map(torch.equal, found, expected))


def train(model, settle, mend):
    """Two steps, the second by schedule. Returns their gradients, and the errors that were met, mended and overcome."""
    found, errors = [], []
    for number in range(2):
        loss = loss_of(model, number)
        settle()
        before = snapshot(model)
        try:
            loss.backward(retain_graph=True)
        except OSError as error:
            errors.append(error.with_traceback(None))  # its frames hold graphs
            assert are_equal(snapshot(model), before)
            mend()
            model.zero_grad()
            loss.backward(retain_graph=True)
        del loss
        found.append(gradients(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    return found, errors


@pytest.fixture
def spilling(offloaded):
    """The setups that write a file."""
    if offloaded.setup.tier != "direct" and offloaded.setup.host_bytes_max > 1 << 20:
        pytest.skip("nothing is spilled")
    return offloaded


class Campaign:
    """Training runs on one setup, each with one fault."""

    def __init__(self, offloaded):
        self.offloaded = offloaded
        self.expected, _ = train(new_net(), lambda: None, None)

    def run(self, operation, kind, number, nth, persistent):
        """Train with the `nth` operation failing. Returns whether anybody was told."""
        model = new_net()
        handle = self.offloaded.enable(model)
        store = handle._engine.store
        inject_fault(store, operation, kind, nth=nth, error_number=number, persistent=persistent)
        found, errors = train(model, self.offloaded.settle, lambda: inject_fault(store, "read", "error", nth=0))
        case = f"N = {nth}"
        assert all(map(are_equal, found, self.expected)), case
        for error in errors:
            self.check(error, {number or errno.EIO, errno.EIO})
        failed = store.stats()["failed"]
        assert not errors or operation == "read", case
        assert failed == 0 or operation != "read", case
        if not persistent:
            assert len(errors) + failed <= 1, case
        self.offloaded.check_nothing_left()
        handle.disable()
        self.offloaded.handles.remove(handle)
        return bool(errors) or failed > 0

    def check(self, error, errnos):
        assert type(error) is _core.SpillError
        assert error.errno in errnos
        assert error.filename == str(self.offloaded.spill_dir)
        assert error.offset >= 0
        assert f"at offset {error.offset} of {self.offloaded.spill_dir}" in str(error)

    def count_operations(self, operation):
        """How many there are: a fault that stays is told of unless it comes after the last of them.

        The same for every kind of fault, so they are counted once.
        """
        key = self.offloaded.setup, operation
        if key not in COUNTED or not self.offloaded.setup.settles:  # threads that race make other copies each time
            nth = 1
            while nth < OPERATIONS_MAX and self.run(operation, "error", errno.EIO, nth, True):
                nth += 1
            COUNTED[key] = nth - 1
        return COUNTED[key]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("operation", "kind", "number", "persistent"), list(rows()))
def test_nth_operation_fails(spilling, operation, kind, number, persistent, is_full, campaign_counts):
    if spilling.setup.schedule == "delays" and not is_full:
        pytest.skip("only with --full")
    is_repeatable = spilling.setup.schedule == "stepped" or spilling.setup.settles
    campaign = Campaign(spilling)
    count = campaign.count_operations(operation)
    assert count >= (1 if operation == "allocate" else 4)
    assert count < OPERATIONS_MAX - 1
    told = [campaign.run(operation, kind, number, nth, persistent) for nth in range(1, count + 1)]
    campaign_counts["faults injected"] += count
    if kind == "wrong_block" or (persistent and kind == "error"):
        assert any(told)
    elif not persistent and (kind == "short_transfer" or number == errno.EINTR):
        assert not any(told), "what can be continued is"
    elif operation != "allocate" and kind == "error":
        # Not a cancelled write's, nor that of a copy nobody waited for. Copies that race are others in each run.
        assert sum(told) >= (count // 2 if is_repeatable else 1)
    if is_repeatable:
        assert not campaign.run(operation, kind, number, count + 8, persistent), "a clean pass at last"


@pytest.mark.parametrize("cut", ["empty", "first page", "half", "last page"])
def test_file_truncated_behind_the_back(spilling, cut, campaign_counts):
    """What is lost is lost, and said so each time; the next step starts afresh."""
    if not spilling.setup.settles:
        pytest.skip("what has not left is not lost")
    campaign = Campaign(spilling)
    model = new_net()
    handle = spilling.enable(model)
    loss = loss_of(model, 0)
    spilling.settle()
    handle._engine.store.quiesce()
    used = handle._engine.store.stats()["spill_used_bytes"]
    cuts = {"empty": 0, "first page": 4096, "half": used // 8192 * 4096, "last page": used - 4096}
    truncate(handle._engine.store, cuts[cut])
    before = snapshot(model)
    for _ in range(2):
        with pytest.raises(OSError, match="spill file ends early") as raised:
            loss.backward(retain_graph=True)
        campaign.check(raised.value, {errno.EIO})
        assert are_equal(snapshot(model), before)
        del raised
    del loss
    model.zero_grad()
    found, errors = train(model, spilling.settle, None)
    assert errors == []
    assert all(map(are_equal, found, campaign.expected))
    campaign_counts["faults injected"] += 1


@pytest.mark.only_cpu("over the double whose device is RAM; tests/twin/inside has pinned memory that runs out")
def test_failed_pinning_keeps_the_tensor(monkeypatch, caplog):
    """In two steps of two, and not tried again before a trim: each tensor counted, warned of once, plain gradients."""
    double = the_double()
    store = _core.SwapStore.slab(double.driver(), _core.HostDriver(), 8 << 20, slab_bytes=4096, slice_bytes=4096)
    monkeypatch.setattr(session, "make_engine", lambda device, options: Engine(store, device))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    batch = torch.randn(64, 64)
    model(batch).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle:
        for _ in range(2):
            model.zero_grad()
            double.fail_at("cuMemHostRegister_v2", 2)
            tried = double.count("cuMemHostRegister_v2")
            model(batch).sum().backward()
            assert all(torch.equal(each.grad, whole) for each, whole in zip(model.parameters(), expected, strict=True))
            assert double.count("cuMemHostRegister_v2") - tried == 2
            handle._engine.drain()  # a block in use would keep its slab from being given back
            store.quiesce()
            assert store.trim() > 0
        report = handle.report()
    assert report.kept["pinning failed"].tensors == 2 * 3  # of four that are saved
    assert report.kept["pinning failed"].nbytes == 6 * batch.nbytes
    assert report.swapped.tensors > 0
    assert [record.message for record in caplog.records if "asked to pin" in record.message] == [
        "a tensor stays on the device: cuMemHostRegister_v2 failed with code 2: "
        "CUDA_ERROR_OUT_OF_MEMORY (out of memory): asked to pin 16384 bytes, failed after 0; lower host_limit"
    ]
    assert double.first_violation == ""
