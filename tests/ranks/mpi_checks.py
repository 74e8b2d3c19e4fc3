"""What must hold of the mpi4py driver, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI
from numpy.testing import assert_allclose, assert_array_equal

from hvdcompress import CompressionError, Dense, Dore, SketchedSGD
from hvdcompress.drivers.mpi import DistributedMean
from ranks.harness import check, main

COMM = MPI.COMM_WORLD


def grads(step: int, rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng([step, rank])
    return [rng.normal(size=(40, 50)), rng.normal(size=7).astype(np.float32), rng.normal(size=()).astype(np.float16)]


@check
def means_have_the_shapes_and_dtypes_of_the_gradients():
    for method in (Dense(), Dore(), SketchedSGD(momentum=0)):
        mean = DistributedMean(method, COMM)
        for step in range(3):
            got = mean(grads(step, COMM.rank))
            for g, given in zip(got, grads(step, COMM.rank)):
                assert g.shape == given.shape and g.dtype == given.dtype, method
    exact = DistributedMean(Dense(), COMM)(grads(0, COMM.rank))
    for i, g in enumerate(exact):
        assert_allclose(g, sum(grads(0, rank)[i].astype(float) for rank in range(COMM.size)) / COMM.size, rtol=2e-3, atol=2e-3)


@check
def a_bad_gradient_on_one_rank_is_an_error_on_all_and_the_next_step_goes_on():
    for first in (True, False):
        mean = DistributedMean(Dore(), COMM)
        if not first:
            mean(grads(0, COMM.rank))
        for wrong, told in (
            ([np.ones((40, 50), complex), *grads(1, 0)[1:]], "complex128"),
            ([np.ones((40, 50), int), *grads(1, 0)[1:]], "int64"),
        ):
            with pytest.raises(CompressionError, match=told):
                mean(wrong if COMM.rank == 0 else grads(1, COMM.rank))
        mean(grads(2, COMM.rank))
    mean = DistributedMean(Dore(), COMM)
    mean(grads(0, COMM.rank))
    with pytest.raises(CompressionError, match="shapes"):
        mean(grads(1, 0)[:2] if COMM.rank == 0 else grads(1, COMM.rank))
    mean(grads(2, COMM.rank))


@check
def a_nan_on_one_rank_is_nan_on_all():
    mean = DistributedMean(Dore(), COMM)
    mean(grads(0, COMM.rank))
    before = {name: array.copy() for name, array in mean.session.states[0].arrays.items()}
    spoilt = grads(1, COMM.rank)
    if COMM.rank == COMM.size - 1:
        spoilt[1][3] = np.nan
    assert all(np.isnan(g).all() for g in mean(spoilt))
    for name, array in mean.session.states[0].arrays.items():
        assert_array_equal(array, before[name])


if __name__ == "__main__":
    main(COMM.rank, COMM.size)
