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
    env = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'examples'}",
        **environment,
    }
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
    process = subprocess.Popen(
        line, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
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
