"""Counter-based randomness: spread evenly, and a function of its place alone."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_array_equal

from hvdcompress.kernels.random import block_keys, derive_key, uniforms


def test_uniform() -> None:
    u = uniforms(block_keys(derive_key(1), 0, 4000), 256).ravel().astype(np.float64)
    assert u.min() > 0 and u.max() < 1
    assert np.all(u * 2**24 % 2 == 1), "odd multiples of 2**-24"
    counts = np.histogram(u, bins=1000, range=(0, 1))[0]
    chi_square = ((counts - u.size / 1000) ** 2 / (u.size / 1000)).sum()
    assert abs(chi_square - 999) < 5 * np.sqrt(2 * 999)


def test_places_blocks_and_keys_do_not_correlate() -> None:
    u = uniforms(block_keys(derive_key(1), 0, 2000), 256).astype(np.float64) - 0.5
    other = uniforms(block_keys(derive_key(2), 0, 2000), 256).astype(np.float64) - 0.5
    limit = 5 / np.sqrt(u.size)
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1]), (u, other), (u[:, :128], u[:, 128:])):
        assert abs((a * b).mean() * 12) < limit * np.sqrt(u.size / a.size)


def test_a_part_has_the_draws_of_the_whole() -> None:
    key = derive_key(3, 4)
    assert_array_equal(block_keys(key, 5, 10), block_keys(key, 0, 15)[5:])
    assert_array_equal(uniforms(block_keys(key, 0, 3), 100), uniforms(block_keys(key, 0, 3), 256)[:, :100])


def test_keys_depend_on_every_field_and_their_order() -> None:
    fields = [
        (seed, step, stream, rank, bucket)
        for seed in (0, 1, -1)
        for step in (0, 1)
        for stream in (1, 2)
        for rank in (0, 1)
        for bucket in (0, 1)
    ]
    assert len({derive_key(*f) for f in fields}) == len(fields)
    assert derive_key(1, 2) != derive_key(2, 1) and derive_key(0) != derive_key(0, 0)


def test_the_draws_are_what_they_were() -> None:
    """They are part of the wire format: all ranks must draw alike, whatever their version of NumPy."""
    assert derive_key(1, 2, 3) == 15020427595393229491
    assert_array_equal(uniforms(block_keys(42, 7, 1), 3)[0] * 2**24, [13346019, 15787253, 13573117])
