"""Count sketches and Sketched-SGD: their statistics, and the algorithm by its definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from hvdcompress import Dense, Group, Layout, SketchedSGD, make
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.sketch import CountSketch, heavymix, squared_norm, tile_for

TILES = pytest.mark.parametrize("tile", [1, 16])
LAYOUT = Layout.of([("a", (40, 25)), ("bias", (10,)), ("b", (30, 50)), ("gain", ())])


def normal(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


@TILES
def test_a_row_is_unbiased_with_the_variance_of_the_formula(tile: int) -> None:
    n, columns, draws = 300, 64, 4000
    x = normal(n)
    x[7] = 5
    sketches = [CountSketch(1, columns, tile, key) for key in range(draws)]
    tables = [sketch.of(x) for sketch in sketches]
    estimates = np.stack([s.estimate(t, n) for s, t in zip(sketches, tables)]).astype(np.float64)
    variance = (np.sum(x.astype(np.float64) ** 2) - x.astype(np.float64) ** 2) / columns
    if tile > 1:  # entries of one tile never meet, so they do not disturb each other
        blocks = np.repeat(np.add.reduceat(x.astype(np.float64) ** 2, np.arange(0, n, tile)), tile)[:n]
        variance = (np.sum(x.astype(np.float64) ** 2) - blocks) / columns
    assert np.all(np.abs(estimates.mean(axis=0) - x) < 5 * np.sqrt(variance / draws))
    assert_allclose(estimates.var(axis=0).mean(), variance.mean(), rtol=0.03)
    norms = np.array([squared_norm(t) for t in tables])
    assert abs(norms.mean() - np.sum(x.astype(np.float64) ** 2)) < 5 * norms.std() / np.sqrt(draws)
    if tile == 1:
        fourth = 2 * (np.sum(x.astype(np.float64) ** 2) ** 2 - np.sum(x.astype(np.float64) ** 4)) / columns
        assert_allclose(norms.var(), fourth, rtol=0.15)


@TILES
def test_the_median_over_rows_has_small_tails(tile: int) -> None:
    n, columns = 4096, 256
    x = normal(n)
    limit, shares = np.sqrt(3 / columns) * np.linalg.norm(x), []
    for rows in (1, 3, 5, 7):
        errors = [s.estimate(s.of(x), n) - x for s in (CountSketch(rows, columns, tile, key) for key in range(40))]
        shares.append(np.mean(np.abs(errors) > limit))
    assert shares[0] < 1 / 3, "Chebyshev's bound for a row"
    for share, most in zip(shares, (0.1, 0.015, 0.003, 0.001)):
        assert share < most, shares


@TILES
def test_linear(tile: int) -> None:
    sketch, x, y = CountSketch(5, 64, tile, 3), normal(1000), normal(1000, 1)
    assert_allclose(sketch.of(x + y), sketch.of(x) + sketch.of(y), atol=1e-4)
    parts = sketch.add(x[333:], 333, sketch.of(x[:333]))
    assert_allclose(parts, sketch.of(x), atol=1e-4, err_msg="a vector may be added part by part")


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("columns", [1, 7, 64, 1000])
def test_one_entry_is_found_exactly(rows: int, columns: int) -> None:
    x = np.zeros(50, np.float32)
    x[7] = 2.5
    for key in range(20):
        sketch = CountSketch(rows, columns, 1, key)
        assert sketch.estimate(sketch.of(x), 50)[7] == 2.5, f"key {key}"


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("columns", [1, 7, 64, 1000])
def test_an_even_number_of_rows_is_refused(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match=f"rows must be odd, not {rows}"):
        CountSketch(rows, columns, 1)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("columns", [1, 7, 64, 1000])
def test_sketches_of_two_vectors_add_up_to_that_of_their_sum(rows: int, columns: int) -> None:
    sketch, x, y = CountSketch(rows, columns, 1, 3), normal(50), normal(50, 1)
    assert_allclose(sketch.of(x + y), sketch.of(x) + sketch.of(y), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("columns", [1, 7])
def test_more_coordinates_than_there_are_are_all_of_them(rows: int, columns: int) -> None:
    layout = Layout.of([("w", (5, 10))])
    for P in (1, 4):
        method = SketchedSGD(k=1000, P=P, rows=rows, columns=columns, momentum=0, exact_below=0)
        given = grads(0, 2, layout, integers=True)
        assert_array_equal(Simulation(method, layout, 2).step(given)[0], np.mean(given, axis=0)[0])


def test_a_table_holds_sums_beyond_what_half_precision_holds() -> None:
    """256 entries of 3e4 in 8 columns, with the signs with which they add up."""
    sketch = CountSketch(1, 8, 1, 5)
    ones = np.ones(256, np.float32)
    signs = np.array([sketch.of(row)[0].sum() for row in np.diag(ones)], np.float32)
    table = sketch.of(3e4 * signs)
    counts = sum(np.abs(sketch.of(row)[0]) for row in np.diag(ones))
    assert table.dtype == np.float32 and table.max() > 65504 and counts.sum() == 256
    assert_array_equal(table[0], 3e4 * counts)


def test_entries_of_a_tile_never_meet() -> None:
    sketch = CountSketch(1, 512, 256, 1)
    x = np.zeros(256 * 3, np.float32)
    x[256:512] = np.arange(1, 257)
    assert_array_equal(sketch.estimate(sketch.of(x), x.size)[256:512], x[256:512])


def test_planted_entries_are_recalled_by_tiles_as_by_single_hashes() -> None:
    d, planted, columns = 1_000_000, 800, 20_000
    columns -= columns % 256
    rng = np.random.default_rng(0)
    starts = rng.choice(d // 200, planted // 200, replace=False) * 200
    for name, places in {
        "at random": rng.choice(d, planted, replace=False),
        "in runs": np.concatenate([np.arange(s, s + 200) for s in starts]),
    }.items():
        x = rng.normal(size=d).astype(np.float32) * np.float32(0.02)
        x[places] = rng.choice([-1, 1], planted) * rng.uniform(0.4, 1.6, planted)
        recall, rms = {}, {}
        for tile in (1, 256):
            found, errors = [], []
            for key in range(3):
                sketch = CountSketch(5, columns, tile, key)
                estimates = sketch.estimate(sketch.of(x), d)
                found.append(np.isin(places, np.argpartition(-np.abs(estimates), planted)[:planted]).mean())
                errors.append(np.sqrt(np.mean((estimates[places] - x[places]) ** 2)))
            recall[tile], rms[tile] = np.mean(found), np.mean(errors)
        assert recall[256] > recall[1] - 0.03, f"{name}: {recall}"
        assert rms[256] < 1.15 * rms[1], f"{name}: {rms}"
        assert recall[1] > 0.8, f"{name}: {recall}"


def test_tile_leaves_enough_slots() -> None:
    assert [tile_for(c) for c in (1, 63, 64, 128, 3072, 16_384, 1_000_000)] == [1, 1, 1, 2, 32, 256, 256]


@TILES
def test_heavymix_contracts(tile: int) -> None:
    d, k, rng = 400, 20, np.random.default_rng(0)
    ratios = []
    for key in range(100):
        x = normal(d, key) ** 3  # some entries are heavy
        sketch = CountSketch(5, 16 * k, tile, key)
        left = x.copy()
        top = heavymix(sketch, sketch.of(x), d, k, rng)
        assert len(set(top.tolist())) == k
        left[top] = 0
        ratios.append(np.sum(left.astype(np.float64) ** 2) / np.sum(x.astype(np.float64) ** 2))
    assert np.mean(ratios) <= 0.8 < 1 - k / d


@TILES
@pytest.mark.parametrize(("wide", "most"), [(8, 0.01), (16, 0.0), (4, 0.2)])
def test_planted_heavy_hitters_are_among_the_candidates(tile: int, wide: int, most: float) -> None:
    d, k, missed, trials = 20_000, 20, 0, 40
    for key in range(trials):
        rng = np.random.default_rng(key)
        x = rng.normal(size=d)
        planted = rng.choice(d, 10, replace=False)
        x[planted] = 0
        # 10 entries with x_i^2 = 1.05 ||x||^2 / k: together 10 * 1.05 / 20 of the whole.
        x[planted] = rng.choice([-1, 1], 10) * np.sqrt(np.sum(x**2) / (1 - 10 * 1.05 / k) * 1.05 / k)
        x = x.astype(np.float32)
        sketch = CountSketch(5, wide * k, tile, key)
        estimates = np.abs(sketch.estimate(sketch.of(x), d))
        candidates = np.argpartition(-estimates, 4 * k)[: 4 * k]
        missed += (~np.isin(planted, candidates)).sum()
    assert missed / (10 * trials) <= most, f"c = {wide} k"


# The method


def grads(step: int, ranks: int, layout: Layout = LAYOUT, integers: bool = False) -> list[list[np.ndarray]]:
    rng = np.random.default_rng([step, ranks])
    made = [rng.normal(size=layout.size).astype(np.float32) for _ in range(ranks)]
    return [[np.round(16 * g) if integers else g] for g in made]


def sketched_places(layout: Layout = LAYOUT) -> np.ndarray:
    return np.concatenate([np.arange(layout.slices[name].start, layout.slices[name].stop) for name in ("a", "b")])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_algorithm_2_and_algorithm_3_give_the_same_weights_without_momentum(ranks: int) -> None:
    """Algorithm 2 applies the rate before accumulating, and each rank takes the *mean* off its memory."""
    method, lr, d = SketchedSGD(ratio=0.3, momentum=0, exact_below=0), 2.0**-6, 2500
    layout = Layout.of([("w", (50, 50))])
    simulation, plan = Simulation(method, layout, ranks), method.plan(d)
    weights, expected, memories = np.zeros(d), np.zeros(d), np.zeros((ranks, d), np.float32)
    for step in range(40):
        given = grads(step, ranks, layout, integers=True)
        weights -= lr * simulation.step(given)[0]
        v = memories + np.float32(lr) * np.stack([g[0] for g in given])
        from hvdcompress.kernels import derive_key
        from hvdcompress.reducers.sketched_sgd import SKETCH

        sketch = CountSketch(method.rows, plan.columns, plan.tile, derive_key(0, step, SKETCH, 0, 0))
        estimates = np.abs(sketch.estimate(np.sum([sketch.of(x) for x in v], axis=0, dtype=np.float32), d))
        candidates = np.sort(np.lexsort((np.arange(d), -estimates))[: plan.candidates])
        mean = v[:, candidates].mean(axis=0)
        top = candidates[np.lexsort((candidates, -np.abs(mean)))[: plan.k]]
        update = np.zeros(d, np.float32)
        update[top] = v[:, top].mean(axis=0)
        expected -= update
        memories = v - update
        assert_array_equal(weights, expected, f"step {step}")


def test_by_hand() -> None:
    """Least squares with x = (2i, 2i + 1), y = i, i = 0..3, the sum of squares, rate 0.005, without momentum."""
    x = np.array([[2 * i, 2 * i + 1] for i in range(4)], float)
    y = np.arange(4.0)
    for k, expected in ((1, [(0, 0.34), (0.3288, 0.34)]), (2, [(0.28, 0.34), (0.172, 0.204)])):
        momentum = 0.9 if k == 2 else 0.0
        method = SketchedSGD(k=k, P=2, columns=64, momentum=momentum, exact_below=0)
        simulation, w = Simulation(method, Layout.of([("w", (1, 2))]), 1), np.zeros(2)
        for after in expected:
            w = w - 0.005 * simulation.step([[(2 * x.T @ (x @ w - y)).astype(np.float32)]])[0]
            assert_allclose(w, after, atol=1e-6, err_msg=f"k = {k}")


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_with_all_as_candidates_it_is_true_top_k(momentum: float) -> None:
    """Whatever the sketch: here with three cells a row."""
    layout, k = Layout.of([("w", (20, 25))]), 30
    method = SketchedSGD(k=k, P=17, columns=3, rows=1, tile=1, momentum=momentum, exact_below=0)
    simulation = Simulation(method, layout, 2)
    u, v = np.zeros(500), np.zeros(500)
    for step in range(30):
        given = grads(step, 2, layout, integers=True)
        u = momentum * u + np.mean([g[0] for g in given], axis=0)
        v = v + u
        top = np.lexsort((np.arange(500), -np.abs(v)))[:k]
        expected = np.zeros(500)
        expected[top] = v[top]
        u[top] = v[top] = 0
        assert_allclose(simulation.step(given)[0], expected, rtol=1e-6, err_msg=f"step {step}")


def test_with_every_coordinate_and_no_momentum_it_is_sgd() -> None:
    simulation, dense = Simulation(SketchedSGD(k=10**6, P=1, columns=64, momentum=0), LAYOUT, 3), Simulation(Dense(), LAYOUT, 3)
    for step in range(5):
        assert_array_equal(simulation.step(grads(step, 3, integers=True))[0], dense.step(grads(step, 3, integers=True))[0])


def test_what_is_not_applied_waits_and_is_applied_whole() -> None:
    """A gradient that stays the same, one coordinate a step: the small one has its turn, and loses nothing."""
    method = SketchedSGD(k=1, P=4, columns=64, momentum=0, exact_below=0)
    simulation, given, total = Simulation(method, Layout.of([("w", (2, 2))]), 2), np.float32([1.0, 0.01, 0, 0]), np.zeros(4)
    for step in range(1, 2001):
        total += simulation.step([[given], [given]])[0]
        assert 0.01 * step - 1.02 <= total[1] <= 0.01 * step + 1e-3, f"step {step}"
        if step == 150:
            assert total[1] > 0
    assert_allclose(total[:2] / 2000, given[:2], rtol=0.05)
    assert_array_equal(total[2:], 0)


@pytest.mark.parametrize("P", [4, 0])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_masking_and_conservation(P: int, momentum: float) -> None:
    simulation, ranks = Simulation(SketchedSGD(ratio=0.2, P=P, momentum=momentum), LAYOUT, 3), 3
    places, applied, accumulated = sketched_places(), np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)
    u = np.zeros((ranks, LAYOUT.size))
    small = np.setdiff1d(np.arange(LAYOUT.size), places)
    for step in range(30):
        given = grads(step, ranks)
        mean = simulation.step(given)[0]
        u = momentum * u + np.stack([g[0] for g in given])
        accumulated += u.mean(axis=0)
        top = places[mean[places] != 0]
        assert len(top) == simulation.sessions[0].reducer.plan(len(places)).k
        if P:
            applied += mean
        assert_allclose(mean[small], u[:, small].mean(axis=0), rtol=1e-4, atol=1e-5, err_msg="small tensors are sent exactly")
        u[:, top] = 0
        for rank in range(ranks):
            arrays = simulation.arrays(rank)
            assert not arrays["v"][top].any() and not arrays["v"][small].any()
            if momentum:
                assert_allclose(arrays["u"], u[rank], rtol=1e-4, atol=1e-4, err_msg="u is cleared where T is, else untouched")
    if P:
        waiting = np.mean([simulation.arrays(rank)["v"] for rank in range(ranks)], axis=0)
        assert_allclose(applied + waiting, accumulated, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_counted_bytes_are_those_of_the_formula_and_do_not_grow_with_ranks(ranks: int) -> None:
    method = SketchedSGD(ratio=0.1)
    simulation = Simulation(method, LAYOUT, ranks)
    for step in range(2):
        simulation.step(grads(step, ranks))
    plan, last = method.plan(2500), simulation.sessions[0].last
    floats = 5 * plan.columns + plan.candidates + 11 + 4
    assert_allclose(last.wire, 2 * 4 * floats * (ranks - 1) / ranks + 44 * (ranks - 1))
    assert_allclose(method.wire_bytes(LAYOUT, Group(0, ranks)), 2 * 4 * floats * (ranks - 1) / ranks)
    assert last.paper == 4 * (5 * plan.columns + plan.candidates + plan.k) + 8 * 11
    assert 5 * plan.columns + plan.candidates <= 0.1 * 2500 + 1
    assert len(method.stages(LAYOUT, Group(0, ranks))) == 2


def test_ten_times_fewer_bytes_at_the_default_ratio() -> None:
    layout = Layout.of([("w", (1000, 300))])
    assert SketchedSGD().wire_bytes(layout, Group(0, 4)) / Dense().wire_bytes(layout, Group(0, 4)) <= 0.1


def test_degenerate_layouts() -> None:
    for shapes, ranks in itertools.product(
        ([], [("b", (5,))], [("w", (0, 4))], [("w", (1, 1))], [("w", (40, 50)), ("s", ())]), (1, 3)
    ):
        for P in (4, 0):
            layout = Layout.of(shapes)
            simulation = Simulation(SketchedSGD(P=P, exact_below=0), layout, ranks)
            for step in range(3):
                assert simulation.step(grads(step, ranks, layout))[0].shape == (layout.size,), (shapes, P)


def test_a_sum_that_overflows_is_abandoned_by_all() -> None:
    simulation = Simulation(SketchedSGD(ratio=0.2), LAYOUT, 2)
    largest = [[np.full(LAYOUT.size, 3e38, np.float32)]] * 2
    with np.errstate(over="ignore", invalid="ignore"):
        assert simulation.step_each(largest) == [None, None]
    assert not simulation.arrays(0)["v"].any()


def test_a_cell_of_fetchsgd_that_overflows_is_abandoned_by_all_though_the_medians_are_finite() -> None:
    layout, rng, abandoned = Layout.of([("w", (10, 12))]), np.random.default_rng(0), 0
    for seed in range(20):
        simulation = Simulation(make("fetchsgd:k=1,rows=3,columns=40,exact_below=0"), layout, 2, seed)
        for _ in range(6):
            with np.errstate(over="ignore", invalid="ignore"):
                given = [[(2e37 * rng.normal(size=120)).astype(np.float32)] for _ in range(2)]
                results = simulation.step_each(given)
            abandoned += results == [None, None]
            assert all(np.isfinite(a).all() for rank in range(2) for a in simulation.arrays(rank).values()), f"seed {seed}"
    assert abandoned, "nothing has overflowed"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rows": 4}, "rows must be odd"),
        ({"ratio": 0}, "ratio"),
        ({"ratio": 1.5}, "ratio"),
        ({"k": 0}, "k must"),
        ({"P": -1}, "P must"),
        ({"momentum": 1.0}, "momentum"),
        ({"tile": 3}, "tile"),
        ({"columns": -5}, "columns"),
    ],
)
def test_bad_options_are_named(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SketchedSGD(**options)
