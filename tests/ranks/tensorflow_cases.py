"""What went wrong for others who train with compressed gradients in TensorFlow, and must not here."""

from __future__ import annotations

import math
import os
import random
import tempfile
import warnings
import zipfile
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvdk
import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose

import hvdcompress.tensorflow as hvc
from hvdcompress.keras import CompressionCallback, load_model
from hvdcompress.tensorflow.binding import bound_to
from ranks import tensorflow_checks
from ranks.harness import (
    check_of_one,
    check_of_two,
    check_on_three,
    check_on_two,
    each,
    everyone,
    main,
    raised_everywhere,
    same_bits,
)
from ranks.tensorflow_checks import (
    LOSS,
    Reduced,
    Traces,
    dense_model,
    fit,
    given_grads,
    given_loss,
    images,
    memory,
    same_weights,
    weights,
)

RANK, SIZE = 0, 1  # set when Horovod is
keras = tf.keras

# Options that make something happen on small tensors.
OPTIONS = {
    "sketch": "sketch:ratio=0.5,exact_below=10,momentum=0.5",
    "atomo": "atomo:budget=0.3,unit=ratio,exchange=allgather,dense_below=10",
    "dore": "dore:block=32,exchange=sharded,scales=byte,dense_below=10",
}
# Options with which nothing of a gradient is lost in the step.
EXACT = {
    "sketch": "sketch:k=10000,columns=8,P=1,momentum=0,exact_below=10",
    "atomo": "atomo:budget=100,values=float32,exchange=allgather,dense_below=10",
    "dore": "dore:alpha=0,uplink=identity,downlink=identity,exchange=sharded,dense_below=10",
}


def compression(method: str, **options) -> hvc.Compressor:
    return hvc.Compression.parse(OPTIONS[method], seed=5, **options)


def finite(arrays) -> bool:
    return all(np.isfinite(array).all() for array in arrays)


def same_everywhere(arrays, where: str) -> None:
    for rank, others in enumerate(everyone(list(arrays))):
        same_bits(arrays, others, f"ranks {RANK} and {rank} differ: {where}")


def by_variable(reduced: Reduced, buckets: list[np.ndarray]) -> dict[int, np.ndarray]:
    """What is in the buckets, by the numbers of the variables."""
    found = {}
    for members, flat in zip(reduced.reduction._buckets, buckets):
        ends = np.cumsum([math.prod(reduced.shapes[i]) for i in members])
        found |= {i: part.reshape(reduced.shapes[i]) for i, part in zip(members, np.split(flat, ends[:-1]))}
    return found


def as_simulated(reduced: Reduced, by_rank: list[list[np.ndarray]], where: str) -> list[np.ndarray]:
    """A step whose means, memory, dtypes and shapes must be right; the means of this rank."""
    own = by_rank[RANK]
    got = reduced(own)
    assert [(g.dtype, g.shape) for g in got] == [(g.dtype, g.shape) for g in own], where
    expected = by_variable(reduced, reduced.simulate([[g.astype(np.float32) for g in grads] for grads in by_rank]))
    assert sorted([*expected, *reduced.reduction._beside]) == list(range(len(own))), where
    for i, mean in expected.items():
        same_bits([got[i].astype(np.float32)], [mean.astype(own[i].dtype).astype(np.float32)], f"{where}, tensor {i}")
    for i in reduced.reduction._beside:
        mean = sum(grads[i].astype(np.float64) for grads in by_rank) / SIZE
        assert_allclose(got[i].astype(np.float64), mean, rtol=1e-6, atol=1e-7, err_msg=f"{where}, tensor {i}")
    simulated = reduced.simulation.sessions[RANK].state_dict()["arrays"]
    same_bits(reduced.reduction.session.state_dict()["arrays"].values(), simulated.values(), where)
    assert all(array.dtype.itemsize >= 4 for array in simulated.values()), where
    return got


# Values


@check_on_two
@each
def one_value_that_is_not_finite_is_forgotten_after_its_step(method):
    reduced, rates = Reduced(compression(method), [(16, 8), (8,)]), {3: np.inf, 5: -np.inf, 7: np.nan}
    for step in range(10):
        by_rank, where = [given_grads(step, rank, reduced.shapes) for rank in range(SIZE)], f"{method}, step {step}"
        if step in rates:
            before = memory(reduced.compressor)
            by_rank[1][0][1, 2] = rates[step]
            assert reduced.simulate(by_rank) is None, where
            assert not any(np.isfinite(g).any() for g in reduced(by_rank[RANK])), where
            same_bits(memory(reduced.compressor).values(), before.values(), where)
            continue
        got = as_simulated(reduced, by_rank, where)
        assert finite([*got, *memory(reduced.compressor).values()]), where
        reduced.optimizer.apply_gradients(zip(map(tf.constant, got), reduced.variables))
    same_everywhere([v.numpy() for v in reduced.variables], method)


@check_on_three
@each
def halves_do_not_overflow_before_they_are_averaged(method):
    large = [np.full((16, 16), 3e4, np.float16), np.full((5,), 3e4, np.float16)]
    text = {**EXACT, "dore": "dore:block=16,exchange=sharded,dense_below=10"}[method]
    for op in (hvd.Average, hvd.Sum):
        reduced = Reduced(hvc.Compression.parse(text, seed=5), [g.shape for g in large], op=op)
        for step in range(3):
            got, where = reduced(large), f"{method}, {op}, step {step}"
            assert all(g.dtype == np.float16 for g in got), where
            if op == hvd.Sum:  # 9e4 is no half
                assert all(np.isposinf(g).all() for g in got), f"{where}: {got}"
            else:
                for g in got:
                    assert_allclose(g.astype(np.float32), 3e4, rtol=2e-3, err_msg=where)


@check_on_two
@each
def gradients_that_are_zero_or_empty_go_through(method):
    shapes = [(40,), (8, 5), (0, 4), (8, 5)]
    compressor = compression(method, dense_below=0)
    reduced = Reduced(compressor, shapes)
    dtypes = [np.float32, np.float32, np.float32, np.float16]
    zero = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
    given = [g.astype(dtype) for g, dtype in zip(given_grads(1, 1, shapes, whole=True), dtypes)]
    for step in range(3):
        got = as_simulated(reduced, [zero, given], f"{method}, step {step}")
        assert finite(got) and any(g.any() for g in got), f"{method}, step {step}"
    for one in (compressor, *reduced.simulation.sessions):
        one.reset()
    got = as_simulated(reduced, [zero, zero], f"{method}, zero on both ranks")
    assert not any(g.any() for g in got) and not any(a.any() for a in memory(compressor).values()), method
    empty = Reduced(compression(method, dense_below=0), [(0, 4)])
    assert empty([np.zeros((0, 4), np.float32)])[0].shape == (0, 4), method


@check_on_two
@each
def scalars_and_tensors_of_few_elements_keep_their_shapes(method):
    reduced = Reduced(compression(method, dense_below=0), [(), (1,), (3, 1), (1, 1, 1, 4)])
    for step in range(5):
        by_rank = [given_grads(step, rank, reduced.shapes) for rank in range(SIZE)]
        got = as_simulated(reduced, by_rank, f"{method}, step {step}")
        reduced.optimizer.apply_gradients(zip(map(tf.constant, got), reduced.variables))
    same_everywhere([v.numpy() for v in reduced.variables], method)


@check_on_two
@each
def no_dtype_loses_range_or_precision_on_the_way(method):
    """Scales are powers of two, about 1e6 and 1e-9: neither is in the range of halves."""
    dtypes = [tf.bfloat16.as_numpy_dtype, np.float16, np.float64]
    reduced, errors = Reduced(compression(method), [(64, 48)] * 3), {}
    for scale in (1.0, 2.0**20, 2.0**-30):
        by_rank = [
            [(g * (scale if dtype != np.float16 else 1)).astype(dtype) for g, dtype in zip(grads, dtypes)]
            for grads in (given_grads(1, rank, reduced.shapes, whole=True) for rank in range(SIZE))
        ]
        for grads in by_rank:
            grads[1] *= scale == 1
        got = as_simulated(reduced, by_rank, f"{method}, gradients times {scale}")
        for i in (0, 2):
            mean = sum(grads[i].astype(np.float64) for grads in by_rank) / SIZE
            errors[scale, i] = np.linalg.norm(got[i].astype(np.float64) - mean) / np.linalg.norm(mean)
            assert_allclose(errors[scale, i], errors[1.0, i], rtol=0.3, err_msg=f"{method}, {dtypes[i]} times {scale}")
        for one in (reduced.compressor, *reduced.simulation.sessions):
            one.reset()


@check_on_three
@each
def codes_are_averaged_as_numbers(method):
    """Codes of 1, 1, 0 and -1, -1, 0 on three ranks: whole numbers would come to 0 and -1, or to 1 and -1."""
    text = {**EXACT, "dore": "dore:block=32,downlink=identity,exchange=sharded,dense_below=10"}[method]
    given = np.zeros((4, 8), np.float32)
    given[0, :3] = [0, 0, 1] if RANK == 2 else [1, -1, 1]
    means = {}
    for name, options in {"Average": {}, "Sum": {"op": hvd.Sum}, "predivided": {"gradient_predivide_factor": 2.0}}.items():
        reduced = Reduced(hvc.Compression.parse(text, seed=5), [(4, 8)], **options)
        (means[name],) = reduced([given])
    assert_allclose(means["Average"][0, :3], [2 / 3, -2 / 3, 1], rtol=1e-6, err_msg=method)
    same_bits([means["Sum"]], [3 * means["Average"]], method)
    assert_allclose(means["predivided"], means["Average"], rtol=1e-6, err_msg=method)


# Variables


class Partly(keras.Model):
    """It has a layer that is frozen, and variables that are not used, on every rank at other addresses."""

    def __init__(self, unused: int = 1):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.others = [object() for _ in range(100 * RANK)]
        self.unused = [self.add_weight(name=f"unused{i}", shape=(i + 4, 5)) for i in range(unused)]
        self.first, self.last = keras.layers.Dense(20, "relu", name="first"), keras.layers.Dense(3, name="last")
        self.frozen = keras.layers.Dense(30, name="frozen", trainable=False)
        self(tf.zeros((1, 40)))

    def call(self, x):
        return self.last(self.frozen(self.first(x)))

    @property
    def left_alone(self) -> list[np.ndarray]:
        return [v.numpy() for v in (*self.unused, *self.frozen.variables)]

    @property
    def used(self) -> list[tf.Variable]:
        return [*self.first.variables, *self.last.variables]


@check_on_two
@each
def variables_without_gradient_are_left_alone_in_fit(method):
    model, compressor = Partly(), compression(method)
    before, start = model.left_alone, [v.numpy() for v in model.used]
    fit(model, hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor), epochs=1, data=images(samples=80))
    same_bits(model.left_alone, before, method)
    assert all((v.numpy() != w).any() for v, w in zip(model.used, start)), method
    assert compressor.stats().steps == 5, method
    same_everywhere(weights(model), method)


@check_of_two
@each
def variables_without_gradient_are_none_to_a_tape(method):
    model, compressor = Partly(unused=20), compression(method)
    sources = [*model.unused[:10], *model.used, *model.frozen.variables, *model.unused[10:]]
    used = [any(v is u for u in model.used) for v in sources]
    before, (x, y), optimizer = model.left_alone, images(), keras.optimizers.SGD(0.1)
    reduced = Reduced(compressor, [v.shape for v in model.used])
    reduced.variables = model.used
    for step in range(4):
        with tf.GradientTape(persistent=True) as tape:
            loss = LOSS(y, model(x))
        own = [np.round(1024 * g.numpy()) for g in tape.gradient(loss, model.used)]  # whole: any order of addition is right
        with tf.GradientTape() as tape:
            loss = given_loss(model.used, own)
        got = hvc.DistributedGradientTape(tape, compressor).gradient(loss, sources)
        assert isinstance(got, list) and [g is not None for g in got] == used, f"{method}, step {step}"
        means = [g.numpy() for g in got if g is not None]
        same_bits(reduced.flattened(means), reduced.simulate(everyone(own)), f"{method}, step {step}")
        optimizer.apply_gradients((m / 1024, v) for m, v in zip(means, model.used))
    same_bits(model.left_alone, before, method)
    same_everywhere(weights(model), method)


@check_on_two
@each
def an_optimizer_that_is_made_anew_goes_on_with_the_memory(method):
    reduced = Reduced(compression(method), [(16, 8), (8,)])
    with Traces() as traces:
        for step in range(15):
            if step % 5 == 0:
                reduced.optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), reduced.compressor)
            by_rank = [given_grads(step, rank, reduced.shapes) for rank in range(SIZE)]
            as_simulated(reduced, by_rank, f"{method}, step {step}")
    assert reduced.compressor.stats().steps == 15 and len(reduced.compressor.reductions) == 1, method
    assert traces.count == 1, f"{method}: built {traces.count} times, and kept as often"


@check_on_two
@each
def a_variable_that_is_resized_begins_with_an_empty_memory(method):
    compressor, kept = compression(method), tf.Variable(tf.zeros((16, 8)), name="kept")
    for rows in (10, 12):
        reduced = Reduced(compressor, [(rows, 4), (16, 8)])
        reduced.variables[1] = kept
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(3):  # the simulation begins with an empty memory
                by_rank = [given_grads(step, rank, reduced.shapes) for rank in range(SIZE)]
                as_simulated(reduced, by_rank, f"{method}, {rows} rows, step {step}")
        messages = [str(one.message) for one in told if "empty memory" in str(one.message)]
        assert len(messages) == (rows == 12), f"{method}, {rows} rows: {messages}"


@check_on_two
@each
def what_is_used_twice_is_compressed_once_as_the_sum(method):
    """A layer of two inputs, an embedding that is the output's matrix too, and one whose gradient is sparse."""
    keras.utils.set_random_seed(0)
    table, places = (tf.Variable(tf.random.normal((50, 16)), name=name) for name in ("embedding", "places"))
    shared = keras.layers.Dense(16, name="shared")
    shared.build((None, 16))
    own = [table, places, *shared.variables]
    compressor, optimizer = compression(method), keras.optimizers.SGD(0.1)
    reduced = Reduced(compressor, [v.shape for v in own])
    reduced.variables = own
    optimizer.build(own)

    def loss_of(tokens):
        one, other = (shared(tf.gather(table, column) + tf.gather(places, column)) for column in tf.unstack(tokens, axis=1))
        return LOSS(tokens[:, 0], tf.matmul(one * other, table, transpose_b=True))

    @tf.function
    def step(tokens):
        with tf.GradientTape() as tape:
            loss = loss_of(tokens)
        local = tape.gradient(loss, own)
        assert isinstance(local[1], tf.IndexedSlices)
        with tf.GradientTape() as tape:
            loss = loss_of(tokens)
        means = hvc.DistributedGradientTape(tape, compressor, sparse_as_dense=True).gradient(loss, own)
        optimizer.apply_gradients(zip(means, own))
        return [tf.convert_to_tensor(g) for g in local], means

    for number in range(4):
        local, means = step(tf.constant(np.random.default_rng([number, RANK]).integers(0, 50, (8, 2))))
        assert all(isinstance(m, tf.Tensor) for m in means), method
        expected = reduced.simulate(everyone([g.numpy() for g in local]))
        got = reduced.flattened([m.numpy() for m in means])
        same_bits(got, expected, f"{method}, step {number}")
        assert compressor.stats().steps == number + 1, method
    same_everywhere([v.numpy() for v in own], method)


# Optimizers


@check_on_two
@each
def clipping_after_the_mean_does_not_touch_the_memory(method):
    results = {}
    for way in ("optimizer", "loop"):
        reduced = Reduced(compression(method), [(16, 8), (8,)])
        v, options = reduced.variables, {"global_clipnorm": 1.0} if way == "optimizer" else {}
        optimizer = keras.optimizers.SGD(0.5, **options)
        if way == "optimizer":
            optimizer = hvc.DistributedOptimizer(optimizer, reduced.compressor)
        optimizer.build(v)

        @tf.function
        def step(grads):
            with tf.GradientTape() as tape:
                loss = given_loss(v, grads)
            if way == "optimizer":
                return optimizer.minimize(loss, v, tape)
            means = hvc.DistributedGradientTape(tape, reduced.compressor).gradient(loss, v)
            return optimizer.apply_gradients(zip(tf.clip_by_global_norm(means, 1.0)[0], v))

        expected = [np.zeros(shape, np.float32) for shape in reduced.shapes]
        for number in range(4):
            by_rank = [given_grads(number, rank, reduced.shapes) for rank in range(SIZE)]
            step([tf.constant(g) for g in by_rank[RANK]])
            means = {i: sum(grads[i] for grads in by_rank) / SIZE for i in range(2)}
            means |= by_variable(reduced, reduced.simulate(by_rank))
            norm = np.sqrt(sum(float((m**2).sum()) for m in means.values()))
            assert norm > 1, f"{method}: nothing is clipped"
            expected = [e - 0.5 * means[i] / norm for i, e in enumerate(expected)]
            for one, other in zip(v, expected):
                assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=f"{method}, {way}, step {number}")
        mine = reduced.simulation.sessions[RANK].state_dict()["arrays"]
        same_bits(memory(reduced.compressor).values(), mine.values(), f"{method}, {way}")
        assert reduced.compressor.stats().steps == 4, f"{method}, {way}"
        same_everywhere([one.numpy() for one in v], f"{method}, {way}")
        results[way] = memory(reduced.compressor).values()
    same_bits(*results.values(), method)


@check_on_two
def what_is_left_out_is_made_good_later():
    for text in ("sketch:k=1,columns=64,momentum=0,exact_below=1", "dore:block=4,exchange=allgather,dense_below=1"):
        reduced = Reduced(hvc.Compression.parse(text, seed=5), [(2, 2)])
        source, total = tf.Variable([[1.0, 0.1], [0.0, 0.0]]), np.zeros((2, 2))
        step = tf.function(lambda: reduced.optimizer._allreduce_grads([source], reduced.variables))
        for number in range(1, 41):
            total += step()[0].numpy()
            if number == 15:
                assert total[0, 1] > 0, f"{text}: {total}"
        before = memory(reduced.compressor)
        source.assign(tf.fill((2, 2), 99.0))
        same_bits(memory(reduced.compressor).values(), before.values(), text)
        assert_allclose(total, 40 * np.array([[1, 0.1], [0, 0]]), atol=1.01, err_msg=text)
        assert not total[1].any() and ("sketch" not in text or total[0, 1] < 4.001), f"{text}: {total}"


@check_on_two
def a_residual_is_not_scaled_by_the_rate_that_was():
    """A warm-up from zero, and a fall to a hundredth."""
    rates = np.float32([*np.linspace(0, 0.1, 21)[:-1], *[0.1] * 60, *[0.001] * 10])
    x = (0.4 * np.random.default_rng(RANK).normal(size=(200, 100))).astype(np.float32)
    y = (x @ np.random.default_rng(9).normal(size=(100, 1))).astype(np.float32)

    class Rates(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return tf.gather(rates, tf.cast(step, tf.int32))

    for text in ("sketch:ratio=0.9,exact_below=10,momentum=0", OPTIONS["dore"], OPTIONS["dore"] + ",rescale=True"):
        compressor, optimizer, losses = hvc.Compression.parse(text), keras.optimizers.SGD(Rates()), []
        w = tf.Variable(tf.zeros((100, 1)))
        optimizer.build([w])

        @tf.function
        def step():
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean((tf.matmul(x, w) - y) ** 2)
            own = tape.gradient(loss, w)
            means = hvc.DistributedGradientTape(tape, compressor, optimizer=optimizer).gradient(loss, [w])
            optimizer.apply_gradients([(means[0], w)])
            return loss, tf.norm(own)

        for number, rate in enumerate(rates):
            before, kept, where = w.numpy(), compressor.residual_norm() if number else 0.0, f"{text}, step {number}"
            loss, gradient = step()
            losses.append(float(loss))
            arrays = [array for name, array in memory(compressor).items() if not name.endswith(".lr")]  # NaN before the first
            assert finite([w.numpy(), *arrays]), where
            moved = np.linalg.norm(w.numpy() - before)
            assert moved == 0 or rate > 0, where
            if number == 80:
                kept *= 100 if "rescale" in text else 1  # which keeps the residual in units of the weights
                limit = 3 * rate * max(everyone(float(gradient) + kept))
                assert 0 < moved <= limit, f"{where}: {moved} against {limit}"
        assert max(losses[80:]) <= 1.05 * losses[79] < 0.5 * losses[0], f"{text}: {losses[::10]}"
        same_everywhere([w.numpy()], text)


# Randomness


def generators() -> tuple:
    """The states of what a user draws from."""
    return random.getstate(), np.random.get_state()[1].tolist(), tf.random.get_global_generator().state.numpy().tolist()  # noqa: NPY002


@check_on_three
@each
def draws_do_not_depend_on_the_generators_of_a_rank(method):
    keras.utils.set_random_seed(RANK)
    given = np.random.default_rng(0).integers(-50, 50, (32, 32)).astype(np.float32)
    reduced, outcomes = Reduced(compression(method), [(32, 32), (32, 32)]), []
    for step in range(6):
        if RANK == 0:
            random.random(), np.random.normal(size=5), tf.random.normal((5,))  # noqa: NPY002
        before = generators()
        got = as_simulated(reduced, [[given, given]] * SIZE, f"{method}, step {step}")
        assert generators() == before, f"{method}, step {step}"
        outcomes += [g.tobytes() for g in got]
        for one in (reduced.compressor, *reduced.simulation.sessions):
            one.reset()
    if method != "sketch":  # it draws hashes, and sends what is found by them as it is
        assert len(set(outcomes)) == len(outcomes), f"{method}: a draw was used twice"


# A training


@check_of_one
@each
def alone_in_the_world_training_is_as_without_compression(method):
    x, results = images()[0], {}
    for way in ("plain", "compressed"):
        keras.utils.set_random_seed(0)
        model, compressor = keras.Sequential([keras.Input((40,)), keras.layers.Dense(1)]), compression(method)
        optimizer = keras.optimizers.SGD(0.01)
        if way == "compressed":
            optimizer = hvc.DistributedOptimizer(optimizer, compressor)
        model.compile(optimizer, "mse")
        callbacks = [CompressionCallback()] if way == "compressed" else []
        history = model.fit(x, x[:, :1], batch_size=16, epochs=13, verbose=0, shuffle=False, callbacks=callbacks).history
        assert history["loss"][-1] < 0.5 * history["loss"][0], f"{method}, {way}: {history['loss']}"
        results[way] = weights(model)
    same_bits(*results.values(), method)
    assert compressor.stats().last.ratio is None and history["compression_ratio"] == [1.0] * 13, method

    gradient, unbound = tf.constant(given_grads(0, 0, [(40, 50)])[0]), compression(method)
    direct = tf.function(lambda given: unbound.decompress(*unbound.compress(given)))
    if method == "sketch":
        with pytest.raises(ValueError, match="spans all tensors"):
            direct(gradient)
    else:
        got = direct(gradient).numpy()
        assert np.vdot(got, gradient) > 0.3 * np.linalg.norm(gradient) ** 2, f"{method}: {got}"


@check_on_two
@each
def ways_to_run_a_fit_have_the_same_steps(method):
    results = {}
    for way in ({}, {"steps_per_execution": 4}, {"run_eagerly": True}):
        model, compressor = dense_model(hidden=20), compression(method)
        optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor)
        fit(model, optimizer, epochs=1, data=images(samples=96), batch_size=8, jit_compile=False, **way)
        assert compressor.stats().steps == 12, f"{method}, {way}"
        same_everywhere(weights(model), f"{method}, {way}")
        results[str(way)] = weights(model)
        same_weights(results[str(way)], results["{}"], f"{method}, {way}", rtol=1e-4)
    optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compression(method))
    raised_everywhere(lambda: fit(dense_model(20), optimizer, jit_compile=True), "jit_compile", error=ValueError)


@check_on_two
@each
def a_saved_model_goes_on_with_its_schedule_and_is_compressed(method):
    rates = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)
    model, names = dense_model(hidden=20), {keras.optimizers.SGD.__name__: keras.optimizers.SGD}
    fit(model, hvc.DistributedOptimizer(keras.optimizers.SGD(rates), compression(method)), epochs=1)
    directory = Path(everyone(tempfile.mkdtemp() if RANK == 0 else None)[0])
    for path in (directory / "model.keras", directory / "model.h5"):
        if RANK == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.save(path)
        everyone(None)
        compressor, where = compression(method), f"{method}, {path.suffix}"
        loaded = load_model(path, compressor)
        same_bits(weights(loaded), weights(model), where)
        for got, expected in zip(loaded.optimizer.variables, model.optimizer.variables):
            same_bits([got.numpy()], [expected.numpy()], f"{where}, {expected.name}")
        x, y = images(seed=1)
        loaded.fit(x, y, batch_size=16, verbose=0)
        assert compressor.stats().steps == 4 and bound_to(loaded.optimizer) is compressor, where
        assert int(loaded.optimizer.iterations) == 8, where
        assert_allclose(loaded.optimizer.learning_rate, 0.1 * 0.5**3.5, rtol=1e-6, err_msg=where)  # as of the step before
        same_everywhere(weights(loaded), where)
        plain = keras.models.load_model(path, custom_objects=names)
        assert type(plain.optimizer) is keras.optimizers.SGD and int(plain.optimizer.iterations) == 4, where
        contents = path.read_bytes() if path.suffix == ".h5" else zipfile.ZipFile(path).read("config.json")
        assert b"hvdcompress" not in contents, where


@check_on_two
def a_saved_model_of_mixed_precision_keeps_its_loss_scale():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = dense_model(hidden=20)
        scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64)
        fit(model, scaled, epochs=1)
        directory = Path(tempfile.mkdtemp())
        model.save(directory / "model.keras")
        loaded = load_model(directory / "model.keras", compressor := compression("dore"))
        assert float(loaded.optimizer.loss_scale) == 64 and int(loaded.optimizer.iterations) == 4
        loaded.set_weights(everyone(weights(loaded))[0])
        fit(loaded, loaded.optimizer, epochs=1)
        assert compressor.stats().steps == 4 and int(loaded.optimizer.iterations) == 8
        with pytest.raises(ValueError, match="compile anew"):
            model.compile(keras.optimizers.legacy.SGD(0.1), LOSS)
            model.save(directory / "model.keras")
            load_model(directory / "model.keras", compressor)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@check_on_three
@each
def an_overflow_on_one_rank_is_a_step_that_no_rank_takes(method):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model, compressor = dense_model(hidden=20), compression(method)
        optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor)
        scaled = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=256)
        x, y = images(samples=80)
        if RANK == 2:
            x[13] = np.inf  # step 4
        fit(model, scaled, epochs=1, data=(x, y), batch_size=4)
        assert (compressor.stats().steps, compressor.stats().abandoned) == (19, 1), f"{method}: {compressor.stats()}"
        assert float(scaled.loss_scale) == 128 and int(scaled.iterations) == 20, f"{method}: {float(scaled.loss_scale)}"
        assert finite([*weights(model), *memory(compressor).values()]), method
        same_everywhere(weights(model), method)
        inside = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        with pytest.raises(ValueError, match=r"LossScaleOptimizer\(DistributedOptimizer"):
            hvc.DistributedOptimizer(inside, compression(method))
        with pytest.raises(TypeError, match="takes 1 positional argument"):
            hvdk.DistributedOptimizer(inside, compression=compression(method))
    finally:
        keras.mixed_precision.set_global_policy("float32")


@check_on_two
def a_sketched_training_learns():
    with pytest.raises(ValueError, match="odd"):
        hvc.Compression.sketch(rows=2)
    for rows in (1, 5):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
        compressor = hvc.Compression.sketch(ratio=0.3, rows=rows, momentum=0)
        optimizer, seen = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor), []

        def look(batch, logs):
            seen.append((model.layers[0].kernel.numpy(), compressor.stats().last.wire))

        x, _ = images(samples=100 * 8, width=784)
        y = x[:, :10].argmax(1)
        history = fit(model, optimizer, [keras.callbacks.LambdaCallback(on_train_batch_end=look)], 2, (x[:400], y[:400]), 8)
        assert len(seen) == 100 and all(wire > 0 for _, wire in seen), rows
        assert all((a != b).any() for (a, _), (b, _) in zip(seen, seen[1:])), rows
        assert history.history["loss"][-1] < 0.7 * history.history["loss"][0], (rows, history.history["loss"])
        same_everywhere(weights(model), f"{rows} rows")


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()
    tensorflow_checks.RANK, tensorflow_checks.SIZE = RANK, SIZE
    main(RANK, SIZE)
