"""The kernels in NumPy: the definition of what every other set must compute, bit for bit.

All arithmetic is float32, rounded after each operation. Subnormal numbers are zero, by definition: on the way into an
operation and on the way out of it, and every zero is +0. (Some threads flush subnormals and some do not; bytes and
memories must not depend on it.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..core import Array, Bytes
from ..errors import PayloadError
from . import pool
from .bits import pack, packed_bytes, unpack
from .random import block_keys, uniforms

TINY = np.float32(2.0**-126)  # the smallest normal float32
LARGEST = np.finfo(np.float32).max
CHUNK = 1 << 14  # elements worked on at a time, so that temporaries stay in the cache

TERNARY_RUN = 16  # blocks that share one base octave when scales are bytes
STEPS = 8  # scales an octave when scales are bytes
LANES = 16  # sums that a Euclidean norm is made of
# float32[8]: 2**(-7/8) ... 2**0, to the bit, since they are part of the wire format
EIGHTHS: Array = np.array(
    [0x3F0B95C2, 0x3F1837F0, 0x3F25FED7, 0x3F3504F3, 0x3F45672A, 0x3F5744FD, 0x3F6AC0C7, 0x3F800000], np.uint32
).view(np.float32)


def zeros(n: int) -> Array:
    """float32[n] of zeros."""
    vector = pool.empty(n)
    vector.fill(0)
    return vector


def concatenate(parts: Sequence[Array]) -> Array:
    """The vectors one after another."""
    return np.concatenate(parts) if parts else zeros(0)


def largest(x: Array) -> float:
    """max|x|; 0 of nothing."""
    return float(np.abs(flush(x.copy())).max(initial=0))


def clipped(x: Array, deviations: float) -> Array:
    """float32[n]: x limited to so many of its standard deviations, taken about zero."""
    limit = np.float32(deviations * math.sqrt(sum_of_squares(x) / max(1, x.size)))
    return np.clip(x, -limit, limit)


def all_finite(x: Array) -> bool:
    """True if no element is NaN or infinite."""
    return bool(np.isfinite(x).all())


def sum_of_squares(x: Array) -> float:
    """||x||^2 in float64, for metrics: not part of any payload."""
    return float(np.square(x, dtype=np.float64).sum())


def weighted_sum(*terms: tuple[float, Array]) -> Array:
    """float32[n]: the sum of factor * vector over the terms, in their order."""
    total = pool.empty(terms[0][1].size).reshape(terms[0][1].shape)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in _chunks(total.size):
            for i, (factor, x) in enumerate(terms):
                term = flush(x[part].copy())
                if factor != 1.0:
                    term = flush(np.multiply(term, np.float32(factor), out=term))
                total[part] = term if i == 0 else flush(np.add(total[part], term, out=term))
    return total


def divide(x: Array, n: int) -> Array:
    """float32[n]: x / n, rounded once."""
    quotient = pool.empty(x.size).reshape(x.shape)
    for part in _chunks(x.size):
        quotient[part] = flush(flush(x[part].copy()) / np.float32(n))
    return quotient


def product(a: Array, b: Array) -> Array:
    """float32[m, n]: a float32[m, k] times b float32[k, n], summed over k in order, each step rounded."""
    total = np.zeros((len(a), b.shape[1]), np.float32)
    rows = max(1, CHUNK // max(1, b.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(a), rows):
            part = total[start : start + rows]
            for column, row in zip(flush(a[start : start + rows].copy()).T, flush(b.copy())):
                flush(np.add(part, flush(np.multiply.outer(column, row)), out=part))
    return total


def ternary_encode(
    x: Array, block: int, key: int, first: int, byte_scales: bool, l2: bool = False, minus: Array | None = None
) -> tuple[Bytes, float]:
    """Draws Bernoulli codes for a vector, block by block, and packs them.

    Element j of a block with scale M >= max|x| becomes M sign(x_j) with probability |x_j| / M, else 0. A block with a
    non-finite element, or norm, decodes to NaN throughout.

    Args:
        x: float32[n].
        block: elements a block; the last one may be shorter.
        key: of the draws, from `derive_key`.
        first: number of x's first block in the bucket.
        byte_scales: scales of one byte, rounded up, instead of float32; `first` is then a multiple of `TERNARY_RUN`.
        l2: the scale is the block's Euclidean norm, and not its largest magnitude.
        minus: float32[n] that is taken off x before; saves a pass over the memory.

    Returns:
        uint8[...]: scales, then a bit an element (1: not zero), then a bit for each non-zero (1: negative); the bits
        are little-endian and each part is filled up with zeros to whole bytes.
        And the expected squared error, the sum over blocks of ||x||_1 M - ||x||^2, in float64: a figure, not to the bit.
    """
    if minus is not None:
        x = weighted_sum((1.0, x), (-1.0, minus))
    block = _fitting(block, x)
    n, blocks = x.size, -(-x.size // block)
    scales, scale_bytes = _encode_scales(_block_norms(x, block, l2), byte_scales)
    mask, signs = np.empty(n, bool), []
    rows = max(1, CHUNK // block)
    for row in range(0, blocks, rows):
        part = x[row * block : (row + rows) * block]
        magnitude = _rows(np.abs(part), block)
        u = uniforms(block_keys(key, first + row, len(magnitude)), block)
        scale = scales[row : row + rows, None]
        with np.errstate(over="ignore", invalid="ignore"):
            # The comparison is negated so that a scale of NaN selects its whole block.
            chosen = ~(u * scale >= flush(magnitude)) & (scale != 0)
        chosen = chosen.ravel()[: part.size]
        mask[row * block : row * block + part.size] = chosen
        signs.append(part[chosen] < 0)
    payload = np.concatenate(
        [
            scale_bytes,
            np.packbits(mask, bitorder="little"),
            np.packbits(np.concatenate(signs) if signs else mask, bitorder="little"),
        ]
    )
    sums = np.add.reduceat(np.abs(x), np.arange(0, n, block), dtype=np.float64) if n else np.zeros(0)
    return payload, max(0.0, float(sums @ scales.astype(np.float64)) - sum_of_squares(x))


def ternary_decode_add(
    payload: Bytes, out: Array, block: int, factor: float, byte_scales: bool, base: Array | None = None
) -> int:
    """Adds factor * (what `ternary_encode` drew) to `out`, in place, or to `base`, the sum going to `out`.

    A base of one element stands for a vector of it.

    Elements whose code is zero are left alone.

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
    if base is not None:
        out[:] = base
    with np.errstate(over="ignore", invalid="ignore"):
        steps = flush(np.float32(factor) * _decode_scales(payload[:head], blocks, byte_scales))[where // block]
        np.negative(steps, out=steps, where=negative.astype(bool))
        out[where] = flush(flush(out[where]) + steps)
    return where.size


def ternary_bytes(n: int, block: int, nonzeros: int, byte_scales: bool) -> int:
    """Size of a payload of `ternary_encode`, exactly."""
    return _scale_bytes(-(-n // block), byte_scales) + -(-n // 8) + -(-nonzeros // 8)


def ternary_signs(x: Array, scale: float, key: int) -> NDArray[np.int8]:
    """int8[n]: sign(x_j) with probability |x_j| / scale, else 0, drawn as `ternary_encode` does for one block of n."""
    magnitude = flush(np.abs(x))
    u = uniforms(block_keys(key, 0, 1), x.size)[0]
    with np.errstate(over="ignore"):
        chosen = u * np.float32(scale) < magnitude
    return np.where(chosen, np.sign(x), 0).astype(np.int8)


def levels_encode(x: Array, block: int, levels: int, key: int, first: int, l2: bool) -> tuple[Bytes, float]:
    """Rounds a vector at random to whole levels of its blocks' norms, and packs them.

    With a = levels |x_j| / M, element j of a block with norm M becomes M sign(x_j) l / levels, where l is the whole number
    above a with probability a - floor(a), else the one below. A block with a non-finite element, or norm, decodes to NaN.

    Args:
        x, block, key, first, l2: as for `ternary_encode`.
        levels: from 1 to 2**15 - 1.

    Returns:
        uint8[...]: the norms, float32; then sign(x_j) l + levels for each element, in as many bits as 2 levels takes.
        And the expected squared error, in float64: a figure, not to the bit.
    """
    block = _fitting(block, x)
    scales, width, codes, noise = _block_norms(x, block, l2), level_bits(levels), [np.empty(0, np.int64)], 0.0
    for start, part in zip(range(0, x.size, max(1, CHUNK // block) * block), _whole_blocks(x, block)):
        row = start // block
        fractions, whole = _levels_of(part, block, levels, scales[row:])
        u = uniforms(block_keys(key, first + row, len(whole)), block)
        with np.errstate(invalid="ignore"):
            chosen = np.where(np.isnan(fractions), levels, whole + (u < fractions)).ravel()[: part.size]
        codes.append(np.where(part < 0, -chosen, chosen).astype(np.int64) + levels)
        units = scales[row : row + len(fractions), None].astype(np.float64) / levels
        variances = fractions.astype(np.float64) * (1 - fractions.astype(np.float64))
        noise += float((units**2 * variances).sum(where=units > 0))
    return np.concatenate([scales.astype("<f4").view(np.uint8), pack(np.concatenate(codes), width)]), noise


def level_bits(levels: int) -> int:
    """Bits of a code from -levels to levels."""
    return (2 * levels).bit_length()


def _levels_of(part: Array, block: int, levels: int, scales: Array) -> tuple[Array, Array]:
    """float32[blocks, block] each: what is above whole levels, and those; NaN in a block whose scale is."""
    magnitude = flush(_rows(np.abs(part), block))
    scale = scales[: len(magnitude), None]
    with np.errstate(invalid="ignore", divide="ignore"):
        places = np.where(scale == 0, 0, magnitude / scale) * np.float32(levels)
    whole = np.floor(places)
    return (places - whole).astype(np.float32), whole.astype(np.float32)


def levels_decode_add(payload: Bytes, out: Array, block: int, levels: int, factor: float) -> int:
    """Adds factor * (what `levels_encode` drew) to `out`, in place. Elements whose code is zero are left alone.

    Returns:
        The number of elements that are not zero.

    Raises:
        PayloadError: the payload is not one of `out.size` elements; `out` is then as it was.
    """
    n, blocks, width = out.size, -(-out.size // block), level_bits(levels)
    if payload.size != 4 * blocks + packed_bytes(n, width):
        raise PayloadError(
            f"a payload of {n} elements in {2 * levels + 1} levels has {4 * blocks + packed_bytes(n, width)} bytes, "
            f"not {payload.size}"
        )
    codes = unpack(payload[4 * blocks :], n, width) - levels
    if n and codes.max() > levels:
        raise PayloadError(f"a payload of {2 * levels + 1} levels has a code of {codes.max() + levels}")
    where = np.flatnonzero(codes)
    with np.errstate(over="ignore", invalid="ignore"):
        units = flush(np.float32(factor) * _decode_scales(payload[: 4 * blocks], blocks, False))
        units = flush(units / np.float32(levels))[where // block]
        out[where] = flush(flush(out[where]) + flush(units * codes[where].astype(np.float32)))
    return where.size


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
            signed = flush(x[part].copy())
            np.negative(signed, out=signed, where=negative)
            np.add.at(row, cells, signed)


def sketch_estimate(n: int, start: int, table: Array, tile: int, keys: Sequence[int]) -> Array:
    """float32[n]: what a sketch holds of elements start ... start + n: the median over its rows, an odd number.

    It is NaN where a row is.
    """
    estimates = pool.empty(n)
    for part in _chunks(n):
        size = min(part.stop, n) - part.start
        rows = np.empty((len(keys), size), np.float32)
        for row, out, key in zip(table, rows, keys):
            cells, negative = _cells(start + part.start, size, row.size, tile, key)
            out[:] = row[cells]
            np.negative(out, out=out, where=negative)
        median = np.sort(flush(rows), axis=0)[len(keys) // 2]
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
    magnitudes = np.abs(flush(x.copy())).view(np.uint32)  # as integers they are in order, NaN being the largest
    threshold = np.partition(magnitudes, x.size - k)[x.size - k] if k else np.uint32(0xFFFFFFFF)
    above = np.flatnonzero(magnitudes > threshold)
    equal = np.flatnonzero(magnitudes == threshold)[: k - above.size]
    return np.sort(np.concatenate([above, equal]))


def _chunks(n: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, n, CHUNK))


def flush(x: Array) -> Array:
    """Makes subnormal numbers and -0 to +0, in place."""
    x[np.abs(x) < TINY] = 0
    return x


def _fitting(block: int, x: Array) -> int:
    """The block size with which x is cut alike, and no memory goes into what is beyond it."""
    return min(block, max(1, x.size))


def _rows(x: Array, block: int) -> Array:
    """float32[blocks, block]: a copy of x, filled up with zeros."""
    padded = np.zeros(-(-x.size // block) * block, np.float32)
    padded[: x.size] = x
    return padded.reshape(-1, block)


def _block_norms(x: Array, block: int, l2: bool) -> Array:
    """float32[blocks]: max|x| or ||x|| of each block, NaN if any of its elements, or the norm, is not finite."""
    block = _fitting(block, x)
    if not x.size:
        return zeros(0)
    if l2:
        with np.errstate(over="ignore"):
            norms = np.concatenate([_euclidean(part, block) for part in _whole_blocks(x, block)])
    else:
        norms = np.maximum.reduceat(np.abs(x), np.arange(0, x.size, block))
    norms[~np.isfinite(norms)] = np.nan
    return flush(norms)


def _euclidean(x: Array, block: int) -> Array:
    """float32[blocks]: ||x|| of each block, in float64: 16 sums of every 16th square, then those in order."""
    rows = _rows(flush(x.copy()), block)
    lanes = np.zeros((len(rows), -(-block // LANES) * LANES))
    lanes[:, :block] = rows
    sums = np.add.reduce(np.square(lanes).reshape(len(rows), -1, LANES), axis=1)
    total = np.zeros(len(rows))
    for lane in sums.T:
        total += lane
    return np.sqrt(total).astype(np.float32)


def _whole_blocks(x: Array, block: int) -> Iterator[Array]:
    """Parts of a vector, of about a chunk's elements but no less than a block."""
    size = max(1, CHUNK // block) * block
    return (x[start : start + size] for start in range(0, x.size, size))


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
        return flush(np.ascontiguousarray(coded).view("<f4").astype(np.float32))
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
