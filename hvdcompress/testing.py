"""What every codec and every method must do, as checks for those who add one.

    from hvdcompress import testing

    testing.check_codec(MyCodec())
    testing.check_method(MyMethod())

Each check is a function of the codec or the method that raises AssertionError, and says in what it differs. They run in
one process; `expected_means` is what another driver, of the same method, must give for the same gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from . import kernels, memory
from .codecs import Codec, PerTensor, codec_of, codecs
from .core import AllReduce, Array, Collective, Group, Layout, Reducer, Reduction, State, Step
from .drivers.simulate import Simulation
from .errors import CompressionError, PayloadError

RANKS = (1, 2, 3, 4, 5)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (2,), (7,), (1, 9), (9, 1), (5, 7), (257,), (16, 3, 3, 3), (40, 50))
LARGE = (90, 200)  # of more than one block, of most codecs
LAYOUTS = (Layout.of([("w", (40, 30)), ("b", (7,)), ("c", (16, 3, 3, 3))], 0), Layout.of([("v", (33, 21))], 1))
SEVERAL = 5.0  # standard errors that a mean may be off


def check_codec(codec: Codec) -> None:
    """Runs every check of a codec; it is an object with its options, not a class nor a name."""
    for check in codec_checks.values():
        check(codec)


def check_method(method: Reducer) -> None:
    """Runs every check of a method; it is an object with its options, not a class nor a name."""
    for check in method_checks.values():
        check(method)


# Gradients


def gradients(layouts: Sequence[Layout], step: int, ranks: int) -> list[list[Array]]:
    """float32[layout.size] for each rank and bucket: normal draws, a part of them ten times as large."""
    rng = np.random.default_rng([step, ranks])
    return [[_heavy_tailed(rng, layout.size) for layout in layouts] for _ in range(ranks)]


def integers(layouts: Sequence[Layout], step: int, ranks: int) -> list[list[Array]]:
    """The same of small whole numbers, the sums of which do not depend on their order."""
    rng = np.random.default_rng([step, ranks])
    return [[rng.integers(-64, 65, layout.size).astype(np.float32) for layout in layouts] for _ in range(ranks)]


def expected_means(method: Reducer, layouts: Sequence[Layout], ranks: int, steps: int) -> Iterator[list[Array]]:
    """float32[layout.size] for each bucket, step by step: what a driver must give for `integers`."""
    simulation = Simulation(method, layouts, ranks)
    for step in range(steps):
        means = simulation.step(integers(layouts, step, ranks))
        assert means is not None
        yield means


def degenerate(shape: tuple[int, ...]) -> Iterator[tuple[str, Array]]:
    """Tensors at the edge of what a method can be given, by name; all finite."""
    n = math.prod(shape)
    one_hot, spread, identity = np.zeros(n), np.ones(n), np.zeros(n)
    one_hot[n // 2 : n // 2 + 1] = -3.0
    spread *= np.logspace(-30, 30, n) if n else 1.0
    identity[:: shape[-1] + 1 if shape else 1] = 1.0  # a matrix whose singular values are equal
    rows = np.repeat(np.arange(1, 2 + n // max(1, shape[-1] if shape else 1)), shape[-1] if shape else 1)[:n]  # of rank one
    cases = {
        "zero": np.zeros(n),
        "minus zero": -np.zeros(n),
        "one hot": one_hot,
        "constant": np.full(n, 0.25),
        "identity": identity,
        "rank one": np.resize(rows, n),
        "tiny": np.full(n, 1e-30),
        "subnormal": np.full(n, 1e-40),
        "large": np.full(n, 1e30),
        "spread": spread,
    }
    for name, x in cases.items():
        yield name, x.astype(np.float32).reshape(shape)


# Codecs


def says_what_it_is(codec: Codec) -> None:
    """It is an object that can be a key, with a number for its frames that no codec of the registry has."""
    assert codec_of(codec) is codec
    assert hash(codec) == hash(dataclasses.replace(codec)), f"{codec} must be a frozen dataclass of hashable options"  # type: ignore[type-var]
    others = [other.number for other in (*codecs.values(), PerTensor) if other is not type(codec)]  # type: ignore[attr-defined]
    assert codec.number not in others, f"{codec} has the number {codec.number} of another codec"
    assert isinstance(codec.unbiased, bool) and isinstance(codec.portable, bool), f"{codec}"
    assert codec.alignment >= 0, f"{codec}"


def does_not_hide_what_is_not_finite(codec: Codec) -> None:
    """An element that is NaN or infinite decodes to something that is not finite, so that the step is abandoned."""
    for shape, bad in itertools.product(((1,), (5, 7), LARGE), (np.nan, np.inf, -np.inf)):
        x = _normal(shape, 0)
        x.reshape(-1)[x.size // 2] = bad
        with np.errstate(all="ignore"):
            decoded = decode(codec, codec.encode(x, key=3).payload, shape)
        assert not np.isfinite(decoded).all(), f"{codec}: {bad} in {list(shape)} is not to be seen"


def round_trips(codec: Codec) -> None:
    """Every shape comes back finite; zeros come back as zeros; the same key draws the same bytes."""
    for shape in (*SHAPES, LARGE):
        for name, x in [("normal", _normal(shape, 0)), *degenerate(shape)]:
            what = f"{codec}, {name} {list(shape)}"
            payload, noise = codec.encode(x, key=3)
            assert payload.dtype == np.uint8 and payload.ndim == 1, what
            assert noise >= 0, what
            assert_array_equal(codec.encode(x, key=3).payload, payload, what)
            decoded = decode(codec, payload, shape)
            assert np.isfinite(decoded).all(), what
            if not np.any(np.abs(x) >= 2.0**-126):
                assert_array_equal(decoded, 0, what)


def adds_what_it_decodes(codec: Codec) -> None:
    """`decode_add` adds factor times what it decodes, and leaves x alone."""
    for shape in SHAPES:
        x, out = _normal(shape, 0), _normal(shape, 1)
        kept, before = x.copy(), out.copy()
        payload = codec.encode(x, key=3).payload
        codec.decode_add(payload, out, -0.5)
        assert_array_equal(x, kept, f"{codec}: x was written to")
        expected = before - 0.5 * decode(codec, payload, shape)
        assert_allclose(out, expected, rtol=1e-5, atol=1e-5, err_msg=f"{codec}, {list(shape)}")


def has_the_mean_and_the_error_that_it_says(codec: Codec, draws: int = 1500) -> None:
    """Its expected error is that of many draws; x is their mean if it is unbiased, and else the error is less than x."""
    x = _heavy_tailed(np.random.default_rng(0), 240).reshape(12, 20)
    drawn = np.stack([decode(codec, codec.encode(x, kernels.derive_key(key)).payload, x.shape) for key in range(draws)])
    drawn = drawn.astype(np.float64)
    errors, noise = ((drawn - x) ** 2).sum(axis=(1, 2)), codec.encode(x, key=0).noise
    off = abs(errors.mean() - noise)
    assert off <= SEVERAL * errors.std() / math.sqrt(draws) + 1e-4 * noise + 1e-6, (
        f"{codec}: {errors.mean()} where it says {noise}"
    )
    if not codec.unbiased:
        assert errors.mean() < (x.astype(np.float64) ** 2).sum(), f"{codec} is no contraction"
        return
    distance = float(((drawn.mean(axis=0) - x) ** 2).sum())
    expected = noise / draws
    assert distance <= 3 * expected + 1e-6, f"{codec} is biased: its mean is {distance} from x, where {expected} is expected"
    rng = np.random.default_rng(1)
    for direction in (x, np.sign(x), *(rng.choice([-1.0, 1.0], x.shape) for _ in range(5))):
        along = ((drawn - x) * direction).sum(axis=(1, 2))
        assert abs(along.mean()) <= SEVERAL * along.std() / math.sqrt(draws) + 1e-5 * np.abs(x).sum(), f"{codec} is biased"


def says_the_error_of_a_large_tensor(codec: Codec, draws: int = 30) -> None:
    """The expected error is that of the draws also where there are many blocks."""
    x = _normal(LARGE, 0)
    drawn = [decode(codec, codec.encode(x, kernels.derive_key(key)).payload, LARGE).astype(np.float64) for key in range(draws)]
    errors, noise = [float(((d - x) ** 2).sum()) for d in drawn], codec.encode(x, key=0).noise
    spread = SEVERAL * np.std(errors) / math.sqrt(draws)
    assert abs(np.mean(errors) - noise) <= spread + 0.01 * noise + 1e-6, f"{codec}: {np.mean(errors)} where it says {noise}"


def has_the_size_that_it_says(codec: Codec) -> None:
    """`expected_bytes` at the density that came out is the payload's size, to the rounding of its parts."""
    for shape, seed in itertools.product((*SHAPES, LARGE), range(3)):
        payload = codec.encode(_normal(shape, seed), key=seed).payload
        density = codec.decode_add(payload, np.zeros(shape, np.float32))
        assert_allclose(codec.expected_bytes(shape, density), payload.size, rtol=0.01, atol=2, err_msg=f"{codec}, {list(shape)}")
        assert codec.expected_bytes(shape) >= 0


def may_be_cut_where_it_says(codec: Codec) -> None:
    """At multiples of its alignment a vector's pieces have the codes that they have in the whole."""
    if not codec.alignment:
        return
    x = _normal((3 * codec.alignment + 5,), 0)
    whole = decode(codec, codec.encode(x, key=9).payload, x.shape)
    cuts = [0, codec.alignment, 3 * codec.alignment, x.size]
    parts = [(start, np.ascontiguousarray(x[start:stop])) for start, stop in zip(cuts, cuts[1:])]
    decoded = [decode(codec, codec.encode(part, 9, start).payload, part.shape) for start, part in parts]
    assert_array_equal(np.concatenate(decoded), whole, f"{codec}")


def refuses_spoilt_payloads(codec: Codec) -> None:
    """Bytes of a peer are decoded, or refused by PayloadError with nothing added."""
    rng = np.random.default_rng(0)
    for trial in range(300):
        shape = SHAPES[trial % len(SHAPES)]
        payload = codec.encode(_normal(shape, trial), key=trial).payload.copy()
        if payload.size and trial % 3:
            payload[rng.integers(0, min(payload.size, 24), 2)] = rng.integers(0, 256, 2)
        if trial % 2:
            payload = payload[: rng.integers(0, payload.size + 1)]
        out = np.ones(shape, np.float32)
        try:
            with np.errstate(all="ignore"):
                codec.decode_add(payload, out)
        except PayloadError:
            assert_array_equal(out, 1, f"{codec}, {list(shape)}: a refused payload was added")


def refuses_another_length(codec: Codec) -> None:
    """A payload that was cut, or has bytes too many, is not one."""
    for shape in SHAPES:
        payload = codec.encode(_normal(shape, 0), key=1).payload
        for wrong in ([payload[:-1]] if payload.size else []) + [np.append(payload, np.uint8(0))]:
            out = np.ones(shape, np.float32)
            try:
                codec.decode_add(wrong, out)
            except PayloadError:
                assert_array_equal(out, 1, f"{codec}, {list(shape)}: a refused payload was added")
            else:
                raise AssertionError(f"{codec} takes {wrong.size} bytes for {list(shape)}, where {payload.size} are right")


def decode(codec: Codec, payload: Any, shape: tuple[int, ...]) -> Array:
    """float32[shape]: what a payload stands for."""
    out = np.zeros(shape, np.float32)
    codec.decode_add(payload, out)
    return out


codec_checks: dict[str, Callable[[Any], None]] = {
    check.__name__: check
    for check in (
        says_what_it_is,
        round_trips,
        adds_what_it_decodes,
        does_not_hide_what_is_not_finite,
        has_the_mean_and_the_error_that_it_says,
        says_the_error_of_a_large_tensor,
        has_the_size_that_it_says,
        may_be_cut_where_it_says,
        refuses_spoilt_payloads,
        refuses_another_length,
    )
}


# Methods


def asks_for_its_stages(method: Reducer) -> None:
    """The collectives that it asks for are those that it announces, in number, kind, size and operation."""
    for ranks in RANKS:
        asked: dict[int, list[Any]] = {bucket: [] for bucket in range(len(LAYOUTS))}

        def watch(bucket: int, stage: int, requests: list[Collective], asked: dict[int, list[Any]] = asked) -> None:
            request = requests[0]
            reduced = (request.array.size, str(request.array.dtype), request.op) if isinstance(request, AllReduce) else ()
            asked[bucket].append((type(request), *reduced))

        Simulation(method, LAYOUTS, ranks, tamper=watch).step(gradients(LAYOUTS, 0, ranks))
        for bucket, layout in enumerate(LAYOUTS):
            stages = method.stages(layout, Group(0, ranks))
            announced = [(s.kind, *((s.length, s.dtype, s.op) if s.kind is AllReduce else ())) for s in stages]
            assert asked[bucket] == announced, f"{method}, {ranks} ranks, bucket {bucket}"


def takes_any_shape(method: Reducer) -> None:
    """Tensors of every shape, alone in their bucket and together, for some steps; all ranks have the same bits."""
    layouts = [Layout.of([("w", shape)], bucket) for bucket, shape in enumerate(SHAPES)]
    layouts.append(Layout.of(((str(i), shape) for i, shape in enumerate(SHAPES)), len(layouts)))
    for ranks in RANKS:
        simulation = Simulation(method, layouts, ranks)
        for step in range(3):
            for mean, layout in zip(simulation.step(gradients(layouts, step, ranks)) or [], layouts):
                assert mean.shape == (layout.size,) and mean.dtype == np.float32, f"{method}, {ranks} ranks, {layout}"
                assert np.isfinite(mean).all(), f"{method}, {ranks} ranks, {layout}"


def takes_degenerate_gradients(method: Reducer) -> None:
    """Zeros stay zero; no finite gradient makes anything but a finite mean, or a step that is abandoned."""
    for shape in SHAPES:
        layout = Layout.of([("w", shape)])
        for (name, x), ranks in itertools.product(degenerate(shape), (1, 3)):
            what = f"{method}, {name} {list(shape)}, {ranks} ranks"
            simulation = Simulation(method, layout, ranks)
            for _ in range(2):
                means = simulation.step([[x.reshape(-1)]] * ranks)
                assert means is None or np.isfinite(means[0]).all(), what
                if not np.any(np.abs(x) >= 2.0**-126):
                    assert means is not None, what
                    assert_array_equal(means[0], 0, what)


def comes_to_the_mean(method: Reducer, steps: int = 300) -> None:
    """Of gradients that stay the same, what is applied comes nearer and nearer to their mean on the average.

    The distance of the average is no more than steps as different as these can have by chance: draws average out, and memory
    makes good what was left behind, sooner than that; a bias that nothing corrects stays. Checked without the method's own
    momentum, which adds to the mean.
    """
    if getattr(method, "momentum", 0):
        method = dataclasses.replace(method, momentum=0.0)  # type: ignore[type-var]
    for ranks in (1, 3):
        given = gradients(LAYOUTS, 0, ranks)
        truth = np.concatenate([np.mean([rank[b] for rank in given], axis=0) for b in range(len(LAYOUTS))])
        simulation, total, squares = Simulation(method, LAYOUTS, ranks), np.zeros(truth.size), np.zeros(truth.size)
        for _ in range(steps):
            mean = np.concatenate(simulation.step(given) or []).astype(np.float64)
            total, squares = total + mean, squares + mean**2
        distance = float(((total / steps - truth) ** 2).sum())
        by_chance = float((squares / steps - (total / steps) ** 2).sum()) / steps
        bound = 1.5 * by_chance + 1e-10 * float((truth**2).sum())
        assert distance <= bound, f"{method}, {ranks} ranks: squared distance {distance}, by chance {by_chance}"


def sends_the_bytes_that_it_says(method: Reducer) -> None:
    """`wire_bytes` is what was counted, the mean over ranks, by the metrics of the step."""
    for ranks in RANKS:
        simulation, status, counted, said = Simulation(method, LAYOUTS, ranks), 0.0, 0.0, 0.0
        for step in range(6):
            simulation.step(gradients(LAYOUTS, step, ranks))
            session = simulation.sessions[0]
            status = (ranks - 1) * session.record().size
            if step:  # the first has the handshake
                counted += float(np.mean([s.last.wire for s in simulation.sessions])) - status
                said += session.predicted_bytes()
        assert_allclose(said, counted, rtol=0.02, atol=5 * 8 * (ranks - 1), err_msg=f"{method}, {ranks} ranks")


def an_abandoned_step_leaves_no_trace(method: Reducer) -> None:
    """A NaN on one rank abandons the step on all; the memory is as it was, and the next step as if it had not been."""
    for ranks in RANKS:
        simulation, twin = Simulation(method, LAYOUTS, ranks), Simulation(method, LAYOUTS, ranks)
        for step in range(3):
            spoilt = gradients(LAYOUTS, 100 + step, ranks)
            spoilt[-1][step % len(LAYOUTS)][5] = (np.nan, np.inf, -np.inf)[step]
            before = [_bits(simulation, rank) for rank in range(ranks)]
            assert simulation.step(spoilt) is None, f"{method}, {ranks} ranks"
            assert [_bits(simulation, rank) for rank in range(ranks)] == before, f"{method}, {ranks} ranks, step {step}"
            for mean, expected in zip(*(s.step(gradients(LAYOUTS, step, ranks)) or [] for s in (simulation, twin))):
                assert_array_equal(mean, expected, f"{method}, {ranks} ranks, step {step}")


def a_failure_on_one_rank_is_raised_on_all(method: Reducer) -> None:
    """In whatever stage it happens, no rank commits, and each has raised by the next step."""
    for ranks, stage in itertools.product((2, 4), range(len(method.stages(LAYOUTS[0], Group(0, 2))))):
        simulation = Simulation([method] * ranks, LAYOUTS, ranks)
        simulation.sessions[1].reducer = cast(Reducer, _Failing(method, stage))
        results = [simulation.step_each(gradients(LAYOUTS, 0, ranks))]
        simulation.sessions[1].reducer = method
        results.append(simulation.step_each(gradients(LAYOUTS, 1, ranks)))
        for rank, outcomes in enumerate(zip(*results)):
            what = f"{method}, {ranks} ranks, failure in stage {stage}: rank {rank} ended with {outcomes}"
            assert any(isinstance(outcome, CompressionError) and "on purpose" in str(outcome) for outcome in outcomes), what
            assert not isinstance(outcomes[0], list), what


def goes_on_from_its_saved_memory(method: Reducer) -> None:
    """A memory that is loaded by new ranks of the same training goes on bit for bit."""
    simulation, ranks = Simulation(method, LAYOUTS, 3), 3
    for step in range(2):
        simulation.step(gradients(LAYOUTS, step, ranks))
    restored = Simulation(method, LAYOUTS, ranks)
    for old, new in zip(simulation.sessions, restored.sessions):
        new.load_state_dict(old.state_dict())
    for step in range(2, 4):
        for mean, expected in zip(*(s.step(gradients(LAYOUTS, step, ranks)) or [] for s in (restored, simulation))):
            assert_array_equal(mean, expected, f"{method}, step {step}")


def goes_on_with_other_ranks(method: Reducer) -> None:
    """Where some ranks stopped, more or fewer go on, and all of them have one mean."""
    for before, after in ((1, 3), (3, 1), (2, 4), (5, 2)):
        simulation, other = Simulation(method, LAYOUTS, before), Simulation(method, LAYOUTS, after)
        for step in range(3):
            simulation.step(gradients(LAYOUTS, step, before))
        memories = [session.state_dict() for session in simulation.sessions]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of buckets that have no memory with so many ranks
            for session in other.sessions:
                session.load_state_dict(memory.redistributed(memories, method, session.group.rank, after))
        for step in range(3, 6):
            assert other.step(gradients(LAYOUTS, step, after)) is not None, f"{method}, {before} ranks to {after}, step {step}"
        assert other.sessions[0].committed == 6, f"{method}, {before} ranks to {after}"


def tells_what_it_keeps_back(method: Reducer) -> None:
    """Nothing before the first step, or without a memory; a squared norm after it."""
    simulation = Simulation(method, LAYOUTS, 2)
    for session in simulation.sessions:
        assert session.residual() == 0, method
    for step in range(3):
        simulation.step(gradients(LAYOUTS, step, 2))
    for session in simulation.sessions:
        kept = session.residual()
        assert math.isfinite(kept) and kept >= 0, f"{method}: {kept}"
        assert kept == 0 or any(state.arrays for state in session.states), f"{method} has no memory, and keeps {kept}"
        session.reset()
        assert session.residual() == 0, method


def leaves_the_gradient_alone(method: Reducer) -> None:
    """It is neither written to nor kept."""
    simulation, given = Simulation(method, LAYOUTS, 2), gradients(LAYOUTS, 0, 2)
    kept = [[g.copy() for g in rank] for rank in given]
    simulation.step(given)
    for g, copy in zip(itertools.chain(*given), itertools.chain(*kept)):
        assert_array_equal(g, copy, f"{method}")
    arrays = [a for session in simulation.sessions for state in session.states for a in state.arrays.values()]
    shared = [np.shares_memory(a, g) for a in arrays for g in itertools.chain(*given)]
    assert not any(shared), f"{method} keeps the gradient"


method_checks: dict[str, Callable[[Any], None]] = {
    check.__name__: check
    for check in (
        asks_for_its_stages,
        takes_any_shape,
        takes_degenerate_gradients,
        comes_to_the_mean,
        sends_the_bytes_that_it_says,
        an_abandoned_step_leaves_no_trace,
        a_failure_on_one_rank_is_raised_on_all,
        goes_on_from_its_saved_memory,
        goes_on_with_other_ranks,
        tells_what_it_keeps_back,
        leaves_the_gradient_alone,
    )
}


class _Failing:
    """A method that fails when it should ask for its collective of a stage."""

    def __init__(self, method: Reducer, stage: int):
        self._method, self._stage = method, stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        reduction, reply = self._method.reduce(grad, state, step), None
        for stage in itertools.count():
            if stage == self._stage:
                raise RuntimeError("on purpose")
            try:
                reply = yield reduction.send(reply)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
        raise AssertionError


def _bits(simulation: Simulation, rank: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in simulation.sessions[rank].state_dict()["arrays"].items()}


def _normal(shape: tuple[int, ...], seed: int) -> Array:
    rng = np.random.default_rng([seed, math.prod(shape)])
    return _heavy_tailed(rng, math.prod(shape)).reshape(shape)


def _heavy_tailed(rng: np.random.Generator, n: int) -> Array:
    x = rng.normal(size=n)
    x[rng.random(n) < 0.05] *= 10
    return x.astype(np.float32)
