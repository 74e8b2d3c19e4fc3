"""Counter-based randomness: every draw is a function of where it is used, and of nothing else.

A key is made of (seed, step, stream, rank, bucket); the draws of a block of elements depend on the key, the block's
number in the bucket and the element's place in the block. There is no generator and no state: a restart resumes the
same draws, and a shard of a vector has the draws that it has in the whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of splitmix64


def derive_key(*fields: int) -> int:
    """A 64-bit key from integers, by absorbing them one after another with splitmix64's finaliser."""
    key = 0
    for field in fields:
        key = _mix((key ^ (field & MASK)) + GOLDEN & MASK)
    return key


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def block_keys(key: int, first: int, blocks: int) -> NDArray[np.uint64]:
    """uint64[blocks]: the keys of blocks first, first + 1, ...: splitmix64 of key + (number + 1) * GOLDEN."""
    numbers = np.arange(first + 1, first + 1 + blocks, dtype=np.uint64)
    z = np.uint64(key) + numbers * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(keys: NDArray[np.uint64], block: int) -> NDArray[np.float32]:
    """float32[keys.size, block]: draws from the 2**23 odd multiples of 2**-24 between 0 and 1.

    Symmetric about 1/2 and exact in float32. A 32-bit finaliser runs over the place in the block; the low half of the
    block's key goes in before it and the high half in the middle of it.
    """
    low = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)[:, None]
    high = (keys >> np.uint64(32)).astype(np.uint32)[:, None]
    places = np.arange(block, dtype=np.uint32) * np.uint32(0x9E3779B1)
    h = places[None, :] ^ low
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= high
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    h >>= np.uint32(9)
    u = h.astype(np.float32)
    u *= np.float32(2.0**-23)
    u += np.float32(2.0**-24)
    return u
