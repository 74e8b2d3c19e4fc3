"""The compiled kernels give the bytes of the NumPy ones, on every instruction set that this machine has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from hvdcompress import PayloadError
from hvdcompress.kernels import atoms, bits, derive_key, pool
from hvdcompress.kernels import numpy as definition

native = pytest.importorskip("hvdcompress.kernels._native", reason="the compiled kernels are not built")

SIZES = [*range(66), *range(66, 301, 5), 255, 257, 1023, 4097, 65_537, 200_003]
KINDS = ["normal", "zero", "one hot", "1e-30", "subnormal", "around the smallest", "huge", "spread", "NaN", "inf", "minus zero"]


CONFIGURATIONS = [(isa, threads) for isa in native.instruction_sets() for threads in (1, 3)]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = native.instruction_set()
    yield
    native.choose(before)
    native.set_threads(1)


def everywhere() -> Iterator[str]:
    """Sets every instruction set and number of threads in turn."""
    for isa, threads in CONFIGURATIONS:
        native.choose(isa)
        native.set_threads(threads)
        yield f"{isa}, {threads} threads"


def vector(kind: str, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, n])
    x = rng.normal(size=n).astype(np.float32)
    if kind in ("zero", "one hot"):
        x[:] = 0
        x[n // 2 : n // 2 + (kind == "one hot")] = -3.5
    scale = {"1e-30": 1e-30, "subnormal": 2.0**-130, "around the smallest": 2.0**-126, "huge": 8e37}.get(kind, 1.0)
    x = x * np.float32(scale)
    if kind == "spread":
        x *= np.exp2(rng.integers(-120, 120, n)).astype(np.float32)
    if kind == "minus zero":
        x[rng.random(n) < 0.5] = -0.0
    if kind in ("NaN", "inf") and n:
        x[rng.integers(0, n, 1 + n // 500)] = np.nan if kind == "NaN" else -np.inf
    return x


def same_bytes(a: np.ndarray, b: np.ndarray, message: str) -> None:
    assert_array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8), message)


def same_where_finite(got: np.ndarray, expected: np.ndarray, message: str) -> None:
    """The same bytes, but for the bits inside a NaN, which mean nothing."""
    spoilt = np.isnan(expected)
    assert_array_equal(np.isnan(got), spoilt, message)
    same_bytes(got[~spoilt], expected[~spoilt], message)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_ternary(kind: str) -> None:
    for n in SIZES:
        x, before = vector(kind, n), vector("normal", n, 1)
        for block, byte_scales, l2 in itertools.product((1, 7, 64) if n < 100 else (37, 256), (False, True), (False, True)):
            first, factor = 16 * (n % 5), (1.0, -0.3, 1e-38)[n % 3]
            payload, _ = definition.ternary_encode(x, block, 77 + n, first, byte_scales, l2)
            expected = before.copy()
            nonzeros = definition.ternary_decode_add(payload, expected, block, factor, byte_scales)
            less, _ = definition.ternary_encode(x, block, 77 + n, first, byte_scales, l2, before)
            beside = np.full_like(before, 7)
            definition.ternary_decode_add(payload, beside, block, factor, byte_scales, before)
            same_where_finite(beside, expected, "from a base")
            alike, from_alike = np.float32([0.25]), np.empty_like(before)
            definition.ternary_decode_add(payload, from_alike, block, factor, byte_scales, alike)
            for configuration in everywhere():
                where = f"{configuration}: {kind}, {n} elements, block {block}, byte scales {byte_scales}, l2 {l2}"
                same_bytes(native.ternary_encode(x, block, 77 + n, first, byte_scales, l2)[0], payload, where)
                same_bytes(
                    native.ternary_encode(x, block, 77 + n, first, byte_scales, l2, before)[0], less, f"{where}, a difference"
                )
                got, beside = before.copy(), pool.empty(before.size)
                assert native.ternary_decode_add(payload, got, block, factor, byte_scales) == nonzeros, where
                same_where_finite(got, expected, where)
                native.ternary_decode_add(payload, beside, block, factor, byte_scales, before)
                same_where_finite(beside, expected, f"{where}, from a base")
                native.ternary_decode_add(payload, beside, block, factor, byte_scales, alike)
                same_where_finite(beside, from_alike, f"{where}, from a base of equal elements")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_levels(kind: str) -> None:
    for n in (*SIZES[::3], *SIZES[-4:]):
        x, before = vector(kind, n), vector("normal", n, 1)
        for block, levels, l2 in itertools.product((1, 7, 64) if n < 100 else (37, 256), (1, 7, 8, 1000), (False, True)):
            factor = (1.0, -0.3, 1e-38)[n % 3]
            payload, _ = definition.levels_encode(x, block, levels, 77 + n, n % 5, l2)
            expected = before.copy()
            nonzeros = definition.levels_decode_add(payload, expected, block, levels, factor)
            for configuration in everywhere():
                where = f"{configuration}: {kind}, {n} elements, block {block}, {levels} levels, l2 {l2}"
                same_bytes(native.levels_encode(x, block, levels, 77 + n, n % 5, l2)[0], payload, where)
                got = before.copy()
                assert native.levels_decode_add(payload, got, block, levels, factor) == nonzeros, where
                same_where_finite(got, expected, where)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("NaN", "inf")])
def test_draws_of_atoms(kind: str) -> None:
    for n in (*SIZES[::3], *SIZES[-4:]):
        magnitudes = np.abs(vector(kind, n))
        for level in (0.0, 1e-9, 0.5 * float(magnitudes.max(initial=0)), 3.0 * float(magnitudes.max(initial=0))):
            expected = atoms.draw_atoms(magnitudes, level, 77 + n)
            for configuration in everywhere():
                got = native.draw_atoms(magnitudes, level, 77 + n)
                assert_array_equal(got, expected, f"{configuration}: {kind}, {n} elements, level {level}")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_matrices(kind: str) -> None:
    for m, k, n in ((0, 3, 4), (1, 1, 1), (5, 0, 3), (7, 16, 33), (100, 64, 64)):
        a, b = vector(kind, m * k).reshape(m, k), vector("normal", k * n, 1).reshape(k, n)
        u, v, before = vector(kind, m), vector("normal", n, 2), vector("normal", m * n, 3).reshape(m, n)
        expected, outer = definition.product(a, b), before.copy()
        atoms.add_outer(outer, u, v)
        for configuration in everywhere():
            same_where_finite(native.product(a, b), expected, f"{configuration}: {kind}, {m} x {k} x {n}")
            got = before.copy()
            native.add_outer(got, u, v)
            same_where_finite(got, outer, f"{configuration}: {kind}, outer product of {m} x {n}")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_quotients(kind: str) -> None:
    for n in SIZES:
        x, y = vector(kind, n), vector("normal", n, 1) * np.float32(1e-37 if kind == "subnormal" else 1)
        sums = [[(1.0, x)], [(1.0, x), (-1.0, y)], [(0.1, x), (1.0, y), (1e-3, x)], [(1.0, y), (-1.0, y)]]
        expected = [*(definition.weighted_sum(*terms) for terms in sums), definition.divide(x, 3)]
        for configuration in everywhere():
            got = [*(native.weighted_sum(*terms) for terms in sums), native.divide(x, 3)]
            for case, (g, e) in enumerate(zip(got, expected)):
                same_where_finite(g, e, f"{configuration}: {kind}, {n} elements, case {case}")
            assert native.all_finite(x) == definition.all_finite(x), f"{configuration}: {kind}, {n}"


def test_figures_agree() -> None:
    for _, kind, n in itertools.product(everywhere(), ("normal", "zero", "1e-30", "one hot"), (0, 1, 31, 1000, 65_537)):
        x = vector(kind, n)
        assert_allclose(native.sum_of_squares(x), definition.sum_of_squares(x), rtol=1e-12)
        for block, byte_scales in ((64, True), (37, False)):
            noise = definition.ternary_encode(x, block, 1, 0, byte_scales)[1]
            got = native.ternary_encode(x, block, 1, 0, byte_scales)[1]
            assert_allclose(got, noise, rtol=1e-6, atol=1e-9 * definition.sum_of_squares(x))
            for levels, l2 in ((1, True), (7, False)):
                noise = definition.levels_encode(x, block, levels, 1, 0, l2)[1]
                got = native.levels_encode(x, block, levels, 1, 0, l2)[1]
                assert_allclose(got, noise, rtol=1e-6, atol=1e-9 * definition.sum_of_squares(x))


@pytest.mark.parametrize("codec", ["ternary", "levels"])
def test_spoilt_payloads_are_refused_alike(codec: str) -> None:
    rng = np.random.default_rng(0)
    for trial in range(3000):
        n, block, byte_scales = int(rng.integers(0, 200)), int(rng.choice([1, 7, 32])), bool(rng.integers(2))
        x = vector("normal", n, trial)
        if codec == "ternary":
            payload, options = definition.ternary_encode(x, block, trial, 0, byte_scales)[0], (block, 1.0, byte_scales)
        else:
            payload, options = definition.levels_encode(x, block, 3, trial, 0, byte_scales)[0], (block, 3, 1.0)
        if payload.size and trial % 3:
            payload[rng.integers(0, payload.size, 3)] = rng.integers(0, 256, 3)
        payload = payload[: rng.integers(0, payload.size + 1)] if trial % 2 else payload
        results = []
        for k in (native, definition):
            out = np.ones(n, np.float32)
            try:
                with np.errstate(invalid="ignore", over="ignore"):
                    getattr(k, f"{codec}_decode_add")(payload, out, *options)
            except PayloadError as error:
                results.append(str(error))
                assert_array_equal(out, 1)
            else:
                results.append(np.nan_to_num(out, nan=7.5).tolist())
        assert results[0] == results[1], f"trial {trial}"


def test_arrays_of_another_kind_are_refused() -> None:
    x = np.ones(10, np.float32)
    payload, _ = definition.ternary_encode(x, 4, 1, 0, False)
    for bad in (x.astype(np.float64), np.ones((10, 2), np.float32)[:, 0]):
        with pytest.raises(TypeError, match="float32"):
            native.ternary_encode(bad, 4, 1, 0, False)
        with pytest.raises(TypeError, match="float32"):
            native.weighted_sum((1.0, bad))
    frozen = np.ones(10, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        native.ternary_decode_add(payload, frozen, 4, 1.0, False)
    with pytest.raises(ValueError, match="differ in size"):
        native.weighted_sum((1.0, x), (1.0, x[:5]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_sketches(kind: str) -> None:
    for n in [*range(0, 301, 7), 4097, 65_537]:
        x, start = vector(kind, n), (n * 37) % 1000
        for rows, tile, slots in ((1, 1, 50), (3, 16, 5), (5, 256, 7), (7, 8, 64)):
            keys = [derive_key(9, row) for row in range(rows)]
            table = np.zeros((rows, slots * tile), np.float32)
            definition.sketch_accumulate(x, start, table, tile, keys)
            estimates = definition.sketch_estimate(n, start, table, tile, keys)
            for configuration in everywhere():
                where = f"{configuration}: {kind}, {n} elements, {rows} rows, tile {tile}"
                got = np.zeros_like(table)
                native.sketch_accumulate(x, start, got, tile, keys)
                same_where_finite(got, table, where)
                same_where_finite(native.sketch_estimate(n, start, table, tile, keys), estimates, where)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [*KINDS, "all equal", "few values"])
def test_top_k(kind: str) -> None:
    for n in SIZES:
        x = vector(kind, n)
        if kind == "all equal":
            x = np.full(n, -2, np.float32)
        elif kind == "few values":
            x = np.random.default_rng(n).integers(-2, 3, n).astype(np.float32)
        for k in {0, 1, n // 1000, n // 3, n - 1 if n else 0, n, n + 5}:
            expected = definition.top_k(x, k)
            assert len(expected) == min(k, n)
            for configuration in everywhere():
                assert_array_equal(native.top_k(x, k), expected, f"{configuration}: {kind}, {k} of {n}")


def test_integers_of_few_bits() -> None:
    for count, width in itertools.product([*range(20), 16_385], [*range(18), 33, 56]):
        values = np.random.default_rng([count, width]).integers(0, 1 << width, count)
        packed = bits.pack(values, width)
        same_bytes(native.pack(values, width), packed, f"{count} of {width} bits")
        assert_array_equal(native.unpack(packed, count, width), values)
        assert_array_equal(native.unpack(np.append(packed, np.uint8(255)), count, width), values)
    for function, arguments in ((native.pack, (np.arange(3), 57)), (native.unpack, (np.zeros(8, np.uint8), 9, 8))):
        with pytest.raises(ValueError, match=r"56 bits|payload of 8 bytes"):
            function(*arguments)


def test_marks() -> None:
    for n in SIZES:
        for share in (0, 0.01, 0.5, 1):
            places = np.flatnonzero(np.random.default_rng(n).random(n) < share)
            mask = bits.mark(places, n)
            same_bytes(native.mark(places, n), mask, f"{places.size} of {n}")
            assert_array_equal(bits.marked(mask), places)
            assert_array_equal(native.marked(mask), places)
    for place in (-1, 9):
        with pytest.raises(IndexError, match="among 9"):
            native.mark(np.int64([place]), 9)


def test_sketches_that_do_not_fit_are_refused() -> None:
    x, table = np.ones(10, np.float32), np.zeros((3, 32), np.float32)
    for tile, keys in ((3, [1, 2, 3]), (64, [1, 2, 3]), (16, [1, 2]), (0, [1, 2, 3])):
        with pytest.raises(ValueError, match=r"tile|rows"):
            native.sketch_accumulate(x, 0, table, tile, keys)
