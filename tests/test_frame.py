"""Frames: what goes in comes out, and what is not a frame is told apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from hvdcompress import CompressionError, PayloadError, frame
from hvdcompress.codecs import codecs

ADDRESS = frame.Address(codec=2, bucket=3, step=70_000, elements=1 << 40)
PAYLOAD = np.arange(10, dtype=np.uint8)


@given(st.binary(max_size=100), st.integers(1, 254), st.integers(0, 1 << 16), st.integers(0, 1 << 40), st.integers(0, 1 << 63))
def test_what_goes_in_comes_out(payload: bytes, codec: int, bucket: int, step: int, count: int) -> None:
    address = frame.Address(codec, bucket, step, count)
    packed = frame.pack(address, np.frombuffer(payload, np.uint8))
    assert packed.size == frame.HEADER.size + len(payload)
    assert frame.unpack(packed, address, sender=0).tobytes() == payload


def test_the_header_is_what_it_was() -> None:
    assert frame.pack(frame.Address(2, 3, 4, 5), PAYLOAD[:1]).tobytes().hex() == (
        "4856444301020300040000000500000000000000010000000000000000"
    )


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: f[:5], "rank 4 has 5 bytes"),
        (lambda f: f[:-1], "9 bytes of payload where its header says 10"),
        (lambda f: np.append(f, f[:1]), "11 bytes of payload where its header says 10"),
        (lambda f: np.append(np.frombuffer(b"GIF8", np.uint8), f[4:]), "GIF8"),
        (lambda f: np.concatenate([f[:4], [9], f[5:]]).astype(np.uint8), "format 9"),
        (lambda f: np.concatenate([f[:5], [1], f[6:]]).astype(np.uint8), "codec 1, expected 2"),
        (lambda f: np.concatenate([f[:6], [1, 0], f[8:]]).astype(np.uint8), "bucket 1, expected 3"),
        (lambda f: np.concatenate([f[:8], [1, 0, 0, 0], f[12:]]).astype(np.uint8), "step 1, expected 70000"),
        (lambda f: np.concatenate([f[:12], [1] + [0] * 7, f[20:]]).astype(np.uint8), "elements 1, expected"),
    ],
)
def test_what_is_wrong_is_said_with_the_sender(spoil, told: str) -> None:
    with pytest.raises(PayloadError, match="rank 4") as caught:
        frame.unpack(spoil(frame.pack(ADDRESS, PAYLOAD)), ADDRESS, sender=4)
    assert told in str(caught.value)


def test_an_excuse_is_raised_by_whoever_unpacks_it() -> None:
    with pytest.raises(CompressionError, match="rank 2: out of memory"):
        frame.unpack(frame.excuse(3, 4, "out of memory"), ADDRESS, sender=2)


def test_gathered_frames_are_cut_by_their_lengths() -> None:
    frames = [frame.pack(ADDRESS, PAYLOAD[:n]) for n in (0, 7, 10)]
    for cut, whole in zip(frame.split(np.concatenate(frames), 3), frames):
        assert_array_equal(cut, whole)
    for wrong in (np.concatenate(frames)[:-1], np.concatenate([*frames, PAYLOAD]), np.zeros(0, np.uint8)):
        with pytest.raises(PayloadError):
            frame.split(wrong, 3)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=120), st.integers(1, 4))
def test_any_bytes_are_refused_or_cut_into_frames(content: bytes, ranks: int) -> None:
    prefix = frame.pack(ADDRESS, PAYLOAD)
    for buffer in (np.frombuffer(content, np.uint8), np.append(prefix, np.frombuffer(content, np.uint8))):
        try:
            frames = frame.split(buffer, ranks)
        except PayloadError:
            continue
        assert len(frames) == ranks and sum(f.size for f in frames) == buffer.size


def test_codec_numbers_are_their_own() -> None:
    numbers = [codec.number for codec in codecs.values()]
    assert len(set(numbers)) == len(numbers) and not {frame.STATUS, frame.EXCUSE} & set(numbers)
