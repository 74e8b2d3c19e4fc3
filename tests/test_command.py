"""The command line: what it says, and what it says where something is wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from launch import ROOT, mpirun

from hvdcompress import make
from hvdcompress.command import models, plan
from hvdcompress.command.app import app, bandwidth
from hvdcompress.core import Group, Layout

# Parameters of the published networks.
PUBLISHED = {"resnet50": 25_557_032, "vgg16": 138_357_544, "bert-base": 109_482_240, "gpt2": 124_439_808}


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_models_have_as_many_parameters_as_they_should(name: str) -> None:
    assert models.elements(models.tensors_of(name)) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "parameters"), [("mlp", 5_695_510), ("small", 669_706), ("cnn", 215_434)])
def test_models_of_the_benchmarks_are_those_of_the_benchmarks(name: str, parameters: int) -> None:
    assert models.elements(models.tensors_of(name)) == parameters


def test_shapes_and_models_are_read_from_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [shape for _, shape in models.tensors_of("10x20,10")] == [(10, 20), (10,)]
    (tmp_path / "mine.py").write_text("import torch\ndef net():\n    return torch.nn.Linear(3, 4)\n")
    monkeypatch.chdir(tmp_path)
    assert models.tensors_of("mine:net") == [("weight", (4, 3)), ("bias", (4,))]
    for bad in ("nothing", "3x-1", "mine:other", "absent:net", ""):
        with pytest.raises(ValueError):
            models.tensors_of(bad)


def test_bytes_of_a_plan_are_those_of_the_formulas() -> None:
    tensors = [("w", (1000, 1000)), ("b", (1000,))]
    found = {c.method: c for c in plan.costs(tensors, 4, plan.Network.of_rate(1e8), ("none", "fp16", "qsgd:exchange=auto"))}
    dense = 2 * 3 / 4 * 4 * 1_001_000
    assert found["none"].bytes == dense
    assert found["fp16"].bytes == dense / 2
    layout = Layout.of([("w", (1000, 1000))])
    beside = 2 * 3 / 4 * (4 * 1000 + 2 * 8)
    assert found["qsgd:exchange=auto"].bytes == pytest.approx(make("qsgd").wire_bytes(layout, Group(0, 4)) + beside, rel=1e-3)
    wire = found["none"].bytes / (1e8 / 8 / plan.FRAMES)
    assert found["none"].wire == pytest.approx(wire)
    assert found["none"].seconds == pytest.approx(wire + 2e-3)


def test_a_slow_network_asks_for_compression_and_a_fast_one_does_not() -> None:
    slow = run("plan", "--model", "mlp", "--bandwidth", "100mbit", "--method", "none", "--method", "fp16", "--method", "dore")
    assert "Take dore" in slow
    million = ("plan", "--model", "1000x1000", "--method", "none", "--method", "fp16", "--method", "dore")
    assert "Do not compress" in run(*million, "--bandwidth", "100gbit")


def test_more_ranks_than_are_simulated_cost_more_where_payloads_are_gathered() -> None:
    layout = Layout.of([("w", (512, 512))])
    few, many = (plan._measure(make("topk"), layout, ranks, models.BATCH).seconds for ranks in (8, 64))
    assert math.isfinite(many) and many > few


def test_drawn_gradients_have_the_rank_of_a_batch_and_a_plan_goes_by_it() -> None:
    shapes = [(600, 600), (600,), (8, 4, 3, 3), (20, 30)]
    drawn = models.gradient(shapes, 64, seed=1)
    assert drawn.dtype == np.float32 and drawn.size == sum(math.prod(shape) for shape in shapes)
    assert np.linalg.matrix_rank(drawn[:360_000].reshape(600, 600)) == 64
    assert np.linalg.matrix_rank(drawn[-600:].reshape(20, 30)) == 20
    assert drawn[:360_000].std() == pytest.approx(1, rel=0.05)
    network = plan.Network.of_rate(1e9)
    small, whole = (plan.costs([("w", (600, 600))], 2, network, ["atomo"], batch=batch)[0] for batch in (64, 600))
    assert 2 * small.arithmetic < whole.arithmetic


def test_the_plan_goes_by_what_bench_has_measured(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    network = {"exchange": 1e6, "allreduce": 2e6, "latency": 0.01, "contention": 3.0}
    path.write_text(json.dumps({"ranks": 2, "network": network}))
    output = run("plan", "--model", "1000x1000", "--bench", str(path), "--method", "none")
    assert "2 ranks" in output and "allreduce 16 Mbit/s, exchange 8 Mbit/s" in output and "3.0 times" in output
    assert "2010.0" in output  # ms: 4 MB at 2 MB/s, and a round


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan",), "--bandwidth"),
        (("plan", "--bandwidth", "fast"), "is no bandwidth"),
        (("plan", "--bandwidth", "1gbit", "--model", "nothing"), "is no model"),
        (("plan", "--bandwidth", "1gbit", "--model", "10x10", "--method", "nothing"), "no method"),
        (("plan", "--bandwidth", "1gbit", "--model", "10x10", "--method", "dore:alfa=1"), "no option"),
        (("plan", "--bandwidth", "1gbit", "-np", "1"), "-np"),
    ],
)
def test_what_is_wrong_is_said(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 0
    assert said in result.output


def test_bandwidths_are_read() -> None:
    assert [bandwidth(text) for text in ("100mbit", "2.5gbit", "10 Gbit/s", "25Gbps", "1000")] == [1e8, 2.5e9, 1e10, 2.5e10, 1e3]


def test_without_its_packages_the_command_line_says_what_to_install() -> None:
    program = "import sys; sys.modules['click'] = None; import hvdcompress.command as c; c.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "hvdcompress[cli]" in done.stderr


def test_the_doctor_finds_this_machine_well_and_says_what_is_not() -> None:
    # os.environ, since MPI leaves variables for its children in the process that the tests run in.
    words = [sys.executable, "-m", "hvdcompress.command", "doctor"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=150, cwd=ROOT, env=dict(os.environ))
    assert done.returncode == 0, done.stdout
    for line in (
        "kernels: compiled",
        "horovod with PyTorch: built with MPI",
        "mpirun with 2 ranks: answer",
        "versions: the same",
    ):
        assert line in done.stdout, done.stdout
    environment = {**os.environ, "PATH": "/nowhere", "HVDCOMPRESS_KERNELS": "numpy"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=150, cwd=ROOT, env=environment)
    assert done.returncode == 1
    assert "NO" in done.stdout and "install Open MPI" in done.stdout and "C++ compiler" in done.stdout


def test_bench_measures_and_its_figures_are_planned_with(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    options = ["--model", "400x300,300", "--repeats", "2", "--method", "none", "--method", "dore", "--output", str(path)]
    done = mpirun(2, "-m", "hvdcompress.command", "bench", *options, timeout=150)
    assert done.returncode == 0, done.stdout
    figures = json.loads(path.read_text())
    assert figures["ranks"] == 2 and set(figures["methods"]) == {"none", "dore"}
    assert all(len(one["seconds"]) == 2 and min(one["seconds"]) > 0 for one in figures["methods"].values())
    assert np.all(np.array(list(figures["network"].values())) > 0)
    assert "bytes sent" in done.stdout
    assert "ranks" in run("plan", "--bench", str(path), "--model", "400x300,300", "--method", "none", "--method", "dore")
