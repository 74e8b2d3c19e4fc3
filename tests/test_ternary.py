"""The ternary codec: its distribution, its bytes, and what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from hvdcompress import PayloadError, kernels
from hvdcompress.codecs import Ternary
from hvdcompress.kernels.numpy import TERNARY_RUN, TINY

BOTH = pytest.mark.parametrize("scales", ["float32", "byte"])
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 4097, 100_003, 1_000_003]


def decode(codec: Ternary, payload: np.ndarray, n: int) -> np.ndarray:
    out = np.zeros(n, np.float32)
    codec.decode_add(payload, out)
    return out


def draw(codec: Ternary, x: np.ndarray, key: int) -> np.ndarray:
    return decode(codec, codec.encode(x, kernels.derive_key(key)).payload, x.size)


def block_scales(codec: Ternary, x: np.ndarray) -> np.ndarray:
    """The scale of each block, as a decoder finds it: the size of the block's non-zeros (its maximum is one of them)."""
    one_draw = np.zeros(-(-x.size // codec.block) * codec.block)
    one_draw[: x.size] = np.max([np.abs(draw(codec, x, key)) for key in range(30)], axis=0)
    return one_draw.reshape(-1, codec.block).max(axis=1)


def normal(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


@BOTH
@pytest.mark.parametrize("block", [16, 256])
def test_unbiased_with_the_variance_of_the_formula(block: int, scales: str) -> None:
    codec, x, n = Ternary(block, scales), normal(1000), 2000
    draws = np.stack([draw(codec, x, key) for key in range(n)]).astype(np.float64)
    variance = codec.encode(x, 0).noise
    # Means of n draws, each within 5 standard errors of what it estimates: an element's variance is |x| M - x^2.
    scale = np.repeat(block_scales(codec, x), block)[: x.size]
    per_element = np.abs(x) * scale - x.astype(np.float64) ** 2
    assert np.all(np.abs(draws.mean(axis=0) - x) <= 5 * np.sqrt(per_element / n) + 1e-7)
    errors = ((draws - x) ** 2).sum(axis=1)
    assert abs(errors.mean() - variance) <= 5 * errors.std() / np.sqrt(n)
    if scales == "float32":
        blocks = [x[i : i + block].astype(np.float64) for i in range(0, x.size, block)]
        assert_allclose(variance, sum(np.abs(b).sum() * np.abs(b).max() - (b**2).sum() for b in blocks), rtol=1e-5)


def test_worst_case_is_attained() -> None:
    b = 256
    x = np.full(b, 1 / (np.sqrt(b) + 1), np.float32)
    x[0] = 1
    assert_allclose(Ternary(b).encode(x, 0).noise / float((x.astype(np.float64) ** 2).sum()), (np.sqrt(b) - 1) / 2, rtol=1e-5)


@BOTH
def test_error_is_at_most_the_maximum(scales: str) -> None:
    codec = Ternary(64, scales)
    bound = 1.0 if scales == "float32" else 2 ** (1 / 8)
    for seed in range(50):
        x = normal(640, seed) * np.float32(10) ** np.repeat(np.arange(-5, 5), 64).astype(np.float32)
        error = np.abs(draw(codec, x, seed) - x).reshape(-1, 64).max(axis=1)
        assert np.all(error <= bound * np.abs(x).reshape(-1, 64).max(axis=1)), f"seed {seed}"


@BOTH
def test_homogeneous_and_odd_for_given_draws(scales: str) -> None:
    codec, x = Ternary(64, scales), normal(1000)
    for exponent in (-30, -3, 1, 40):
        factor = np.float32(2.0**exponent)
        assert_array_equal(draw(codec, factor * x, 1), factor * draw(codec, x, 1), f"2**{exponent}")
    assert_array_equal(draw(codec, -x, 1), -draw(codec, x, 1))


@BOTH
@pytest.mark.parametrize("n", SIZES)
def test_lossless_packing_in_the_size_of_the_formula(n: int, scales: str) -> None:
    for block, kind in itertools.product((1, 32, 256), ("mixed", "ones", "minus ones", "zeros")):
        codes = {
            "mixed": np.random.default_rng(n).integers(-1, 2, n),
            "ones": np.ones(n),
            "minus ones": -np.ones(n),
            "zeros": np.zeros(n),
        }[kind].astype(np.float32)
        codec = Ternary(block, scales)
        payload = codec.encode(codes, key=n).payload  # a code of a block's maximum is kept for certain
        assert_array_equal(decode(codec, payload, n), codes, f"{codec}, {kind}")
        blocks, nonzeros = -(-n // block), np.count_nonzero(codes)
        head = 4 * blocks if scales == "float32" else blocks + -(-blocks // TERNARY_RUN)
        assert payload.size == head + -(-n // 8) + -(-nonzeros // 8), f"{codec}, {kind}"
        assert payload.size == codec.expected_bytes((n,), density=nonzeros / max(1, n))


@BOTH
@pytest.mark.parametrize("cut", [TERNARY_RUN * 32, 2 * TERNARY_RUN * 32])
def test_a_shard_has_the_codes_that_it_has_in_the_whole(cut: int, scales: str) -> None:
    codec, x = Ternary(32, scales), normal(2000)
    whole = decode(codec, codec.encode(x, key=9).payload, x.size)
    parts = [decode(codec, codec.encode(part, 9, start).payload, part.size) for part, start in ((x[:cut], 0), (x[cut:], cut))]
    assert_array_equal(np.concatenate(parts), whole)


@BOTH
def test_blocks_steps_and_ranks_draw_independently(scales: str) -> None:
    codec, x = Ternary(64, scales), np.tile(normal(64), 200)
    chosen = [draw(codec, x, key).reshape(200, 64) != 0 for key in (1, 2)]
    p = np.abs(x[:64]) / np.abs(x[:64]).max()
    expected = (p**2).sum() + ((1 - p) ** 2).sum()  # places that agree between two independent blocks
    for a, b in ((chosen[0][:100], chosen[0][100:]), (chosen[0], chosen[1])):
        agree = (a == b).sum(axis=1)
        assert abs(agree.mean() - expected) < 5 * agree.std() / np.sqrt(len(agree))


@BOTH
def test_degenerate_inputs(scales: str) -> None:
    codec, one_hot = Ternary(32, scales), np.zeros(100, np.float32)
    one_hot[70] = -3
    if scales == "byte":
        one_hot[70] = -4  # a power of two has a byte of its own
    assert_array_equal(draw(codec, one_hot, 0), one_hot)
    subnormal = np.full(100, TINY / 2, np.float32)
    assert_array_equal(draw(codec, subnormal, 0), np.zeros(100))
    assert np.isfinite(draw(codec, np.full(100, 1e-30, np.float32), 0)).all()
    largest = np.full(100, np.finfo(np.float32).max, np.float32)
    assert_array_equal(draw(codec, largest, 0), largest)
    for bad in (np.nan, np.inf, -np.inf):
        x = normal(2 * 32 * TERNARY_RUN)
        x[5] = bad
        got = draw(codec, x, 0)
        assert np.isnan(got[:32]).all(), f"{bad} must spoil its block"
        assert np.isfinite(got[32 * TERNARY_RUN :]).all(), f"{bad} must not reach the next run"


def test_decode_adds_and_leaves_zeros_alone() -> None:
    codec, x, out = Ternary(32), normal(100), normal(100, 1)
    before, decoded = out.copy(), draw(codec, x, 3)
    codec.decode_add(codec.encode(x, kernels.derive_key(3)).payload, out, factor=0.25)
    assert_array_equal(out, np.where(decoded == 0, before, before + np.float32(0.25) * decoded))


def test_the_bytes_are_what_they_were() -> None:
    """The wire format: a change of any of these is a new `frame.FORMAT`."""
    x = np.float32([0.5, -2.0, 0.0, 1.0, 0.25, -0.25, 0.0, 0.125, -1.0, 3.0])
    assert Ternary(4).encode(x, key=7).payload.tobytes().hex() == "000000400000803e00004040b20315"
    assert Ternary(4, "byte").encode(x, key=7).payload.tobytes().hex() == "81f7dffcb20315"


@BOTH
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_bytes_of_a_peer_are_refused_or_decoded_but_never_dangerous(scales: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 200))
    codec = Ternary(data.draw(st.sampled_from([1, 7, 32])), scales)
    payload = codec.encode(normal(n), key=1).payload
    if data.draw(st.booleans()):
        payload = np.frombuffer(data.draw(st.binary(max_size=400)), np.uint8)
    else:
        for place in data.draw(st.lists(st.integers(0, max(0, payload.size - 1)), max_size=5)) if payload.size else ():
            payload[place] = data.draw(st.integers(0, 255))
        payload = payload[: data.draw(st.integers(0, payload.size))]
    out = np.ones(n, np.float32)
    try:
        codec.decode_add(payload, out)
    except PayloadError:
        assert_array_equal(out, np.ones(n))
    else:
        assert payload.size == codec.expected_bytes((n,), np.count_nonzero(out != 1) / max(1, n)) or np.isin(out, 1).any()


@pytest.mark.parametrize("options", [{"block": 0}, {"block": 1 << 32}, {"scales": "float16"}])
def test_bad_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Ternary(**options)  # type: ignore[arg-type]
