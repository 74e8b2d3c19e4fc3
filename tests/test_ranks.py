"""The drivers and adapters under real mpirun and Horovod: many checks in one start for each number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANKS, Run
from launch import ROOT, mpirun
from ranks.harness import PAPERS, checks_for

SCRIPTS = {  # with the numbers of ranks, and the seconds that all checks on one of them may take: twice what they do
    "mpi_checks.py": ((1, 3), 60.0),
    "torch_checks.py": ((1, 2, 3, 4), 200.0),
    "tensorflow_checks.py": ((1, 2, 3), 400.0),
    "tensorflow_cases.py": ((1, 2, 3), 180.0),
    "framework_checks.py": ((1, 2, 3), 100.0),
    "torch_cases.py": ((1, 2, 3, 4), 200.0),
}
# Of the long tier: starts that repeat on another number of ranks what one every day shows, and checks that take long.
SLOW_STARTS = {
    ("torch_checks.py", 3),
    ("torch_checks.py", 4),
    ("torch_cases.py", 3),
    ("torch_cases.py", 4),
    ("tensorflow_checks.py", 3),
    ("tensorflow_cases.py", 3),
    ("framework_checks.py", 1),
    ("framework_checks.py", 2),
    ("framework_checks.py", 3),
}
SLOW_CHECKS = {
    "every_option_is_as_without_compression",
    "tapes_are_as_without_compression",
    "groups_of_variables_are_as_without_compression",
}


@pytest.mark.parametrize(
    ("script", "ranks", "check"),
    [
        pytest.param(
            script, ranks, check, marks=[pytest.mark.slow] if (script, ranks) in SLOW_STARTS or check in SLOW_CHECKS else []
        )
        for script, (starts, _) in SCRIPTS.items()
        for ranks in starts
        for check in checks_for(RANKS / script, ranks)
    ],
)
def test_on_ranks(run_checks: Run, script: str, ranks: int, check: str, pytestconfig: pytest.Config) -> None:
    left_out = set() if pytestconfig.getoption("--slow") else SLOW_CHECKS
    checks = tuple(name for name in checks_for(RANKS / script, ranks) if name not in left_out)
    results, output = run_checks(script, ranks, SCRIPTS[script][1], checks)
    assert len(results) == ranks
    for rank, result in enumerate(results):
        assert result.get(check) == "ok", f"rank {rank}: {result.get(check, 'was not begun')}\n{output[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("method", PAPERS)
def test_runs_are_the_same_bit_for_bit_where_nothing_is_fused(tmp_path: Path, method: str) -> None:
    check = f"draws_are_shared_and_are_no_others[{method}]"
    done = mpirun(3, RANKS / "torch_cases.py", tmp_path, check, timeout=60, HOROVOD_FUSION_THRESHOLD="0")
    for rank in range(3):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {check: "ok"}, f"rank {rank}: {done.stdout[-3000:]}"


def test_one_process_needs_no_mpirun(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    subprocess.run([sys.executable, RANKS / "torch_cases.py", tmp_path], check=True, timeout=100, env=environment)
    results = json.loads((tmp_path / "0.json").read_text())
    assert results and set(results.values()) == {"ok"}, results
