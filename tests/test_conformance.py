"""Every codec and every method of the registries passes the public checks, under every driver."""

from __future__ import annotations

import dataclasses
import math
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from conforming import CODECS, METHODS

from hvdcompress import Dense, Group, Layout, codecs, kernels, make, methods, testing
from hvdcompress.codecs import Encoded, Levels, PerTensor
from hvdcompress.core import AllGather, AllReduce, AllToAll, Reducer, Step
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.kernels import pool

# What is lost for good by design: estimates, collisions and all, in the place of what they take away.
BIASED = {"sketch:ratio=0.5,P=0,exact_below=10,momentum=0.5"}


@pytest.mark.parametrize("check", testing.method_checks)
@pytest.mark.parametrize("text", sorted(METHODS))
def test_method(text: str, check: str, request: pytest.FixtureRequest) -> None:
    if text in BIASED and check == "comes_to_the_mean":
        request.applymarker(pytest.mark.xfail(raises=AssertionError, strict=True))
    testing.method_checks[check](make(text))


@pytest.mark.parametrize("check", testing.codec_checks)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codec(codec: codecs.Codec, check: str) -> None:
    testing.codec_checks[check](codec)


def test_every_registered_name_is_checked() -> None:
    assert {text.partition(":")[0] for text in METHODS} == set(methods)


def test_codecs_have_numbers_of_their_own() -> None:
    numbers = [codec.number for codec in (*codecs.codecs.values(), PerTensor)]
    assert len(set(numbers)) == len(numbers) and all(1 <= number <= 254 for number in numbers)


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("terngrad:clip=1.0", "comes_to_the_mean"),
        ("gather:codec=topk:ratio=0.1", "comes_to_the_mean"),
        ("fetchsgd:ratio=0.1,exact_below=10,momentum=0.5", "comes_to_the_mean"),
    ],
)
@pytest.mark.filterwarnings("ignore:topk.*is biased:RuntimeWarning")
def test_the_checks_find_a_bias(text: str, check: str) -> None:
    with pytest.raises(AssertionError, match="ranks"):
        testing.method_checks[check](make(text))


@dataclasses.dataclass(frozen=True)
class Wrong(Levels):
    """A codec with a fault."""

    fault: str = "none"

    @property
    def number(self) -> int:
        return {"number": 2}.get(self.fault, 200)

    def encode(self, x: np.ndarray, key: int, start: int = 0) -> Encoded:
        payload, noise = super().encode(x, key if self.fault != "not drawn" else 1, start if self.fault != "start" else 0)
        if self.fault == "noise":
            noise *= 1.5
        if self.fault == "hides NaN" and not np.isfinite(x).all():
            return super().encode(np.zeros_like(x), key, start)
        return Encoded(payload, noise)

    def decode_add(self, payload: np.ndarray, out: np.ndarray, factor: float = 1.0) -> float:
        if self.fault == "length":
            payload = np.append(payload, np.zeros(len(self.encode(out, 0).payload), np.uint8))[: len(self.encode(out, 0).payload)]
        if self.fault == "zero":
            return 0.0
        if self.fault == "biased":
            factor *= 0.9
        if self.fault == "overwrites":
            out[...] = 0
        return super().decode_add(payload, out, factor)

    def expected_bytes(self, shape: tuple[int, ...], density: float | None = None) -> float:
        return super().expected_bytes(shape, density) + (0 if self.fault != "size" else 1 + 0.1 * math.prod(shape))


@pytest.mark.parametrize(
    "fault", ["number", "zero", "not drawn", "start", "noise", "hides NaN", "length", "biased", "overwrites", "size"]
)
def test_the_checks_find_a_fault(fault: str) -> None:
    """Each in turn; and none in what has none."""
    testing.check_codec(Wrong(levels=2, block=64))
    with pytest.raises((AssertionError, ValueError)):
        testing.check_codec(Wrong(levels=2, block=64, fault=fault))


@pytest.mark.parametrize("bad", ["zip", Levels, 42, None])
def test_what_is_no_codec_is_told(bad: object) -> None:
    with pytest.raises(ValueError, match="codec"):
        make("gather", codec=bad)


def test_a_biased_codec_without_feedback_warns() -> None:
    with pytest.warns(RuntimeWarning, match="topk:ratio=0.1 is biased, and what it leaves out is lost"):
        make("gather:codec=topk:ratio=0.1")
    with pytest.raises(ValueError, match="other bytes on another processor"):
        make("gather:downlink=entrywise")


EACH = pytest.mark.parametrize("text", ["sketch", "atomo", "dore"])
TENSORS = ((), (1,), (10,), (3, 3), (10, 10), (64, 3, 3, 3), (1000, 1000))


@EACH
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("shape", TENSORS, ids=str)
def test_with_its_usual_options_no_tensor_takes_more_bytes_than_dense(text: str, ranks: int, shape: tuple[int, ...]) -> None:
    """Counted. What travels dense is averaged exactly, and nothing of it is kept."""
    layout, method = Layout.of([("w", shape)]), make(text)
    simulation, given = Simulation(method, layout, ranks), testing.gradients([layout], 0, ranks)
    steps = 3 if math.prod(shape) <= 1000 else 1
    for _ in range(steps):
        mean = simulation.step(given)[0]
        counted = np.mean([s.last.wire for s in simulation.sessions])
    session = simulation.sessions[0]
    status = (ranks - 1) * (session.record().size + (session.handshake().size if steps == 1 else 0))
    # A sketch goes for the whole model: beside its tensors it has a cell a row, and a hash of the candidates.
    once = 8 * (method.rows + 4) * (ranks - 1) / ranks if text == "sketch" and math.prod(shape) < 1000 else 0
    assert counted - status - once <= Dense().wire_bytes(layout, Group(0, ranks)), f"{counted}"
    dense = once or method.stages(layout, Group(0, ranks)) == Dense().stages(layout, Group(0, ranks))
    if dense:
        expected = np.mean([g[0] for g in given], axis=0, dtype=np.float64)
        accumulated = sum(0.9**power for power in range(steps)) if text == "sketch" else 1  # its momentum
        np.testing.assert_allclose(mean, accumulated * expected, rtol=1e-6, atol=1e-6 * np.abs(given).max())
        assert [session.residual() for session in simulation.sessions] == [0] * ranks


@EACH
def test_no_tensor_of_a_model_takes_more_bytes_than_dense(text: str) -> None:
    layout = Layout.of((str(shape), shape) for shape in TENSORS)
    for ranks in (2, 8):
        simulation = Simulation(make(text), layout, ranks)
        for step in range(2):
            simulation.step(testing.gradients([layout], step, ranks))
        assert np.mean([s.last.wire for s in simulation.sessions]) <= 1.001 * Dense().wire_bytes(layout, Group(0, ranks)), ranks


@pytest.mark.parametrize("text", ["sketch", "sketch:momentum=0", "atomo", "dore", "dore:exchange=sharded"])
def test_a_gradient_that_is_overwritten_after_its_first_collective_is_asked_for_changes_nothing(text: str) -> None:
    layout, after = Layout.of([("w", (40, 30)), ("b", (7,))]), []
    for overwritten in (False, True):
        given = testing.gradients([layout], 0, 2)

        def overwrite(bucket: int, stage: int, asked: list) -> None:
            for request, rank in zip(asked, given):
                if overwritten:
                    rank[0][:] = 1e9

        simulation = Simulation(make(text), layout, 2, tamper=overwrite)
        mean = simulation.step(given)[0]
        arrays = [array.tobytes() for rank in range(2) for array in simulation.arrays(rank).values()]
        after.append((mean.tobytes(), arrays))
    assert after[0] == after[1]


def seconds(work: Callable[[], object], times: int = 5) -> float:
    """Of a processor, the least of some runs: other processes do not count."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


@EACH
def test_twice_as_many_elements_take_about_twice_as_long(text: str) -> None:
    took = []
    for rows in (1000, 2000):
        layout = Layout.of((str(number), (100, 100)) for number in range(rows // 10))
        simulation, given = Simulation(make(text), layout, 1), testing.gradients([layout], 0, 1)
        simulation.step(given)
        took.append(seconds(lambda: simulation.step(given)))
    assert took[1] <= 2.5 * took[0], took


@pytest.mark.slow
def test_a_large_matrix_is_taken_apart_within_seconds() -> None:
    x, codec = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32), codecs.Spectral()
    assert seconds(lambda: codec.decode_add(codec.encode(x, 1).payload, np.zeros_like(x)), times=1) <= 5


@pytest.mark.parametrize("text", ["sketch", "atomo:exchange=allgather", "dore:exchange=allgather", "dore:exchange=sharded"])
def test_ranks_are_decoded_one_after_another(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the new memory, which the method documents, and what is received, no room grows with the number of ranks."""
    monkeypatch.setattr(pool, "LEAST", 1 << 62)  # what is used again is not seen to be allocated
    layout, beside = Layout.of([("w", (500, 400))]), {}
    method, grad = make(text), testing.gradients([layout], 0, 1)[0][0]
    for ranks in (2, 4, 8):
        group = Group(0, ranks)
        state = method.init(layout, group)
        reduction, received = method.reduce(grad, state, Step(0, kernels.sum_of_squares(grad))), 0
        codes = _answers(method, layout, ranks)
        tracemalloc.start()
        try:
            request = reduction.send(None)
            tracemalloc.reset_peak()  # what encoding has taken is not of decoding
            while True:
                if isinstance(request, AllReduce):
                    reply = request.array * ranks
                elif isinstance(request, AllGather):
                    reply = codes or [request.payload] * ranks
                    received += sum(p.nbytes for p in reply)
                else:
                    assert isinstance(request, AllToAll)
                    reply = [request.payloads[0]] * ranks
                request = reduction.send(reply)
        except StopIteration as stop:
            memory = sum(array.nbytes for array in stop.value.state.arrays.values())
            beside[ranks] = (tracemalloc.get_traced_memory()[1] - memory - received) / (4 * layout.size)
        finally:
            tracemalloc.stop()
    assert max(beside.values()) <= 6, f"dense copies: {beside}"
    assert beside[8] <= beside[2] + 0.5, f"dense copies: {beside}"


def _answers(method: Reducer, layout: Layout, ranks: int) -> list[np.ndarray]:
    """The owners' codes of a bucket that is shared out; none where there is one round."""
    codes: list[np.ndarray] = []

    def keep(bucket: int, stage: int, asked: list) -> None:
        codes.extend(request.payload for request in asked if stage == 1 and isinstance(request, AllGather))

    Simulation(method, layout, ranks, tamper=keep).step([testing.gradients([layout], 0, 1)[0]] * ranks)
    return codes


@pytest.mark.parametrize("text", ["sketch:momentum=0,exact_below=0,ratio=0.5", "dore:block=25", "dore:block=25,rescale=True"])
def test_a_change_of_rate_does_not_apply_what_is_kept_at_the_old_one(text: str) -> None:
    """Least squares by SGD: a drop of the rate after 100 steps, a rate that begins at zero, and one that is zero throughout."""
    rng, d, ranks = np.random.default_rng(0), 100, 2
    a, solution = rng.normal(size=(ranks, 400, d)) / 10, rng.normal(size=d)
    layout = Layout.of([("w", (1, d))])

    def loss(w: np.ndarray) -> float:
        return sum(float(((m @ (w - solution)) ** 2).mean()) for m in a) / ranks

    schedules = {
        "drop": [0.1] * 100 + [0.001] * 5,
        "warm-up": [0.1 * step / 20 for step in range(20)] + [0.1] * 100,
        "zero": [0.0] * 10,
    }
    for name, rates in schedules.items():
        simulation, w = Simulation(make(text), layout, ranks), np.zeros(d)
        for step, lr in enumerate(rates):
            gradients = [(m.T @ (m @ (w - solution)) / 4).astype(np.float32) for m in a]
            kept = max(math.sqrt(session.residual()) for session in simulation.sessions)
            before, moved = loss(w), lr * simulation.step([[g] for g in gradients], lr)[0]
            w = w - moved
            assert np.isfinite(w).all(), f"{name}, step {step}"
            assert all(np.isfinite(x).all() for n, x in simulation.arrays(0).items() if n != "lr"), f"{name}, step {step}"
            if name == "drop" and step >= 100:
                scale = 0.1 / 0.001 if "rescale" in text and step == 100 else 1.0  # which the option is there for
                assert np.linalg.norm(moved) <= 3 * lr * (np.linalg.norm(np.mean(gradients, axis=0)) + scale * kept), step
                assert loss(w) <= 1.05 * before, f"step {step}: {before} to {loss(w)}"
            assert lr or not moved.any()
        assert name == "zero" or loss(w) < 0.5 * loss(np.zeros(d)), f"{name}: {loss(w)}"
