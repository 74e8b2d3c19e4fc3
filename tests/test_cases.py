"""Every case of what went wrong for others has its tests, with every method and framework, or says why not."""

from __future__ import annotations

import runpy

import pytest
from cases import CASES, FRAMEWORKS, TESTS, Case, found, missing
from launch import ROOT
from ranks.harness import checks_for
from test_ranks import SCRIPTS


@pytest.mark.parametrize("case", CASES, ids=[case.fault.replace(" ", "_") for case in CASES])
def test_nothing_is_left_out_without_a_reason(case: Case) -> None:
    assert case.tests.keys() | case.reasons.keys() >= set(FRAMEWORKS), case
    for framework in FRAMEWORKS:
        for method, reason in missing(case, framework).items():
            assert reason, f"{case.fault}: {framework} with {method}"
    for references in case.tests.values():
        for test in map(found, references):
            script = TESTS / test.file
            if test.file.startswith("ranks/"):  # it is run by a start that there is
                names = [f"{test.function}[{m}]" for m in test.methods] if test.each else [test.function]
                run = {name for ranks in SCRIPTS[script.name][0] for name in checks_for(script, ranks)}
                assert run >= set(names), f"{test}: of {names}"


def test_reasons_are_for_what_is_left_out() -> None:
    for case in CASES:
        used = {reason for framework in FRAMEWORKS for reason in missing(case, framework).values()}
        assert set(case.reasons.values()) <= used, f"{case.fault}: {set(case.reasons.values()) - used}"


def test_the_table_is_that_of_the_cases() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert runpy.run_path(str(ROOT / "docs" / "reliability_table.py"))["page"](page) == page, "python docs/reliability_table.py"
