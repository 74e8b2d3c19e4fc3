"""Every codec and every method of the registries passes the public checks, under every driver."""

from __future__ import annotations

import pytest
from conforming import CODECS, METHODS

from hvdcompress import codecs, make, methods, testing
from hvdcompress.codecs import PerTensor

# What is lost for good by design: both put an estimate, collisions and all, in the place of what they take away.
BIASED = {"fetchsgd:k=200,columns=8192,exact_below=10,momentum=0.5", "sketch:ratio=0.5,P=0,exact_below=10,momentum=0.5"}


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
def test_the_checks_find_a_bias(text: str, check: str) -> None:
    with pytest.raises(AssertionError, match="ranks"):
        testing.method_checks[check](make(text))
