"""Distributed least squares without Horovod: NumPy arrays, averaged over mpi4py.

    mpirun -np 3 python -m mpi4py examples/mpi4py_least_squares.py

Every rank has rows of its own. The gradients of the ranks do not vanish at the common solution, and DORE's memory is
what lets the compressed means reach it all the same; try --alpha 0, which has none.
"""

from __future__ import annotations

import argparse

import numpy as np
from mpi4py import MPI

from hvdcompress import Dore
from hvdcompress.drivers.mpi import DistributedMean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--alpha", type=float, default=0.1, help="rate of the memory")
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(0)
    solution_shape = (300, 4)
    planted = rng.normal(size=solution_shape)
    own = np.random.default_rng(1 + comm.rank)
    a = own.normal(size=(900, solution_shape[0]))
    b = a @ planted + own.normal(size=(900, solution_shape[1]))

    # For comparison only: the solution from everyone's rows.
    normal, right = comm.allreduce(a.T @ a), comm.allreduce(a.T @ b)
    solution = np.linalg.solve(normal, right)
    lr = 0.05 / (np.linalg.eigvalsh(normal)[-1] / 900 / comm.size)

    x = np.zeros(solution_shape)
    mean = DistributedMean(Dore(alpha=args.alpha), comm)
    for step in range(args.steps + 1):
        if comm.rank == 0 and step % max(1, args.steps // 6) == 0:
            print(f"step {step}: distance to the solution {np.linalg.norm(x - solution):.3e}", flush=True)
        (grad,) = mean([a.T @ (a @ x - b) / 900])
        x -= lr * grad
    if comm.rank == 0 and comm.size > 1:
        total = mean.session.stats().total
        print(f"{total.wire / 1e6:.2f} MB sent by each rank, {total.ratio:.1%} of what floats would take")


if __name__ == "__main__":
    main()
