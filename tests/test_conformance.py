"""Every codec and every method of the registries passes the public checks, under every driver."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from conforming import CODECS, METHODS

from hvdcompress import codecs, make, methods, testing
from hvdcompress.codecs import Encoded, Levels, PerTensor

# What is lost for good by design: estimates, collisions and all, in the place of what they take away.
BIASED = {"sketch:ratio=0.5,P=0,exact_below=10,momentum=0.5"}


@pytest.mark.parametrize("check", testing.method_checks)
@pytest.mark.parametrize("text", sorted(METHODS))
def test_method(text: str, check: str, request: pytest.FixtureRequest) -> None:
    if text in BIASED and check == "comes_to_the_mean":
        request.applymarker(pytest.mark.xfail(raises=AssertionError, strict=True))
    testing.method_checks[check](make(text))


@pytest.mark.parametrize("check", testing.codec_checks)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codec(codec: codecs.Codec, check: str) -> None:
    testing.codec_checks[check](codec)


def test_every_registered_name_is_checked() -> None:
    assert {text.partition(":")[0] for text in METHODS} == set(methods)


def test_codecs_have_numbers_of_their_own() -> None:
    numbers = [codec.number for codec in (*codecs.codecs.values(), PerTensor)]
    assert len(set(numbers)) == len(numbers) and all(1 <= number <= 254 for number in numbers)


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("terngrad:clip=1.0", "comes_to_the_mean"),
        ("gather:codec=topk:ratio=0.1", "comes_to_the_mean"),
        ("fetchsgd:ratio=0.1,exact_below=10,momentum=0.5", "comes_to_the_mean"),
    ],
)
@pytest.mark.filterwarnings("ignore:topk.*is biased:RuntimeWarning")
def test_the_checks_find_a_bias(text: str, check: str) -> None:
    with pytest.raises(AssertionError, match="ranks"):
        testing.method_checks[check](make(text))


@dataclasses.dataclass(frozen=True)
class Wrong(Levels):
    """A codec with a fault."""

    fault: str = "none"

    @property
    def number(self) -> int:
        return {"number": 2}.get(self.fault, 200)

    def encode(self, x: np.ndarray, key: int, start: int = 0) -> Encoded:
        payload, noise = super().encode(x, key if self.fault != "not drawn" else 1, start if self.fault != "start" else 0)
        if self.fault == "noise":
            noise *= 1.5
        if self.fault == "hides NaN" and not np.isfinite(x).all():
            return super().encode(np.zeros_like(x), key, start)
        return Encoded(payload, noise)

    def decode_add(self, payload: np.ndarray, out: np.ndarray, factor: float = 1.0) -> float:
        if self.fault == "length":
            payload = np.append(payload, np.zeros(len(self.encode(out, 0).payload), np.uint8))[: len(self.encode(out, 0).payload)]
        if self.fault == "zero":
            return 0.0
        if self.fault == "biased":
            factor *= 0.9
        if self.fault == "overwrites":
            out[...] = 0
        return super().decode_add(payload, out, factor)

    def expected_bytes(self, shape: tuple[int, ...], density: float | None = None) -> float:
        return super().expected_bytes(shape, density) + (0 if self.fault != "size" else 1 + 0.1 * math.prod(shape))


@pytest.mark.parametrize(
    "fault", ["number", "zero", "not drawn", "start", "noise", "hides NaN", "length", "biased", "overwrites", "size"]
)
def test_the_checks_find_a_fault(fault: str) -> None:
    """Each in turn; and none in what has none."""
    testing.check_codec(Wrong(levels=2, block=64))
    with pytest.raises((AssertionError, ValueError)):
        testing.check_codec(Wrong(levels=2, block=64, fault=fault))


@pytest.mark.parametrize("bad", ["zip", Levels, 42, None])
def test_what_is_no_codec_is_told(bad: object) -> None:
    with pytest.raises(ValueError, match="codec"):
        make("gather", codec=bad)


def test_a_biased_codec_without_feedback_warns() -> None:
    with pytest.warns(RuntimeWarning, match="topk:ratio=0.1 is biased, and what it leaves out is lost"):
        make("gather:codec=topk:ratio=0.1")
    with pytest.raises(ValueError, match="other bytes on another processor"):
        make("gather:downlink=entrywise")
