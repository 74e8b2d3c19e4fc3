"""Every codec and every method of the registries passes the public checks, under every driver."""

from __future__ import annotations

import pytest

from hvdcompress import codecs, make, methods, testing
from hvdcompress.codecs import Entrywise, Fourier, Levels, PerTensor, Spectral, Ternary, TopK

# Options other than the defaults where those are for tensors larger than the checks': so that something happens at all.
METHODS = {
    "atomo:atoms=spectral,budget=0.3,unit=ratio",
    "atomo:atoms=spectral,budget=2,values=float16,reshape=paper,factors=svd",
    "atomo:atoms=entrywise,budget=0.1,unit=ratio",
    "atomo:atoms=fourier,budget=200,unit=bytes",
    "dense",
    "diana:block=32",
    "diana:block=32,exchange=sharded",
    "dore:block=32,exchange=allgather",
    "dore:block=32,exchange=sharded,scales=byte",
    "double_squeeze:block=16",
    "double_squeeze:block=16,exchange=sharded",
    "double_squeeze_topk:ratio=0.2",
    "fetchsgd:k=200,columns=8192,exact_below=10",
    "gather:codec=levels:levels=3;block=64,downlink=levels,exchange=sharded",
    "gather",
    "local_topk:ratio=0.1,exact_below=10",
    "mem_sgd:block=16",
    "qsgd:levels=1,block=64",
    "qsgd:levels=7,block=64,exchange=sharded",
    "sketch:ratio=0.5,exact_below=10",
    "sketch:ratio=0.5,P=0,exact_below=10",
    "terngrad",
    "terngrad_shared",
    "topk:ratio=0.1",
    "true_topk:ratio=0.1,exact_below=10",
}
CODECS = [
    *(make_codec() for make_codec in codecs.codecs.values()),
    Ternary(16, "byte"),
    Ternary(32, norm="l2"),
    Levels(1, 64),
    Levels(127, 100, "max"),
    Levels(1000, 7),
    TopK(k=3),
    Entrywise(40),
    Entrywise("l2"),
    Entrywise("max"),
    Entrywise(0.5),
    Entrywise(100, "bytes"),
    Fourier(0.3, "ratio", block=16),
    Spectral(1.5, reshape="paper", factors="svd"),
    Spectral("l2"),
    Spectral(0.3, "ratio", values="float16"),
]


# What is lost for good by design: both put an estimate, collisions and all, in the place of what they take away.
BIASED = {"fetchsgd:k=200,columns=8192,exact_below=10", "sketch:ratio=0.5,P=0,exact_below=10"}


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
        ("fetchsgd:ratio=0.1,exact_below=10", "comes_to_the_mean"),
    ],
)
def test_the_checks_find_a_bias(text: str, check: str) -> None:
    with pytest.raises(AssertionError, match="ranks"):
        testing.method_checks[check](make(text))
