"""Settings from the environment: a bad value is named with its variable."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvdcompress import settings


@pytest.mark.parametrize("text", ["20s", "-1", "0", "nan", "inf"])
def test_numbers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NAME", text)
    with pytest.raises(ValueError, match=f"NAME must be a positive number, not '{text}'"):
        settings.number("NAME", 20)
    for good, value in (("", 20), ("2.5", 2.5)):
        monkeypatch.setenv("NAME", good)
        assert settings.number("NAME", 20) == value


@pytest.mark.parametrize("text", ["abc", "-3", "0", "99999999999", "1.5"])
def test_counts(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NAME", text)
    with pytest.raises(ValueError, match=f"NAME must be a whole number from 1 to 64, not '{text}'"):
        settings.count("NAME", 1, most=64)
    monkeypatch.setenv("NAME", "8")
    assert settings.count("NAME", 1, most=64) == 8


@pytest.mark.parametrize(
    ("name", "value"), [("HVDCOMPRESS_ISA", "AVX2"), ("HVDCOMPRESS_KERNELS", "cuda"), ("HVDCOMPRESS_NUM_THREADS", "many")]
)
def test_a_bad_variable_is_named_when_the_package_is_imported(name: str, value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import hvdcompress"], env={**os.environ, name: value}, capture_output=True, text=True
    )
    assert done.returncode == 1 and f"{name} must be" in done.stderr and repr(value) in done.stderr, done.stderr


def test_numpy_kernels_can_be_asked_for() -> None:
    program = "from hvdcompress import kernels; print(kernels.implementation())"
    env = {**os.environ, "HVDCOMPRESS_KERNELS": "numpy"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "numpy\n"
