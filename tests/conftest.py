from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cases import CASES, Found, found
from launch import ROOT, mpirun
from ranks.harness import PAPERS

RANKS = ROOT / "tests" / "ranks"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="the long tier too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="of the long tier: --slow"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which cases ran, with which methods under which framework; where not all of them did, what is left."""
    passed = [report.nodeid for report in terminalreporter.stats.get("passed", ())]
    if not any("test_on_ranks" in nodeid for nodeid in passed):
        return
    terminalreporter.section("what went wrong for others")
    for case in CASES:
        told = []
        for framework, references in case.tests.items():
            tests = [found(reference) for reference in references]
            ran = [method for method in PAPERS if any(_ran(test, method, passed) for test in tests)]
            told.append(f"{framework}: {', '.join(ran) or 'not run'}")
        terminalreporter.line(f"{case.fault}: {'; '.join(told)}")


def _ran(test: Found, method: str, passed: list[str]) -> bool:
    own = [nodeid for nodeid in passed if test.function in nodeid and Path(test.file).name in nodeid]
    by_method = [nodeid for nodeid in own if any(name in nodeid for name in PAPERS)]
    return method in test.methods and (any(method in nodeid for nodeid in by_method) if by_method else bool(own))


Run = Callable[[str, int, float, "tuple[str, ...]"], "tuple[list[dict[str, str]], str]"]


@pytest.fixture(scope="session")
def run_checks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a script of checks under mpirun, once for each number of ranks; returns each rank's results and the output."""

    @cache
    def run(script: str, ranks: int, timeout: float, checks: tuple[str, ...]) -> tuple[list[dict[str, str]], str]:
        directory: Path = tmp_path_factory.mktemp(f"{Path(script).stem}-{ranks}")
        done = mpirun(ranks, RANKS / script, directory, *checks, timeout=timeout, HOROVOD_DYNAMIC_PROCESS_SETS="1")
        files = [directory / f"{rank}.json" for rank in range(ranks)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files], done.stdout

    return run
