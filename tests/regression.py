"""The distributed ridge regression that DORE is studied on: 1200 x 500, rows shared out, local gradients at x* not zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvdcompress import Layout
from hvdcompress.core import Reducer
from hvdcompress.drivers.simulate import Simulation


class Regression:
    """f = mean over ranks of f_i, f_i = mean squared residual of the rank's rows + 0.05 ||x||^2; all draws N(0, 1)."""

    def __init__(self, ranks: int, rows: int = 1200, d: int = 500, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.ranks, self.d = ranks, d
        a = rng.normal(size=(rows, d))
        b = a @ rng.normal(size=d) + rng.normal(size=rows)
        self.a, self.b = np.split(a, ranks), np.split(b, ranks)
        self.hessian = 2 * a.T @ a / rows + 0.1 * np.eye(d)
        self.solution = np.linalg.solve(self.hessian, 2 * a.T @ b / rows)
        self.curvatures = np.linalg.eigvalsh(self.hessian)

    def grads(self, x: np.ndarray) -> list[np.ndarray]:
        return [2 * a.T @ (a @ x - b) / len(b) + 0.1 * x for a, b in zip(self.a, self.b)]

    def descend(self, method: Reducer, step_size: float, steps: int) -> Iterator[tuple[np.ndarray, Simulation]]:
        """Plain SGD with simulated ranks from x = 0; `step_size` is gamma * L. Yields x and the simulation after each step."""
        simulation, x = Simulation(method, Layout.of([("x", (self.d,))]), self.ranks), np.zeros(self.d)
        for _ in range(steps):
            mean = simulation.step([[g.astype(np.float32)] for g in self.grads(x)])
            assert mean is not None
            x = x - step_size / self.curvatures[-1] * mean[0]
            yield x, simulation
