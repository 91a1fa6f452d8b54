"""Every optimizer of torch, and others, with their state in the store: the bits of plain training."""

import itertools

import pytest
import torch
from core.store_rig import TIERS, make_store
from live_bytes import Peak
from state_rig import (
    MIN_BYTES,
    OPTIMIZERS,
    TORCH_DIFFERS,
    assert_equal,
    everything,
    make_mover,
    make_optimizer,
    params_of,
    run,
)
from users_rig import On, train, trained

import offload
from offload.optimizer_state import divisible
from offload.optimizer_state import mover as mover_module
from offload.runtime.engine import Engine

STEPS = 20
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)]


def make(name, variant, dtype):
    kind, options = OPTIMIZERS[name]
    if (name, variant, dtype) in TORCH_DIFFERS:
        pytest.skip("torch's own runs differ")
    try:
        optimizer = make_optimizer(kind, {**options, **({variant: True} if variant != "default" else {})}, dtype)
        run(optimizer, 1)
    except (TypeError, RuntimeError, ValueError) as error:
        pytest.skip(f"torch refuses: {error}")
    return make_optimizer(kind, {**options, **({variant: True} if variant != "default" else {})}, dtype)


@pytest.mark.parametrize("variant", ["default", "foreach", "fused"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_are_those_of_plain_training(name, dtype, variant, tmp_path, monkeypatch):
    monkeypatch.setattr(mover_module, "CHUNK_BYTES", 1)  # each parameter alone
    plain, moved = make(name, variant, dtype), make(name, variant, dtype)
    mover = make_mover(moved, "direct", tmp_path)
    run(plain, STEPS)
    run(moved, STEPS)
    assert_equal(everything(moved), everything(plain))
    assert mover.counts.whole_steps == 0
    assert mover.counts.nbytes > 0 or name in ("Adafactor",)
    mover.close()
    assert type(moved.state) is type(plain.state)
    assert_equal([moved.state[p] for p in params_of(moved)], [plain.state[p] for p in params_of(plain)])


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_every_tier(name, tier, tmp_path):
    plain, moved = make_optimizer(*OPTIMIZERS[name]), make_optimizer(*OPTIMIZERS[name])
    mover = make_mover(moved, tier, tmp_path)
    run(plain, STEPS)
    run(moved, STEPS)
    counts = mover.counts
    assert counts.tensors > 0
    assert counts.out_bytes > counts.in_bytes >= 15 * counts.nbytes
    assert_equal(everything(moved), everything(plain))
    mover.close()
    assert_equal(everything(moved), everything(plain))
    assert mover.engine.store.stats()["live_tickets"] == 0


def test_state_that_exists_leaves_at_once(tmp_path):
    plain, moved = make_optimizer(*OPTIMIZERS["AdamW"]), make_optimizer(*OPTIMIZERS["AdamW"])
    run(plain, 3)
    run(moved, 3)
    states = [moved.state[param] for param in params_of(moved)[:2]]
    known = [id(state["exp_avg"]) for state in states]
    del states
    mover = make_mover(moved, "direct", tmp_path)
    for param, identity in zip(params_of(moved), known, strict=False):
        there = moved.state.peek(param)["exp_avg"]
        assert there.isnan().all()
        assert id(there) == identity, "the object that the optimizer knows stays"
        del there
    run(plain, 3, begin=3)
    run(moved, 3, begin=3)
    assert_equal(everything(moved), everything(plain))
    mover.close()


def test_state_that_the_program_has_taken_before_stays(tmp_path):
    """As without offload, the program sees the optimizer's updates in it, and the optimizer what the program writes."""
    plain, moved = make_optimizer(*OPTIMIZERS["AdamW"]), make_optimizer(*OPTIMIZERS["AdamW"])
    for optimizer in (plain, moved):
        run(optimizer, 3)
    taken = [optimizer.state[params_of(optimizer)[0]]["exp_avg"] for optimizer in (plain, moved)]
    mover = make_mover(moved, "direct", tmp_path)
    assert mover.counts.held == 1
    for begin in (3, 6):
        for optimizer, own in zip((plain, moved), taken, strict=True):
            run(optimizer, 3, begin=begin)
            own.mul_(0.5)
        assert torch.equal(*taken)
    del taken, own
    run(plain, 1, begin=9)
    run(moved, 1, begin=9)
    assert mover.counts.held == 0
    assert_equal(everything(moved), everything(plain))
    mover.close()


def test_only_a_chunk_and_the_windows_are_in_memory(tmp_path, monkeypatch):
    moved = make_optimizer(*OPTIMIZERS["AdamW"])
    mover = make_mover(moved, "direct", tmp_path)
    run(moved, 1)
    step, most = mover_module.ChunkedStep.run, []

    def counted(self, chunk):
        here = [each for tensors in moved.state.tensors.values() for each in tensors if not each.is_away]
        most.append(sum(each.nbytes for each in here))
        step(self, chunk)

    monkeypatch.setattr(mover_module.ChunkedStep, "run", counted)
    run(moved, 1, begin=1)
    assert len(most) > 1
    largest = max(2 * param.nbytes for param in params_of(moved))
    assert max(most) <= max(largest, mover_module.CHUNK_BYTES)
    mover.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as it is", "converted"])
def test_a_checkpoint_is_loaded_one_parameter_at_a_time(dtype, tmp_path, monkeypatch):
    """In memory are what is being written and the state of the next parameter."""
    monkeypatch.setenv("OFFLOAD_THROTTLE", "8MB/s")  # without waiting, all would still be in memory
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(20)))
    plain, moved = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    run(plain, 1)
    checkpoint = plain.state_dict()
    expected = checkpoint["state"]
    checkpoint["state"] = {
        key: {name: value if name == "step" else value.to(dtype) for name, value in values.items()}
        for key, values in expected.items()
    }
    knobs = {"n_tensors": 0, "min_tensor_bytes": MIN_BYTES, "spill_dir": tmp_path}
    with offload.enable(model, optimizer=moved, optimizer_state=True, **knobs):
        peak = Peak()
        with peak.watch():
            moved.load_state_dict(checkpoint)
        of_one = 2 * (16 << 10)
        scalars = 1024  # in place of what has left
        assert of_one < peak.nbytes <= mover_module.BEHIND_BYTES + of_one + scalars
        assert moved.state.away_nbytes == 20 * of_one > 5 * peak.nbytes
        assert_equal(moved.state_dict()["state"], expected)


@pytest.mark.parametrize("tier", TIERS)
def test_an_update_takes_the_place_of_what_was_stored(tier, tmp_path):
    """Space in the store is needed once, beside what is being copied."""
    moved = make_optimizer(*OPTIMIZERS["AdamW"])
    host_bytes_max = 128 << 10 if tier == "slab+disk" else 2 << 20  # so that some state is on the disk
    engine = Engine(make_store(tier, tmp_path, host_bytes_max=host_bytes_max), torch.device("cpu"))
    mover = mover_module.StateMover(moved, engine, MIN_BYTES, str)
    run(moved, 20)
    engine.drain()
    mover.look()
    counts, stats = mover.counts, engine.store.stats()
    assert counts.failed == 0
    assert counts.out_bytes > 15 * counts.nbytes
    nbytes = counts.nbytes + counts.tensors * 4096  # of whole pages
    windows = mover_module.CHUNK_BYTES + mover_module.AHEAD_BYTES + mover_module.BEHIND_BYTES
    most = {"direct": nbytes, "slab": nbytes + windows, "slab+disk": nbytes}[tier]
    assert 0 < stats["pool_high_water_bytes" if tier == "slab" else "spill_high_water_bytes"] <= most
    mover.close()


@pytest.mark.parametrize("more", [{"step_in_backward": True}, {"gradients": True}], ids=str)
def test_the_spill_file_has_state_and_gradients_once(more, tmp_path):
    on = On(True, tmp_path, optimizer_state=True, **more)
    model, optimizer = trained(on)
    train(model, optimizer, 10, begin=2)
    report = on.handles[0].report()
    moved = [*report.optimizer_state, *report.gradients]
    most = sum(counts.nbytes + counts.tensors * 4096 for counts in moved)
    assert all(counts.out_bytes >= 10 * counts.nbytes for counts in moved)
    assert 0 < optimizer.state.engine.store.stats()["spill_high_water_bytes"] <= most
    on.off()


class CountsInGroup(torch.optim.Optimizer):
    """As TransformerEngine's FusedAdam: the number of steps is in the group."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self.steps += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("m", torch.zeros_like(param))
                    momentum.lerp_(param.grad, 0.1)
                    param.sub_(group["lr"] / group["step"] / self.steps * momentum)
        return loss


class GlobalNorm(CountsInGroup):
    """As Prodigy, D-Adaptation: a sum over all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            norm = sum((param.grad**2).sum() for param in params) if params else torch.ones(())
            for param in params:
                momentum = self.state[param].setdefault("m", torch.zeros_like(param))
                momentum.lerp_(param.grad / (1 + norm.sqrt()), 0.1)
                param.sub_(group["lr"] * momentum)
        return loss


class TakesNoClosure(CountsInGroup):
    @torch.no_grad()
    def step(self):
        for param in params_of(self):
            if param.grad is not None:
                param.sub_(self.state[param].setdefault("m", torch.zeros_like(param)).lerp_(param.grad, 0.1))


class HasModule(CountsInGroup):
    """Who knows what its step does with a module."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.module = torch.nn.Linear(2, 2)


class DrawsNumbers(CountsInGroup):
    """As stochastic rounding."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for param in params_of(self):
            if param.grad is not None:
                momentum = self.state[param].setdefault("m", torch.zeros_like(param))
                momentum.lerp_(param.grad + torch.randn(param.shape), 0.1)
                param.sub_(momentum)
        return loss


@pytest.mark.parametrize(
    ("kind", "is_chunked"),
    [(CountsInGroup, True), (GlobalNorm, False), (TakesNoClosure, False), (HasModule, False), (DrawsNumbers, True)],
)
def test_another_optimizer_is_tried_first(kind, is_chunked, tmp_path, monkeypatch):
    monkeypatch.setattr(mover_module, "CHUNK_BYTES", 1)
    results = []
    for is_moved in (False, True):
        optimizer = make_optimizer(kind, {})
        mover = make_mover(optimizer, "direct", tmp_path) if is_moved else None
        torch.manual_seed(7)
        run(optimizer, 6)
        results.append((*everything(optimizer), optimizer.steps, torch.get_rng_state()))
    assert_equal(*results)
    assert mover.counts.whole_steps == (0 if is_chunked else 6)
    assert mover.counts.tensors > 0
    mover.close()


def test_state_of_others_stays_and_that_is_said(tmp_path):
    params = [torch.nn.Parameter(torch.randn(64, 64))]
    base = torch.optim.AdamW([torch.nn.Parameter(torch.randn(2))])  # its class's step has hooks from now on
    assert base.param_groups

    class Derived(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    for optimizer, why in (
        (torch.optim.LBFGS(params), "LBFGS"),
        (torch.optim.Adam(params, capturable=True), "capturable"),
        (Derived(params), "base class"),
    ):
        mover = make_mover(optimizer, "direct", tmp_path)
        assert why in str(mover.counts)
        assert type(optimizer.state).__name__ == "defaultdict"
        mover.close()


def test_small_and_other_tensors_stay(tmp_path):
    optimizer = make_optimizer(*OPTIMIZERS["AdamW"])
    mover = make_mover(optimizer, "direct", tmp_path)
    run(optimizer, 1)
    small = params_of(optimizer)[3]
    raw = optimizer.state.peek(small)
    assert not raw["exp_avg"].isnan().any()
    large = optimizer.state.peek(params_of(optimizer)[0])
    assert large["exp_avg"].isnan().all()
    assert large["step"].item() == 1
    mover.close()


WRITES = {
    "add_": lambda t: t.add_(1),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(1),
    "copy_": lambda t: t.copy_(torch.ones(t.shape)),
    "foreach": lambda t: torch._foreach_add_([t], 1),
    "foreach_zero": lambda t: torch._foreach_zero_([t]),
    "item": lambda t: t[0].fill_(1),
    "data": lambda t: t.data.zero_(),
    "numpy": lambda t: t.numpy().fill(0),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_away_reads_as_nan_and_cannot_be_written(write, tmp_path):
    plain, moved = make_optimizer(*OPTIMIZERS["AdamW"]), make_optimizer(*OPTIMIZERS["AdamW"])
    mover = make_mover(moved, "direct", tmp_path)
    run(plain, 2)
    run(moved, 2)
    away = moved.state.peek(params_of(moved)[0])["exp_avg"]
    assert away.shape == params_of(moved)[0].shape
    assert away.isnan().all()
    with pytest.raises(RuntimeError):
        WRITES[write](away)
    run(plain, 1, begin=2)
    run(moved, 1, begin=2)
    assert_equal(everything(moved), everything(plain))
    mover.close()


READS = {
    "item": lambda o, p: o.state[p],
    "get": lambda o, p: o.state.get(p),
    "items": lambda o, p: next(s for q, s in o.state.items() if q is p),
    "values": lambda o, p: next(iter(o.state.values())),
    "dict": lambda o, p: dict(o.state)[p],
    "unpacked": lambda o, p: {**o.state}[p],
    "copy": lambda o, p: o.state.copy()[p],
    "setdefault": lambda o, p: o.state.setdefault(p, {}),
    "pop": lambda o, p: o.state.pop(p),
}


@pytest.mark.parametrize(("read", "tier"), [*itertools.product(READS, ["direct"]), ("item", "slab+disk")])
def test_the_state_of_a_parameter_is_brought_back_when_asked_for(read, tier, tmp_path):
    plain, moved = make_optimizer(*OPTIMIZERS["AdamW"]), make_optimizer(*OPTIMIZERS["AdamW"])
    mover = make_mover(moved, tier, tmp_path)
    run(plain, 2)
    run(moved, 2)
    assert_equal(READS[read](moved, params_of(moved)[0]), plain.state[params_of(plain)[0]])
    if read != "pop":
        for optimizer in (plain, moved):  # what the caller changes is what the next step uses
            optimizer.state[params_of(optimizer)[0]]["exp_avg"].mul_(2)
        run(plain, 2, begin=2)
        run(moved, 2, begin=2)
        assert moved.state.peek(params_of(moved)[0])["exp_avg"].isnan().all()
        assert_equal(everything(moved), everything(plain))
    mover.close()


def test_a_view_that_somebody_holds_keeps_its_tensor_in_memory(tmp_path):
    plain, moved = make_optimizer(*OPTIMIZERS["AdamW"]), make_optimizer(*OPTIMIZERS["AdamW"])
    mover = make_mover(moved, "direct", tmp_path)
    views = []
    for optimizer in (plain, moved):
        run(optimizer, 2)
        views.append(optimizer.state[params_of(optimizer)[0]]["exp_avg"].view(-1))
        run(optimizer, 2, begin=2)
    assert_equal(*views)
    del views
    run(moved, 1, begin=4)
    assert moved.state.peek(params_of(moved)[0])["exp_avg"].isnan().all()
    mover.close()


@pytest.mark.parametrize("is_guarded", [True, False])
def test_adafactor_takes_one_eps_for_parameters_of_several_dtypes(is_guarded, tmp_path, monkeypatch):
    """With foreach, that of the first one's dtype. In chunks, each dtype would have its own."""
    monkeypatch.setattr(mover_module, "CHUNK_BYTES", 1)
    if not is_guarded:
        monkeypatch.setattr(divisible, "_has_one_eps", lambda group: False)

    def make_two_kinds():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(16, 16)) for _ in range(4)]
        params[2:] = [torch.nn.Parameter(each.detach().bfloat16()) for each in params[2:]]
        return torch.optim.Adafactor(params, foreach=True)

    def step(optimizer, number):
        generator = torch.Generator().manual_seed(number)
        for param in params_of(optimizer):
            param.grad = (1e-3 * torch.randn(16, 16, generator=generator)).to(param.dtype)
        optimizer.step()

    plain, moved = make_two_kinds(), make_two_kinds()
    mover = make_mover(moved, "direct", tmp_path)
    for number in range(3):
        step(plain, number)
        step(moved, number)
    equal = all(map(torch.equal, params_of(plain), params_of(moved)))
    assert (equal, mover.counts.whole_steps) == ((True, 3) if is_guarded else (False, 0))
    mover.close()
