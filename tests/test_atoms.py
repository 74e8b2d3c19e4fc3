"""Atomic sparsification: optimal probabilities, its special cases, its bases, its payloads."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from conforming import CODECS
from numpy.testing import assert_allclose, assert_array_equal

from hvdcompress import Atomo, Layout, PayloadError, kernels, make
from hvdcompress.codecs import Entrywise, Fourier, Levels, PerTensor, Spectral, Ternary, TopK, places, spectral
from hvdcompress.codecs.atoms import DENSE, read_count, water_level
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.testing import decode

ATOMS = (Entrywise, Fourier, Spectral)


def heavy(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(2, size=n)).astype(np.float32)


def probabilities(magnitudes: np.ndarray, budget: float) -> np.ndarray:
    level = water_level(magnitudes, budget)
    exact = magnitudes.astype(np.float64)
    return np.minimum(1.0, exact / level) if level else (exact > 0).astype(float)


def one_by_one(magnitudes: np.ndarray, budget: float) -> np.ndarray:
    """The paper's sequential algorithm: the largest first, p = 1 as long as the rest is not balanced."""
    order = np.argsort(-magnitudes, kind="stable")
    p, left = np.zeros(magnitudes.size), budget
    for place, i in enumerate(order):
        rest = magnitudes[order[place:]].astype(np.float64)
        if rest.sum() == 0:
            break
        if magnitudes[i] * left <= rest.sum():
            p[order[place:]] = rest * left / rest.sum()
            break
        p[i], left = 1.0, left - 1
    return p


@pytest.mark.parametrize("budget", [0.3, 1, 2.5, 7, 19.5, 20])
def test_water_filling_is_the_paper_and_optimal(budget: float) -> None:
    """Sums to the budget, is in the order of the magnitudes, and no feasible p has less variance."""
    for seed in range(40):
        magnitudes = np.abs(heavy(20, seed))
        if seed % 4 == 0:
            magnitudes[:3] = magnitudes[3]  # equal ones
        p = probabilities(magnitudes, budget)
        assert_allclose(p.sum(), budget, rtol=1e-9)
        assert_allclose(p, one_by_one(magnitudes, budget), rtol=1e-6, atol=1e-9)
        assert np.all(np.diff(p[np.argsort(magnitudes)]) >= 0) and p.max() <= 1
        squares = magnitudes.astype(np.float64) ** 2
        variance = (squares * (1 / p - 1)).sum()
        rng = np.random.default_rng(seed)
        for _ in range(1000 // 40):
            other = rng.dirichlet(np.full(20, rng.uniform(0.2, 5))) * budget
            other = np.minimum(1, other + 1e-12)
            other[other < 1] *= min(1.0, (budget - (other == 1).sum()) / max(1e-300, other[other < 1].sum()))  # feasible
            assert other.sum() <= budget * (1 + 1e-9)
            assert variance <= (squares * (1 / other - 1)).sum() * (1 + 1e-9), f"seed {seed}: {other} is better"


def test_edges_of_water_filling() -> None:
    assert_array_equal(probabilities(np.zeros(5, np.float32), 2), 0)
    assert_array_equal(probabilities(np.float32([3, 0, 1, 0]), 2), [1, 0, 1, 0])
    assert_allclose(probabilities(np.float32([10, 1, 0.5, 0.2, 0.1]), 3), [1, 1, 0.625, 0.25, 0.125], rtol=1e-6)
    assert_allclose(probabilities(np.float32([1, 1]), 0.01), [0.005, 0.005], rtol=1e-9)
    assert_array_equal(probabilities(np.zeros(0, np.float32), 1), np.zeros(0))


@pytest.mark.parametrize(("budget", "norm"), [("l2", 2), ("max", np.inf)])
def test_qsgd_and_terngrad_are_special_cases(budget: str, norm: float) -> None:
    """Their probabilities are the optimum of a budget of ||g||_1 / ||g||; the same draws give the same message."""
    for seed, n in itertools.product(range(20), (1, 100, 1000)):
        x = heavy(n, seed)
        magnitudes = np.abs(x).astype(np.float64)
        level = np.linalg.norm(magnitudes, norm)
        assert_allclose(probabilities(np.abs(x), magnitudes.sum() / level), magnitudes / level, rtol=1e-12)
        special = Ternary(block=n, norm="l2" if budget == "l2" else "max")
        payloads = [codec.encode(x, kernels.derive_key(seed)) for codec in (Entrywise(budget), special)]
        messages = [decode(codec, e.payload, x.shape) for codec, e in zip((Entrywise(budget), special), payloads)]
        assert_array_equal(messages[0], messages[1], f"seed {seed}, {n} elements")
        assert_allclose(payloads[0].noise, payloads[1].noise, rtol=1e-4, atol=1e-4)


def test_one_level_of_qsgd_and_terngrad_as_methods_are_atomo() -> None:
    layout = Layout.of([("a", (20, 30)), ("b", (5, 7, 3))])
    grads = [[heavy(layout.size, rank)] for rank in range(3)]
    for special, general in (
        (make("terngrad"), Atomo("entrywise", "max")),
        (make("gather", codec=PerTensor(tuple((Ternary(600, norm="l2"), s) for s in layout.shapes))), Atomo("entrywise", "l2")),
    ):
        means = [Simulation(method, layout, 3).step(grads) for method in (special, general)]
        assert_array_equal(means[0][0], means[1][0], f"{special} and {general}")
    assert make("qsgd", levels=1, block=64).settings(layout).uplink == Ternary(64, norm="l2")


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_one_level_is_ternary(norm: str) -> None:
    """The two codecs round alike: one level with the same draws is the ternary message."""
    for seed in range(10):
        x = heavy(1000, seed)
        for one in (Levels(1, 64, norm), Ternary(64, norm=norm)):
            assert_allclose(one.encode(x, seed).noise, Ternary(64, norm=norm).encode(x, seed).noise, rtol=1e-5)
        levels, ternary = (decode(c, c.encode(x, seed).payload, x.shape) for c in (Levels(1, 64, norm), Ternary(64, norm=norm)))
        assert_allclose(levels, ternary, rtol=1e-6)


@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, ATOMS)], ids=str)
def test_variance_of_the_mean_over_ranks_falls_with_their_number(codec: Entrywise | Fourier | Spectral) -> None:
    """Ranks draw independently: the mean of W has 1 / W of the variance."""
    shape = (16, 15)
    layout, x = Layout.of([("w", shape)]), heavy(240, 5)
    noise, draws = codec.encode(x.reshape(shape), 0).noise, 400
    for ranks in (1, 4):
        simulation = Simulation(make("gather", codec=PerTensor(((codec, shape),)), exchange="allgather"), layout, ranks)
        errors = [float(((simulation.step([[x]] * ranks)[0].astype(float) - x) ** 2).sum()) for _ in range(draws)]
        spread = 5 * np.std(errors) / math.sqrt(draws)
        assert abs(np.mean(errors) - noise / ranks) <= spread + 1e-3 * noise, f"{ranks} ranks"


def test_the_criterion_predicts_spectral_or_entrywise() -> None:
    """At equal floats sqrt(m + n) ||X||_* <= ||X||_{1,1} says that spectral atoms have the lower variance."""
    rng, right = np.random.default_rng(0), 0
    m, n, trials = 24, 40, 60
    for trial in range(trials):
        rank = int(rng.integers(1, 12))
        low = rng.normal(size=(m, rank)) @ rng.normal(size=(rank, n))
        sparse = rng.normal(size=(m, n)) * (rng.random((m, n)) < 0.05)
        mix = trial / trials
        x = ((1 - mix) * low / np.linalg.norm(low) + mix * sparse / np.linalg.norm(sparse)).astype(np.float32)
        nuclear, entries = np.linalg.norm(x, "nuc"), np.abs(x).sum()
        second_moments = nuclear**2 / 1.0, entries**2 / (m + n)  # of one atom, and of as many entries as it has floats
        right += (math.sqrt(m + n) * nuclear <= entries) == (second_moments[0] <= second_moments[1])
        spectral, entrywise = Spectral(0.5).encode(x, 0).noise, Entrywise(0.5 * (m + n)).encode(x, 0).noise
        balanced = nuclear >= 0.5 * np.linalg.norm(x, 2) and entries >= 0.5 * (m + n) * np.abs(x).max()
        if balanced and abs(math.log(second_moments[0] / second_moments[1])) > 0.2:
            assert (spectral < entrywise) == (math.sqrt(m + n) * nuclear <= entries), f"trial {trial}"
    assert right == trials


def test_atoms_of_any_matrix_add_up_to_it() -> None:
    """The atoms add up to X, to rounding, and have unit norm, whatever is degenerate about it."""
    rng = np.random.default_rng(0)
    orthogonal = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    matrices = {
        "random": rng.normal(size=(30, 20)),
        "wide": rng.normal(size=(8, 100)),
        "orthogonal": orthogonal,
        "rank one": np.outer(rng.normal(size=30), rng.normal(size=20)),
        "row": rng.normal(size=(1, 50)),
        "column": rng.normal(size=(50, 1)),
        "repeated": orthogonal @ np.diag([3.0] * 10 + [1.0] * 10) @ orthogonal.T,
        "ill-conditioned": orthogonal @ np.diag(np.logspace(0, -9, 20)) @ orthogonal.T,
        "tiny": 1e-35 * rng.normal(size=(30, 20)),
        "huge": 1e35 * rng.normal(size=(30, 20)),
        "zero": np.zeros((30, 20)),
        "zero, large": np.zeros((300, 400)),
        "of small rank": rng.normal(size=(300, 64)) @ rng.normal(size=(64, 400)),
        "of small rank, tall": rng.normal(size=(400, 64)) @ rng.normal(size=(64, 300)),
        "of half the rank": rng.normal(size=(400, 140)) @ rng.normal(size=(140, 300)),
        "of full rank, large": rng.normal(size=(300, 400)),
    }
    for (name, x), factors in itertools.product(matrices.items(), ("gram", "svd")):
        x = x.astype(np.float32)
        exponent = int(np.frexp(np.abs(x).max())[1])
        scaled = np.ldexp(x, -exponent)
        u, sigmas, v = spectral.atoms_in(scaled, spectral.basis_of(scaled, factors))
        assert_allclose((u.T * sigmas) @ v, scaled, atol=1e-5, err_msg=f"{name}, {factors}")
        for vectors in (u, v):
            norms = np.linalg.norm(vectors[sigmas > 1e-6], axis=1)
            assert_allclose(norms, 1, rtol=1e-5, err_msg=f"{name}, {factors}")
        assert np.isfinite(decode(Spectral(0.5, factors=factors), Spectral(0.5).encode(x, 1).payload, x.shape)).all()


def test_small_ranks_are_told_and_have_the_singular_vectors_of_the_whole() -> None:
    """A gradient of a batch of 64 has 64 of them; a tail that is small, but no rounding, keeps its place."""
    rng = np.random.default_rng(3)
    small = (rng.normal(size=(300, 64)) @ rng.normal(size=(64, 400))).astype(np.float32)
    tail = small + 1e-4 * rng.normal(size=small.shape).astype(np.float32)
    hidden = small.copy()
    hidden[7, 11] += 1e-3 * np.linalg.norm(small)  # one more direction, which 128 signs see as they see the others
    for x, found in ((small, 128), (small.T.copy(), 128), (tail, 300), (hidden, 128)):
        basis = spectral.basis_of(x, "gram")
        assert basis.shape == (found, 300)
        assert_allclose(basis @ basis.T, np.eye(found), atol=1e-5)
        u, sigmas, v = spectral.atoms_in(x, basis)
        assert np.linalg.norm((u.T * sigmas) @ v - x) <= 4e-6 * np.linalg.norm(x)
        singular = np.linalg.svd(x.astype(np.float64), compute_uv=False)[:65]
        assert_allclose(np.sort(sigmas)[::-1][:65], singular, rtol=1e-4, atol=1e-5 * singular[0])
        least = Spectral(3, factors="svd").encode(x, 1).noise
        assert_allclose(Spectral(3).encode(x, 1).noise, least, rtol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_matrices_that_are_not_finite_travel_as_they_are(value: float) -> None:
    x = np.ones((300, 400), np.float32)
    x[3, 5] = value
    np.testing.assert_array_equal(decode(Spectral(3), Spectral(3).encode(x, 1).payload, x.shape), x)


def test_matrices_of_tensors() -> None:
    paper, out = Spectral(reshape="paper"), Spectral()
    for shape, as_paper, as_out in (
        ((512, 256, 3, 3), (65536, 18), (512, 2304)),
        ((64, 3, 7, 7), (96, 98), (64, 147)),
        ((64, 32, 1, 1), (64, 32), (64, 32)),
        ((5, 7, 3, 3), (35, 9), (5, 63)),
        ((300, 200), (300, 200), (300, 200)),
        ((10,), (5, 2), (1, 10)),
        ((7,), (7, 1), (1, 7)),
        ((), (1, 1), (1, 1)),
        ((3, 3, 32, 64), (9, 2048), (288, 64)),  # TensorFlow's order
        ((8, 4, 5), (16, 10), (8, 20)),
    ):
        assert paper.matrix(shape) == as_paper, shape
        assert out.matrix(shape) == as_out, shape
        assert math.prod(paper.matrix(shape)) == math.prod(out.matrix(shape)) == math.prod(shape)


def test_tensors_that_atoms_would_not_shrink_are_sent_as_they_are() -> None:
    for codec, shape in (
        (Spectral(3, values="float32"), (10, 4)),
        (Spectral(9), (10, 4)),
        (Spectral(3), (40,)),
        (Spectral("max", values="float32"), (6, 6)),
        (Entrywise(99.5), (100,)),
        (Fourier(1000, "bytes"), (15, 15)),
    ):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        payload, noise = codec.encode(x, key=1)
        assert read_count(payload) == DENSE and payload.size == 4 + 4 * x.size and noise == 0, f"{codec}"
        assert_array_equal(decode(codec, payload, shape), x)
    layout = Layout.of([("w", (10, 4)), ("b", (40,))])
    simulation = Simulation(Atomo(values="float32", exchange="allgather"), layout, 2)
    given = [[heavy(layout.size, rank)] for rank in range(2)]
    assert_allclose(simulation.step(given)[0], np.mean(given, axis=0)[0], rtol=1e-6, atol=1e-7)


def test_nothing_drawn_is_a_message_like_others() -> None:
    """Redrawing it would bias the mean: with a tenth of an atom nine messages of ten are empty."""
    for codec in (Entrywise(0.1), Fourier(0.1), Spectral(0.1)):
        x, empty, total, draws = heavy(400).reshape(20, 20), 0, 0.0, 3000
        for key in range(draws):
            payload = codec.encode(x, kernels.derive_key(key)).payload
            empty += sum(payload[:8].tolist()) == 0 if codec.number != Spectral.number else read_count(payload) == 0
            total += float((decode(codec, payload, x.shape) * x).sum())
        assert 0.85 * draws < empty < 0.95 * draws, f"{codec}"
        energy = float((x.astype(float) ** 2).sum())
        spread = math.sqrt(codec.encode(x, 0).noise * energy / draws)
        assert abs(total / draws - energy) < 5 * spread, f"{codec}"


@pytest.mark.parametrize("atoms", ["entrywise", "fourier", "spectral"])
def test_a_budget_in_bytes_is_kept_on_the_average(atoms: str) -> None:
    shape = (60, 80)
    layout = Layout.of([("w", shape)])
    for wanted in (300, 1000, 6000):
        codec = Atomo(atoms, wanted, "bytes").settings(layout).uplink.parts[0][0]
        sizes = [codec.encode(heavy(4800, seed).reshape(shape), seed).payload.size for seed in range(200)]
        spread = 5 * np.std(sizes) / math.sqrt(len(sizes))
        assert abs(np.mean(sizes) - wanted) <= spread + 0.01 * wanted + 2, f"{wanted}: {np.mean(sizes)}"
        ratio = Atomo(atoms, wanted / (4 * 4800), "ratio").settings(layout).uplink.parts[0][0]
        x = heavy(4800).reshape(shape)
        assert_array_equal(ratio.encode(x, 1).payload, codec.encode(x, 1).payload)


def test_equal_magnitudes_cost_a_sign_each() -> None:
    """As of gradients clipped by value: whether they are at the level or next to it, the budget is kept."""
    for ties, share in ((800, 0.06), (1000, 0.05), (64, 0.1)):
        x = heavy(1000, 1) * np.float32(0.01)
        x[:ties] = np.where(np.arange(ties) % 2, 1.0, -1.0)
        sizes = [Entrywise(share, "ratio").encode(x, kernels.derive_key(seed)).payload.size for seed in range(100)]
        assert np.mean(sizes) <= 4000 * share + 5 * np.std(sizes) / 10 + 2, f"{ties} ties: {np.mean(sizes)}"


def test_a_budget_that_is_enough_for_all_sends_all() -> None:
    x = np.zeros(1000, np.float32)
    x[::20] = heavy(50)
    for codec in (Entrywise(50), Entrywise(0.1, "ratio"), Entrywise(300, "bytes"), Fourier(2000, "bytes", block=1)):
        payload, noise = codec.encode(x, 1)
        assert noise == 0 and payload.size < 400, f"{codec}"
        assert_allclose(decode(codec, payload, x.shape), x, rtol=1e-6, err_msg=f"{codec}")


def test_what_overflows_is_sent_as_it_is() -> None:
    """A level beyond float32 must not come to zero in silence."""
    x = np.full(10_000, 2e35, np.float32)
    for codec, given in (
        (Entrywise(), x),
        (Entrywise(1e-35), heavy(1000) * 1e6),
        (Spectral(1e-6), x.reshape(100, 100)),
    ):
        assert_array_equal(decode(codec, codec.encode(given, 1).payload, given.shape), given, f"{codec}")


def test_clipping_leaves_a_tensor_without_spread_alone() -> None:
    for x in (np.float32([3.0]), np.full(40, 0.25, np.float32), np.zeros(5, np.float32)):
        assert_array_equal(kernels.clipped(x, 1.0), x)
    x = heavy(1000)
    assert_allclose(kernels.clipped(x, 2.5), np.clip(x, -2.5 * x.std(), 2.5 * x.std()), rtol=1e-2)


def test_too_many_atoms_are_refused() -> None:
    for shape, count in (((2, 3), 50), ((0, 0), 3_000_000), ((0,), 1)):
        size = 0 if not all(shape) else count * 4 * 5
        payload = np.concatenate([np.array([count], "<u4").view(np.uint8), np.zeros(size, np.uint8)])
        with pytest.raises(PayloadError):
            Spectral(values="float32").decode_add(payload, np.zeros(shape, np.float32))
    place = places.encode(np.array([3]), 100)
    head = [np.array([1, 1], "<u4").view(np.uint8), np.float32([7]).view(np.uint8)]
    twice = np.concatenate([*head, place, np.float32([2]).view(np.uint8), place, np.uint8([0])])
    with pytest.raises(PayloadError, match="twice"):
        Entrywise().decode_add(twice, np.zeros(100, np.float32))


def test_halves_are_their_own_means() -> None:
    x = np.concatenate([np.linspace(-1, 1, 401), np.logspace(-9, 0, 200), [0.0, 2.0**-24, -(2.0**-14)]]).astype(np.float32)
    draws = np.stack([kernels.to_halves(x, kernels.derive_key(key)).astype(np.float64) for key in range(4000)])
    neighbours = np.abs(draws - x).max(axis=0)
    assert np.all(neighbours <= np.maximum(np.abs(x) * 2.0**-10, 2.0**-24))
    assert np.all(np.abs(draws.mean(axis=0) - x) <= 5 * draws.std(axis=0) / math.sqrt(len(draws)) + 1e-12)
    exact = x.astype(np.float16).astype(np.float32) == x
    assert_array_equal(draws[:, exact], np.tile(x[exact], (len(draws), 1)), "what is a half stays what it is")


def test_the_cosines_are_an_orthonormal_basis() -> None:
    for n in (1, 2, 3, 8, 77, 256):
        basis = kernels.cosines(n).astype(np.float64)
        assert_allclose(basis @ basis.T, np.eye(n), atol=1e-6)
        k, i = np.arange(n)[:, None], np.arange(n)[None, :]
        expected = np.sqrt(np.where(k == 0, 1, 2) / n) * np.cos(np.pi * (2 * i + 1) * k / (2 * n))
        assert_allclose(basis, expected, atol=1e-7)


def test_payloads_are_packed_to_the_bit() -> None:
    """Sizes from the formats' own words."""
    x = heavy(1000)
    for levels, bits in ((1, 2), (3, 3), (7, 4), (8, 5), (127, 8), (32767, 16)):
        assert Levels(levels, 100).encode(x, 1).payload.size == 4 * 10 + -(-1000 * bits // 8), levels
    assert TopK(k=10).encode(x, 1).payload.size == -(-10 * 6 // 8) + -(-(10 + 15) // 8) + 40, "6 low bits each, 999 >> 6 = 15"
    assert TopK(k=300).encode(x, 1).payload.size == 125 + 1200, "a mask of 1000 bits"
    payload = Entrywise(20).encode(x, 1).payload
    exact, drawn = read_count(payload), read_count(payload, 4)
    assert payload.size == 12 + places.places_bytes(1000, exact) + 4 * exact + places.places_bytes(1000, drawn) + -(-drawn // 8)
    payload = Spectral(3, values="float32").encode(x.reshape(20, 50), 1).payload
    assert payload.size == 4 + read_count(payload) * 4 * 70
    payload = Spectral(3, values="float16").encode(x.reshape(20, 50), 1).payload
    assert payload.size == 4 + read_count(payload) * (4 + 2 * 70)


def test_the_bytes_are_what_they_were() -> None:
    """The wire format: a change of any of these is a new `frame.FORMAT`."""
    x = np.float32([0.5, -2.0, 0.0, 1.0, 0.25, -0.25, 0.0, 0.125, -1.0, 3.0])
    for codec, expected in EXPECTED.items():
        assert codec.encode(x, key=7).payload.tobytes().hex() == expected, codec
    assert kernels.pack_digits(np.int8([1, -1, 0, 1, 1, -1, -1, 0, 1, 1, 1]), 2).tolist() == [150704633, 1]
    assert_array_equal(kernels.unpack_digits(np.int32([150704633, 1]) * 2, 11, 2), [2, -2, 0, 2, 2, -2, -2, 0, 2, 2, 2])


EXPECTED = {
    Levels(3, 4): "76a412400000c03ec2624a40c3d88c32",
    Levels(7, 5, "max"): "000000400000404008a77887e4",
    Ternary(4, norm="l2"): "76a412400000c03ec2624a40820305",
    TopK(k=3): "0a02000000c00000803f00004040",
    Entrywise(4): "02000000000000000000c83f0202000000c000004040",
    Fourier(4, block=8): "01000000020000003ba10c400002f30435c0220001",
    Entrywise(9.5): "ffffffff0000003f000000c0000000000000803f0000803e000080be000000000000003e000080bf00004040",
}


@pytest.mark.parametrize("n", [0, 1, 2, 3, 8, 9, 1000, 1024, 100_003])
def test_places(n: int) -> None:
    rng = np.random.default_rng(n)
    for count in {0, min(1, n), n // 1000, n // 30, n // 9, n // 2, n}:
        chosen = np.sort(rng.choice(n, count, replace=False)).astype(np.int64) if n else np.zeros(0, np.int64)
        packed = places.encode(chosen, n)
        assert packed.size == places.places_bytes(n, count) <= -(-n // 8)
        assert abs(8 * packed.size - places.places_bits(n, count)) < 16
        if count:
            assert packed.size <= 2 + count * (2 + math.log2(n / count)) / 8
        assert_array_equal(places.decode(packed, n, count), chosen)


def test_places_that_are_none_are_refused() -> None:
    for n, count, fill in ((9, 9, 255), (1000, 10, 0), (1000, 10, 255), (1000, 300, 0)):
        with pytest.raises(PayloadError):
            places.decode(np.full(places.places_bytes(n, count), fill, np.uint8), n, count)
    beyond = places.encode(np.array([5, 1022]), 1023)
    with pytest.raises(PayloadError, match="do not ascend, or are beyond"):
        places.decode(beyond, 1022, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 100, 256])
def test_digits_of_all_ranks_can_be_summed(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    for digits in (np.ones((ranks, 77)), -np.ones((ranks, 77)), rng.integers(-1, 2, (ranks, 77))):
        words = [kernels.pack_digits(row.astype(np.int8), ranks) for row in digits]
        assert len(words[0]) == kernels.digit_words(77, ranks)
        total, exact = words[0].copy(), words[0].astype(np.int64)
        for other in words[1:]:
            total, exact = total + other, exact + other
            assert_array_equal(total, exact, "a sum has left int32")
        assert_array_equal(kernels.unpack_digits(total, 77, ranks), digits.sum(axis=0))


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("atomo:budget=0", "budget"),
        ("atomo:budget=l3", "budget"),
        ("atomo:budget=8,unit=bytes", "bytes"),
        ("atomo:unit=bits", "unit"),
        ("atomo:reshape=square", "reshape"),
        ("atomo:atoms=entrywise,reshape=paper", "no option 'reshape'"),
        ("atomo:atoms=fourier,block=5000", "block"),
        ("atomo:exchange=sharded", "has to see it whole"),
        ("qsgd:levels=0", "levels"),
        ("qsgd:norm=l1", "norm"),
        ("topk:ratio=0", "ratio"),
        ("terngrad:clip=0", "clip"),
        ("terngrad_shared:clip=-1", "clip"),
        ("gather:codec=zip", "there is no codec 'zip'"),
        ("local_topk:k=0", "k must"),
        ("mem_sgd:exchange=ring", "exchange"),
        ("dore:rescale=maybe", "rescale"),
        ("dore:uplink=0", "codec"),
        ("sketch:k=2.5", "k must"),
        ("sketch:P=1.5", "P must"),
        ("sketch:exact_below=abc", "exact_below"),
        ("local_topk:momentum=abc", "momentum"),
        ("topk:ratio=abc", "ratio"),
        ("topk:ratio=True", "ratio"),
        ("atomo:budget=True", "budget"),
        ("terngrad:clip=1e999", "clip"),
        ("gather:codec=5", "codec"),
    ],
)
def test_bad_options_are_named(method: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(method)
