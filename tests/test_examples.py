"""The examples, run as a user would, for some steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from launch import ROOT, mpirun
from numpy.testing import assert_allclose

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_is_short(path) -> None:
    assert path.name.startswith("demo") or len(path.read_text().splitlines()) < 120


def test_digits_are_learned_with_every_compression() -> None:
    for compression in ("none", "fp16", "dore"):
        options = ["--compression", compression, "--data", "digits", "--epochs", "6", "--lr", "0.05"]
        done = mpirun(2, EXAMPLES / "pytorch_fashion_mnist.py", *options, timeout=100)
        assert done.returncode == 0, done.stdout
        accuracies = [float(a) for a in re.findall(r"test accuracy ([\d.]+)%", done.stdout)]
        assert len(accuracies) == 6 and accuracies[-1] > 85, done.stdout


def test_one_rank_alone() -> None:
    done = mpirun(1, EXAMPLES / "pytorch_fashion_mnist.py", "--data", "digits", "--epochs", "1", timeout=60)
    assert done.returncode == 0, done.stdout
    assert "test accuracy" in done.stdout, done.stdout
    assert "dense bytes" not in done.stdout, done.stdout


def test_fashion_mnist_for_some_steps() -> None:
    if not datasets.FASHION_MNIST.is_dir():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    done = mpirun(2, EXAMPLES / "pytorch_fashion_mnist.py", "--max-steps", "60", "--lr", "0.05", timeout=100)
    assert done.returncode == 0, done.stdout
    (accuracy, left), *_ = re.findall(r"test accuracy ([\d.]+)%, ([\d.]+)% of the dense bytes", done.stdout)
    assert float(accuracy) > 50 and float(left) < 6, done.stdout


@pytest.mark.parametrize("compression", ["dore:block=64,scales=byte", pytest.param("none", marks=pytest.mark.slow)])
def test_digits_are_learned_with_keras(compression: str, tmp_path: Path) -> None:
    options = ["--compression", compression, "--data", "digits", "--epochs", "6", "--lr", "0.05", "--logs", tmp_path]
    done = mpirun(2, EXAMPLES / "keras_fashion_mnist.py", *options, timeout=100)
    assert done.returncode == 0, done.stdout
    accuracies = [float(a) for a in re.findall(r"val_accuracy: ([\d.]+)", done.stdout)]
    assert len(accuracies) == 6 and accuracies[-1] > 0.85, done.stdout
    assert ("compression_ratio: 0.0" in done.stdout) == (compression != "none"), done.stdout
    assert list((tmp_path / "train").glob("events.*"))


@pytest.mark.slow
def test_digits_are_learned_in_a_loop_of_ones_own() -> None:
    options = ["--compression", "sketch:momentum=0", "--data", "digits", "--epochs", "6"]
    done = mpirun(2, EXAMPLES / "tensorflow_custom_loop.py", *options, timeout=100)
    assert done.returncode == 0, done.stdout
    found = re.findall(r"test accuracy ([\d.]+)%, ([\d.]+)% of the dense bytes", done.stdout)
    assert len(found) == 6 and float(found[-1][0]) > 85 and float(found[-1][1]) < 13, done.stdout


@pytest.mark.parametrize(("ranks", "left"), [(1, 1e-2), (3, 1e-4)])  # the rows of one rank are a worse conditioned problem
def test_least_squares_over_mpi4py(ranks: int, left: float) -> None:
    done = mpirun(ranks, EXAMPLES / "mpi4py_least_squares.py", "--steps", "900", timeout=100)
    assert done.returncode == 0, done.stdout
    distances = [float(x) for x in re.findall(r"distance to the solution ([\d.e+-]+)", done.stdout)]
    assert len(distances) >= 3 and distances[-1] < left * distances[0], done.stdout


def test_both_data_sets_are_split_and_standardised() -> None:
    names = ["digits"] + (["fashion-mnist"] if datasets.FASHION_MNIST.is_dir() else [])
    for name, sizes in zip(names, ((1200, 200, 397), (50_000, 10_000, 10_000))):
        splits = datasets.load(name)
        assert tuple(len(images.y) for images in splits) == sizes
        assert_allclose([splits.train.x.mean(), splits.train.x.std()], [0, 1], atol=1e-3)
        assert all(set(np.unique(images.y)) == set(range(10)) and images.x.ndim == 4 for images in splits)
    with pytest.raises(ValueError, match="no data set 'cifar'"):
        datasets.load("cifar")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("paper", ["atomo", "dore", "sketched_sgd"])
def test_papers_experiments_in_short(paper: str, tmp_path: Path) -> None:
    line = [sys.executable, ROOT / "benchmarks" / "papers" / f"{paper}.py", "--quick", "--output", tmp_path]
    done = subprocess.run(line, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "┃" in done.stdout and list(tmp_path.glob("*.png")), done.stdout[-2000:]
