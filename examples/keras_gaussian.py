"""A Keras model on 200,000 Gaussian rows, with the callback and without: what it does where there is little to do.

The demonstration that TensorFlow Large Model Support came with: three features, two classes, batches of 8. What such a
step saves for backward is a few hundred bytes. Swapping those would cost time and free nothing, and the report says so.
The second part is wide enough for swapping to make a difference.

    python examples/keras_gaussian.py [--quick | --whole]

Of the 25,000 batches of 8 an epoch here has 5,000; with --whole it has all, which takes some ten minutes on two cores.
"""

import argparse
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

from offload.integrations.keras import OffloadCallback
from offload.units import format_bytes


def gaussian_rows(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Two classes, normally distributed around two points of a space of three dimensions."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, rows)
    return (generator.normal(size=(rows, 3)) + labels[:, None]).astype("float32"), labels


def train(
    rows: int, batch: int, width: int, steps: int | None, callback: OffloadCallback | None
) -> dict[str, list[float]]:
    """The losses and accuracies of one epoch, from a seed; `steps` where it shall not be all of the rows."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = gaussian_rows(rows)
    callbacks = [] if callback is None else [callback]
    history: dict[str, list[float]] = model.fit(
        x, y, batch_size=batch, steps_per_epoch=steps, verbose=0, callbacks=callbacks
    ).history
    return history


def compare(title: str, rows: int, batch: int, width: int, steps: int | None = None, **options: object) -> bool:
    """Train with the callback and without; whether both gave the same."""
    plain = train(rows, batch, width, steps, None)
    callback = OffloadCallback(**options)
    offloaded = train(rows, batch, width, steps, callback)
    report = callback.report()
    print(f"{title}: {rows} rows, {steps or -(-rows // batch)} batches of {batch}, width {width}")
    print(f"{'':12}{'plain':>22}{'offloaded':>22}")
    for name in plain:
        print(f"{name:12}{plain[name][-1]:>22.16f}{offloaded[name][-1]:>22.16f}")
    print(f"{'swapped':12}{'–':>22}{format_bytes(report.swapped.nbytes):>22}")
    print(*(f"note: {note}\n" for note in report.notes), sep="")
    return plain == offloaded


def main() -> int:
    """Both parts; 1 where a loss or an accuracy differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--quick", action="store_true", help="fewer rows: some seconds")
    much.add_argument("--whole", action="store_true", help="all 25,000 batches of 8: minutes")
    args = parser.parse_args()
    quick = args.quick
    same = compare("As it was", 2_000 if quick else 200_000, 8, 8, None if quick or args.whole else 5_000)
    wide = {"rows": 8_192, "batch": 4_096, "width": 128} if quick else {"rows": 131_072, "batch": 32_768, "width": 512}
    same &= compare("Wide enough", **wide, n_tensors=-1, min_tensor_bytes="1MiB")
    print("equal losses and accuracies" if same else "LOSSES OR ACCURACIES DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
