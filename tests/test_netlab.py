"""The lab of slow networks that the benchmarks use. It needs root, and what containers may not do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT

NETLAB = [sys.executable, str(ROOT / "benchmarks" / "netlab")]
LAB = ["--lab", "tests"]


def netlab(*words: str | Path, timeout: float = 60, code: int = 0) -> str:
    # os.environ, since MPI leaves variables for its children in the process that the tests run in.
    line = [*NETLAB, *LAB, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, env=dict(os.environ))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def _lab():
    if os.geteuid():
        pytest.skip("a lab needs root")
    netlab("down")
    try:
        netlab("up", "--hosts", 2, "--rate", "100mbit")
    except AssertionError as error:
        pytest.skip(f"no lab can be made here: {error}")
    yield
    netlab("down")
    assert "hvdlab-tests" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.usefixtures("_lab")
def test_hosts_have_names_of_their_own_and_are_a_real_multi_node_job(tmp_path: Path) -> None:
    assert netlab("exec", "h1", "--", "hostname").strip() == "h1"
    job = [sys.executable, ROOT / "benchmarks" / "training_job.py", "steps", "--model", "small", "--rounds", 2, "--nic", "lab0"]
    path = tmp_path / "steps.json"
    netlab("run", "-np", 2, "--timeout", 100, "--", *job, "--methods", "none", "dore", "--output", path, timeout=120)
    found = json.loads(path.read_text())
    dense, dore = (sorted(found["methods"][method]["bytes"])[0] for method in ("none", "dore"))
    exact = 4 * 669_706
    assert exact < dense < 1.15 * exact  # frame headers are 4.6 %
    assert dore < 0.1 * dense
    seconds = [min(found["methods"][method]["seconds"]) for method in ("none", "dore")]
    assert seconds[0] > 8 * exact / 1e8, "faster than the link"
    assert seconds[1] < seconds[0]
    assert 5e6 < found["network"]["allreduce"] < 13e6


@pytest.mark.usefixtures("_lab")
def test_what_hangs_is_stopped_and_leaves_nothing() -> None:
    assert "stopped after 3 s" in netlab("run", "-np", 2, "--timeout", 3, "--", "sleep", "1000", code=124)
    assert netlab("exec", "h0", "--", "sh", "-c", "ip netns pids hvdlab-tests-h1 | wc -l").strip() == "0"


def test_what_is_wrong_is_said() -> None:
    assert "must be a command" in netlab("run", "-np", 2, code=2)
    if not os.geteuid():
        assert "a rate is written as" in netlab("up", "--rate", "fast", code=1)
        assert "is not up" in netlab("--lab", "none", "rate", "1gbit", code=1)
