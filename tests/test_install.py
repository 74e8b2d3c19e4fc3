"""The package as others install it: a wheel, without Horovod or any framework, used from another directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import copy_of_tracked_files

PROGRAM = """
import importlib.util, pathlib, sys, warnings
import numpy as np
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import hvdcompress
from hvdcompress import kernels
compiled = sys.argv[2] == "True"
assert (kernels.implementation() != "numpy") == compiled, kernels.implementation()
assert ["compiled kernels are not there" in str(w.message) for w in told] == ([] if compiled else [True]), told
from hvdcompress import Dore, Layout
from hvdcompress.drivers.simulate import Simulation
assert pathlib.Path(hvdcompress.__file__).is_relative_to(sys.argv[1]), hvdcompress.__file__
assert not any(importlib.util.find_spec(name) for name in ("torch", "tensorflow", "horovod", "mpi4py")), "a framework is here"
mean = Simulation(Dore(), Layout.of([("w", (1000,))]), 2).step([[np.ones(1000, np.float32)]] * 2)
np.testing.assert_array_equal(mean[0], 1)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    line = [str(part) for part in command]
    done = subprocess.run(line, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("compiler", [True, False])
def test_wheel_works_without_any_framework_from_another_directory(tmp_path: Path, compiler: bool) -> None:
    source, target, numpy_only = copy_of_tracked_files(tmp_path / "source"), tmp_path / "site", tmp_path / "numpy"
    environment = {} if compiler else {"CC": "false", "CXX": "false"}
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source, cwd=tmp_path, **environment)
    (wheel,) = tmp_path.glob("hvdcompress-*.whl")
    run(*pip, "install", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    numpy_only.mkdir()
    for part in Path(np.__file__).parent.parent.glob("numpy*"):
        (numpy_only / part.name).symlink_to(part)
    # -S: without site-packages, where the frameworks are.
    program = f"import sys; sys.path[:0] = [{str(target)!r}, {str(numpy_only)!r}]\n{PROGRAM}"
    run(sys.executable, "-S", "-c", program, target, str(compiler), cwd=tmp_path)
