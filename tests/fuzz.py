"""Spoilt bytes of a peer, at random: payloads that were valid, mutated, and given to whoever reads them.

    python tests/fuzz.py --payloads 1000000 --seed 0

Each must be refused with a `CompressionError`, the target being as it was, or decode; the compiled kernels and NumPy's, to
the same bits. Anything else is said with the seed and the number of the trial, which make it again:

    python tests/fuzz.py --seed 0 --trial 4711
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from conforming import CODECS, METHODS

from hvdcompress import CompressionError, Dore, Group, Layout, frame, kernels, make, testing
from hvdcompress.codecs import Codec, Entrywise, Levels, PerTensor, Spectral, Ternary, TopK
from hvdcompress.core import AllGather, AllToAll
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.kernels import atoms, bits
from hvdcompress.kernels import numpy as definition
from hvdcompress.reducers.channel import Channel
from hvdcompress.session import Record, Session

SHAPES = (*testing.SHAPES, (0, 4), (3, 0, 2))
KINDS = ("zero", "one hot", "spread", "large")
RANKS = 3
MARGIN = 16  # floats before and after a target that must stay as they are
COMPARED = 8  # of so many trials, one is made with both sets of kernels
STEP = 70_000
# A mutated field gets one of these, in its width: sizes and counts at the ends of their ranges.
EDGES = [0, 1, 2, 7, 8, 255, 256, *(edge for b in (15, 16, 31, 32, 63, 64) for edge in ((1 << b) - 1, 1 << b)), 0x7F800000]


class Case(NamedTuple):
    """A valid payload of a codec, for a tensor of a shape; of a record's, the codec is None."""

    name: str
    codec: Codec | None
    shape: tuple[int, ...]
    payload: bytes


class Trial(NamedTuple):
    """Bytes for whoever reads a `target`: "payload" is what stands in a correct frame."""

    target: str
    case: Case
    data: bytes


class Figures(NamedTuple):
    """By name of the codec, method or record: how many were tried, refused, decoded."""

    tried: Counter[str]
    refused: Counter[str]
    decoded: Counter[str]

    def table(self) -> str:
        rows = [
            f"{name[:68]:<68} {n:>9} {self.refused[name]:>9} {self.decoded[name]:>9}" for name, n in sorted(self.tried.items())
        ]
        sums = f"{'all':<68} {self.tried.total():>9} {self.refused.total():>9} {self.decoded.total():>9}"
        return "\n".join([f"{'':<68} {'tried':>9} {'refused':>9} {'decoded':>9}", *rows, sums])


# What is mutated, and how


@lru_cache(maxsize=1)
def corpus() -> dict[str, list[Case]]:
    """Valid payloads by target."""
    layout = Layout.of((str(number), shape) for number, shape in enumerate(SHAPES))
    inner = (Ternary(32, "byte"), Levels(3, 16), TopK(0.2), Entrywise(3), Spectral(1))
    given = [(str(codec), codec, SHAPES) for codec in CODECS]
    given += [(f"PerTensor of {codec}", PerTensor.of(codec, layout), ((layout.size,),)) for codec in inner]
    payloads = []
    for name, codec, shapes in given:
        for shape in shapes:
            rng = np.random.default_rng(len(payloads))
            draws = 3 if len(shapes) > 1 else 60
            gradients = [rng.standard_t(2, shape).astype(np.float32) for _ in range(draws)]
            gradients += [x for kind, x in testing.degenerate(shape) if kind in KINDS]
            payloads += [Case(name, codec, shape, codec.encode(np.asarray(x), 7).payload.tobytes()) for x in gradients]
    sessions = _sessions()
    records = [Case("status record", None, (), s.record().tobytes()) for s in sessions]
    failed = Record(2, 5, bytes(8), "rank 1: MemoryError: \N{GREEK SMALL LETTER MU}").pack()
    greetings = [Case("handshake", None, (), s.handshake().tobytes()) for s in sessions]
    return {
        "payload": payloads,
        "frame": payloads,
        "frames": payloads,
        "record": [*records, Case("status record", None, (), failed.tobytes()), greetings[0]],
        "handshake": [*greetings, records[0]],
    }


TARGETS = ("payload",) * 15 + ("frame",) * 2 + ("frames", "record", "handshake")


def drawn(seed: int, number: int) -> Trial:
    """The trial of a number, a function of it and of the seed."""
    rng = random.Random(seed << 40 | number)
    target = rng.choice(TARGETS)
    cases = corpus()[target]
    at = rng.randrange(len(cases))
    case, other = cases[at], cases[(at + rng.randint(1, 3)) % len(cases)]  # most often of the same codec
    data = {
        "payload": lambda: case.payload,
        "frame": lambda: _framed(case, case.payload),
        "frames": lambda: b"".join(_framed(case, payload) for payload in (case.payload, b"", other.payload)),
    }.get(target, lambda: case.payload)()
    return Trial(target, case, mutated(data, other.payload, rng))


def mutated(payload: bytes, other: bytes, rng: random.Random) -> bytes:
    """One to three changes; none in one of 64, so that what is valid is tried too."""
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 3)) if rng.randrange(64) else 0):
        rng.choice(MUTATIONS)(data, other, rng)
    return bytes(data)


def flips_bits(data: bytearray, other: bytes, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 8) if data else 0):
        data[_place(data, rng)] ^= 1 << rng.randrange(8)


def sets_bytes(data: bytearray, other: bytes, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4) if data else 0):
        data[_place(data, rng)] = rng.choice((0, 255, rng.randrange(256)))


def sets_a_field(data: bytearray, other: bytes, rng: random.Random) -> None:
    width = rng.choice((1, 2, 4, 8))
    if len(data) >= width:
        at = _place(data, rng) // width * width
        value = rng.choice((*EDGES, len(data) - 1, len(data), len(data) + 1)) % (1 << 8 * width)
        data[at : at + width] = value.to_bytes(width, "little")[: len(data) - at]


def swaps_fields(data: bytearray, other: bytes, rng: random.Random) -> None:
    width = rng.choice((1, 4, 8))
    a, b = (rng.randrange(max(1, min(len(data), 64) // width)) * width for _ in range(2))
    if max(a, b) + width <= len(data):
        data[a : a + width], data[b : b + width] = data[b : b + width], data[a : a + width]


def fills_a_run(data: bytearray, other: bytes, rng: random.Random) -> None:
    start, stop = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    data[start:stop] = bytes([rng.choice((0, 255))]) * (stop - start)


def cuts_the_end(data: bytearray, other: bytes, rng: random.Random) -> None:
    del data[rng.choice((rng.randrange(len(data) + 1), max(0, len(data) - 1))) :]


def cuts_out_a_run(data: bytearray, other: bytes, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.randint(1, 9)]


def extends(data: bytearray, other: bytes, rng: random.Random) -> None:
    data += rng.choice((bytes(1), rng.randbytes(rng.randint(1, 9)), bytes(data[-9:])))


def splices(data: bytearray, other: bytes, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:] = other[rng.choice((at, rng.randrange(len(other) + 1))) :]


MUTATIONS = (
    flips_bits,
    flips_bits,
    sets_bytes,
    sets_bytes,
    sets_a_field,
    sets_a_field,
    swaps_fields,
    fills_a_run,
    cuts_the_end,
    cuts_out_a_run,
    extends,
    splices,
)


def _place(data: bytearray, rng: random.Random) -> int:
    return rng.randrange(rng.choice((min(len(data), 32), len(data))))


def _address(case: Case) -> frame.Address:
    assert case.codec is not None
    return frame.Address(case.codec.number, 3, STEP, int(np.prod(case.shape)))


def _framed(case: Case, payload: bytes) -> bytes:
    return frame.pack(_address(case), np.frombuffer(payload, np.uint8)).tobytes()


@lru_cache(maxsize=1)
def _sessions() -> list[Session]:
    layouts = [Layout.of([("a", (5, 7)), ("b", (3,))], 0), Layout.of([("c", (9,))], 1)]
    return [Session(Dore(), layouts, Group(rank, RANKS)) for rank in range(RANKS)]


# What must become of it


def attempt(trial: Trial) -> tuple[str, Any]:
    """("refused", message), or ("decoded", what of); raises whatever a reader should not have raised."""
    buffer = np.frombuffer(trial.data, np.uint8).copy()  # of its own size, so that AddressSanitizer sees what is beyond
    buffer.setflags(write=False)
    try:
        return "decoded", READERS[trial.target](buffer, trial.case)
    except CompressionError as error:
        assert str(error), "an error without a message"
        return "refused", str(error)


def _read_payload(buffer: np.ndarray, case: Case) -> bytes:
    return _read_frame(frame.pack(_address(case), buffer), case)


def _read_frame(buffer: np.ndarray, case: Case) -> bytes:
    """The bits of a target, after what was decoded has been added to it."""
    assert case.codec is not None
    n = int(np.prod(case.shape))
    margin = MARGIN * (buffer.size % 2)  # else AddressSanitizer watches the ends
    room = np.full(n + 2 * margin, 0.75, np.float32)
    out = room[margin : margin + n].reshape(case.shape)
    try:
        density = Channel(case.codec, 3, STEP).add(buffer, 4, out, 0.5)
    except CompressionError as error:
        assert np.all(room == 0.75), f"what was refused ({error}) has been added"
        raise
    assert np.all(room[:margin] == 0.75) and np.all(room[margin + n :] == 0.75), "written beside the target"
    assert 0 <= density < float("inf"), f"a density of {density}"
    return np.where(np.isnan(out), np.float32(np.nan), out).tobytes()  # the bits inside a NaN mean nothing


def _read_frames(buffer: np.ndarray, case: Case) -> list[bytes]:
    frames = frame.split(buffer, RANKS)
    assert len(frames) == RANKS and sum(f.size for f in frames) == buffer.size, "frames that are not what was gathered"
    return [frame.unpack(f, _address(case), rank).tobytes() for rank, f in enumerate(frames)]


def _read_record(buffer: np.ndarray, case: Case) -> Any:
    record = Record.unpack(buffer, 1)
    session, *others = _sessions()
    goes_on = session.agree([session.record(), buffer, others[1].record()])
    assert isinstance(goes_on, bool) and (not goes_on or record.status == 0), f"the step goes on: {record}"
    return record


def _read_handshake(buffer: np.ndarray, case: Case) -> Any:
    session, *others = _sessions()
    session.check_handshake([session.handshake(), buffer, others[1].handshake()])
    return Record.unpack(buffer, 1)


READERS: dict[str, Callable[[np.ndarray, Case], Any]] = {
    "payload": _read_payload,
    "frame": _read_frame,
    "frames": _read_frames,
    "record": _read_record,
    "handshake": _read_handshake,
}


@contextlib.contextmanager
def numpy_kernels() -> Iterator[None]:
    """Has NumPy's kernels serve, for a while."""
    sources = (definition, atoms, bits)
    own = {name: getattr(s, name) for name in kernels.__all__ for s in sources if hasattr(s, name)}
    serving = {name: getattr(kernels, name) for name in own}
    vars(kernels).update(own)
    try:
        yield
    finally:
        vars(kernels).update(serving)


def run(payloads: int, seed: int = 0, first: int = 0, note: Callable[[int], object] = int) -> Figures:
    """Makes so many trials, from the number `first` on; `note` is told the number of each before it is made.

    Raises:
        AssertionError: one has come to something else; the message has the codec, the payload and how to make it again.
    """
    figures, compared = Figures(Counter(), Counter(), Counter()), kernels.implementation() != "numpy"
    for number in range(first, first + payloads):
        note(number)
        trial = drawn(seed, number)
        try:
            result = attempt(trial)
            if compared and trial.target == "payload" and number % COMPARED == 0:
                with numpy_kernels():
                    by_definition = attempt(trial)
                assert result == by_definition, f"the compiled kernels: {result}; NumPy's: {by_definition}"
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{told(trial, seed, number)}") from error
        figures.tried[trial.case.name] += 1
        (figures.refused if result[0] == "refused" else figures.decoded)[trial.case.name] += 1
    return figures


def told(trial: Trial, seed: int, number: int) -> str:
    return (
        f"seed {seed}, trial {number}: the {trial.target} of {trial.case.name}, for {list(trial.case.shape)}: "
        f"{len(trial.data)} bytes {trial.data.hex()}"
    )


# Exchanges of whole methods

LAYOUTS = (Layout.of([("w", (12, 10)), ("b", (7,))], 0), Layout.of([("v", (33, 5)), ("s", ()), ("none", (0, 4))], 1))


def run_exchanges(steps: int, seed: int = 0, texts: tuple[str, ...] = tuple(sorted(METHODS))) -> Figures:
    """Spoils what one rank sends in one collective of a step: all ranks raise, give the step up, or have the same mean.

    Each method makes so many steps, each from the same memory. An allreduce is spoilt in its values.

    Raises:
        AssertionError: ranks have come to different ends, or a memory is not what it may be.
    """
    figures = Figures(Counter(), Counter(), Counter())
    for text in texts:
        spoiler = _Spoiler()
        simulation = Simulation(make(text), LAYOUTS, RANKS, tamper=spoiler)
        for step in range(2):
            assert simulation.step(testing.gradients(LAYOUTS, step, RANKS)) is not None
        memories = [session.state_dict() for session in simulation.sessions]
        for number in range(steps):
            for session, memory in zip(simulation.sessions, memories):
                session.load_state_dict(memory)
            stages = len(simulation.sessions[0].reducer.stages(LAYOUTS[number % 2], Group(0, RANKS)))
            spoiler.spoil(random.Random(seed << 40 | number), number % 2, number // 2 % stages)
            with np.errstate(all="ignore"):
                results = simulation.step_each(testing.gradients(LAYOUTS, number, RANKS))
            try:
                assert spoiler.data is not None, "nothing was spoilt"
                kind = _end_of(simulation, results)
            except AssertionError as error:
                data = spoiler.data.hex() if spoiler.data is not None else "nothing"
                raise AssertionError(f"{error}\n{text}, seed {seed}, step {number}: {spoiler.where} was {data}") from error
            figures.tried[text] += 1
            (figures.decoded if kind == "means" else figures.refused)[text] += 1
        spoiler.spoil(None, 0, 0)
    return figures


class _Spoiler:
    """Mutates what a rank gives to one collective of a bucket."""

    def __init__(self) -> None:
        self.spoil(None, 0, 0)

    def spoil(self, rng: random.Random | None, bucket: int, stage: int) -> None:
        self._rng, self._at = rng, (bucket, stage)
        self.data: bytes | None = None
        self.where = ""

    def __call__(self, bucket: int, stage: int, asked: list[Any]) -> None:
        rng = self._rng
        if rng is None or (bucket, stage) != self._at:
            return
        rank = rng.randrange(RANKS)
        request = asked[rank]
        self.where = f"what rank {rank} gave to collective {stage} of bucket {bucket}"
        if isinstance(request, AllGather):
            asked[rank] = AllGather(self._mutated(request.payload, rng))
        elif isinstance(request, AllToAll):
            payloads, to = list(request.payloads), rng.randrange(RANKS)
            payloads[to] = self._mutated(payloads[to], rng)
            asked[rank] = AllToAll(payloads)
        else:
            data = bytearray(request.array.tobytes())
            rng.choice((flips_bits, sets_bytes, sets_a_field))(data, b"", rng)
            self.data = bytes(data)
            asked[rank] = request._replace(array=np.frombuffer(self.data, request.array.dtype).copy())

    def _mutated(self, buffer: np.ndarray, rng: random.Random) -> np.ndarray:
        whole = buffer.tobytes()
        if rng.randrange(4):  # the payload, in a frame that is right for it
            _, _, codec, bucket, step, elements, _ = frame.HEADER.unpack(whole[: frame.HEADER.size])
            payload = np.frombuffer(mutated(whole[frame.HEADER.size :], whole, rng), np.uint8)
            self.data = frame.pack(frame.Address(codec, bucket, step, elements), payload).tobytes()
        else:
            self.data = mutated(whole, whole, rng)
        return np.frombuffer(self.data, np.uint8).copy()


def _end_of(simulation: Simulation, results: list[Any]) -> str:
    kinds = {"error" if isinstance(r, Exception) else "means" if r is not None else "given up" for r in results}
    assert len(kinds) == 1, f"the ranks came to different ends: {results}"
    for result in results:
        assert not isinstance(result, Exception) or isinstance(result, CompressionError), repr(result)
        if isinstance(result, list):
            for mean, same, layout in zip(result, results[0], LAYOUTS):
                assert mean.shape == (layout.size,) and mean.dtype == np.float32, f"a mean of {mean.dtype}{list(mean.shape)}"
                assert mean.tobytes() == same.tobytes(), "the ranks have other means"
    for rank, session in enumerate(simulation.sessions):
        for name, array in session.state_dict()["arrays"].items():
            assert np.isfinite(array).all() or name.endswith(".lr"), f"rank {rank} keeps what is not finite in {name}"
    return kinds.pop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payloads", type=int, default=20_000)
    parser.add_argument("--exchanges", type=int, default=20, help="steps of each method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--trial", type=int, help="makes this one alone, and shows it")
    parser.add_argument("--note", type=Path, help="a file for the number of the trial that is being made, should it crash")
    given = parser.parse_args()
    if given.trial is not None:
        print(told(drawn(given.seed, given.trial), given.seed, given.trial), flush=True)
        print(run(1, given.seed, given.trial).table())
        return
    note: Callable[[int], object] = int
    if given.note:
        file = os.open(given.note, os.O_CREAT | os.O_WRONLY)
        note = lambda number: os.pwrite(file, b"%012d" % number, 0)  # noqa: E731
    began = time.perf_counter()
    print(run(given.payloads, given.seed, given.first, note).table())
    print(f"{given.payloads} payloads: {time.perf_counter() - began:.1f} s, kernels: {kernels.implementation()}", flush=True)
    began = time.perf_counter()
    print(run_exchanges(given.exchanges, given.seed).table())
    print(f"exchanges: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
