"""Bytes of a peer, spoilt at random: refused with a clear error or decoded, never anything else. `fuzz.py` has the fuzzer."""

from __future__ import annotations

import dataclasses

import fuzz
import numpy as np
import pytest
from conforming import CODECS, METHODS
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from hvdcompress import CompressionError, Layout, PayloadError, frame
from hvdcompress.codecs import Identity, PerTensor, TopK, places
from hvdcompress.session import Record


@pytest.mark.parametrize("payloads", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_spoilt_payloads_are_refused_or_decoded_alike_by_both_kernels(payloads: int) -> None:
    figures = fuzz.run(payloads, seed=payloads)
    print(figures.table())
    assert figures.tried.total() == payloads == figures.refused.total() + figures.decoded.total()
    for name in [*map(str, CODECS), "status record", "handshake"]:
        assert figures.refused[name] > 50 and figures.decoded[name] > 50, f"{name}: the fuzzer is of no use\n{figures.table()}"


@pytest.mark.parametrize("steps", [4, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_spoilt_exchange_comes_to_the_same_end_on_all_ranks(steps: int) -> None:
    figures = fuzz.run_exchanges(steps, seed=steps)
    print(figures.table())
    assert set(figures.tried.values()) == {steps} and set(figures.tried) == METHODS
    assert figures.refused.total() > steps and figures.decoded.total() > steps


def test_a_trial_is_a_function_of_its_seed_and_number() -> None:
    trials = [fuzz.drawn(7, number) for number in range(100)]
    assert trials == [fuzz.drawn(7, number) for number in range(100)] != [fuzz.drawn(8, number) for number in range(100)]
    with pytest.raises(AssertionError, match="wrong"):
        fuzz.run(1, 7, first=40, note=_fail_at(40))


def _fail_at(number: int):
    def note(at: int) -> None:
        assert at != number, "wrong"

    return note


@dataclasses.dataclass(frozen=True)
class Faulty(TopK):
    """A codec with a fault in what it reads."""

    fault: str = ""

    def decode_add(self, payload: np.ndarray, out: np.ndarray, factor: float = 1.0) -> float:
        if self.fault == "index":
            return float(payload[-1])  # there need not be one
        if self.fault == "refused too late":
            out += 1
        if self.fault == "beside" and payload.size % 2:
            whole = out.base if out.base is not None else out
            while whole.base is not None:
                whole = whole.base
            whole[:1] = 0
        return super().decode_add(payload, out, factor)


@pytest.mark.parametrize("fault", ["index", "refused too late", "beside"])
def test_the_fuzzer_finds_a_fault_and_says_the_payload(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Faulty(fault=fault)
    cases = [
        fuzz.Case(str(codec), codec, shape, codec.encode(np.ones(shape, np.float32), 1).payload.tobytes())
        for shape in ((0,), (9, 3))
    ]
    monkeypatch.setattr(fuzz, "corpus", lambda: dict.fromkeys(fuzz.READERS, cases))
    monkeypatch.setattr(fuzz, "TARGETS", ("payload",))
    with pytest.raises(
        AssertionError, match=r"seed 1, trial \d+: the payload of Faulty.* for \[[0-9, ]*\]: \d+ bytes [0-9a-f]*"
    ) as caught:
        fuzz.run(500, seed=1)
    number = int(str(caught.value).split("trial ")[1].split(":")[0])
    with pytest.raises(AssertionError, match=f"trial {number}:"):
        fuzz.run(1, seed=1, first=number)


def test_the_fuzzer_finds_kernels_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    if fuzz.kernels.implementation() == "numpy":
        pytest.skip("there is one set of kernels only")
    right = fuzz.definition.weighted_sum
    monkeypatch.setattr(fuzz.definition, "weighted_sum", lambda *terms: right(*terms) + np.float32(1e-7))
    with pytest.raises(AssertionError, match=r"(?s)the compiled kernels: .*NumPy's: .*seed 1, trial"):
        fuzz.run(2000, seed=1)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_bytes_are_no_places_or_the_places_that_they_are_packed_from(data: st.DataObject) -> None:
    """Of so large vectors too that a place has more than 32 bits."""
    count = data.draw(st.integers(1, 40))
    n = data.draw(st.integers(count, 200) | st.integers(1 << 20, 1 << 44))
    size = places.places_bytes(n, count)
    if data.draw(st.booleans()):
        chosen = np.sort(np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=count, max_size=count, unique=True))))
        payload = places.encode(chosen, n)
        for at in data.draw(st.lists(st.integers(0, size - 1), max_size=2)):
            payload[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        payload = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    try:
        found = places.decode(payload, n, count)
    except PayloadError:
        return
    assert found.dtype == np.int64 and found.shape == (count,)
    assert found[0] >= 0 and found[-1] < n and np.all(np.diff(found) > 0)
    assert_array_equal(places.decode(places.encode(found, n), n, count), found)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.lists(st.integers(0, 5), max_size=5))
def test_any_bytes_are_a_payload_of_these_tensors_or_refused(content: bytes, sizes: list[int]) -> None:
    codec = PerTensor.of(Identity(), Layout.of((str(i), (size,)) for i, size in enumerate(sizes)))
    lengths = np.array([4 * size for size in sizes], "<u4").tobytes()
    for payload in (content, lengths + content, lengths + (content * 5)[: 4 * sum(sizes)]):
        out = np.ones(sum(sizes), np.float32)
        try:
            codec.decode_add(np.frombuffer(payload, np.uint8), out)
        except PayloadError:
            assert_array_equal(out, 1)
        else:
            assert payload[: 4 * len(sizes)] == lengths and len(payload) == 4 * (len(sizes) + sum(sizes))


@given(st.integers(0, 255), st.integers(0, 1 << 40), st.binary(min_size=8, max_size=8), st.text(max_size=50))
def test_a_record_comes_back_or_has_a_status_that_is_none(status: int, step: int, digest: bytes, text: str) -> None:
    packed = Record(status, step, digest, text).pack()
    if status > 2:
        with pytest.raises(PayloadError, match=f"rank 3 has the status {status}"):
            Record.unpack(packed, 3)
    else:
        assert Record.unpack(packed, 3) == (status, step % (1 << 32), digest, text)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "3", '{"version": ', "[" * 100_000, "\x00", '"method"'])
def test_a_handshake_that_is_none_is_refused_with_its_rank(text: str) -> None:
    session, *others = fuzz._sessions()
    spoilt = Record(0, 0, bytes(8), text).pack()
    for records, rank in (
        ([session.handshake(), spoilt, session.handshake()], 1),
        ([spoilt, *(o.handshake() for o in others)], 0),
    ):
        with pytest.raises(CompressionError, match=f"handshake from rank {rank} does not decode"):
            session.check_handshake(records)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 254), st.sampled_from([0, 1, -1, 28, 1 << 31, 1 << 32, 1 << 63]))
def test_a_header_that_says_another_length_is_refused(payload: bytes, codec: int, more: int) -> None:
    length = max(0, len(payload) + more)
    header = frame.HEADER.pack(frame.MAGIC, frame.FORMAT, codec, 1, 2, 3, length)
    buffer = np.frombuffer(header + payload, np.uint8)
    for read in (
        lambda: frame.unpack(buffer, frame.Address(codec, 1, 2, 3), 0).tobytes(),
        lambda: frame.split(buffer, 1)[0][28:].tobytes(),
    ):
        if length == len(payload):
            assert read() == payload
        else:
            with pytest.raises(PayloadError, match=r"bytes (of payload|are left over)"):
                read()
