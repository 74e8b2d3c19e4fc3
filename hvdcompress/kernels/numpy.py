"""The kernels in NumPy: the definition of what every other set must compute, bit for bit.

All arithmetic is float32, rounded after each operation. Subnormal numbers are zero, by definition: on the way into an
operation and on the way out of it, and every zero is +0. (Some threads flush subnormals and some do not; bytes and
memories must not depend on it.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..core import Array, Bytes
from ..errors import PayloadError
from .random import block_keys, uniforms

TINY = np.float32(2.0**-126)  # the smallest normal float32
LARGEST = np.finfo(np.float32).max
CHUNK = 1 << 14  # elements worked on at a time, so that temporaries stay in the cache

TERNARY_RUN = 16  # blocks that share one base octave when scales are bytes
STEPS = 8  # scales an octave when scales are bytes
# float32[8]: 2**(-7/8) ... 2**0, to the bit, since they are part of the wire format
EIGHTHS: Array = np.array(
    [0x3F0B95C2, 0x3F1837F0, 0x3F25FED7, 0x3F3504F3, 0x3F45672A, 0x3F5744FD, 0x3F6AC0C7, 0x3F800000], np.uint32
).view(np.float32)


def zeros(n: int) -> Array:
    """float32[n] of zeros."""
    return np.zeros(n, np.float32)


def concatenate(parts: Sequence[Array]) -> Array:
    """The vectors one after another."""
    return np.concatenate(parts) if parts else zeros(0)


def all_finite(x: Array) -> bool:
    """True if no element is NaN or infinite."""
    return bool(np.isfinite(x).all())


def sum_of_squares(x: Array) -> float:
    """||x||^2 in float64, for metrics: not part of any payload."""
    return float(np.square(x, dtype=np.float64).sum())


def weighted_sum(*terms: tuple[float, Array]) -> Array:
    """float32[n]: the sum of factor * vector over the terms, in their order."""
    total = np.empty_like(terms[0][1])
    with np.errstate(over="ignore", invalid="ignore"):
        for part in _chunks(total.size):
            for i, (factor, x) in enumerate(terms):
                term = _flush(x[part].copy())
                if factor != 1.0:
                    term = _flush(np.multiply(term, np.float32(factor), out=term))
                total[part] = term if i == 0 else _flush(np.add(total[part], term, out=term))
    return total


def divide(x: Array, n: int) -> Array:
    """float32[n]: x / n, rounded once."""
    quotient = np.empty_like(x)
    for part in _chunks(x.size):
        quotient[part] = _flush(_flush(x[part].copy()) / np.float32(n))
    return quotient


def ternary_encode(x: Array, block: int, key: int, first: int, byte_scales: bool) -> Bytes:
    """Draws Bernoulli codes for a vector, block by block with the maximum norm, and packs them.

    Element j of a block with scale M >= max|x| becomes M sign(x_j) with probability |x_j| / M, else 0. A block with a
    non-finite element decodes to NaN throughout.

    Args:
        x: float32[n].
        block: elements a block; the last one may be shorter.
        key: of the draws, from `derive_key`.
        first: number of x's first block in the bucket.
        byte_scales: scales of one byte, rounded up, instead of float32; `first` is then a multiple of `TERNARY_RUN`.

    Returns:
        uint8[...]: scales, then a bit an element (1: not zero), then a bit for each non-zero (1: negative); the bits
        are little-endian and each part is filled up with zeros to whole bytes.
    """
    n, blocks = x.size, -(-x.size // block)
    scales, scale_bytes = _encode_scales(_block_maxima(x, block), byte_scales)
    mask, signs = np.empty(n, bool), []
    rows = max(1, CHUNK // block)
    for row in range(0, blocks, rows):
        part = x[row * block : (row + rows) * block]
        magnitude = _rows(np.abs(part), block)
        u = uniforms(block_keys(key, first + row, len(magnitude)), block)
        scale = scales[row : row + rows, None]
        with np.errstate(over="ignore", invalid="ignore"):
            # The comparison is negated so that a scale of NaN selects its whole block.
            chosen = ~(u * scale >= _flush(magnitude)) & (scale != 0)
        chosen = chosen.ravel()[: part.size]
        mask[row * block : row * block + part.size] = chosen
        signs.append(part[chosen] < 0)
    return np.concatenate(
        [
            scale_bytes,
            np.packbits(mask, bitorder="little"),
            np.packbits(np.concatenate(signs) if signs else mask, bitorder="little"),
        ]
    )


def ternary_decode_add(payload: Bytes, out: Array, block: int, factor: float, byte_scales: bool) -> int:
    """Adds factor * (what `ternary_encode` drew) to `out`, in place. Elements whose code is zero are left alone.

    Returns:
        The number of elements that are not zero.

    Raises:
        PayloadError: the payload is not one of `out.size` elements; `out` is then as it was.
    """
    n, blocks = out.size, -(-out.size // block)
    head, bits = _scale_bytes(blocks, byte_scales), -(-n // 8)
    if payload.size < head + bits:
        raise PayloadError(f"a ternary payload of {n} elements has at least {head + bits} bytes, not {payload.size}")
    mask = np.unpackbits(payload[head : head + bits], bitorder="little").view(bool)
    if mask[n:].any():
        raise PayloadError(f"a ternary payload marks elements after its {n}th")
    where = np.flatnonzero(mask)
    if payload.size != ternary_bytes(n, block, where.size, byte_scales):
        raise PayloadError(
            f"a ternary payload of {n} elements, {where.size} of them not zero, has "
            f"{ternary_bytes(n, block, where.size, byte_scales)} bytes, not {payload.size}"
        )
    negative = np.unpackbits(payload[head + bits :], bitorder="little", count=where.size)
    with np.errstate(over="ignore", invalid="ignore"):
        steps = _flush(np.float32(factor) * _decode_scales(payload[:head], blocks, byte_scales))[where // block]
        np.negative(steps, out=steps, where=negative.astype(bool))
        out[where] = _flush(_flush(out[where]) + steps)
    return where.size


def ternary_bytes(n: int, block: int, nonzeros: int, byte_scales: bool) -> int:
    """Size of a payload of `ternary_encode`, exactly."""
    return _scale_bytes(-(-n // block), byte_scales) + -(-n // 8) + -(-nonzeros // 8)


def ternary_noise(x: Array, block: int, byte_scales: bool) -> float:
    """The expected squared error of `ternary_encode`: the sum over blocks of ||x||_1 M - ||x||^2, in float64."""
    scales, _ = _encode_scales(_block_maxima(x, block), byte_scales)
    if not x.size:
        return 0.0
    sums = np.add.reduceat(np.abs(x), np.arange(0, x.size, block), dtype=np.float64)
    return max(0.0, float(sums @ scales.astype(np.float64)) - sum_of_squares(x))


def sketch_accumulate(x: Array, start: int, table: Array, tile: int, keys: Sequence[int]) -> None:
    """Adds a vector to a tiled count sketch, in place.

    Element i of the whole vector, in tile t = i // tile at place m, is added to cell p * tile + (m + o) % tile of each
    row with a sign; p, o and the sign are drawn for the row and the tile. Two elements of one tile never meet; two of
    different tiles meet with probability 1 / columns.

    Args:
        x: float32[n], which lies at `start` in the whole vector.
        table: float32[rows, columns]; columns is a multiple of `tile`.
        tile: a power of two; 1 is the ordinary count sketch.
        keys: of the draws, one a row, from `derive_key`.
    """
    for row, key in zip(table, keys):
        for part in _chunks(x.size):
            cells, negative = _cells(start + part.start, min(part.stop, x.size) - part.start, row.size, tile, key)
            signed = _flush(x[part].copy())
            np.negative(signed, out=signed, where=negative)
            np.add.at(row, cells, signed)


def sketch_estimate(n: int, start: int, table: Array, tile: int, keys: Sequence[int]) -> Array:
    """float32[n]: what a sketch holds of elements start ... start + n: the median over its rows, an odd number.

    It is NaN where a row is.
    """
    estimates = np.empty(n, np.float32)
    for part in _chunks(n):
        size = min(part.stop, n) - part.start
        rows = np.empty((len(keys), size), np.float32)
        for row, out, key in zip(table, rows, keys):
            cells, negative = _cells(start + part.start, size, row.size, tile, key)
            out[:] = row[cells]
            np.negative(out, out=out, where=negative)
        median = np.sort(_flush(rows), axis=0)[len(keys) // 2]
        estimates[part] = np.where(np.isnan(rows).any(axis=0), np.float32(np.nan), median)
    return estimates


def _cells(start: int, n: int, columns: int, tile: int, key: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """int64[n], bool[n]: where elements start ... start + n go in a row, and whether they are negated."""
    places = np.arange(start, start + n)
    first = start // tile
    draws = block_keys(key, first, (start + n - 1) // tile - first + 1)[places // tile - first]
    slots = ((draws & np.uint64(0xFFFFFFFF)) * np.uint64(columns // tile)) >> np.uint64(32)
    rotations = (draws >> np.uint64(32)).astype(np.int64)
    cells = slots.astype(np.int64) * tile + ((places + rotations) & (tile - 1))
    return cells, (draws >> np.uint64(63)).astype(bool)


def top_k(x: Array, k: int) -> NDArray[np.int64]:
    """int64[min(k, n)]: the places of the largest magnitudes, in ascending order; of equal ones the first are taken."""
    if k >= x.size:
        return np.arange(x.size)
    magnitudes = np.abs(_flush(x.copy())).view(np.uint32)  # as integers they are in order, NaN being the largest
    threshold = np.partition(magnitudes, x.size - k)[x.size - k] if k else np.uint32(0xFFFFFFFF)
    above = np.flatnonzero(magnitudes > threshold)
    equal = np.flatnonzero(magnitudes == threshold)[: k - above.size]
    return np.sort(np.concatenate([above, equal]))


def _chunks(n: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, n, CHUNK))


def _flush(x: Array) -> Array:
    """Makes subnormal numbers and -0 to +0, in place."""
    x[np.abs(x) < TINY] = 0
    return x


def _rows(x: Array, block: int) -> Array:
    """float32[blocks, block]: a copy of x, filled up with zeros."""
    padded = np.zeros(-(-x.size // block) * block, np.float32)
    padded[: x.size] = x
    return padded.reshape(-1, block)


def _block_maxima(x: Array, block: int) -> Array:
    """float32[blocks]: max|x| of each block, NaN if any of its elements is not finite."""
    if not x.size:
        return zeros(0)
    maxima = np.maximum.reduceat(np.abs(x), np.arange(0, x.size, block))
    maxima[~np.isfinite(maxima)] = np.nan
    return _flush(maxima)


def _scale_bytes(blocks: int, byte_scales: bool) -> int:
    return blocks + -(-blocks // TERNARY_RUN) if byte_scales else 4 * blocks


def _encode_scales(maxima: Array, byte_scales: bool) -> tuple[Array, Bytes]:
    """The scales that a decoder will read, and their bytes."""
    if byte_scales:
        coded = _byte_scales(maxima)
        return _decode_scales(coded, maxima.size, True), coded
    return maxima, maxima.astype("<f4").view(np.uint8)


def _byte_scales(maxima: Array) -> Bytes:
    """One byte a block, after one byte for each run of blocks.

    The run's byte is 127 + B, where 2**B is the least power of two that is no less than the run's maxima; 0 if all of
    them are zero. A block's byte c > 0 stands for 2**(B + (c - 255) / 8), the least such value that is no less than the
    block's maximum (and no less than what c = 1 stands for); c = 0 for zero. A run with a maximum that is not finite has
    the byte 0 and c = 255 throughout.
    """
    runs = -(-maxima.size // TERNARY_RUN)
    padded = np.pad(maxima, (0, runs * TERNARY_RUN - maxima.size))
    broken = np.isnan(padded)
    padded[broken] = 0
    mantissa, octave = np.frexp(padded)  # maximum = mantissa * 2**octave, 1/2 <= mantissa < 1
    step = np.searchsorted(EIGHTHS, mantissa) + 1 - STEPS  # mantissa <= 2**(step / 8)
    # A mantissa of 1/2 is 2**-1 itself, one below the first of EIGHTHS.
    eighths = octave.astype(np.int64) * STEPS + np.where(mantissa == 0.5, -STEPS, step)  # maximum <= 2**(eighths / 8)
    eighths, nonzero, broken = (a.reshape(runs, TERNARY_RUN) for a in (eighths, padded != 0, broken))
    top = np.where(nonzero, eighths, -(1 << 30)).max(axis=1, initial=-(1 << 30))
    base = -(-top // STEPS)  # the octave B
    codes = np.clip(eighths - base[:, None] * STEPS + 255, 1, 255) * nonzero
    heads = np.where(nonzero.any(axis=1), base + 127, 0)
    spoilt = broken.any(axis=1)
    codes[spoilt], heads[spoilt] = 255, 0
    coded: Bytes = np.concatenate([heads, codes.ravel()[: maxima.size]]).astype(np.uint8)
    return coded


def _decode_scales(coded: Bytes, blocks: int, byte_scales: bool) -> Array:
    if not byte_scales:
        return _flush(np.ascontiguousarray(coded).view("<f4").astype(np.float32))
    runs = -(-blocks // TERNARY_RUN)
    heads, codes = np.repeat(coded[:runs], TERNARY_RUN)[:blocks], coded[runs:].astype(np.int64)
    eighths = (heads.astype(np.int64) - 127) * STEPS + codes - 255
    octave, step = np.divmod(eighths - 1, STEPS)  # 2**(eighths / 8) = EIGHTHS[step] * 2**(octave + 1)
    with np.errstate(over="ignore"):
        scales = np.ldexp(EIGHTHS[step], (octave + 1).astype(np.int32)).astype(np.float32)
    scales = np.clip(scales, TINY, LARGEST)
    scales[heads == 0] = np.nan
    scales[codes == 0] = 0
    return scales
