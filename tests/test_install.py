"""The package as others install it: a wheel, without Horovod or any framework, used from another directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launch import ROOT

PROGRAM = """
import importlib.util, pathlib, sys
import numpy as np
import hvdcompress
from hvdcompress import Dore, Layout
from hvdcompress.drivers.simulate import Simulation
assert pathlib.Path(hvdcompress.__file__).is_relative_to(sys.argv[1]), hvdcompress.__file__
assert not any(importlib.util.find_spec(name) for name in ("torch", "tensorflow", "horovod", "mpi4py")), "a framework is here"
mean = Simulation(Dore(), Layout.of([("w", (1000,))]), 2).step([[np.ones(1000, np.float32)]] * 2)
np.testing.assert_array_equal(mean[0], 1)
"""


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_wheel_works_without_any_framework_from_another_directory(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist"]
    run(*build, "--config-settings=--build-option=--quiet", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("hvdcompress-*.whl")
    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    numpy_only = tmp_path / "numpy"
    numpy_only.mkdir()
    import numpy

    for part in Path(numpy.__file__).parent.parent.glob("numpy*"):
        (numpy_only / part.name).symlink_to(part)
    # -S: without site-packages, where the frameworks are.
    program = f"import sys; sys.path[:0] = [{str(target)!r}, {str(numpy_only)!r}]\n{PROGRAM}"
    run(sys.executable, "-S", "-c", program, target, cwd=tmp_path)
