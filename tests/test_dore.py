"""DORE: equal to its definition, bit for bit where that is possible, and converging as it should."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from regression import Regression

from hvdcompress import CompressionError, Dense, Dore, Group, Layout, frame, kernels
from hvdcompress.codecs import Identity, Ternary
from hvdcompress.core import AllGather, AllToAll
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.kernels.numpy import TERNARY_RUN
from hvdcompress.reducers.two_pass import DOWNLINK, UPLINK

LAYOUTS = [Layout.of([("a", (61, 7)), ("b", (9,))], 0), Layout.of([("c", (3001,))], 1)]
EXCHANGES = pytest.mark.parametrize("exchange", ["allgather", "sharded"])
SCALES = pytest.mark.parametrize("scales", ["float32", "byte"])


def grads(step: int, ranks: int, layouts: list[Layout] = LAYOUTS) -> list[list[np.ndarray]]:
    rng = np.random.default_rng([step, ranks])
    return [[rng.normal(size=layout.size).astype(np.float32) for layout in layouts] for _ in range(ranks)]


def same_bits(a: np.ndarray, b: np.ndarray, message: str = "") -> None:
    assert_array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32), message)


class OneMaster:
    """DORE as the paper writes it: one master, workers, and the model x^ itself, in float32."""

    def __init__(self, workers: int, layout: Layout, codec: Ternary, alpha: float, beta: float, eta: float):
        self.layout, self.codec, self.alpha, self.beta, self.eta = layout, codec, *map(np.float32, (alpha, beta, eta))
        self.h_i = np.zeros((workers, layout.size), np.float32)
        self.e, self.x, self.k = np.zeros(layout.size, np.float32), np.zeros(layout.size, np.float32), 0

    def quantised(self, x: np.ndarray, stream: int, rank: int) -> np.ndarray:
        out = np.zeros_like(x)
        self.codec.decode_add(self.codec.encode(x, kernels.derive_key(0, self.k, stream, rank, self.layout.bucket)).payload, out)
        return out

    def step(self, gradients: list[np.ndarray], gamma: float) -> None:
        gamma, n = np.float32(gamma), np.float32(len(gradients))
        h = _ordered_sum(self.h_i) / n
        d = np.stack([self.quantised(g - h_i, UPLINK, i) for i, (g, h_i) in enumerate(zip(gradients, self.h_i))])
        self.h_i += self.alpha * d
        estimate = h + _ordered_sum(d) / n
        x_plus = -gamma * estimate  # relative to x^, which cancels in q
        q = x_plus + self.eta * self.e
        q_hat = self.quantised(q, DOWNLINK, 0)
        self.e = q - q_hat
        self.x += self.beta * q_hat
        self.k += 1


def _ordered_sum(rows: np.ndarray) -> np.ndarray:
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


@EXCHANGES
@SCALES
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_bitwise_the_paper_with_one_master_in_the_model_domain(exchange: str, scales: str, ranks: int) -> None:
    """With dyadic rates: constant, and changing with `rescale`."""
    for rescale, options in itertools.product((False, True), ({}, {"eta": 0.5, "beta": 0.75, "alpha": 0.25})):
        method = Dore(block=32, scales=scales, exchange=exchange, rescale=rescale, **options)
        simulation = Simulation(method, LAYOUTS, ranks)
        masters = [OneMaster(ranks, lay, Ternary(32, scales), method.alpha, method.beta, method.eta) for lay in LAYOUTS]
        models = [np.zeros(layout.size, np.float32) for layout in LAYOUTS]
        for step in range(40):
            lr = 2.0**-9 if rescale and step > 20 else 2.0**-6
            means = simulation.step(grads(step, ranks), lr)
            for bucket, master in enumerate(masters):
                master.step([g[bucket] for g in grads(step, ranks)], lr)
                models[bucket] -= np.float32(lr) * means[bucket]
                same_bits(models[bucket], master.x, f"{method}, {ranks} ranks, step {step}, bucket {bucket}")


def test_without_rescaling_a_change_of_rate_is_another_run() -> None:
    """So the test above can fail."""
    results = []
    for rescale in (False, True):
        simulation = Simulation(Dore(block=32, rescale=rescale), LAYOUTS, 2)
        results.append([simulation.step(grads(step, 2), 2.0**-6 if step < 5 else 2.0**-9)[1] for step in range(8)])
    same_bits(results[0][4], results[1][4])
    assert np.any(results[0][5] != results[1][5])


def test_a_rate_of_zero_rescales_nothing() -> None:
    simulation = Simulation(Dore(block=32, rescale=True), LAYOUTS, 2)
    constant = Simulation(Dore(block=32), LAYOUTS, 2)
    for step, lr in enumerate((0.0, 0.0, 0.5, 0.0, 0.5)):
        got, expected = simulation.step(grads(step, 2), lr), constant.step(grads(step, 2))
        same_bits(got[1], expected[1], f"step {step}")
    with pytest.raises(CompressionError, match="learning rate"):
        simulation.step(grads(9, 2))


@SCALES
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_both_exchanges_give_the_same_bits(scales: str, ranks: int) -> None:
    simulations = [
        Simulation(Dore(block=16, scales=scales, exchange=e), LAYOUTS, ranks) for e in ("allgather", "sharded", "auto")
    ]
    for step in range(25):
        means = [simulation.step(grads(step, ranks)) for simulation in simulations]
        for other, bucket in itertools.product(means[1:], range(len(LAYOUTS))):
            same_bits(other[bucket], means[0][bucket], f"{ranks} ranks, step {step}")


def test_wildly_different_scales_in_one_bucket_give_the_same_bits() -> None:
    simulations = [Simulation(Dore(block=16, scales="byte", exchange=e), LAYOUTS, 3) for e in ("allgather", "sharded")]
    for step in range(5):
        spread = [
            [g * np.float32(10) ** np.linspace(-37, 37, g.size).astype(np.float32) for g in rank] for rank in grads(step, 3)
        ]
        means = [simulation.step(spread) for simulation in simulations]
        for bucket in range(len(LAYOUTS)):
            same_bits(means[0][bucket], means[1][bucket], f"step {step}")


@EXCHANGES
def test_h_is_the_mean_of_the_memories_without_drift(exchange: str) -> None:
    simulation = Simulation(Dore(block=32, exchange=exchange), LAYOUTS[1], 3)
    for step in range(300):
        simulation.step(grads(step, 3, LAYOUTS[1:]))
    own = [
        simulation.arrays(rank)["h"] if exchange == "sharded" else simulation.arrays(rank)["copies"][rank] for rank in range(3)
    ]
    kept = [simulation.arrays(rank)["copies"] for rank in range(3)]
    masters = np.concatenate(kept, axis=1) if exchange == "sharded" else kept[0]
    same_bits(masters, np.stack(own), "the master's copies are the workers' memories")


def test_identity_codecs_make_dore_its_special_cases() -> None:
    """Both: SGD. The second: DIANA; with alpha = 0 as well, QSGD."""
    sgd, ranks = Simulation(Dense(), LAYOUTS, 3), 3
    identity = Simulation(Dore(uplink=Identity(), downlink=Identity(), alpha=0.3), LAYOUTS, ranks)
    diana = Simulation(Dore(block=32, downlink=Identity(), alpha=0.1), LAYOUTS, ranks)
    qsgd = Simulation(Dore(block=32, downlink=Identity(), alpha=0.0), LAYOUTS, ranks)
    memories, codec = np.zeros((ranks, LAYOUTS[1].size), np.float32), Ternary(32)
    for step in range(20):
        given = grads(step, ranks)
        means = [simulation.step(given)[1] for simulation in (sgd, identity, diana, qsgd)]
        assert_allclose(means[1], means[0], rtol=0, atol=1e-5, err_msg="SGD to rounding only: h + (g - h) is not g in floats")
        for alpha, mean in ((0.1, means[2]), (0.0, means[3])):
            codes = np.zeros_like(memories)
            for rank in range(ranks):
                residual = given[rank][1] - (memories[rank] if alpha else 0)
                codec.decode_add(codec.encode(residual, kernels.derive_key(0, step, UPLINK, rank, 1)).payload, codes[rank])
            h = _ordered_sum(memories) / np.float32(ranks) if alpha else np.float32(0)
            expected = h + _ordered_sum(codes) / np.float32(ranks)
            same_bits(mean, expected, f"alpha {alpha}, step {step}")
            memories += np.float32(alpha) * codes


@pytest.mark.parametrize(
    ("ranks", "rows", "d", "block", "steps"),
    [(4, 400, 100, 64, 2200), pytest.param(20, 1200, 500, 256, 8000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_linear_convergence_and_vanishing_residuals(ranks: int, rows: int, d: int, block: int, steps: int) -> None:
    """With the memory DORE keeps SGD's rate to the rounding of float32, in which h_i is kept; without it, it only comes near."""
    problem, distances, left = Regression(ranks, rows, d), {}, {}
    start = np.linalg.norm(problem.solution), np.linalg.norm(np.mean(problem.grads(np.zeros(d)), axis=0))
    for name, method in {"sgd": Dense(), "dore": Dore(block=block), "no memory": Dore(block=block, alpha=0.0)}.items():
        path, x, simulation = [], np.zeros(d), None
        for x, simulation in problem.descend(method, 0.0547, steps if name != "no memory" else 2000):
            path.append(np.linalg.norm(x - problem.solution) / start[0])
        distances[name] = np.array(path)
        if name != "sgd":
            arrays = [simulation.arrays(rank) for rank in range(ranks)]
            memories = [a["copies"][rank] if "copies" in a else np.zeros(d) for rank, a in enumerate(arrays)]
            first = max(np.linalg.norm(g - h) / np.linalg.norm(g) for g, h in zip(problem.grads(x), memories))
            second = np.linalg.norm(np.mean(problem.grads(x), axis=0) + simulation.arrays(0)["e"]) / start[1]
            left[name] = first, second
    assert distances["dore"][-1] < 2e-6
    assert distances["no memory"][-500:].mean() > 1e-3
    early = slice(steps // 8, steps // 3)
    slopes = {
        name: np.polyfit(np.arange(early.start, early.stop), np.log(distances[name][early]), 1)[0] for name in ("sgd", "dore")
    }
    assert_allclose(slopes["dore"], slopes["sgd"], rtol=0.03)
    assert max(left["dore"]) < 1e-5, left
    assert left["no memory"][0] == 1 and left["no memory"][1] > 1e-2, left


@EXCHANGES
@SCALES
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_counted_bytes_are_those_of_the_formulas(exchange: str, scales: str, ranks: int) -> None:
    """(W - 1) c d and 2 c d (W - 1) / W, and the headers, with what was really drawn; d is no multiple of block * W."""
    seen: list[tuple[int, list[np.ndarray]]] = []

    def watch(bucket: int, stage: int, asked: list) -> None:
        for request in asked:
            seen.append((stage, [request.payload] if isinstance(request, AllGather) else request.payloads))

    method, n = Dore(block=32, scales=scales, exchange=exchange), LAYOUTS[1].size
    simulation = Simulation(method, [dataclasses.replace(LAYOUTS[1], bucket=0)], ranks, tamper=watch)
    for step in range(3):
        seen.clear()
        simulation.step(grads(step, ranks, LAYOUTS[1:]))
        sent = [session.last.wire for session in simulation.sessions]
        status = (ranks - 1) * 44
        if step == 0:
            status += (ranks - 1) * simulation.sessions[0].handshake().size
        sizes = [[_size_of(f, n, ranks, exchange, scales, i) for i, f in enumerate(frames)] for _, frames in seen[:ranks]]
        counted = [[f.size for f in frames] for _, frames in seen[:ranks]]
        assert counted == sizes, "headers, scales, mask and signs make up the frames"
        if exchange == "allgather":
            received = [sum(sizes[other][0] for other in range(ranks) if other != rank) for rank in range(ranks)]
            assert sum(sent) == sum(received) + ranks * status
        else:
            own = [frames[rank] for rank, frames in enumerate(sizes)]
            codes = [frames[0].size for _, frames in seen[ranks:]]
            first = sum(map(sum, sizes)) - sum(own)
            assert sum(sent) == first + (ranks - 1) * sum(codes) + ranks * status
        session = simulation.sessions[0]
        predicted = method.wire_bytes(LAYOUTS[1], session.group, session.metrics)
        assert_allclose(np.mean(sent) - status, predicted, rtol=0.02)


def _size_of(packed: np.ndarray, n: int, ranks: int, exchange: str, scales: str, part: int) -> int:
    """28 bytes, scales, mask and signs, from the bits of the mask."""
    if exchange == "sharded":
        alignment = 32 * (TERNARY_RUN if scales == "byte" else 1)
        pieces = -(-n // alignment)
        n = min(n, (part + 1) * pieces // ranks * alignment) - min(n, part * pieces // ranks * alignment)
    blocks = -(-n // 32)
    head = blocks + -(-blocks // TERNARY_RUN) if scales == "byte" else 4 * blocks
    mask = packed[28 + head : 28 + head + -(-n // 8)]
    return 28 + head + -(-n // 8) + -(-int(np.unpackbits(mask).sum()) // 8)


def test_ninety_five_per_cent_is_passed_for_every_number_of_ranks_when_sharded() -> None:
    layout, method = Layout.of([("w", (1 << 20,))]), Dore(block=256, exchange="sharded")
    gaussian = {"uplink_density": 0.264, "downlink_density": 0.264}
    for ranks in (2, 4, 8, 64):
        dense = Dense().wire_bytes(layout, Group(0, ranks))
        assert method.wire_bytes(layout, Group(0, ranks), gaussian) / dense < 0.05, ranks
    gathered = dataclasses.replace(method, exchange="allgather")
    assert gathered.wire_bytes(layout, Group(0, 2), gaussian) / Dense().wire_bytes(layout, Group(0, 2)) < 0.05
    assert gathered.wire_bytes(layout, Group(0, 4), gaussian) / Dense().wire_bytes(layout, Group(0, 4)) > 0.08


def test_the_exchange_is_chosen_by_predicted_cost() -> None:
    small, middle, large = (Layout.of([("w", (n,))]) for n in (1000, 300_000, 25_000_000))
    chosen = {
        (name, ranks): Dore().stages(layout, Group(0, ranks))[0].kind
        for name, layout in (("small", small), ("middle", middle), ("large", large))
        for ranks in (2, 4, 8)
    }
    assert all(chosen["small", ranks] is AllGather for ranks in (2, 4, 8))
    assert chosen["middle", 2] is AllGather and chosen["middle", 8] is AllToAll
    assert all(chosen["large", ranks] is AllToAll for ranks in (2, 4, 8))  # of which each rank is the master of a part only


@EXCHANGES
def test_asks_for_just_the_collectives_that_it_says(exchange: str) -> None:
    asked = []
    simulation = Simulation(
        Dore(exchange=exchange), LAYOUTS, 3, tamper=lambda bucket, stage, requests: asked.append((bucket, type(requests[0])))
    )
    simulation.step(grads(0, 3))
    for bucket, layout in enumerate(LAYOUTS):
        stages = simulation.sessions[0].reducer.stages(layout, Group(0, 3))
        assert [kind for b, kind in asked if b == bucket] == [stage.kind for stage in stages]


def test_the_gradient_is_neither_written_to_nor_kept() -> None:
    for exchange in ("allgather", "sharded"):
        simulation, given = Simulation(Dore(block=32, exchange=exchange), LAYOUTS, 2), grads(0, 2)
        copies = [[g.copy() for g in rank] for rank in given]
        simulation.step(given)
        for g, copy in zip(itertools.chain(*given), itertools.chain(*copies)):
            same_bits(g, copy)
            g += 1
        arrays = [a for session in simulation.sessions for state in session.states for a in state.arrays.values()]
        assert not any(np.shares_memory(a, g) for a in arrays for g in itertools.chain(*given))


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 255, 256, 257])
def test_any_size_and_many_ranks(n: int) -> None:
    layout = Layout.of([("w", (n,))])
    for ranks, exchange in itertools.product((1, 2, 5), ("allgather", "sharded")):
        simulation = Simulation(Dore(exchange=exchange), layout, ranks)
        for step in range(3):
            assert simulation.step(grads(step, ranks, [layout]))[0].shape == (n,)
        zeros = [[np.zeros(n, np.float32)] for _ in range(ranks)]
        fresh = Simulation(Dore(exchange=exchange), layout, ranks)
        same_bits(fresh.step(zeros)[0], np.zeros(n, np.float32))


def test_256_ranks() -> None:
    layout = Layout.of([("w", (2000,))])
    simulation = Simulation(Dore(block=16, exchange="sharded"), layout, 256)
    given = grads(0, 256, [layout])
    mean = simulation.step(given)[0]
    assert np.corrcoef(mean, np.mean(given, axis=0)[0])[0, 1] > 0.25


def test_sums_to_the_gradients_over_time() -> None:
    """With e fed back whole, what is applied differs from what was meant by e alone, however small a coordinate is."""
    simulation, total = Simulation(Dore(block=4, alpha=0.1), Layout.of([("w", (4,))]), 2), np.zeros(4)
    given = np.float32([1.0, 0.01, 0, 0])
    for _ in range(2000):
        total += simulation.step([[given], [given]])[0]
    assert_allclose(total[:2] / 2000, given[:2], rtol=0.05)
    assert_array_equal(total[2:], 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"alpha": -0.1}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"beta": 0.0}, "beta"),
        ({"eta": 1.5}, "eta"),
        ({"block": 0}, "block"),
        ({"scales": "int8"}, "scales"),
        ({"exchange": "ring"}, "exchange"),
    ],
)
def test_bad_options_are_named(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Dore(**options)


def test_frames_of_another_step_are_told_apart() -> None:
    kept: list = []

    def replay(bucket: int, stage: int, asked: list) -> None:
        kept.append(asked[1])
        if len(kept) == 2:
            asked[1] = kept[0]

    simulation = Simulation(Dore(exchange="allgather"), LAYOUTS[1], 2, tamper=replay)
    simulation.step(grads(0, 2, LAYOUTS[1:]))
    with pytest.raises(CompressionError, match="rank 1 is of step 0, expected 1"):
        simulation.step(grads(1, 2, LAYOUTS[1:]))
    assert frame.HEADER.size == 28


def test_a_bucket_that_compression_would_enlarge_is_averaged_dense() -> None:
    small = Layout.of([("w", (40,))])
    for ranks in (2, 8, 64):
        group = Group(0, ranks)
        assert Dore().wire_bytes(small, group) <= Dense().wire_bytes(small, group), ranks
    simulation, dense = Simulation(Dore(), small, 16), Simulation(Dense(), small, 16)
    for step in range(3):
        same_bits(simulation.step(grads(step, 16, [small]))[0], dense.step(grads(step, 16, [small]))[0])
    assert not simulation.arrays(0), "and keeps no memory"
