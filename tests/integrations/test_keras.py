"""`OffloadCallback` in `model.fit` of the real Keras: bit-equal weights, and nothing left, however `fit` ends."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
import torch
from frameworks import need

keras = need("keras")

import offload  # noqa: E402
from offload.contrib import LMSCallback  # noqa: E402
from offload.integrations.keras import OffloadCallback  # noqa: E402
from offload.session import session_of  # noqa: E402

ROWS, COLUMNS = 96, 16


def make_model(**compiled) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((COLUMNS,)),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=compiled.pop("accumulation", None))
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"], **compiled
    )
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(ROWS, COLUMNS)).astype("float32"), generator.integers(0, 3, ROWS)


def fit(model: keras.Model, *callbacks, **arguments) -> dict:
    keras.utils.set_random_seed(1)
    x, y = data()
    given = {"batch_size": 32, "epochs": 3, "verbose": 0, **arguments}
    return model.fit(x, y, callbacks=list(callbacks), **given).history


def all_on(kind=OffloadCallback, **options) -> OffloadCallback:
    return kind(**{"n_tensors": -1, "min_tensor_bytes": 1, **options})


def assert_same(model: keras.Model, expected: keras.Model) -> None:
    for a, b in zip(model.weights, expected.weights, strict=True):
        assert torch.equal(a.value, b.value), a.path
    for a, b in zip(model.optimizer.variables, expected.optimizer.variables, strict=True):
        assert torch.equal(a.value, b.value), a.path


def assert_plain(model: keras.Model) -> None:
    """Nothing of ours on it, and the engine can be enabled at once."""
    assert session_of(model) is None
    assert "forward" not in vars(model)
    assert getattr(model.train_function, "callback", None) is None
    with offload.enable(model, n_tensors=-1):
        pass


@pytest.mark.parametrize("accumulation", [None, 2], ids=["plain", "accumulated"])
def test_the_same_weights_losses_and_metrics(accumulation):
    plain, swapped = make_model(accumulation=accumulation), make_model(accumulation=accumulation)
    expected = fit(plain)
    callback = all_on(lb=2)
    assert fit(swapped, callback) == expected
    assert_same(swapped, plain)
    report = callback.report()
    assert report.steps == 9
    assert report.swapped.tensors > 0
    assert_plain(swapped)


def test_figures_are_in_the_epochs_logs_if_asked_for():
    plain, swapped = make_model(), make_model()
    expected = fit(plain)
    rows = []
    behind = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: rows.append(dict(logs)))
    history = fit(swapped, all_on(log=True), behind)
    figures = {name: values for name, values in history.items() if name.startswith("offload/")}
    assert {name: values for name, values in history.items() if name not in figures} == expected
    known = {"peak_mib", "saved_mib", "swapped_mib", "stalled_ms", "slowdown_percent"}
    assert set(figures) == {f"offload/{name}" for name in known}
    assert {len(values) for values in figures.values()} == {3}, "each epoch has each figure"
    assert all(value > 0 for name in ("peak_mib", "swapped_mib") for value in figures[f"offload/{name}"])
    assert np.isnan(figures["offload/saved_mib"]).all(), "n_tensors has no plan"
    assert [row["offload/swapped_mib"] for row in rows] == figures["offload/swapped_mib"]
    assert_same(swapped, plain)


def test_a_ragged_last_batch():
    plain, swapped = make_model(), make_model()
    callback = all_on()
    assert fit(swapped, callback, batch_size=40) == fit(plain, batch_size=40)
    assert_same(swapped, plain)
    assert callback.report().swapped.tensors > 0


def test_validation_and_prediction_are_left_alone():
    plain, swapped = make_model(), make_model()
    callback = all_on()
    x, y = data()
    assert fit(swapped, callback, validation_data=(x, y)) == fit(plain, validation_data=(x, y))
    steps = callback.report().steps
    assert steps == 9
    assert np.array_equal(swapped.predict(x, verbose=0), plain.predict(x, verbose=0))


def test_a_training_step_of_the_users_own_that_does_not_call_the_model():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = keras.Sequential([keras.layers.Dense(32, activation="gelu"), keras.layers.Dense(3)])

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, self.net(x), from_logits=True))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            return {"loss": loss.detach()}

    models = []
    for callbacks in ([], [all_on()]):
        keras.utils.set_random_seed(0)
        model = Own()
        model.compile("adam", "sparse_categorical_crossentropy")
        fit(model, *callbacks)
        models.append(model)
    assert_same(*models)
    assert callbacks[0].report().steps == 9
    assert callbacks[0].report().swapped.tensors > 0


def test_the_ancestors_callback():
    plain, swapped = make_model(), make_model()
    callback = LMSCallback(2, 1, min_tensor_bytes=1)
    assert fit(swapped, callback) == fit(plain)
    assert_same(swapped, plain)
    report = callback.report()
    assert report.swapped.tensors > 0
    assert report.kept["n_tensors"].tensors > 0
    assert (callback.handle._options.n_tensors, callback.handle._options.lookahead_nodes) == (2, 1)
    assert (LMSCallback()._switch.options) == {"n_tensors": -1, "lb": 1}


def test_it_can_be_used_for_another_fit():
    plain, swapped = make_model(), make_model()
    callback = all_on()
    for _ in range(2):
        assert fit(swapped, callback) == fit(plain)
    assert_same(swapped, plain)
    assert_plain(swapped)


class Failing(keras.callbacks.Callback):
    """Raises in one of Keras's calls."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        super().__init__()
        setattr(self, where, self.fail)
        self.error = error

    def fail(self, *args, **kwargs):
        raise self.error("on purpose")


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_exception_in_the_step_leaves_nothing_wrapped(error):
    model = make_model()
    callback = all_on()
    step = type(model).train_step
    calls = []

    def failing(data):
        result = step(model, data)
        calls.append(data)
        if len(calls) == 4:
            raise error("on purpose")
        return result

    model.train_step = failing
    with pytest.raises(error, match="on purpose"):
        fit(model, callback)
    assert callback.report().steps == 4
    assert_plain(model)
    del model.train_step
    fit(model, callback)
    assert callback.report().steps == 9


@pytest.mark.parametrize("where", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_end", "on_train_begin"])
def test_an_exception_of_another_callback_leaves_nothing_wrapped(where):
    model = make_model()
    callback = all_on()

    def run() -> None:
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(model, callback, Failing(where, RuntimeError))

    run()
    gc.collect()
    assert_plain(model)


@pytest.mark.parametrize("where", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_end", "on_test_begin"])
def test_an_exception_that_somebody_keeps_leaves_nothing_wrapped(where):
    """A notebook keeps the last exception, and with it the frame of `fit`."""
    model = make_model()
    with pytest.raises(RuntimeError, match="on purpose") as kept_alive:
        fit(model, all_on(), Failing(where, RuntimeError), validation_data=data())
    assert kept_alive.value is not None
    assert not {"forward", "evaluate"} & set(vars(model))
    assert_plain(model)


def test_a_data_set_that_raises_leaves_nothing_wrapped():
    model = make_model()
    callback = all_on()
    x, y = data()

    def batches():
        yield x[:32], y[:32]
        yield x[:32], y[:32]
        raise OSError("the disk is gone")

    def run() -> None:
        with pytest.raises(OSError, match="the disk is gone"):
            model.fit(batches(), steps_per_epoch=5, epochs=2, verbose=0, callbacks=[callback])

    run()
    for _ in range(100):  # a collection does nothing while another thread collects
        gc.collect()
        assert callback.report().swapped.tensors > 0
        if session_of(model) is None:
            break
        time.sleep(0.01)
    assert_plain(model)


def test_a_fit_without_epochs_is_said_and_leaves_nothing():
    model, callback = make_model(), all_on()
    assert fit(model, callback, epochs=0) == {}
    assert "no training step has run yet" in str(callback.report())
    assert_plain(model)


def test_what_an_interrupted_fit_has_left_is_undone_by_the_next():
    plain, model = make_model(), make_model()
    callback = all_on()
    with pytest.raises(RuntimeError, match="on purpose") as kept_alive:
        fit(model, callback, Failing("on_train_begin", RuntimeError))
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(plain, Failing("on_train_begin", RuntimeError))
    assert fit(model, callback) == fit(plain)
    assert_same(model, plain)
    assert kept_alive.value is not None
    assert_plain(model)


@pytest.mark.parametrize("same", [True, False], ids=["one object", "two objects"])
def test_twice_is_an_error_and_leaves_nothing(same):
    model = make_model()
    callback = all_on()
    with pytest.raises(ValueError, match="hold OffloadCallback twice; keep one of them"):
        fit(model, callback, callback if same else all_on())
    assert_plain(model)


def test_a_model_that_is_enabled_already_stays_so():
    model = make_model()
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle:
        with pytest.raises(ValueError, match="already enabled on this model, so a Keras OffloadCallback cannot enable"):
            fit(model, all_on())
        fit(model)
    assert handle.report().swapped.tensors > 0
    assert_plain(model)


def test_checkpoints_are_those_of_a_plain_model_and_training_resumes(tmp_path):
    x, y = data()

    def two_epochs(model, *callbacks):
        keras.utils.set_random_seed(2)
        model.fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))

    resumed = []
    for callbacks in ([], [all_on()]):
        model = make_model()
        names = list(model.state_dict())
        two_epochs(model, *callbacks, keras.callbacks.ModelCheckpoint(tmp_path / "saved.keras"))  # saves meanwhile
        assert list(model.state_dict()) == names
        keras.utils.set_random_seed(3)
        again = keras.saving.load_model(tmp_path / "saved.keras")
        two_epochs(again, *callbacks)
        resumed.append(again)
    assert callbacks[0].report().swapped.tensors > 0
    assert_same(*resumed)


@pytest.mark.parametrize("asked", [True, "auto", False])
def test_gradients_cannot_leave(asked):
    with pytest.raises(ValueError, match=r"gradients=True cannot be used with Keras, .* leave it out"):
        OffloadCallback(optimizer_state=asked, gradients=True)
    OffloadCallback(gradients=False)


def test_wrong_option_and_wrong_backend(monkeypatch):
    with pytest.raises(TypeError, match=r"takes the knobs of offload.enable \(.*n_tensors.*\), not 'tensors'"):
        OffloadCallback(tensors=3)
    with pytest.raises(ValueError, match="n_tensors must be -1"):
        fit(make_model(), OffloadCallback(n_tensors=-7))
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="Keras runs on jax: set KERAS_BACKEND=torch"):
        OffloadCallback()
