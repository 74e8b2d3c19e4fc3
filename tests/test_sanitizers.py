"""The compiled kernels under AddressSanitizer and UndefinedBehaviorSanitizer, built anew: their tests, and the fuzzer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import ROOT, copy_of_tracked_files

PAYLOADS = int(os.environ.get("PAYLOADS", "300000"))  # a minute; ci/sanitize makes a million
Run = Callable[..., str]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs Python with the package of a copy in which the kernels are built with sanitizers; returns what was printed."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here")
    source = copy_of_tracked_files(tmp_path_factory.mktemp("sanitized") / "source")
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"
    env = {**os.environ, "CFLAGS": flags, "CXXFLAGS": flags, "LDFLAGS": flags}
    subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=source, env=env, check=True, capture_output=True)
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout.strip()
    env = {
        **os.environ,
        "LD_PRELOAD": f"{runtime}:{runtime.replace('libasan', 'libubsan')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own are not ours to mend
        "PYTHONMALLOC": "malloc",  # so that the ends of its small objects are watched too
        "PYTHONPATH": f"{source}:{source / 'tests'}",
        "HVDCOMPRESS_KERNELS": "native",
    }

    def run(*line: str, **further: str) -> str:
        command = [sys.executable, *line]
        done = subprocess.run(command, cwd=source, env={**env, **further}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert str(ROOT) not in done.stdout
        return done.stdout

    assert str(source) in run("-c", "import hvdcompress.kernels._native as n; print(n.__file__)")
    return run


def test_kernels_under_sanitizers(sanitized: Run) -> None:
    files = [f"tests/test_{name}.py" for name in ("native", "ternary", "large")]
    assert " passed" in sanitized("-m", "pytest", *files, "-p", "no:cacheprovider")


def test_spoilt_payloads_under_sanitizers(sanitized: Run, tmp_path: Path) -> None:
    """A share for each instruction set. Should it crash, `note` has the number of the trial."""
    names = sanitized("-c", "from hvdcompress.kernels import _native; print(*_native.instruction_sets())").split()
    for number, isa in enumerate(names):
        share, note = PAYLOADS // len(names), tmp_path / isa
        line = [f"--payloads={share}", f"--first={number * share}", "--exchanges=10", f"--note={note}"]
        try:
            printed = sanitized("tests/fuzz.py", *line, HVDCOMPRESS_ISA=isa)
        except AssertionError as error:
            raise AssertionError(f"{isa}, trial {note.read_text() if note.exists() else 'none'}: {error}") from error
        print(printed)
        assert f"{share} payloads: " in printed and f"kernels: {isa}" in printed
