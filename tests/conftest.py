from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from launch import ROOT, mpirun

RANKS = ROOT / "tests" / "ranks"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="the long tier too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="of the long tier: --slow"))


Run = Callable[[str, int, float], "tuple[list[dict[str, str]], str]"]


@pytest.fixture(scope="session")
def run_checks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a script of checks under mpirun, once for each number of ranks; returns each rank's results and the output."""

    @cache
    def run(script: str, ranks: int, timeout: float) -> tuple[list[dict[str, str]], str]:
        directory: Path = tmp_path_factory.mktemp(f"{Path(script).stem}-{ranks}")
        done = mpirun(ranks, RANKS / script, directory, timeout=timeout, HOROVOD_DYNAMIC_PROCESS_SETS="1")
        files = [directory / f"{rank}.json" for rank in range(ranks)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files], done.stdout

    return run
