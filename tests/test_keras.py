"""Whole trainings with Keras: what they learn, and what they cost. Of the long tier."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import datasets
import pytest
from launch import ROOT, mpirun
from numpy.testing import assert_allclose


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fashion_mnist_is_learned_as_well_as_without_compression(tmp_path: Path) -> None:
    if not datasets.FASHION_MNIST.is_dir():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    done = mpirun(2, ROOT / "examples" / "demo.py", "--keras", "--seeds", "1", "--output", tmp_path, timeout=1100)
    assert done.returncode == 0, done.stdout
    runs = {name: run for name, (run,) in json.loads((tmp_path / "runs.json").read_text()).items()}
    left = {"DORE": 0.05, "Sketched-SGD": 0.11, "ATOMO": 0.05}  # of the dense bytes: as with PyTorch
    for method, share in left.items():
        (name,) = [name for name in runs if name.startswith(method)]
        assert runs[name]["accuracies"][-1] > runs["dense"]["accuracies"][-1] - 0.01, done.stdout
        assert runs[name]["counted"] < share * runs[name]["dense"], done.stdout
        assert_allclose(runs[name]["formula"], runs[name]["counted"], rtol=0.02)
        seen = scalars(tmp_path / "tensorboard", name.split(",")[0].replace(" ", "-"))
        assert len(seen["epoch_compression_ratio"]) == len(runs[name]["accuracies"])
        assert_allclose(seen["epoch_compression_bytes"], runs[name]["counted"], rtol=0.02)
        assert all(value > 0 for value in seen["epoch_compression_residual"]) == (method != "ATOMO")


def scalars(board: Path, start: str) -> dict[str, list[float]]:
    """What TensorBoard's files of a training say, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    (training,) = board.glob(f"{start}*")
    events = EventAccumulator(str(training / "train"))
    events.Reload()
    names = events.Tags()["tensors"]
    return {
        name: [float(make_ndarray(event.tensor_proto)) for event in events.Tensors(name)] for name in names if "epoch" in name
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_160_variables_costs_little_more_than_plain_horovod() -> None:
    script = ROOT / "benchmarks" / "tensorflow_step.py"
    done = mpirun(2, script, "--json", "--compression", "dore", timeout=800)
    (line,) = [line for line in done.stdout.splitlines() if '{"plain"' in line]
    figures = json.loads(line[line.index("{") :])
    plain, compressed = (
        {key: median(run[key] for run in figures[which]) for key in ("first epoch", "step")} for which in ("plain", "compressed")
    )
    assert compressed["first epoch"] <= plain["first epoch"], figures
    assert compressed["step"] <= 2 * plain["step"], figures
    assert figures["memory"]["traces"] == 0, figures
    assert figures["memory"]["grown"] < 0.02 * figures["memory"]["MiB"], figures
