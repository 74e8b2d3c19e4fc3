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
        self.ranks, self.d, self.seed = ranks, d, seed
        a = rng.normal(size=(rows, d))
        b = a @ rng.normal(size=d) + rng.normal(size=rows)
        self.a, self.b = np.split(a, ranks), np.split(b, ranks)
        self.hessian = 2 * a.T @ a / rows + 0.1 * np.eye(d)
        self.solution = np.linalg.solve(self.hessian, 2 * a.T @ b / rows)
        self.curvatures, self.directions = np.linalg.eigh(self.hessian)  # ascending; column j belongs to curvature j

    def grads(self, x: np.ndarray) -> list[np.ndarray]:
        """float64[d] of each rank."""
        return [2 * a.T @ (a @ x - b) / len(b) + 0.1 * x for a, b in zip(self.a, self.b)]

    def rate(self, step_size: float) -> float:
        """gamma, of gamma * L."""
        return step_size / float(self.curvatures[-1])

    def descend(self, method: Reducer, step_size: float, steps: int) -> Iterator[tuple[np.ndarray, Simulation]]:
        """Plain SGD with simulated ranks from x = 0; `step_size` is gamma * L. Yields x and the simulation after each step."""
        simulation = Simulation(method, Layout.of([("x", (self.d,))]), self.ranks, self.seed)
        x = np.zeros(self.d)
        for _ in range(steps):
            mean = simulation.step([[g.astype(np.float32)] for g in self.grads(x)])
            assert mean is not None
            x = x - self.rate(step_size) * mean[0]
            yield x, simulation

    def plateau(self, step_size: float, block: int) -> float:
        """The root of E||x - x*||^2 in which SGD with codes of the gradients ends: QSGD's, with blocks' maxima.

        The errors e of linear descent with independent noise of covariance N have the covariance S of the Lyapunov equation
        S = (1 - gamma H) S (1 - gamma H) + gamma^2 N. N is taken at x*, where E(Q(g) - g)_j^2 = |g_j| (M - |g_j|), and is
        diagonal; the trace of S is wanted, whose diagonal in H's directions has a closed form.
        """
        gamma = self.rate(step_size)
        noise = sum(_code_variances(g, block) for g in self.grads(self.solution)) / self.ranks**2
        along = (self.directions**2).T @ noise  # float64[d]: noise in H's directions
        return float(np.sqrt((gamma**2 * along / (1 - (1 - gamma * self.curvatures) ** 2)).sum()))


def _code_variances(g: np.ndarray, block: int) -> np.ndarray:
    """float64[d]: the variance of each element of a ternary code of g."""
    largest = np.concatenate([np.full(part.size, np.abs(part).max()) for part in np.split(g, range(block, g.size, block))])
    return np.abs(g) * (largest - np.abs(g))
