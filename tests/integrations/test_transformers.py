"""The mixin and the callback in the real Trainer: bit-equal weights, and nothing left, however `train` ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from frameworks import ONE_WAY, need

transformers = need("transformers")
need("accelerate")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

import offload  # noqa: E402
from offload.integrations.transformers import OffloadTrainerCallback, OffloadTrainerMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ON = {"n_tensors": -1, "min_tensor_bytes": 1}


class Rows(torch.utils.data.Dataset):
    """Sequences of two lengths, so that batches have two shapes; one row may be unreadable."""

    def __init__(self, fails_at: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(64, (12 if number < 8 else 20,), generator=generator) for number in range(18)]
        self.fails_at = fails_at

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number == self.fails_at:
            raise OSError("the disk is gone")
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


class Unshuffled(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class OffloadUnshuffled(OffloadTrainerMixin, Unshuffled):
    """What a user writes."""


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def arguments(path: Path, **changes) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    }
    return TrainingArguments(output_dir=str(path), **{**given, **changes})


def train(path: Path, how: str, callbacks=(), rows: Rows | None = None, resume=None, model=None, **changes):
    """Train plainly, with the mixin or with the callback: the model, and the handle where there is one."""
    model = model if model is not None else make_model()
    given = {"model": model, "args": arguments(path, **changes), "train_dataset": rows or Rows()}
    if how == "mixin":
        trainer = OffloadUnshuffled(**given, callbacks=list(callbacks), offload=ON)
        with settled(model, lambda: trainer.offload_handle):
            trainer.train(resume_from_checkpoint=resume)
        return model, trainer.offload_handle
    own = OffloadTrainerCallback(**ON) if how == "callback" else None
    trainer = Unshuffled(**given, callbacks=[*([own] if own else []), *callbacks])
    with settled(model, lambda: own and own.handle):
        trainer.train(resume_from_checkpoint=resume)
    return model, own and own.handle


@contextmanager
def settled(model, handle: Callable) -> Iterator[None]:
    """All that is to leave has left when backward begins: what is still leaving is taken back, not prefetched."""
    hook = model.register_forward_hook(lambda *_: handle() and handle()._engine.drain())
    try:
        yield
    finally:
        hook.remove()


def assert_same(model, expected) -> None:
    assert list(model.state_dict()) == list(expected.state_dict())
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def assert_plain(model) -> None:
    with offload.enable(model, n_tensors=-1):
        pass


SWITCHES = [
    {},
    pytest.param({"gradient_accumulation_steps": 3}, marks=pytest.mark.full),
    pytest.param({"bf16": True}, marks=pytest.mark.full),
    {"gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 0.1},
]


@pytest.mark.parametrize("how", ["mixin", "callback"])
@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: ", ".join(switch) or "plain")
def test_the_same_weights(how, switch, tmp_path):
    plain, _ = train(tmp_path, "plain", **switch)
    swapped, handle = train(tmp_path, how, **switch)
    assert_same(swapped, plain)
    report = handle.report()
    assert report.steps == 10
    assert report.swapped.tensors > 0
    assert report.prefetched > 0
    assert_plain(swapped)


@pytest.mark.parametrize("how", ONE_WAY)
def test_gradient_checkpointing_composes_and_is_said(how, tmp_path):
    plain, _ = train(tmp_path, "plain", gradient_checkpointing=True)
    swapped, handle = train(tmp_path, how, gradient_checkpointing=True)
    assert_same(swapped, plain)
    assert handle.report().swapped.tensors > 0
    assert "gradient checkpointing is on: tensors inside its blocks are recomputed" in str(handle.report())


@pytest.mark.parametrize("how", ONE_WAY)
def test_evaluation_is_left_alone(how, tmp_path):
    class Evaluating(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = state.global_step == 2

    model = make_model()
    given = {"model": model, "args": arguments(tmp_path), "train_dataset": Rows(), "eval_dataset": Rows()}
    if how == "mixin":
        trainer = OffloadUnshuffled(**given, callbacks=[Evaluating()], offload=ON)
    else:
        callback = OffloadTrainerCallback(**ON)
        trainer = Unshuffled(**given, callbacks=[callback, Evaluating()])
    trainer.train()
    handle = trainer.offload_handle if how == "mixin" else callback.handle
    assert handle.report().steps == 10
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("how", ONE_WAY)
def test_resuming_from_a_checkpoint(how, tmp_path):
    plain, _ = train(tmp_path / "plain", "plain", save_strategy="epoch")
    swapped, _ = train(tmp_path / how, how, save_strategy="epoch")
    assert_same(swapped, plain)
    saved = tmp_path / how / "checkpoint-5"
    assert sorted(path.name for path in saved.iterdir()) == sorted(
        path.name for path in (tmp_path / "plain" / "checkpoint-5").iterdir()
    )
    resumed, handle = train(tmp_path / how, how, resume=str(saved))
    assert_same(resumed, plain)
    assert handle.report().steps == 5
    assert handle.report().swapped.tensors > 0


def fail(*args, **kwargs):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("how", ["mixin", "callback"])
@pytest.mark.parametrize("where", ["forward", "backward", "loader"])
def test_an_exception_in_a_step_leaves_nothing_wrapped(how, where, tmp_path):
    model = make_model()
    hook = None
    if where == "forward":
        hook = model.lm_head.register_forward_pre_hook(fail)
    elif where == "backward":
        hook = model.transformer.wte.weight.register_hook(fail)
    rows = Rows(fails_at=6 if where == "loader" else None)
    with pytest.raises((RuntimeError, OSError), match=r"on purpose|the disk is gone"):
        train(tmp_path, how, model=model, rows=rows)
    assert_plain(model)
    if hook is not None:
        hook.remove()
    _, handle = train(tmp_path, how, model=model)
    assert handle.report().steps == 10


@pytest.mark.parametrize("how", ONE_WAY)
def test_a_smaller_batch_after_running_out_of_memory(how, tmp_path):
    """`auto_find_batch_size` begins anew within one call of `train`."""
    model, rows, calls = make_model(), Rows(), []
    rows.rows = [row[:12] for row in rows.rows]

    def refuse_once(module, args):
        calls.append(args[0].shape[0])
        if len(calls) == 2:
            raise RuntimeError("CUDA out of memory. On purpose")

    hook = model.lm_head.register_forward_pre_hook(refuse_once)
    changes = {"auto_find_batch_size": True, "per_device_train_batch_size": 8, "num_train_epochs": 1}
    _, handle = train(tmp_path, how, model=model, rows=rows, **changes)
    hook.remove()
    assert calls[0] == calls[1] > calls[2]
    assert handle.report().swapped.tensors > 0
    assert_plain(model)


def failing(where: str) -> TrainerCallback:
    """Evaluates after the first step, and raises in one of the Trainer's events."""

    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = True

    setattr(Failing, where, fail)
    return Failing()


@pytest.mark.parametrize("how", ONE_WAY)
@pytest.mark.parametrize("where", ["on_step_begin", "on_step_end", "on_prediction_step", "on_epoch_end"])
def test_an_exception_of_another_callback_leaves_nothing_wrapped(how, where, tmp_path):
    model = make_model()
    own = OffloadTrainerCallback(**ON)
    given = {"model": model, "args": arguments(tmp_path), "train_dataset": Rows(), "eval_dataset": Rows()}
    if how == "mixin":
        trainer = OffloadUnshuffled(**given, callbacks=[failing(where)], offload=ON)
    else:
        trainer = Unshuffled(**given, callbacks=[own, failing(where)])
    wrappable = [trainer, trainer.callback_handler, model]
    before = [set(vars(target)) for target in wrappable]
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.train()
    for target, names in zip(wrappable, before, strict=True):
        left = set(vars(target)) - names
        assert not left & {"forward", "training_step", "get_batch_samples", "call_event", "evaluate"}, left
    assert_plain(model)


def test_what_an_interrupted_run_has_left_is_undone_by_the_next(tmp_path):
    model, other = make_model(), failing("on_train_begin")
    callback = OffloadTrainerCallback(**ON)
    trainer = Unshuffled(model=model, args=arguments(tmp_path), train_dataset=Rows(), callbacks=[callback, other])
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.train()
    trainer.remove_callback(other)
    trainer.train()
    assert callback.report().steps == 10
    assert "training_step" not in vars(trainer)
    assert_plain(model)


@pytest.mark.parametrize("same", [True, False], ids=["one object", "two objects"])
def test_twice_is_an_error_and_leaves_nothing(same, tmp_path):
    callback = OffloadTrainerCallback(**ON)
    other = callback if same else OffloadTrainerCallback(**ON)
    model = make_model()
    trainer = Unshuffled(model=model, args=arguments(tmp_path), train_dataset=Rows(), callbacks=[callback, other])
    with pytest.raises(ValueError, match="has OffloadTrainerCallback twice; keep one of them"):
        trainer.train()
    assert not {"training_step", "get_batch_samples"} & set(vars(trainer))
    assert_plain(model)


@pytest.mark.parametrize("how", ONE_WAY)
def test_a_model_that_is_enabled_already_stays_so(how, tmp_path):
    model = make_model()
    with offload.enable(model, **ON):
        with pytest.raises(ValueError, match="already enabled on this model, so "):
            train(tmp_path, how, model=model)
        assert "forward" in vars(model)
    assert_plain(model)


def test_mixin_and_callback_together_are_refused(tmp_path):
    model = make_model()
    with pytest.raises(ValueError, match="already enabled on this model, so OffloadUnshuffled cannot"):
        train(tmp_path, "mixin", model=model, callbacks=[OffloadTrainerCallback(**ON)])
    assert_plain(model)


@pytest.mark.parametrize("how", ONE_WAY)
def test_the_trainers_own_offloading_is_refused_with_the_reason(how, tmp_path):
    model = make_model()
    with pytest.raises(ValueError, match=r'_kwargs=\{"offload": True\}\) moves the same tensors itself'):
        train(
            tmp_path,
            how,
            model=model,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"offload": True, "use_reentrant": False},
        )
    assert_plain(model)


@pytest.mark.parametrize("how", ONE_WAY)
def test_data_parallel_is_refused(how, tmp_path, monkeypatch):
    model = make_model()
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"DataParallel over 2 GPUs .* run torchrun --nproc_per_node=N"):
        train(tmp_path, how, model=model)
    assert_plain(model)


def test_a_run_without_steps_is_said_and_leaves_nothing(tmp_path):
    model, expected = make_model(), make_model()
    _, handle = train(tmp_path, "callback", model=model, num_train_epochs=0)
    assert handle.report().steps == 0
    assert "no training step has run yet" in str(handle.report())
    with pytest.raises(RuntimeError, match="OffloadUnshuffled has no session yet: it begins with training"):
        train(tmp_path, "mixin", model=model, num_train_epochs=0)  # the mixin is on from the first loss
    assert_same(model, expected)
    assert_plain(model)


@pytest.mark.parametrize("how", ONE_WAY)
def test_figures_are_logged_with_the_loss_and_shown_in_the_progress_bar(how, tmp_path):
    logged: list[dict[str, float]] = []
    shown: list[str] = []

    class Listener(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.append(dict(logs))

    class Bar(TrainerCallback):
        @property
        def training_bar(self):
            return self

        def set_postfix(self, values, refresh=True):
            shown.append(values["peak"])

    train(tmp_path, how, callbacks=[Listener(), Bar()], logging_strategy="steps", logging_steps=1)
    with_loss = [row for row in logged if "loss" in row]
    assert with_loss
    assert all({"offload/peak_mib", "offload/stalled_ms"} <= set(row) for row in with_loss)
    assert "offload/slowdown_percent" in with_loss[-1]
    assert not any("offload/peak_mib" in row for row in logged if "loss" not in row)
    assert len(shown) == len(with_loss)


def test_wrong_option(tmp_path):
    with pytest.raises(TypeError, match=r"takes the knobs of offload.enable .*, not 'tensors'"):
        OffloadTrainerCallback(tensors=3)
    with pytest.raises(TypeError, match=r"OffloadUnshuffled takes the knobs of offload.enable .*, not 'tensors'"):
        OffloadUnshuffled(model=make_model(), args=arguments(tmp_path), offload={"tensors": 3})
