"""Past 2^31 and 2^32 elements, bytes and places: by what is computed of them, and on memory that is zeros and takes no room."""

from __future__ import annotations

import itertools
import mmap
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from hvdcompress import CompressionError, Dense, Dore, Group, Layout, SketchedSGD, frame, make, traffic
from hvdcompress.codecs import Entrywise, Identity, Levels, PerTensor, Spectral, Ternary, TopK, atoms, codec, places
from hvdcompress.core import AllGather, AllReduce, AllToAll, Array, Outcome, Reduction, Stage, State, Step
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.kernels import bits, derive_key
from hvdcompress.kernels import numpy as definition
from hvdcompress.kernels.random import GOLDEN, MASK, block_keys, uniforms
from hvdcompress.reducers.accumulation import Split, split_of
from hvdcompress.reducers.two_pass import _divide
from hvdcompress.session import MOST, Session
from hvdcompress.sketch import CountSketch

FAR = [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 3, 1 << 40]
NORESERVE = 0x4000  # of mmap's flags: pages that are never written take no room
linux = pytest.mark.skipif(sys.platform != "linux", reason="maps zeros as Linux does")


def virtual(size: int, dtype: str, sparse: bool = False) -> np.ndarray:
    """Zeros that take no room before they are written to: a page of 2 MB, or of 4 KB if `sparse`."""
    nbytes = size * np.dtype(dtype).itemsize
    room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    if not sparse:
        room.madvise(mmap.MADV_HUGEPAGE)  # fewer of them to be looked up
    return np.frombuffer(room, dtype, size)


def resident() -> int:
    """Bytes of this process now, from where `peak` counts on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """The most bytes that this process has had since `resident`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def payload_of(size: int) -> np.ndarray:
    """uint8[size], read-only, all in one byte."""
    return np.broadcast_to(np.zeros(1, np.uint8), (size,))


@pytest.fixture
def native():
    module = pytest.importorskip("hvdcompress.kernels._native", reason="the compiled kernels are not built")
    before = module.instruction_set()
    yield module
    module.choose(before)
    module.set_threads(1)


# Draws


def mixed(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def drawn(key: int, block: int, place: int) -> float:
    """u of an element, by docs/wire-format.md, in Python's integers."""
    block_key = mixed((key + (block + 1) * GOLDEN) & MASK)
    h = (place * 0x9E3779B1 & 0xFFFFFFFF) ^ (block_key & 0xFFFFFFFF)
    h ^= h >> 16
    h = (h * 0x85EBCA6B & 0xFFFFFFFF) ^ (block_key >> 32)
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    h ^= h >> 16
    return (2 * (h >> 9) + 1) / 2**24


@pytest.mark.parametrize("first", FAR)
def test_draws_of_far_blocks_are_those_of_the_format(first: int) -> None:
    key = derive_key(3, 1, 4)
    expected = [[drawn(key, first + block, place) for place in range(5)] for block in range(3)]
    assert_array_equal(uniforms(block_keys(key, first, 3), 5), expected)
    near = uniforms(block_keys(key, first & 0xFFFFFFFF if first >> 32 else first & 0x7FFFFFFF, 3), 5)
    assert np.any(near != np.float32(expected)) or first == (1 << 31) - 1, "no high bit of a block's number is lost"


@pytest.mark.parametrize("first", FAR)
def test_far_blocks_are_encoded_alike_by_both_kernels(native, first: int) -> None:
    x, key = np.random.default_rng(0).normal(size=500).astype(np.float32), derive_key(1)
    for isa, byte_scales in itertools.product(native.instruction_sets(), (False, True)):
        native.choose(isa)
        aligned = first // 16 * 16
        for block in (1, 7, 64):
            expected, _ = definition.ternary_encode(x, block, key, aligned, byte_scales)
            assert_array_equal(native.ternary_encode(x, block, key, aligned, byte_scales)[0], expected, f"{isa}, {block}")
            expected, _ = definition.levels_encode(x, block, 5, key, first, byte_scales)
            assert_array_equal(native.levels_encode(x, block, 5, key, first, byte_scales)[0], expected, f"{isa}, {block}")


@pytest.mark.parametrize("codec", [Ternary(32), Ternary(32, "byte"), Levels(7, 32)], ids=str)
def test_a_far_part_of_a_bucket_has_draws_of_its_own(codec: codec.Codec) -> None:
    x = np.random.default_rng(0).normal(size=2048).astype(np.float32)
    starts = [0, *(n // codec.alignment * codec.alignment for n in (1 << 31, 1 << 32, 1 << 36, 1 << 37))]
    codes = {codec.encode(x, 5, start).payload.tobytes() for start in starts}
    assert len(codes) == len(starts)


@pytest.mark.parametrize("codec", [Ternary(1 << 31), Ternary(1 << 31, "byte", "l2"), Levels(7, 1 << 31)], ids=str)
def test_a_block_takes_no_more_memory_than_there_are_elements(codec: codec.Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    x, block = np.random.default_rng(0).normal(size=300).astype(np.float32), 1 << 24
    tracemalloc.start()
    try:
        for l2 in (False, True):
            ternary, ternary_noise = definition.ternary_encode(x, block, 3, 0, False, l2)
            levels, levels_noise = definition.levels_encode(x, block, 7, 3, 0, l2)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
            whole, whole_noise = definition.ternary_encode(x, 300, 3, 0, False, l2)
            assert_array_equal(ternary, whole)
            assert ternary_noise == whole_noise
            whole, whole_noise = definition.levels_encode(x, 300, 7, 3, 0, l2)
            assert_array_equal(levels, whole)
            assert levels_noise == whole_noise
    finally:
        tracemalloc.stop()
    out = np.zeros(300, np.float32)
    codec.decode_add(codec.encode(x, 3).payload, out)
    assert np.isfinite(out).all() and out.any()


# Sketches


def cell_of(element: int, key: int, slots: int, tile: int) -> tuple[int, bool]:
    """Where an element goes in a row, and whether it is negated, by docs/wire-format.md."""
    z = mixed((key + (element // tile + 1) * GOLDEN) & MASK)
    return ((z % 2**32) * slots >> 32) * tile + (element % tile + (z >> 32)) % tile, bool(z >> 63)


@pytest.mark.parametrize("start", FAR)
@pytest.mark.parametrize(("tile", "slots"), [(1, 640), (256, 3), (1 << 10, (1 << 32) - 1), (1, 3_000_000_019), (1 << 34, 5)])
def test_cells_of_far_elements_are_those_of_the_format(start: int, tile: int, slots: int) -> None:
    """In small sketches, and in rows of up to 2^42 cells."""
    cells, negative = definition._cells(start, 600, slots * tile, tile, 77)
    expected = [cell_of(start + i, 77, slots, tile) for i in range(600)]
    assert_array_equal(cells, [cell for cell, _ in expected])
    assert_array_equal(negative, [sign for _, sign in expected])
    assert cells.min() >= 0 and cells.max() < slots * tile


@pytest.mark.parametrize("start", FAR)
def test_far_elements_are_sketched_alike_by_both_kernels(native, start: int) -> None:
    x, keys = np.random.default_rng(0).normal(size=700).astype(np.float32), [derive_key(5, row) for row in range(3)]
    for isa, (tile, slots) in itertools.product(native.instruction_sets(), ((1, 640), (256, 7))):
        native.choose(isa)
        tables = [np.zeros((3, slots * tile), np.float32) for _ in range(2)]
        for kernels, table in zip((definition, native), tables):
            kernels.sketch_accumulate(x, start, table, tile, keys)
        assert_array_equal(tables[1], tables[0], f"{isa}, tile {tile}")
        estimates = [kernels.sketch_estimate(700, start, tables[0], tile, keys) for kernels in (definition, native)]
        assert_array_equal(estimates[1], estimates[0], f"{isa}, tile {tile}")


@linux
@pytest.mark.parametrize(("tile", "columns"), [(1, (1 << 32) - 1), (256, 1 << 33)])
def test_a_row_of_some_2_32_cells_gives_back_what_is_in_it(native, tile: int, columns: int) -> None:
    x, keys = np.random.default_rng(0).normal(size=500 * tile).astype(np.float32)[:20_000], [derive_key(5)]
    cells, _ = definition._cells(1 << 40, x.size, columns, tile, keys[0])
    assert cells.max() > columns * 0.9 and np.unique(cells).size == x.size, "this test is of far cells that do not meet"
    for kernels, reader in ((definition, native), (native, definition)):
        table = virtual(columns, "float32", sparse=True).reshape(1, columns)
        kernels.sketch_accumulate(x, 1 << 40, table, tile, keys)
        assert_array_equal(reader.sketch_estimate(x.size, 1 << 40, table, tile, keys), x)


def test_a_sketch_of_more_slots_than_are_drawn_is_refused() -> None:
    CountSketch(1, 256 * ((1 << 32) - 1), 256)
    with pytest.raises(ValueError, match="columns must be fewer"):
        CountSketch(1, 256 << 32, 256)


# Kernels on more elements than 32 bits count


@linux
@pytest.mark.parametrize(
    ("byte_scales", "best_only"), [(False, True), *(pytest.param(b, False, marks=pytest.mark.slow) for b in (False, True))]
)
def test_a_code_of_more_than_2_32_elements_is_decoded_where_it_belongs(native, byte_scales: bool, best_only: bool) -> None:
    """In the long tier on every instruction set, on one thread and on several. NumPy's would need a bool for each element."""
    n, block = (1 << 32) + 1000, 1 << 20
    blocks, marked = -(-n // block), [5, (1 << 31) + 7, (1 << 32) - 1, 1 << 32, n - 1]
    out = virtual(n, "float32")
    head = definition._scale_bytes(blocks, byte_scales)
    payload = virtual(head + -(-n // 8) + 1, "uint8")
    if byte_scales:
        payload[: -(-blocks // 16)], payload[-(-blocks // 16) : head] = 128, 255  # 2^1
    else:
        payload[:head] = np.full(blocks, 2.0, "<f4").view(np.uint8)
    for place in marked:
        payload[head + place // 8] |= 1 << place % 8
    payload[-1] = 0b10001  # the first and the last are negative
    configurations = list(itertools.product(native.instruction_sets(), (1, 3)))
    for times, (isa, threads) in enumerate(configurations[-2:-1] if best_only else configurations, 1):
        native.choose(isa)
        native.set_threads(threads)
        assert native.ternary_decode_add(payload, out, block, 1.0, byte_scales) == len(marked)
        assert out[marked].tolist() == [-2.0 * times, 2.0 * times, 2.0 * times, 2.0 * times, -2.0 * times], f"{isa}, {threads}"
        beside = [place + step for place in marked for step in (-1, 1) if place + step < n and place + step not in marked]
        assert not out[beside].any(), f"{isa}, {threads}: other elements have changed"


@linux
@pytest.mark.slow
@pytest.mark.parametrize("n", [(1 << 31) + 77, (1 << 32) + 77])
def test_the_largest_of_more_elements_than_32_bits_count_are_found(native, n: int) -> None:
    x, planted = virtual(n, "float32"), [3, (1 << 31) - 1, 1 << 31, n - 70, n - 1]
    x[planted] = [1, -2, 3, 2.5, -4]
    assert native.top_k(x, 3).tolist() == planted[2:]
    assert native.sum_of_squares(x) == 1 + 4 + 9 + 6.25 + 16
    assert native.all_finite(x)
    x[n - 2] = np.nan
    assert not native.all_finite(x)


@linux
@pytest.mark.parametrize("value", [0.0, 2.0])
def test_the_largest_of_many_equal_elements_are_found_without_room_for_all_of_them(native, value: float) -> None:
    n, planted = 1 << 24, [77, 1 << 23, (1 << 24) - 1]
    x = np.full(n, value, np.float32)
    x[planted] = [5, -3, 4]
    before = resident()
    assert native.top_k(x, 3).tolist() == planted
    assert native.top_k(x, 5).tolist() == [0, 1, *planted]
    assert peak() - before < n, "a tenth of what they would take with their places"


# Sizes and places


def test_places_of_very_large_vectors_are_packed_in_the_size_of_the_format() -> None:
    for n, count in itertools.product([*FAR, 1 << 44], (1, 2, 1000, 1 << 20, 1 << 31, (1 << 32) + 5)):
        if count > n:
            continue
        sizes = []
        for low in range(max(0, n.bit_length() - count.bit_length() - 2), n.bit_length() - count.bit_length() + 3):
            sizes.append((count * (low + 1) + ((n - 1) >> low), low))
        best = min(sizes)[1]
        exact = -(-count * best // 8) + -(-(count + ((n - 1) >> best)) // 8)
        assert abs(places.places_bytes(n, count) - min(-(-n // 8), exact)) <= 1, f"{count} of {n}"
        assert isinstance(places.places_bytes(n, count), int)


@pytest.mark.parametrize("n", [*FAR, 1 << 44])
def test_places_beyond_32_bits_come_back(n: int) -> None:
    rng = np.random.default_rng(n % 1000)
    for count in (1, 2, 7, 5000):
        chosen = np.unique(np.concatenate([rng.integers(0, n, count - 1), [n - 1]]))
        packed = places.encode(chosen, n)
        assert packed.size == places.places_bytes(n, chosen.size)
        assert_array_equal(places.decode(packed, n, chosen.size), chosen, f"{count} of {n}")


def test_integers_of_many_bits_are_packed_to_the_bit() -> None:
    for width in (1, 31, 32, 33, 40, 62):
        values = np.array([0, 1, (1 << width) - 1, 1 << (width - 1)], np.int64) & (1 << width) - 1
        assert_array_equal(bits.unpack(bits.pack(values, width), 4, width), values, f"{width} bits")
    assert bits.packed_bytes((1 << 32) + 1, 3) == 1610612737
    assert bits.packed_bytes(1 << 40, 33) == 33 << 37
    assert bits.digit_words((1 << 33) + 1, 2) == -(-((1 << 33) + 1) // 10)


@pytest.mark.parametrize("n", [(1 << 31) + 1, (1 << 32) + 5, 10**12])
def test_payloads_of_very_large_tensors_have_the_size_of_the_format(n: int) -> None:
    assert Identity().expected_bytes((n,)) == 4 * n
    blocks = -(-n // 256)
    assert Ternary(256).expected_bytes((n,), density=1.0) == 4 * blocks + 2 * -(-n // 8)
    assert Ternary(256, "byte").expected_bytes((n,), density=0.0) == blocks + -(-blocks // 16) + -(-n // 8)
    assert Levels(7, 512).expected_bytes((n,)) == 4 * -(-n // 512) + -(-n * 4 // 8)
    assert TopK(k=1000).expected_bytes((n,)) == places.places_bytes(n, 1000) + 4000
    assert Entrywise(n / 2).expected_bytes((n,)) <= 4 + 4 * n
    assert Spectral(3).expected_bytes((n // 1000, 1000)) == 4 + 3 * (2 * (n // 1000 + 1000) + 4)


def test_what_does_not_fit_into_32_bits_of_a_payload_is_an_error() -> None:
    class Huge(Identity):
        def encode(self, x: Array, key: int, start: int = 0) -> codec.Encoded:
            return codec.Encoded(payload_of((1 << 32) + 4), 0.0)

    with pytest.raises(CompressionError, match="4294967300 bytes, more than 32 bits"):
        PerTensor(((Identity(), (1,)), (Huge(), (1,)))).encode(np.zeros(2, np.float32), 0)
    assert atoms.count_bytes(1, (1 << 32) - 2).tolist() == [1, 0, 0, 0, 254, 255, 255, 255]
    for count in ((1 << 32) - 1, 1 << 32):  # the first says that a tensor is sent as it is
        with pytest.raises(CompressionError, match=f"{count} atoms"):
            atoms.count_bytes(1, count)


@linux
def test_frames_of_more_than_4_gb_are_told_and_cut_by_their_lengths() -> None:
    length = (5 << 30) + 3
    gathered = virtual(2 * (frame.HEADER.size + length), "uint8")
    address = frame.Address(2, 70_000, (1 << 32) + 9, 1 << 41)
    for at in (0, frame.HEADER.size + length):
        header = frame.pack(address, np.zeros(0, np.uint8))
        header[-8:] = np.array([length], "<u8").view(np.uint8)
        gathered[at : at + frame.HEADER.size] = header
    first, second = frame.split(gathered, 2)
    assert first.size == second.size == frame.HEADER.size + length
    assert frame.unpack(second, address, 1).size == length
    with pytest.raises(CompressionError, match=f"{length - 1} bytes of payload where its header says {length}"):
        frame.unpack(second[:-1], address, 1)
    with pytest.raises(CompressionError, match="elements 2199023255552, expected 0"):
        frame.unpack(first, address._replace(elements=0), 0)


# Who has what


@pytest.mark.parametrize("n", [*FAR, 10**12 + 7])
@pytest.mark.parametrize("owners", [2, 3, 8, 4096])
def test_owners_have_even_runs_of_a_very_large_bucket(n: int, owners: int) -> None:
    for alignment in (1, 256, 4096):
        parts = _divide(n, owners, alignment)
        assert parts[0].start == 0 and parts[-1].stop == n
        assert all(a.stop == b.start and a.stop % alignment == 0 for a, b in zip(parts, parts[1:]))
        assert max(p.size for p in parts) - min(p.size for p in parts) <= 2 * alignment


def test_tensors_and_places_beyond_32_bits_are_where_the_layout_says() -> None:
    big = (1 << 20, 1 << 13)  # 2^33
    layout = Layout.of([("a", big), ("bias", (5,)), ("b", big), ("c", (40, 50))])
    assert layout.size == (1 << 34) + 2005
    assert layout.slices["c"] == slice((1 << 34) + 5, (1 << 34) + 2005)
    split = split_of(layout, 1000)
    assert (split.selectable, split.exact) == ((1 << 34) + 2000, 5)
    found = np.array([0, (1 << 33) - 1, 1 << 33, (1 << 34) + 1999])
    assert split.places(found).tolist() == [0, (1 << 33) - 1, (1 << 33) + 5, (1 << 34) + 2004]
    assert Split((), ()).places(np.empty(0, np.int64)).size == 0
    plan = SketchedSGD(ratio=0.1).plan(split.selectable)
    assert plan.k == round(0.07 * 0.1 * split.selectable) and plan.candidates == 4 * plan.k
    assert 5 * plan.columns + plan.candidates <= 0.1 * split.selectable


def test_bytes_are_counted_past_4_gb() -> None:
    request = AllGather(payload_of((5 << 30) + 1))
    sent = traffic.exchanged(request, [request.payload, payload_of(3), payload_of((1 << 33) + 1)], 0, 3)
    assert sent.payload == (5 << 30) + 1 and sent.wire == (5 << 30) + 1 + (1 << 33) + 1
    to_all = AllToAll([payload_of(7), payload_of((1 << 32) + 1), payload_of(1 << 32)])
    sent = traffic.exchanged(to_all, [], 1, 3)
    assert sent.payload == (1 << 33) + 8 and sent.wire == (1 << 32) + 7
    summed = AllReduce(np.broadcast_to(np.zeros(1, np.float32), ((1 << 31) + 1,)), "sum")
    assert traffic.exchanged(summed, None, 0, 2).wire == 4 * ((1 << 31) + 1)
    total = traffic.Traffic()
    for _ in range(1000):
        total += traffic.allreduced((1 << 32) + 1, 2)
    assert total.payload == total.wire == 1000 * ((1 << 32) + 1)
    assert Dense().wire_bytes(Layout.of([("w", (1 << 20, 1 << 20))]), Group(0, 2)) == 4 << 40


# What Horovod and MPI cannot count


class Sending:
    """A method that asks for one collective, of a size, on one rank; others send a byte."""

    def __init__(self, kind: type[AllGather | AllToAll], size: int, large_on: int):
        self.kind, self.size, self.large_on = kind, size, large_on

    def __repr__(self) -> str:
        return "Sending()"

    def init(self, layout: Layout, group: Group) -> State:
        return State(layout, group, {})

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        return (Stage(self.kind),)

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        return 0.0

    def residual(self, state: State) -> float:
        return 0.0

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        size = self.size if state.group.rank == self.large_on else 1
        asked = AllGather(payload_of(size)) if self.kind is AllGather else AllToAll([payload_of(size)] * state.group.size)
        for sender, reply in enumerate((yield asked)):
            if reply.size not in (1, self.size):
                frame.unpack(reply, frame.Address(1, 0, 0, 0), sender)  # an excuse
        return Outcome(grad, state, 0)


@pytest.mark.parametrize("kind", [AllGather, AllToAll])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_payload_that_cannot_be_counted_is_told_on_all_ranks(kind: type[AllGather | AllToAll], ranks: int) -> None:
    """The splits of an alltoall and what is gathered are counted in 32 bits: their sums must be below 2^31."""
    layout, given = Layout.of([("w", (3,))]), [[np.ones(3, np.float32)]] * ranks
    fitting, too_large = MOST // ranks, MOST // ranks + 1
    assert Simulation(Sending(kind, fitting, 1), layout, ranks).step(given) is not None
    results = Simulation(Sending(kind, too_large, 1), layout, ranks).step_each(given)
    for rank, result in enumerate(results):
        assert isinstance(result, CompressionError), f"rank {rank}: {result}"
        assert str(result).startswith(f"rank 1: {too_large * ranks} bytes would be exchanged at once"), f"rank {rank}: {result}"


@pytest.mark.parametrize("method", ["dense", "terngrad_shared", "true_topk", "sketch:ratio=1"])
def test_an_allreduce_that_cannot_be_counted_is_refused_before_the_first_step(method: str) -> None:
    layout = Layout.of([("w", (1 << 20, 1 << 16))])
    with pytest.raises(ValueError, match=r"would sum \d+ elements at once.*use smaller buckets"):
        Session(make(method), [layout], Group(0, 2))


def test_options_with_which_an_allreduce_cannot_be_counted_are_refused_between_steps() -> None:
    session = Session(SketchedSGD(k=5, columns=256, momentum=0.0), [Layout.of([("w", (40, 50))])], Group(0, 2))
    with pytest.raises(ValueError, match="elements at once"):
        session.change(columns=1 << 31)
    assert session.reducer == SketchedSGD(k=5, columns=256, momentum=0.0)


def test_what_auto_predicts_of_very_large_buckets_needs_no_memory() -> None:
    layout = Layout.of([("w", (1 << 20, 1 << 14))])
    tracemalloc.start()
    try:
        for text, ranks in itertools.product(("dore", "atomo", "qsgd", "topk", "sketch", "local_topk"), (2, 8)):
            sent = make(text).wire_bytes(layout, Group(0, ranks))
            assert 0 < sent <= Dense().wire_bytes(layout, Group(0, ranks)), text
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    assert Dore().stages(layout, Group(0, 8))[0].kind is AllToAll
