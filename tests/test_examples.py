"""Every example in its quick mode, as a user would run it."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from frameworks import need

ROOT = Path(__file__).parents[1]
DEBIANS_IMAGES = Path("/usr/share/datasets/fashion-mnist")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


def output_of(name: str, *arguments: object, launcher: tuple[str, ...] = ()) -> str:
    done = run(name, *arguments, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_idx(path: Path, values: np.ndarray) -> None:
    """An IDX file of bytes."""
    content = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype("u1").tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def images(tmp_path):
    """Four small IDX files, one of them gzipped; the bright rows of an image tell its class."""
    generator = np.random.default_rng(0)
    for part, rows in (("train", 300), ("t10k", 50)):
        labels = generator.integers(0, 10, rows)
        pictures = generator.integers(0, 60, (rows, 28, 28))
        for number, label in enumerate(labels):
            pictures[number, 2 * label : 2 * label + 4] += 180
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", pictures)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{'.gz' if part == 'train' else ''}", labels)
    return tmp_path


def test_every_example_is_run():
    """Here, or under torchrun where the processes are looked at."""
    tests = Path(__file__).read_text() + (ROOT / "tests" / "integrations" / "test_torch_distributed.py").read_text()
    for path in EXAMPLES:
        assert f'"{path.stem}"' in tests or f'"{path.name}"' in tests, path


@pytest.mark.long
def test_keras_gaussian():
    need("keras")
    text = output_of("keras_gaussian", "--quick")
    narrow, wide = text.split("Wide enough")
    assert "NOTHING WAS SWAPPED: every saved tensor was kept" in narrow
    assert "NOTHING WAS SWAPPED" not in wide
    swapped = [line.split()[-2:] for line in wide.splitlines() if line.startswith("swapped")]
    assert swapped[0][1] == "MiB"
    assert "equal losses and accuracies" in wide


@pytest.mark.full
def test_fashion_mnist(images):
    text = output_of("fashion_mnist", "--quick", "--data", images)
    assert "equal within rounding" in text
    assert "swapped" in text
    assert "NOTHING WAS SWAPPED" not in text


@pytest.mark.long
@pytest.mark.skipif(not DEBIANS_IMAGES.is_dir(), reason="apt-get install dataset-fashion-mnist")
def test_fashion_mnist_with_debians_files():
    text = output_of("fashion_mnist", "--quick")
    assert "equal within rounding" in text
    assert "NOTHING WAS SWAPPED" not in text


def test_fashion_mnist_without_its_files(tmp_path):
    done = run("fashion_mnist", "--quick", "--data", tmp_path)
    assert done.returncode == 2
    assert "found no train-images-idx3-ubyte[.gz]" in done.stderr
    assert "apt-get install dataset-fashion-mnist" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_fashion_mnist_with_a_file_cut_off(images):
    path = images / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    done = run("fashion_mnist", "--quick", "--data", images)
    assert done.returncode == 2
    assert "is no IDX file of unsigned bytes: [300, 28, 28] announced, 235199 bytes there" in done.stderr


@pytest.mark.long
def test_image_classifier():
    text = output_of("image_classifier", "--quick")
    assert "equal losses and weights" in text
    assert "waited for data" in text
    assert "NOTHING WAS SWAPPED" not in text


@pytest.mark.full
def test_image_classifier_in_two_processes():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    left_threads = str(ROOT / "tests" / "integrations" / "left_threads.py")
    text = output_of("image_classifier", "--quick", launcher=(*launcher, left_threads))
    assert text.count("equal losses and weights") == 2
    assert text.count("gloo's threads left: 0\n") == 2
    assert "process 1 of 2" in text


@pytest.mark.long
def test_char_gpt():
    offloaded = output_of("char_gpt", "--quick")
    plain = output_of("char_gpt", "--quick", "--plain")
    losses = [line for line in offloaded.splitlines() if line.startswith("step ")]
    assert len(losses) == 20
    assert losses == [line for line in plain.splitlines() if line.startswith("step ")]
    assert "NOTHING WAS SWAPPED" not in offloaded
    assert offloaded.splitlines()[-1] == plain.splitlines()[-1]  # what it writes


@pytest.mark.long
def test_larger_than_memory(tmp_path):
    """`tests/parameters/test_trained_lifetimes.py` runs it under a bound of memory."""
    need("safetensors")
    sizes = ("--layers", 1, "--width", 512, "--steps", 2, "--batch", 1, "--length", 32)
    texts = [
        output_of("larger_than_memory", tmp_path / name, *sizes, *given)
        for name, given in (("moved", ("--stop", 1)), ("moved", ()), ("plain", ("--plain",)))
    ]
    losses = [[line.split()[3] for line in text.splitlines() if line.startswith("step ")] for text in texts]
    assert losses[0] + losses[1] == losses[2]
    assert "leave memory between uses" in texts[1]
