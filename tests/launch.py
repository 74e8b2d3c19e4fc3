"""Starts scripts under mpirun, with a time limit that always holds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def mpirun(ranks: int, *command: str | Path, timeout: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python script on so many ranks. Returns its code and its output; a code of 124 if time ran out."""
    line = [
        "mpirun",
        "--oversubscribe",
        "--bind-to",
        "none",
        "--tag-output",
        "-np",
        str(ranks),
        sys.executable,
        *map(str, command),
    ]
    return _run(line, timeout, environment)


def horovodrun_elastic(
    ranks: int, hosts: str, directory: Path, *command: str | Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs a Python script under elastic Horovod over Gloo, by `mpirun`'s rules.

    Args:
        hosts: the first content of `<directory>/hosts`, lines of name:slots; the script may change it.
    """
    (directory / "hosts").write_text(hosts)
    discover = directory / "discover"
    discover.write_text(f"#!/bin/sh\ncat {directory / 'hosts'}\n")
    discover.chmod(0o755)
    line = [
        str(Path(sys.executable).with_name("horovodrun")),
        "--gloo",
        "--network-interfaces",
        "lo",
        "--gloo-timeout-seconds",
        "15",
        "-np",
        str(ranks),
        "--min-np",
        "1",
        "--host-discovery-script",
        str(discover),
        sys.executable,
        *map(str, command),
    ]
    return _run(line, timeout, {})


def _run(line: list[str], timeout: float, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # who waits for MPI would spin on cores that others compute with
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'examples'}",
        **environment,
    }
    process = subprocess.Popen(
        line, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # which launchers pass on to their ranks
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return subprocess.CompletedProcess(line, 124, f"{output}\nended after {timeout} s", None)
    return subprocess.CompletedProcess(line, process.returncode, output, None)


def copy_of_tracked_files(target: Path) -> Path:
    """The working tree as a fresh clone has it: nothing that was built."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target
