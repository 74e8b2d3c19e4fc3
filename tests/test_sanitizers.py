"""The compiled kernels under AddressSanitizer and UndefinedBehaviorSanitizer: the same tests, built anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, copy_of_tracked_files


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kernels_under_sanitizers(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here")
    source = copy_of_tracked_files(tmp_path / "source")
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"
    env = {**os.environ, "CFLAGS": flags, "CXXFLAGS": flags, "LDFLAGS": flags}
    subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=source, env=env, check=True, capture_output=True)
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout.strip()
    env = {
        **os.environ,
        "LD_PRELOAD": f"{runtime}:{runtime.replace('libasan', 'libubsan')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own are not ours to mend
        "PYTHONPATH": str(source),
        "HVDCOMPRESS_KERNELS": "native",
    }
    where = "import hvdcompress.kernels._native as n; print(n.__file__)"
    done = subprocess.run([sys.executable, "-c", where], cwd=source, env=env, capture_output=True, text=True)
    assert str(source) in done.stdout, done.stdout + done.stderr
    line = [sys.executable, "-m", "pytest", "tests/test_native.py", "tests/test_ternary.py", "-p", "no:cacheprovider"]
    done = subprocess.run(line, cwd=source, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
    assert str(ROOT) not in done.stdout
