"""`OffloadCallback` in `Trainer.fit` of the real Lightning: bit-equal weights, and nothing left, however `fit` ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from frameworks import need
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

pl = need("lightning.pytorch")

import offload  # noqa: E402
from offload.integrations.lightning import OffloadCallback  # noqa: E402

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(pl.LightningModule):
    """Calls a part of itself and never its own forward, as many do."""

    def __init__(self, fails_at: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.25), nn.Linear(64, 3))
        self.fails_at = fails_at
        self.error = error
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        if batch_idx == self.fails_at:
            raise self.error("on purpose")
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Net):
    """Two losses a step, optimized by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for part in (0, 1):
            loss = functional.cross_entropy(self.net(batch[0][part::2]), batch[1][part::2])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(88, 16, generator=generator), torch.randint(3, (88,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16)  # the last of eight rows


def make(kind: type[Net] = Net, **arguments) -> Net:
    torch.manual_seed(0)
    return kind(**arguments)


def fit(model: Net, *callbacks, resume_from: Path | None = None, data=None, **arguments) -> pl.Trainer:
    torch.manual_seed(1)
    given = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **{**given, **arguments})
    trainer.fit(model, data or loader(), ckpt_path=resume_from)
    return trainer


def all_on(**options) -> OffloadCallback:
    return OffloadCallback(**{"n_tensors": -1, "min_tensor_bytes": 1, **options})


def assert_same(model: Net, expected: Net) -> None:
    assert model.losses == expected.losses
    assert model.losses
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def assert_plain(model: Net, trainer: pl.Trainer | None = None) -> None:
    """Nothing of ours on it, and the engine can be enabled at once."""
    assert "forward" not in vars(model)
    assert trainer is None or "training_step" not in vars(trainer.strategy)
    with offload.enable(model, n_tensors=-1):
        pass


@pytest.mark.parametrize("kind", [Net, Manual], ids=["automatic", "manual"])
def test_the_same_losses_and_weights(kind):
    plain, swapped = make(kind), make(kind)
    fit(plain)
    callback = all_on(lb=2)
    swapped.net.register_forward_hook(lambda *_: callback.handle._engine.drain())  # what is still leaving is taken back
    trainer = fit(swapped, callback)
    assert_same(swapped, plain)
    report = callback.report()
    assert report.steps == 12
    assert report.swapped.tensors > 0
    assert report.prefetched > 0
    assert_plain(swapped, trainer)


@pytest.mark.parametrize(
    "switch",
    [
        {"accumulate_grad_batches": 4},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "precision": "bf16-mixed"},
    ],
    ids=lambda switch: ", ".join(switch),
)
def test_under_lightnings_own_switches(switch):
    plain, swapped = make(), make()
    fit(plain, **switch)
    callback = all_on()
    fit(swapped, callback, **switch)
    assert_same(swapped, plain)
    assert callback.report().swapped.tensors > 0


def test_accumulating_by_hand():
    class Accumulating(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
            self.losses.append(loss.item())

    plain, swapped = make(Accumulating), make(Accumulating)
    callback = all_on()
    fit(plain)
    fit(swapped, callback)
    assert_same(swapped, plain)
    assert callback.report().swapped.tensors > 0


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_an_exception_in_the_step_leaves_nothing_wrapped(error):
    model = make(fails_at=3, error=error)
    callback = all_on()
    with pytest.raises(error, match="on purpose"):
        fit(model, callback)
    assert callback.report().steps == 4
    assert_plain(model)
    model.fails_at = None
    fit(model, callback)
    assert callback.report().steps == 12


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_batch_end", "on_train_epoch_end"])
def test_an_exception_of_another_callback_leaves_nothing_wrapped(hook):
    def fail(*args, **kwargs):
        raise RuntimeError("on purpose")

    other = pl.Callback()
    setattr(other, hook, fail)
    model = make()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(model, all_on(), other)
    assert_plain(model)


def test_a_loader_that_raises_leaves_nothing_wrapped():
    class Source:
        def __iter__(self):
            yield from list(loader())[:2]
            raise OSError("the disk is gone")

    model, callback = make(), all_on()
    with pytest.raises(OSError, match="the disk is gone"):
        fit(model, callback, data=Source())
    assert callback.report().steps == len(model.losses) > 0  # Lightning is one batch ahead
    assert_plain(model)


@pytest.mark.parametrize("nothing", ["max_epochs", "max_steps", "limit_train_batches"])
def test_a_fit_without_steps_is_said_and_leaves_nothing(nothing):
    model, callback = make(), all_on()
    trainer = fit(model, callback, **{nothing: 0})
    assert model.losses == []
    assert_plain(model, trainer)
    if nothing == "max_epochs":
        assert "no training step has run yet" in str(callback.report())


def test_twice_is_an_error_and_leaves_nothing():
    model = make()
    with pytest.raises(ValueError, match="already enabled on this model, so a Lightning OffloadCallback cannot"):
        fit(model, all_on(), all_on())
    assert_plain(model)


def test_a_model_that_is_enabled_already_stays_so():
    model = make()
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1):
        with pytest.raises(ValueError, match="already enabled on this model"):
            fit(model, all_on())
        assert "forward" in vars(model)
    assert_plain(model)


def test_training_resumes_from_a_checkpoint(tmp_path):
    resumed = []
    for callbacks in ([], [all_on()]):
        interrupted, again = make(), make()
        path = tmp_path / f"saved{len(callbacks)}.ckpt"
        fit(interrupted, *callbacks, max_epochs=1).save_checkpoint(path)
        fit(again, *callbacks, max_epochs=2, resume_from=path)
        assert len(again.losses) == 6
        resumed.append(again)
    plain, swapped = (torch.load(tmp_path / f"saved{number}.ckpt", weights_only=False) for number in (0, 1))
    assert list(swapped["state_dict"]) == list(plain["state_dict"])
    assert swapped["callbacks"] == {}
    assert callbacks[0].report().swapped.tensors > 0
    assert_same(*resumed)


class Logger(pl.loggers.logger.DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None) -> None:
        self.rows.append((step, dict(metrics)))


@pytest.mark.parametrize("log", [True, False])
def test_figures_go_to_the_trainers_logger_and_its_progress_bar(log):
    logger = Logger()
    trainer = fit(make(), all_on(log=log), logger=logger, log_every_n_steps=1)
    names = {name for _, row in logger.rows for name in row if name.startswith("offload/")}
    known = {"peak_mib", "swapped_mib", "stalled_ms", "slowdown_percent"}
    assert names == ({f"offload/{name}" for name in known} if log else set())
    assert ("offload/peak_mib" in trainer.progress_bar_metrics) == log


def test_wrong_option():
    with pytest.raises(TypeError, match=r"takes the knobs of offload.enable .*, not 'tensors'"):
        OffloadCallback(tensors=3)


@pytest.mark.full
def test_ddp_with_two_processes(tmp_path):
    """Both ranks: the same gradients as without the engine, and all is undone."""
    results = {}
    for mode in ("plain", "offloaded"):
        command = [sys.executable, __file__, mode, str(tmp_path / mode)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        results[mode] = [torch.load(f"{tmp_path / mode}-{rank}") for rank in (0, 1)]
    for plain, swapped in zip(results["plain"], results["offloaded"], strict=True):
        assert swapped["losses"] == plain["losses"]
        assert all(torch.equal(a, b) for a, b in zip(swapped["weights"], plain["weights"], strict=True))
        assert swapped["swapped"] > 0
        assert swapped["steps"] == 6
        assert swapped["left"] == []
    assert results["plain"][0]["losses"] != results["plain"][1]["losses"]


def main(mode: str, path: str) -> None:
    torch.set_num_threads(1)
    model = make()
    callback = all_on()
    callbacks = [callback] if mode == "offloaded" else []
    trainer = fit(model, *callbacks, strategy="ddp", devices=2, accumulate_grad_batches=2)
    found = {"losses": model.losses, "weights": [parameter.detach() for parameter in model.parameters()]}
    if callbacks:
        left = [name for name in ("forward",) if name in vars(model)]
        left += [name for name in ("training_step",) if name in vars(trainer.strategy)]
        found |= {"swapped": callback.report().swapped.tensors, "steps": callback.report().steps, "left": left}
    torch.save(found, f"{path}-{trainer.global_rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
