"""What must hold of the TensorFlow adapter under real Horovod, on any number of ranks."""

from __future__ import annotations

import csv
import os
import tempfile
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import horovod.keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvdk
import numpy as np
import pytest
import tensorflow as tf
from conforming import METHODS
from numpy.testing import assert_allclose, assert_array_equal

import hvdcompress.tensorflow as hvc
from hvdcompress import CompressionError, Dense, Dore, adapter
from hvdcompress.core import AllReduce, Group, Outcome
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.keras import CompressionCallback, CompressionCheckpoint, CompressionSchedule
from hvdcompress.tensorflow.binding import bound_to
from hvdcompress.tensorflow.compressor import Compressor
from hvdcompress.tensorflow.reduction import Reduction, Treatment
from ranks.harness import (
    check,
    check_of_one,
    check_of_three,
    check_of_two,
    check_on_two,
    everyone,
    main,
    raised_everywhere,
    same_bits,
)

RANK, SIZE = 0, 1  # set when Horovod is

SHAPES = [(40, 50), (7,), (3, 5, 7, 11), (30, 40), ()]  # with dense_below=1000 the first, third and fourth are compressed
keras = tf.keras


def given_grads(step: int, rank: int, shapes=SHAPES, whole: bool = False) -> list[np.ndarray]:
    rng = np.random.default_rng([step, rank])
    grads = [np.asarray(rng.normal(size=shape), np.float32) for shape in shapes]
    return [np.asarray(np.round(16 * g), np.float32) for g in grads] if whole else grads


def variables(shapes=SHAPES, dtype=tf.float32, name: str = "v") -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape, dtype), name=f"{name}{i}") for i, shape in enumerate(shapes)]


class Reduced:
    """Gradients averaged as a bound optimizer does it, and as the simulation does."""

    def __init__(self, compressor, shapes=SHAPES, name: str = "v", **options):
        self.compressor, self.shapes, self.variables = compressor, shapes, variables(shapes, name=name)
        self.optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.5), compressor, **options)
        self.simulation = None

    def __call__(self, grads: list[np.ndarray]) -> list[np.ndarray]:
        tensors = [tf.constant(g) for g in grads]
        if SIZE > 1:
            return [t.numpy() for t in self.optimizer._allreduce_grads(tensors, self.variables)]
        # Horovod's optimizer does nothing where there is one rank.
        return [t.numpy() for t in self.reduction(tensors, Treatment())[0]]

    @property
    def reduction(self) -> Reduction:
        tensors = [tf.zeros(shape) for shape in self.shapes]
        return self.compressor.reduction(self.variables, tensors, hvd.global_process_set)

    def flattened(self, grads: list[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([grads[i].ravel() for i in bucket]) for bucket in self.reduction._buckets]

    def simulate(self, by_rank: list[list[np.ndarray]]) -> list[np.ndarray] | None:
        if self.simulation is None:
            self.simulation = Simulation(self.compressor.method, self.reduction.session.layouts, SIZE, seed=self.compressor._seed)
        return self.simulation.step([self.flattened(grads) for grads in by_rank])


def memory(compressor) -> dict[str, np.ndarray]:
    return {
        f"{number}.{name}": array.copy()
        for number, one in enumerate(compressor.state_dict()["sets"])
        for name, array in one["arrays"].items()
    }


class Traces:
    """Counts how often a step was built."""

    def __enter__(self):
        self.count, self._build = 0, Reduction.build

        def build(reduction, *args):
            self.count += 1
            return self._build(reduction, *args)

        Reduction.build = build
        return self

    def __exit__(self, *_):
        Reduction.build = self._build


# Models to train: 8 batches of 8, another part of the data on each rank


def images(seed: int = 0, samples: int = 64, width: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, RANK])
    x = rng.normal(size=(samples, width)).astype(np.float32)
    return x, (x[:, :3].argmax(1)).astype(np.int64)


def dense_model(hidden: int = 50, seed: int = 0, names: str = "abc"):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(hidden, "relu", name=name) for name in names[:-1]]
    return keras.Sequential([keras.Input((40,)), *layers, keras.layers.Dense(3, name=names[-1])])


def embedding_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Embedding(60, 20), keras.layers.Flatten(), keras.layers.Dense(50), keras.layers.Dense(3)]
    )
    model.call = tf.function(model.call)  # the sparse gradients of a function have no shape
    return model


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(model, optimizer, callbacks=(), epochs: int = 2, data=None, batch_size: int = 16, **compiled):
    model.compile(optimizer, LOSS, **compiled)
    x, y = data or images()
    return model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))


def weights(model) -> list[np.ndarray]:
    return model.get_weights()


def same_weights(a, b, where: str, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for one, other in zip(a, b):
        assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=where)


def identity(**options):
    """Compression that loses nothing, by allgather, in buckets of a few layers."""
    return hvc.Compression.gather(dense_below=100, bucket_mb=0.008, exchange="allgather", **options)


@check
def every_method_gives_the_bits_of_the_simulation():
    """Where floats are summed the gradients are whole numbers: the order in which a network adds then does not show."""
    for text in sorted(METHODS):
        reduced = Reduced(hvc.Compression.parse(text, seed=5))
        layouts, method = reduced.reduction.session.layouts, reduced.compressor.method
        assert len(layouts) == 1, text
        summed = any(stage.kind is AllReduce for stage in method.stages(layouts[0], Group(RANK, SIZE)))
        for step in range(5):
            by_rank = [given_grads(step, rank, whole=summed) for rank in range(SIZE)]
            if step == 3:
                by_rank[-1][0][1, 2] = np.nan
            expected, got = reduced.simulate(by_rank), reduced(by_rank[RANK])
            where = f"{text}, {SIZE} ranks, step {step}"
            if step == 3:
                assert expected is None, where
                assert all(np.isnan(g).all() for g in got), where
                continue
            same_bits(reduced.flattened(got), expected, where)
            assert np.count_nonzero(expected[0]) > 0, where
            if not method.whole_model:
                for small in (1, 4):
                    mean = sum(g[small].astype(float) for g in by_rank) / SIZE
                    assert_allclose(got[small], mean, rtol=1e-5, atol=1e-7, err_msg=where)
        # The memory too is that of the simulation, so Horovod, mpi4py and PyTorch have the same.
        mine = reduced.simulation.sessions[RANK].state_dict()["arrays"]
        assert mine.keys() == reduced.reduction.session.state_dict()["arrays"].keys(), text
        same_bits(reduced.reduction.session.state_dict()["arrays"].values(), mine.values(), text)


@check
def several_buckets_in_two_rounds_are_those_of_the_simulation():
    for exchange in ("allgather", "sharded"):
        reduced = Reduced(hvc.Compressor(Dore(block=32, exchange=exchange), bucket_mb=0.008, seed=7))
        assert len(reduced.reduction.session.layouts) == 2
        for step in range(6):
            by_rank = [given_grads(step, rank) for rank in range(SIZE)]
            same_bits(reduced.flattened(reduced(by_rank[RANK])), reduced.simulate(by_rank), f"{exchange}, step {step}")
        assert_allclose(
            reduced.compressor.predicted_bytes(),
            reduced.compressor.stats().last.wire,
            rtol=0.1,
            err_msg=f"{exchange}: predicted and counted bytes",
        )


def given_loss(variables, grads):
    """A loss that has these gradients."""
    return tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, grads)])


class GivenModel(keras.Model):
    """Its gradients are the data that it is trained on."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        self.given = [self.add_weight(name=f"w{i}", shape=shape, initializer="zeros") for i, shape in enumerate(shapes)]

    def call(self, inputs):
        return inputs

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = given_loss(self.given, [tf.squeeze(g, 0) for g in data])
        self.optimizer.minimize(loss, self.given, tape)
        return {"loss": tf.constant(0.0)}


@check_of_two
def fit_takes_the_steps_of_the_simulation():
    """Through Keras: with learning rate 1 the weights become minus the sum of the means."""
    for text in ("dore:block=32,exchange=sharded", "sketch:ratio=0.5,exact_below=10,momentum=0.5", "atomo:budget=2"):
        model, steps = GivenModel(), 6
        compressor = hvc.Compression.parse(text, seed=5)
        model.compile(hvc.DistributedOptimizer(keras.optimizers.SGD(1.0), compressor))
        by_step = [[given_grads(step, rank, whole=True) for rank in range(SIZE)] for step in range(steps)]
        given = tuple(np.stack([by_step[step][RANK][i] for step in range(steps)]) for i in range(len(SHAPES)))
        model.fit(tf.data.Dataset.from_tensor_slices(given).batch(1), epochs=1, verbose=0)
        (held,) = compressor._held.values()
        simulation = Simulation(compressor.method, held.reduction.session.layouts, SIZE, seed=5)
        expected = [np.zeros(layout.size, np.float32) for layout in simulation.sessions[0].layouts]
        for by_rank in by_step:
            flat = [
                [np.concatenate([grads[i].ravel() for i in bucket]) for bucket in held.reduction._buckets] for grads in by_rank
            ]
            expected = [total - mean for total, mean in zip(expected, simulation.step(flat))]
        got = model.get_weights()
        for bucket, total in zip(held.reduction._buckets, expected):
            assert_allclose(np.concatenate([got[i].ravel() for i in bucket]), total, rtol=1e-6, atol=1e-6, err_msg=text)


# The table of options: each equal to Horovod without compression


def table() -> dict[str, tuple]:
    """By name: what makes the optimizer of a compression, what `compile` is told, and whether it is a legacy one."""

    def of(module, base, **options):
        return lambda compression: module.DistributedOptimizer(base(), compression=compression, **options)

    def sgd():
        return keras.optimizers.SGD(0.1, momentum=0.5)

    def legacy():
        return keras.optimizers.legacy.SGD(0.1, momentum=0.5)

    def adam():
        return keras.optimizers.Adam(0.01)

    return {
        "backward_passes": (of(hvdk, sgd, backward_passes_per_step=2), {}),
        "averaged_backward_passes": (of(hvdk, sgd, backward_passes_per_step=2, average_aggregated_gradients=True), {}),
        "legacy_backward_passes": (of(hvdk, legacy, backward_passes_per_step=2), {}),
        "new": (of(hvdk, sgd), {}),
        "adam": (of(hvdk, adam), {}),
        "legacy": (of(hvdk, legacy), {}),
        "horovod.keras": (of(horovod.keras, sgd), {}),
        "horovod.tensorflow": (of(hvd, sgd), {}),
        "run_eagerly": (of(hvdk, sgd), {"run_eagerly": True}),
        "steps_per_execution": (of(hvdk, sgd), {"steps_per_execution": 4}),
        "sum": (of(hvdk, sgd, op=hvd.Sum), {}),
        "predivide": (of(hvdk, sgd, gradient_predivide_factor=2.0), {}),
        "groups": (of(hvdk, sgd, groups=2), {}),
    }


@check_on_two
def every_option_is_as_without_compression():
    plain, unbound, bound = {}, {}, {}
    for name, (make, compiled) in table().items():
        for results, compression in ((plain, hvc.Compression.none), (unbound, identity()), (bound, identity())):
            model = dense_model()
            optimizer = make(compression)
            callbacks = [CompressionCallback(reset=False)] if results is bound else []
            history = fit(model, optimizer, callbacks, epochs=1, **compiled)
            results[name] = weights(model)
            if results is bound:
                assert bound_to(model.optimizer) is compression and not compression._places, name
                assert history.history["compression_bytes"][-1] > 0, name
            if results is not plain:
                steps = compression.stats().steps
                assert steps == (2 if "backward" in name else 4), (name, steps)
        same_weights(unbound[name], plain[name], f"{name}, unbound")
        same_weights(bound[name], plain[name], f"{name}, bound")
        for others in everyone(bound[name]):
            same_bits(bound[name], others, name)


@check_of_two
def groups_of_variables_are_as_without_compression():
    """Horovod then hands over gradients in the order of the groups, and not of the variables."""
    results = {}
    for way in ("plain", "unbound", "bound"):
        model = dense_model()
        v = model.trainable_variables
        compression = hvc.Compression.none if way == "plain" else identity()
        optimizer = hvdk.DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression=compression, groups=[[v[4], v[0]], [v[1], v[5]]]
        )
        fit(model, optimizer, [CompressionCallback(reset=False)] if way == "bound" else [])
        results[way] = weights(model)
    same_weights(results["unbound"], results["plain"], "unbound")
    same_weights(results["bound"], results["plain"], "bound")


@check_on_two
def a_sum_is_not_dropped_by_horovods_tensorflow_module():
    """`hvd.tensorflow.DistributedOptimizer` loses op= for a Keras optimizer; ours does not."""
    results = {}
    for op in (hvd.Average, hvd.Sum):
        reduced = Reduced(identity(), op=op)
        results[op] = reduced(given_grads(0, RANK))
    for average, total in zip(results[hvd.Average], results[hvd.Sum]):
        assert_allclose(total, SIZE * average, rtol=1e-6)


def tape_steps(model, tape_of, steps: int = 4, sources=None, in_function: bool = False):
    """Trains by hand; the last batch is smaller."""
    x, y = images()
    optimizer, chosen = keras.optimizers.SGD(0.1), sources or model.trainable_variables
    optimizer.build(chosen)

    def step(xs, ys):
        with tf.GradientTape() as tape:
            loss = LOSS(ys, model(xs))
        tape = tape_of(tape)
        optimizer.apply_gradients(zip(tape.gradient(loss, chosen), chosen))

    run = tf.function(step) if in_function else step
    for number in range(steps):
        batch = slice(8 * number, 8 * number + (5 if number == steps - 1 else 8))
        run(tf.constant(x[batch]), tf.constant(y[batch]))
    return weights(model)


@check_on_two
def tapes_are_as_without_compression():
    for in_function in (False, True):
        for options in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 2}):
            plain = tape_steps(dense_model(), lambda tape: hvd.DistributedGradientTape(tape, **options), in_function=in_function)
            for module in (hvd, hvc):
                compressor = identity()
                got = tape_steps(
                    dense_model(),
                    lambda tape: module.DistributedGradientTape(tape, compression=compressor, **options),
                    in_function=in_function,
                )
                where = f"{options}, {module.__name__}, in a function: {in_function}"
                same_weights(got, plain, where)
                assert compressor.stats().steps == 4, where


@check_on_two
def tapes_of_every_step_trace_once_and_fill_no_cache():
    from horovod.tensorflow import _make_cached_allreduce_grads_fn

    (cache,) = [
        cell.cell_contents for cell in _make_cached_allreduce_grads_fn.__closure__ if isinstance(cell.cell_contents, dict)
    ]
    model, compressor = dense_model(), hvc.Compression.dore(block=32, dense_below=100)
    with Traces() as traces:
        tape_steps(model, lambda tape: hvc.DistributedGradientTape(tape, compressor), steps=2)
        before, size = traces.count, len(cache)
        tape_steps(model, lambda tape: hvc.DistributedGradientTape(tape, compressor), steps=8)
        assert (traces.count, len(cache)) == (before, size) and before == 1, (traces.count, before, len(cache), size)
    hvc.DistributedGradientTape(tf.GradientTape(), hvc.Compression.dore())
    assert len(cache) == size, "a compressor that is made anew for each tape would stay in there"


@check
def a_compressor_is_its_own_key():
    """Horovod keeps what it makes by the compressor: it must be hashable, and equal to itself alone."""
    one, other = hvc.Compression.dore(), hvc.Compression.dore()
    assert {one: 1}[one] == 1 and one != other


# Whose gradient it is


def steps_of_each_variable(compressor) -> dict[str, int]:
    return {
        "+".join(v.name for v in held.reduction.variables): held.reduction.session.committed for held in compressor._held.values()
    }


@check_on_two
def two_optimizers_with_one_compressor_do_not_share_memory():
    """Horovod gives both one function, traced once: variables of the same shapes must not be taken for each other."""
    compressor = hvc.Compression.dore(block=32, dense_below=100, seed=3)
    models = [dense_model(seed=1), dense_model(seed=2)]
    for model in models:
        fit(model, hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor), epochs=1)
    assert len(compressor.state_dict()["sets"]) == 2
    assert [one["step"] for one in compressor.state_dict()["sets"]] == [4, 4]
    alone = hvc.Compression.dore(block=32, dense_below=100, seed=3)
    model = dense_model(seed=2)
    fit(model, hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), alone), epochs=1)
    same_bits(weights(models[1]), weights(model))


@check_on_two
def frozen_layers_leave_the_memory_of_others_alone():
    """A layer of the same shape is trained in place of the one that is frozen: they must not share memory."""
    model, compressor = dense_model(hidden=40), hvc.Compression.dore(block=32, seed=3)
    optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor)
    optimizer.build(model.trainable_variables)
    a, b = model.layers[0], model.layers[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for frozen in (a, b, a):
            a.trainable, b.trainable = frozen is not a, frozen is not b
            fit(model, optimizer, epochs=1)
    with pytest.warns(RuntimeWarning, match="begins with an empty memory"):
        a.trainable = b.trainable = True
        fit(model, optimizer, epochs=1)
    steps = steps_of_each_variable(compressor)
    assert steps == {
        "b/kernel+b/bias+c/kernel+c/bias": 8,
        "a/kernel+a/bias+c/kernel+c/bias": 4,
        "a/kernel+a/bias+b/kernel+b/bias+c/kernel+c/bias": 4,
    }, steps


@check_on_two
def two_functions_of_a_gan_have_a_memory_each():
    generator, critic = dense_model(seed=1), dense_model(seed=2)
    compressor = hvc.Compression.dore(block=32, dense_below=100)
    with Traces() as traces:
        for model in (generator, critic):
            tape_steps(model, lambda tape: hvc.DistributedGradientTape(tape, compressor), in_function=True)
        assert traces.count == 4, traces.count  # two batch sizes each
    assert [one["step"] for one in compressor.state_dict()["sets"]] == [4, 4]


@check_on_two
def variables_of_one_name_are_told_apart():
    compressor = hvc.Compression.dore(block=32, seed=1)
    v = [tf.Variable(tf.zeros((40, 50)), name="kernel") for _ in range(3)]
    optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor)
    optimizer._allreduce_grads([tf.ones((40, 50))] * 3, v)
    (held,) = compressor._held.values()
    assert [variable.name for variable in held.reduction.variables] == ["kernel", "kernel#2", "kernel#3"]


@check_on_two
def memory_goes_with_the_variables():
    """The memory of variables that are gone is given up when another set comes, even one that has their addresses."""
    compressor = hvc.Compression.dore(block=32)
    for _ in range(3):
        Reduced(compressor)(given_grads(0, RANK))
    assert len(compressor._held) <= 2, len(compressor._held)
    reduced = Reduced(compressor)
    compressor._held = {(0, *map(id, reduced.variables)): compressor._held.popitem()[1]}
    reduced(given_grads(0, RANK))
    assert reduced.reduction.session.committed == 1


@check_on_two
def new_batch_sizes_go_on_with_the_same_memory():
    """Retraced or not, steps are those of the simulation."""
    reduced, calls = Reduced(hvc.Compression.dore(block=32, seed=2)), 0

    @tf.function
    def step(given, more):
        nonlocal calls
        calls += 1
        return reduced.optimizer._allreduce_grads([g + 0 * tf.reduce_sum(more) for g in given], reduced.variables)

    for number in range(6):
        by_rank = [given_grads(number, rank) for rank in range(SIZE)]
        got = step([tf.constant(g) for g in by_rank[RANK]], tf.zeros(1 + number % 3))
        same_bits(reduced.flattened([g.numpy() for g in got]), reduced.simulate(by_rank), f"step {number}")
    assert calls == 3


@check_on_two
def gradients_of_unknown_shape_have_that_of_their_variable():
    reduced = Reduced(hvc.Compression.dore(block=32, seed=2))

    @tf.function(input_signature=[[tf.TensorSpec(None)] * len(SHAPES)])
    def step(given):
        return reduced.optimizer._allreduce_grads(given, reduced.variables)

    by_rank = [given_grads(0, rank) for rank in range(SIZE)]
    got = step([tf.constant(g) for g in by_rank[RANK]])
    same_bits(reduced.flattened([g.numpy() for g in got]), reduced.simulate(by_rank))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible with expected shape"):
        step([tf.constant(g.reshape(g.shape[::-1])) for g in by_rank[RANK]])


# Sparse gradients


@check_of_two
def sparse_gradients_are_as_without_compression():
    rng = np.random.default_rng(RANK)
    data = rng.integers(0, 60, (64, 4)), rng.integers(0, 3, 64)
    for sparse_as_dense, op in ((False, hvd.Average), (False, hvd.Sum), (True, hvd.Average)):
        results = {}
        for way in ("plain", "bound"):
            model = embedding_model()
            compression = hvc.Compression.none if way == "plain" else identity()
            optimizer = hvdk.DistributedOptimizer(
                keras.optimizers.SGD(0.1), compression=compression, sparse_as_dense=sparse_as_dense, op=op
            )
            fit(model, optimizer, [CompressionCallback(reset=False)] if way == "bound" else [], data=data)
            results[way] = weights(model)
        same_weights(results["bound"], results["plain"], f"sparse_as_dense={sparse_as_dense}, {op}")
        names = [variable.name for held in compression._held.values() for variable in held.reduction.variables]
        assert any("embedding" in name for name in names) == sparse_as_dense, names


@check_on_two
def unbound_a_sparse_gradient_made_dense_is_refused():
    data = np.zeros((16, 4), np.int64), np.zeros(16, np.int64)
    optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=identity(), sparse_as_dense=True)
    raised_everywhere(lambda: fit(embedding_model(), optimizer, data=data), "attach()", error=ValueError)


# Process sets and one rank


@check_of_three
def process_sets_average_among_themselves():
    for way in ("unbound", "bound"):
        pair = hvd.add_process_set([0, 2])
        compressor = identity(process_set=pair) if way == "unbound" else identity()
        optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compressor, process_set=pair)
        model = dense_model()
        before = weights(model)
        fit(model, optimizer, [CompressionCallback(reset=False)] if way == "bound" else [], epochs=1)
        everywhere = everyone(weights(model))
        same_bits(everywhere[0], everywhere[2], way)
        assert any((a != b).any() for a, b in zip(everywhere[0], everywhere[1])), way
        assert any((a != b).any() for a, b in zip(everywhere[0], before)), way
        assert compressor.stats().steps == (0 if RANK == 1 else 4), way
        hvd.remove_process_set(pair)


@check_of_three
def unbound_a_process_set_that_the_compressor_was_not_given_is_found_out():
    pair = hvd.add_process_set([0, 2])
    assert identity(process_set=pair) is not None
    optimizer = hvc.DistributedOptimizer(
        keras.optimizers.SGD(1.0), identity(process_set=hvd.global_process_set), process_set=pair
    )
    v = variables()
    if RANK != 1:
        with pytest.raises(ValueError, match="another process set"):
            optimizer._allreduce_grads([tf.zeros(shape) for shape in SHAPES], v)
    hvd.remove_process_set(pair)


@check_of_one
def with_one_rank_nothing_is_sent_and_fit_goes_on():
    for text in ("dore", "sketch"):
        model, compressor = dense_model(), hvc.Compression.parse(text)
        history = fit(
            model, hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor), [CompressionCallback()]
        )
        assert history.history["compression_ratio"] == [1.0, 1.0] and compressor.stats().steps == 0
        assert history.history["compression_bytes"] == [0.0, 0.0]


# Transactions


@check_of_two
def a_step_with_a_nan_leaves_no_trace():
    for culprit, value in ((0, np.nan), (1, np.inf), (4, -np.inf), (3, np.nan)):
        pair = [Reduced(hvc.Compression.dore(block=16, bucket_mb=0.008, seed=4)) for _ in range(2)]
        for step in range(5):
            clean = given_grads(step, RANK)
            expected = pair[0](clean)
            if step == 3:
                before, spoilt = memory(pair[1].compressor), given_grads(99, RANK)
                if RANK == SIZE - 1:
                    spoilt[culprit].reshape(-1)[0] = value
                got = pair[1](spoilt)
                assert all(np.isnan(g).all() for g in got), f"tensor {culprit}: {got}"
                same_bits(memory(pair[1].compressor).values(), before.values(), f"tensor {culprit}")
                assert pair[1].compressor.stats().abandoned == 1
            same_bits(pair[1](clean), expected, f"tensor {culprit}, step {step}")


class Failing:
    """A method that fails on the last rank, in a stage of some step."""

    def __init__(self, method, step: int, stage: int, error: Exception):
        self._method, self._where, self._error = method, (step, stage), error
        self.whole_model, self.facts = method.whole_model, method.facts

    def __repr__(self) -> str:
        return "Failing()"

    def __getattr__(self, name):
        return getattr(self._method, name)

    def reduce(self, grad, state, step):
        reduction, reply = self._method.reduce(grad, state, step), None
        for stage in range(9):
            if RANK == SIZE - 1 and self._where == (step.number, stage):
                raise self._error
            try:
                reply = yield reduction.send(reply)
            except StopIteration as stop:
                return stop.value
        raise AssertionError


@check_of_two
def a_failure_on_one_rank_is_raised_on_all_and_leaves_no_trace():
    for exchange, stage in (("allgather", 0), ("sharded", 0), ("sharded", 1)):
        method = Failing(Dore(block=16, exchange=exchange), 2, stage, RuntimeError("on purpose"))
        reduced = Reduced(hvc.Compressor(method, bucket_mb=0.008))
        for step in range(2):
            reduced(given_grads(step, RANK))
        before = memory(reduced.compressor)
        raised_everywhere(lambda: reduced(given_grads(2, RANK)), f"rank {SIZE - 1}: RuntimeError: on purpose")
        same_bits(memory(reduced.compressor).values(), before.values(), exchange)
        method._where = None
        assert all(np.isfinite(g).all() for g in reduced(given_grads(2, RANK)))


@check_on_two
def a_failure_in_a_fit_ends_it_everywhere_and_is_no_end_of_data():
    """What ends an iteration in Python is the end of the data to Keras."""
    for error in (RuntimeError("StopIteration"), StopIteration()):
        compressor = hvc.Compressor(Failing(Dore(block=16, exchange="sharded"), 2, 1, error), dense_below=100)
        optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor)
        raised_everywhere(
            lambda: fit(dense_model(), optimizer), f"rank {SIZE - 1}", "StopIteration", error=tf.errors.UnknownError
        )


@check_on_two
def an_error_before_the_method_is_raised_on_all():
    reduced = Reduced(hvc.Compression.dore(block=16))
    reduced(given_grads(0, RANK))
    if RANK == SIZE - 1:
        reduced.reduction.program._flat[0] = np.zeros(3, np.float32)
    raised_everywhere(lambda: reduced(given_grads(1, RANK)), f"rank {SIZE - 1}: ValueError")


@check_of_two
def ranks_that_differ_hear_in_what_in_the_first_step():
    """Whatever differs, and however differently the ranks trace before it."""
    cases = {
        "method": (lambda: hvc.Compression.dore(block=32 if RANK else 64), "block=64"),
        "seed": (lambda: hvc.Compression.dore(seed=RANK), "seed"),
        "buckets": (lambda: hvc.Compression.dore(bucket_mb=0.008 if RANK else 4), "bucket"),
        "another method": (lambda: hvc.Compression.sketch() if RANK else hvc.Compression.dore(), "method"),
    }
    for name, (make, fragment) in cases.items():
        reduced = Reduced(make())
        raised_everywhere(lambda: reduced(given_grads(0, RANK)), "ranks 0 and 1 differ", fragment)
    shapes = [*SHAPES, (60, 30)] if RANK else SHAPES
    reduced = Reduced(hvc.Compression.dore(), shapes)
    raised_everywhere(lambda: reduced(given_grads(0, RANK, shapes)), "ranks 0 and 1 differ")
    # Sets of equal variables are numbered: let both ranks have had both.
    assert Reduced(hvc.Compression.dore(), SHAPES if RANK else [*SHAPES, (60, 30)]).reduction


@check_on_two
def the_handshake_is_in_the_first_step_that_is_executed():
    """Tracing sends nothing: a rank that traces more, or earlier, does not wait for others."""
    reduced = Reduced(hvc.Compression.dore(block=32, seed=1))
    step = tf.function(lambda given: reduced.optimizer._allreduce_grads(given, reduced.variables))
    if RANK == 0:
        step.get_concrete_function([tf.TensorSpec(shape) for shape in SHAPES])
    assert not any(everyone(reduced.compressor._held and reduced.reduction.session.met))
    session, greetings = reduced.reduction.session, []
    greet = session.handshake
    session.handshake = lambda further: greetings.append(greet(further)) or greetings[-1]
    for number in range(2):
        by_rank = [given_grads(number, rank) for rank in range(SIZE)]
        got = step([tf.constant(g) for g in by_rank[RANK]])
        same_bits(reduced.flattened([g.numpy() for g in got]), reduced.simulate(by_rank))
    assert len(greetings) == 1


@check_on_two
def trainings_in_two_threads_do_not_meet():
    """What is under way at the same time must have names of its own."""
    both = [Reduced(hvc.Compression.dore(block=32, seed=1)) for _ in range(2)]
    for reduced in both:  # which numbers them, alike on all ranks
        reduced(given_grads(0, RANK))

    def train(reduced):
        return [gradient for step in range(20) for gradient in reduced(given_grads(step, RANK))]

    with ThreadPoolExecutor(2) as threads:
        same_bits(*threads.map(train, both))


@check_on_two
def a_step_that_broke_off_is_begun_anew():
    reduced = Reduced(hvc.Compression.dore(block=32, seed=1))
    twin = Reduced(hvc.Compression.dore(block=32, seed=1))
    for step in range(3):
        expected = twin(given_grads(step, RANK))
        if step == 1:  # as if Horovod had raised after the buckets were started
            session = reduced.reduction.session
            session.start(0, np.full(session.layouts[0].size, np.nan, np.float32))
        same_bits(reduced(given_grads(step, RANK)), expected, f"step {step}")


class Scribbling(Dense):
    """A method that writes into what it is sent."""

    def reduce(self, grad, state, step):
        total = yield AllReduce(grad, "sum")
        total[:] = 0
        return Outcome(total, state, 0)


@check_on_two
def tensorflows_memory_cannot_be_written_to():
    reduced = Reduced(hvc.Compressor(Scribbling()))
    raised_everywhere(lambda: reduced(given_grads(0, RANK)), "read-only")


class Rewriting(Dense):
    """A method that writes its mean over that of the step before."""

    def init(self, layout, group):
        room = np.zeros(layout.size + 16, np.float32)
        start = -room.ctypes.data // 4 % 16  # TensorFlow takes over without a copy what lies at a multiple of 64 bytes
        return super().init(layout, group)._replace(arrays={"mean": room[start : start + layout.size]})

    def reduce(self, grad, state, step):
        outcome = yield from super().reduce(grad, state, step)
        state.arrays["mean"][:] = outcome.mean
        return outcome._replace(mean=state.arrays["mean"])


@check_on_two
def the_memory_is_not_what_tensorflow_works_on():
    """A tensor, and even the variable that it is assigned to, would change with the method's array."""
    reduced = Reduced(hvc.Compressor(Rewriting()), [(40, 50)])
    kept = tf.Variable(tf.zeros((40, 50)))

    @tf.function
    def step(given, keep):
        (mean,) = reduced.optimizer._allreduce_grads([given], reduced.variables)
        return kept.assign(mean) if keep else mean

    for number in range(2):
        step(tf.constant(given_grads(number, RANK)[0]), keep=number == 0)
    mean = sum(given_grads(0, rank)[0] for rank in range(SIZE)) / np.float32(SIZE)
    assert_allclose(kept, mean, rtol=1e-5, atol=1e-7)


# Unbound, by the token


@check_of_two
def equal_gradients_are_not_merged():
    """Grappler makes one of operations with equal inputs, not the same one on every rank, and runs those of constants itself."""
    from tensorflow.python.eager import context

    shapes = [(40, 50)] * 6
    for options in ({"groups": 2}, {}):
        compressor = hvc.Compression.dore(block=32, exchange="sharded")
        optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor, **options)
        v = variables(shapes)

        @tf.function
        def step():
            return optimizer._allreduce_grads([tf.ones(shape) for shape in shapes], v)

        context.enable_run_metadata()
        context.context().enable_graph_collection()
        for _ in range(3):
            got = step()
        graphs = [graph for function in context.export_run_metadata().function_graphs for graph in function.partition_graphs]
        context.disable_run_metadata()
        assert compressor.stats().steps == 3
        assert all(np.isfinite(g).all() for g in got)
        left = Counter(node.op for graph in graphs for node in graph.node if node.op.startswith("Horovod"))
        assert left["HorovodAllreduce"] + left["HorovodGroupedAllreduce"] == options.get("groups", len(shapes)), (options, left)


@check_of_two
def tokens_go_through_horovod_one_for_each_gradient():
    """What Horovod is given must depend on the gradients, else it is merged with others or left out."""
    compressor = hvc.Compression.dore(block=32, exchange="allgather")
    v, seen = variables([(40, 50)] * 4), []
    optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor)
    original = adapter.factor_of
    adapter.factor_of = lambda reduced, size: (seen.append(list(reduced)), original(reduced, size))[1]
    try:
        optimizer._allreduce_grads([tf.ones((40, 50))] * 4, v)
    finally:
        adapter.factor_of = original
    mean = sum((rank + 1) ** 2 for rank in range(SIZE)) / SIZE
    assert len(seen) == 4
    assert_allclose(seen, [[1.0, mean]] * 4, rtol=1e-6)


@check_of_two
def an_unknown_operation_is_found_out_by_the_token():
    for op in (hvd.Min, hvd.Max, hvd.Product):
        v = variables([(40, 50), (30, 40)])
        with tf.GradientTape() as tape:
            loss = given_loss(v, given_grads(0, RANK, [(40, 50), (30, 40)]))
        tape = hvd.DistributedGradientTape(tape, compression=identity(), op=op)
        raised_everywhere(lambda: tape.gradient(loss, v), "op=hvd.Average or hvd.Sum", error=tf.errors.UnknownError)


@check_of_two
def whole_models_are_refused_unbound_and_bound_by_the_callback():
    for module in (hvdk, horovod.keras):
        optimizer = module.DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression=hvc.Compression.sketch(ratio=0.3, exact_below=10)
        )
        raised_everywhere(lambda: fit(dense_model(), optimizer), "spans all tensors", "CompressionCallback", error=ValueError)
    model, compressor = dense_model(), hvc.Compression.sketch(ratio=0.3, exact_below=10)
    optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor)
    history = fit(model, optimizer, [CompressionCallback(reset=False)])
    assert compressor.stats().steps == 8 and history.history["compression_residual"][-1] > 0
    for others in everyone(weights(model)):
        same_bits(weights(model), others)
    tape_of = lambda tape: hvd.DistributedGradientTape(tape, compression=hvc.Compression.sketch())  # noqa: E731
    raised_everywhere(lambda: tape_steps(dense_model(), tape_of), "spans all tensors", error=ValueError)


@check_on_two
def unbound_one_compressor_for_two_models_of_other_shapes_is_refused():
    compressor = identity()
    fit(dense_model(), hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor), epochs=1)
    other = hvdk.DistributedOptimizer(keras.optimizers.Adam(0.1), compression=compressor)
    raised_everywhere(lambda: fit(dense_model(hidden=60), other, epochs=1), "a compressor of its own", error=ValueError)


# Mixed precision


@check_of_two
def loss_scaling_is_divided_out():
    """The memory is that of a training without a loss scale, though the scale changes and some steps overflow."""
    results = {}
    for scale in (None, 2.0**10):
        reduced = Reduced(hvc.Compression.dore(block=16, seed=1))
        inner = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), reduced.compressor)
        optimizer = inner
        if scale:
            optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=2)
        v = reduced.variables
        optimizer.build(v)

        @tf.function
        def train(grads):
            with tf.GradientTape() as tape:
                loss = given_loss(v, grads)
            optimizer.minimize(loss, v, tape)

        scales = []
        for step in range(6):
            grads = [tf.constant(g) for g in given_grads(step, RANK)]
            if scale and step == 3:  # an overflow on one rank: nothing moves, and the scale is halved
                spoilt = [g * np.float32("inf") if RANK == 0 and i == 3 else g for i, g in enumerate(grads)]
                before = [memory(reduced.compressor), [w.numpy() for w in v]]
                train(spoilt)
                same_bits(memory(reduced.compressor).values(), before[0].values())
                same_bits([w.numpy() for w in v], before[1])
            scales.append(float(optimizer.loss_scale) if scale else 1.0)
            train(grads)
        if scale:
            assert len(set(scales)) > 1, scales
            assert reduced.compressor.stats().abandoned == 1
        results[scale] = ([w.numpy() for w in v], memory(reduced.compressor))
    for name, array in results[None][1].items():
        same_bits([results[2.0**10][1][name]], [array], name)
    same_weights(results[2.0**10][0], results[None][0], "weights")


@check_on_two
def mixed_precision_models_train_bound_and_are_refused_unbound():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        results = {}
        for way in ("plain", "bound by the callback", "bound when made"):
            model, compression = dense_model(), hvc.Compression.none if way == "plain" else identity()
            make = hvc.DistributedOptimizer if way == "bound when made" else hvdk.DistributedOptimizer
            optimizer = make(keras.optimizers.SGD(0.1), compression=compression)
            fit(model, optimizer, [CompressionCallback(reset=False)] if way == "bound by the callback" else [], epochs=3)
            results[way] = weights(model)
            assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
            same_weights(results[way], results["plain"], way, rtol=1e-3, atol=1e-4)
            stats = compression.stats() if way != "plain" else None
            assert way == "plain" or (stats.steps + stats.abandoned == 12 and stats.steps > 4), stats
        optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=identity())
        raised_everywhere(lambda: fit(dense_model(), optimizer), "loss scale", "CompressionCallback", error=ValueError)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@check_on_two
def a_tape_is_told_of_the_loss_scale():
    pair = [Reduced(hvc.Compression.dore(block=16, seed=1)) for _ in range(2)]
    loss_scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=256)
    for step in range(3):
        expected = pair[0](given_grads(step, RANK))
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v * g) for v, g in zip(pair[1].variables, [tf.constant(g) for g in given_grads(step, RANK)]))
            loss = loss_scaled.get_scaled_loss(loss)
        tape = hvc.DistributedGradientTape(tape, pair[1].compressor, optimizer=loss_scaled)
        grads = loss_scaled.get_unscaled_gradients(tape.gradient(loss, pair[1].variables))
        same_bits([g.numpy() for g in grads], expected, f"step {step}")


@check_on_two
def loss_scales_that_differ_between_ranks_are_an_error_on_every_rank():
    model = dense_model()
    optimizer = keras.mixed_precision.LossScaleOptimizer(
        hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), hvc.Compression.dore(block=16)), initial_scale=2.0 ** (8 + RANK)
    )
    raised_everywhere(lambda: fit(model, optimizer), "no longer agree", "loss scale", error=tf.errors.UnknownError)


@check_on_two
def dtypes_are_kept():
    for dtype, tolerance in ((tf.float16, 2e-3), (tf.bfloat16, 1.6e-2), (tf.float64, 1e-6)):
        shapes = [(40, 50), (9,), (), (0, 4), (30, 40)]
        v = variables(shapes, dtype)
        by_rank = [[tf.cast(g, dtype) for g in given_grads(1, rank, shapes)] for rank in range(SIZE)]
        for module, compression in ((hvc, hvc.Compression.dense()), (hvc, identity()), (hvdk, identity())):
            optimizer = module.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
            got = optimizer._allreduce_grads(by_rank[RANK], v)
            for number, (g, variable) in enumerate(zip(got, v)):
                assert g.dtype == dtype and g.shape == variable.shape, (g.dtype, g.shape)
                mean = sum(tf.cast(grads[number], tf.float64).numpy() for grads in by_rank) / SIZE
                within = 1e-14 if dtype == tf.float64 and len(variable.shape) < 2 else tolerance  # dense ones keep all bits
                assert_allclose(tf.cast(g, tf.float64), mean, rtol=within, atol=within, err_msg=str(dtype))


# What is refused when the optimizer is made


@check
def unsupported_combinations_are_refused_when_the_optimizer_is_made():
    dore = hvc.Compression.dore
    loss_scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="LossScaleOptimizer\\(DistributedOptimizer"):
        hvc.DistributedOptimizer(loss_scaled, dore())
    for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(ValueError, match="not Adasum, Min, Max or Product"):
            hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), dore(), op=op)
        with pytest.raises(ValueError, match="not Adasum, Min, Max or Product"):
            hvc.DistributedGradientTape(tf.GradientTape(), dore(), op=op)
    with pytest.raises(ValueError, match="TensorFlow 1"):
        hvc.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), dore())
    with pytest.raises(ValueError, match="wrap it in hvd"):
        hvc.attach(keras.optimizers.SGD(0.1), dore())
    for momentum in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.legacy.SGD(0.1, momentum=0.9)):
        with pytest.raises(CompressionError, match=r"momentum of 0\.9"):
            hvc.DistributedOptimizer(momentum, hvc.Compression.sketch())
    with pytest.raises(CompressionError, match=r"momentum of 0\.9"):
        hvc.DistributedOptimizer(keras.optimizers.Adam(0.1), hvc.Compression.sketch())
    hvc.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), hvc.Compression.sketch(momentum=0))
    optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), hvc.Compression.none)
    assert bound_to(optimizer) is None
    with pytest.raises(ValueError, match="has no compressor"):
        fit(dense_model(), optimizer, [CompressionCallback()])
    with pytest.raises(ValueError, match="not of Horovod"):
        fit(dense_model(), keras.optimizers.SGD(0.1), [CompressionCallback(dore())])


@check_on_two
def xla_is_refused_and_an_optimizers_own_is_no_matter():
    def optimizer(**options):
        return hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1, **options), compression=identity())

    callbacks = [CompressionCallback(reset=False)]
    raised_everywhere(lambda: fit(dense_model(), optimizer(), callbacks, jit_compile=True), "jit_compile", error=ValueError)
    raised_everywhere(lambda: fit(dense_model(), optimizer(), jit_compile=True), "jit_compile", error=ValueError)
    bound = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), identity())
    raised_everywhere(lambda: fit(dense_model(), bound, jit_compile=True), "jit_compile", error=ValueError)
    fit(dense_model(), optimizer(jit_compile=True), callbacks, jit_compile=False)
    model = dense_model()
    model.compile(optimizer(), LOSS, jit_compile=True)
    tf.function(model.train_step)(images())  # a loop of one's own, without XLA whatever the model was told


@check_on_two
def graphs_of_tensorflow_1_are_refused():
    reduced = Reduced(identity())
    with tf.Graph().as_default(), pytest.raises(ValueError, match="not a graph of TensorFlow 1"):
        reduced.optimizer._allreduce_grads([tf.zeros(shape) for shape in SHAPES], reduced.variables)


@check_on_two
def without_graphs_bound_works_and_unbound_is_refused():
    plain = dense_model()
    fit(plain, hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1)), epochs=1)
    tf.config.run_functions_eagerly(True)
    try:
        for compressor in (identity(), hvc.Compression.gather(dense_below=100, exchange="sharded")):
            model = dense_model()
            fit(model, hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor), epochs=1)
            same_weights(weights(model), weights(plain), "eager")
        optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=identity())
        raised_everywhere(lambda: fit(dense_model(), optimizer, epochs=1), "without a graph", error=ValueError)
    finally:
        tf.config.run_functions_eagerly(False)


@check_on_two
def autograph_leaves_our_text_alone():
    """It would make a text of its own of it, and other errors of its errors."""
    from tensorflow.python.autograph.core.ag_ctx import Status, control_status_ctx

    seen, build = [], Reduction.build

    def watched(reduction, *args):
        seen.append(control_status_ctx().status)
        return build(reduction, *args)

    Reduction.build = watched
    try:
        for callbacks in ([], [CompressionCallback()]):
            fit(dense_model(), hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=identity()), callbacks, epochs=1)
    finally:
        Reduction.build = build
    assert len(seen) > 4 and set(seen) == {Status.DISABLED}, seen


@check
def rescale_goes_by_the_learning_rate():
    method = {"exchange": "allgather", "block": 16, "rescale": True}
    for base in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        rates = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [1.0, 0.5, 0.125])
        reduced = Reduced(hvc.Compression.double_squeeze(seed=1, **method))
        optimizer = hvc.DistributedOptimizer(base(rates), reduced.compressor)
        reduction = reduced.reduction
        for step, lr in enumerate((1.0, 1.0, 0.5, 0.125)):
            by_rank = [given_grads(step, rank) for rank in range(SIZE)]
            got = [t.numpy() for t in reduction([tf.constant(g) for g in by_rank[RANK]], Treatment(1.0, optimizer))[0]]
            reduced.simulation = reduced.simulation or Simulation(
                reduced.compressor.method, reduction.session.layouts, SIZE, seed=1
            )
            flat = [reduced.flattened(grads) for grads in by_rank]
            same_bits(reduced.flattened(got), reduced.simulation.step(flat, lr), f"{base.__name__}, step {step}")
            optimizer.iterations.assign_add(1)
    unknown = Reduced(hvc.Compression.double_squeeze(**method))
    with pytest.raises(ValueError, match="give the tape the optimizer"):
        unknown.reduction([tf.zeros(shape) for shape in SHAPES], Treatment())
    unbound = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvc.Compression.double_squeeze(**method))
    raised_everywhere(lambda: fit(dense_model(), unbound), "which Horovod does not tell", error=ValueError)


# Keras


@check_on_two
def figures_are_seen_by_whoever_reads_logs():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as directory:
        table, board = Path(directory) / "log.csv", Path(directory) / "board"
        compressor = hvc.Compression.dore(block=16, dense_below=100)
        history = fit(
            dense_model(),
            hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor),
            [
                hvdk.callbacks.BroadcastGlobalVariablesCallback(0),
                hvdk.callbacks.MetricAverageCallback(),
                CompressionCallback(),
                keras.callbacks.CSVLogger(str(table)),
                keras.callbacks.TensorBoard(str(board)),
            ],
            epochs=3,
        )
        names = ("compression_ratio", "compression_bytes", "compression_residual")
        events = EventAccumulator(str(board / "train"))
        events.Reload()
        rows = list(csv.DictReader(table.open()))
        for name in names:
            expected = history.history[name]
            assert len(expected) == 3 and all(value > 0 for value in expected), (name, expected)
            assert_allclose([float(row[name]) for row in rows], expected, rtol=1e-6)
            assert_allclose(
                [float(tf.make_ndarray(e.tensor_proto)) for e in events.Tensors(f"epoch_{name}")], expected, rtol=1e-6
            )
        stats = compressor.stats()
        assert_allclose(history.history["compression_bytes"][-1], stats.last.wire, rtol=0.2)
        assert history.history["compression_ratio"][-1] < 0.5
        assert_allclose(history.history["compression_residual"][-1], compressor.residual_norm())


@check_on_two
def the_callback_binds_what_was_traced_unbound_before():
    model, compressor = dense_model(), identity()
    fit(model, hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor), epochs=1)
    assert not compressor._held and compressor._places
    x, y = images()
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[CompressionCallback()])
    (held,) = compressor._held.values()
    assert held.reduction.session.committed == 4


@check_on_two
def the_first_batch_leaves_no_memory_where_weights_are_broadcast():
    """After it Horovod gives all ranks the same weights: what was kept belongs to others."""
    for reset in (True, False):
        compressor = hvc.Compression.sketch(ratio=0.3, exact_below=10, momentum=0)
        optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor)
        kept = []
        spy = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: kept.append(compressor.residual_norm()))
        callbacks = [hvdk.callbacks.BroadcastGlobalVariablesCallback(0), CompressionCallback(reset=reset), spy]
        model = dense_model(seed=RANK)
        fit(model, optimizer, callbacks)
        assert (kept[0] == 0) == reset and all(k > 0 for k in kept[1:]), kept
        for others in everyone(weights(model)):
            same_bits(weights(model), others)
        x, y = images()
        model.fit(x, y, batch_size=16, verbose=0, callbacks=callbacks[1:])  # another fit goes on with the memory
        assert kept[8] > 0, kept


@check_on_two
def a_rank_that_resets_alone_is_found_out():
    """Even if the other has begun a step anew in the meantime, as a reset does."""
    for other in (lambda session: None, lambda session: session.restart()):
        reduced = Reduced(hvc.Compression.dore(block=16))
        reduced(given_grads(0, RANK))
        if RANK == 1:
            reduced.compressor.reset()
        else:
            other(reduced.reduction.session)
        raised_everywhere(lambda: reduced(given_grads(1, RANK)), "ranks 0 and 1 no longer agree", "memory emptied")


@check_on_two
def a_schedule_changes_options_without_tracing():
    for text, option, values in (
        ("sketch:exact_below=10,momentum=0", "ratio", {0: 0.4, 2: 0.1}),
        ("atomo:exchange=allgather,dense_below=100", "budget", {0: 4, 2: 1}),
        ("topk:exchange=allgather,dense_below=100", "ratio", {0: 0.3, 2: 0.02}),
    ):
        compressor = hvc.Compression.parse(text)
        optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor)
        with Traces() as traces:
            schedule = CompressionSchedule(**{option: values})
            callbacks = [CompressionCallback(reset=False), schedule]
            model = dense_model()
            history = fit(model, optimizer, callbacks, epochs=4)
            at_start = traces.count
        sent = history.history["compression_bytes"]
        assert_allclose(sent[1], sent[0], rtol=0.2, err_msg=text)
        assert sent[2] < 0.7 * sent[1] and at_start <= 2, (text, sent, at_start)
    with pytest.raises(ValueError, match="no option 'ratios'"):
        fit(dense_model(), optimizer, [CompressionCallback(), CompressionSchedule(ratios={0: 1})])
    with pytest.raises(ValueError, match="no value for epoch 0"):
        CompressionSchedule(ratio={1: 0.1})
    reduced = Reduced(hvc.Compression.dore(block=16, exchange="allgather"))
    reduced(given_grads(0, RANK))
    with pytest.raises(ValueError, match="cannot become"):
        reduced.compressor.change(exchange="sharded")
    # A step that is given up goes through collectives of the lengths that the options have by now, whenever it was traced.
    reduced = Reduced(hvc.Compression.sketch(ratio=0.3, exact_below=10, momentum=0))
    reduced(given_grads(0, RANK))
    reduced.compressor.change(ratio=0.1)
    if RANK == 1:
        reduced.reduction._functions.clear()
    assert all(np.isnan(g).all() for g in reduced([g * np.float32("nan") for g in given_grads(1, RANK)]))
    reduced = Reduced(hvc.Compression.topk(ratio=0.1, exchange="allgather"))
    reduced(given_grads(0, RANK))
    reduced.compressor.change(ratio=0.2 if RANK else 0.3)
    raised_everywhere(lambda: reduced(given_grads(1, RANK)), "no longer agree: on the options")


@check_on_two
def a_training_goes_on_from_its_checkpoint_bit_for_bit():
    """One file a rank; the schedule goes on where it was."""
    with tempfile.TemporaryDirectory() as directory:

        def train(model, epochs: int, initial_epoch: int = 0, checkpoint: bool = True) -> Compressor:
            compressor = hvc.Compression.topk(ratio=0.5, exchange="allgather", dense_below=100, seed=3)
            model.compile(hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor), LOSS)
            callbacks = [CompressionCallback(reset=False), CompressionSchedule(ratio={0: 0.5, 2: 0.1})]
            if checkpoint:
                callbacks.append(CompressionCheckpoint(directory))
            x, y = images()
            model.fit(
                x, y, batch_size=16, epochs=epochs, initial_epoch=initial_epoch, verbose=0, shuffle=False, callbacks=callbacks
            )
            return compressor

        whole, halves = dense_model(), dense_model()
        expected = train(whole, 4, checkpoint=False)
        train(halves, 2)
        got = train(halves, 4, initial_epoch=2)
        same_bits(weights(halves), weights(whole))
        same_bits(memory(got).values(), memory(expected).values())
        assert got.stats().steps == 16
        raised_everywhere(lambda: train(dense_model(), 4, initial_epoch=1), "initial_epoch=4", error=tf.errors.UnknownError)
        if RANK == 1:
            (Path(directory) / "compression-1.npz").write_bytes(b"no zip")
        raised_everywhere(
            lambda: train(dense_model(), 5, initial_epoch=4), "rank 1", "no memory of a compressor", error=tf.errors.UnknownError
        )


@check_on_two
def a_memory_that_is_taken_up_is_not_emptied():
    """The callbacks as the README has them: the first batch's memory is given up when a training begins, not when it goes on."""
    with tempfile.TemporaryDirectory() as directory:
        model, kept = dense_model(), []
        for first in (0, 1):
            compressor = hvc.Compression.topk(ratio=0.05, exchange="allgather", dense_below=100)
            model.compile(hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor), LOSS)
            spy = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: kept.append(compressor.residual_norm()))
            callbacks = [CompressionCallback(), CompressionCheckpoint(directory), spy]
            x, y = images()
            history = model.fit(
                x, y, batch_size=16, epochs=first + 1, initial_epoch=first, verbose=0, callbacks=callbacks
            ).history
            assert_allclose(history["compression_bytes"], compressor.stats().total.wire / 4)  # steps of this training
        assert kept[0] == 0 and all(k > 0 for k in kept[1:]), kept


@check_on_two
def memories_are_found_by_what_they_are_of():
    """Of two sets of variables the second alone is trained when training goes on; the memory of the first waits."""
    both = Reduced(hvc.Compression.dore(block=16, seed=1))
    other = Reduced(both.compressor, [(40, 60)], "w")
    both(given_grads(0, RANK))
    other(given_grads(0, RANK, [(40, 60)]))
    saved = both.compressor.state_dict()
    expected = other(given_grads(1, RANK, [(40, 60)]))
    later = Reduced(hvc.Compression.dore(block=16, seed=1), [(40, 60)], "w")
    later.compressor.load_state_dict(saved)
    same_bits(later(given_grads(1, RANK, [(40, 60)])), expected)
    assert len(later.compressor.state_dict()["sets"]) == 2
    wrong = Reduced(hvc.Compression.dore(block=16, seed=1), [(40, 70)], "w")
    wrong.compressor.load_state_dict(saved)
    raised_everywhere(lambda: wrong(given_grads(1, RANK, [(40, 70)])), "another training", "w0")


@check_on_two
def what_is_bound_stays_bound():
    for way in ("attached", "by another callback"):
        given, bound = identity(), identity()
        optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=given)
        model = dense_model()
        if way == "attached":
            hvc.attach(optimizer, bound)
        else:
            fit(model, optimizer, [CompressionCallback(bound)], epochs=1)
        fit(model, optimizer, [CompressionCallback()], epochs=1)
        assert given.stats().steps == 0 and bound.stats().steps == (4 if way == "attached" else 8), way


@check_on_two
def one_callback_serves_two_models():
    callback = CompressionCallback()
    for compressor in (hvc.Compression.topk(dense_below=100, exchange="allgather"), hvc.Compression.dore(dense_below=100)):
        fit(dense_model(), hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor), [callback], epochs=1)
        assert compressor.stats().steps == 4, compressor.method


@check_on_two
def an_overflow_in_a_sparse_gradient_leaves_no_trace():
    v, table = tf.Variable(tf.zeros((40, 50))), tf.Variable(tf.zeros((9, 2)))
    compressor = hvc.Compression.topk(ratio=0.05, exchange="allgather")

    def gradients(scale):
        with tf.GradientTape() as tape:
            loss = given_loss([v], given_grads(0, RANK, [(40, 50)])) + scale * tf.reduce_sum(tf.gather(table, [1, 2 + RANK]))
        return hvc.DistributedGradientTape(tape, compressor).gradient(loss, [v, table])

    dense, sparse = gradients(1.0)
    assert_allclose(tf.convert_to_tensor(sparse).numpy()[:4, 0], [0, 1, 1 / SIZE, 1 / SIZE])
    before = memory(compressor)
    dense, sparse = gradients(np.float32("inf") if RANK == 0 else 1.0)
    assert np.isnan(dense).all() and np.isnan(sparse.values).all()
    same_bits(memory(compressor).values(), before.values())
    assert compressor.stats().abandoned == 1


@check_on_two
def ranks_may_trace_two_models_in_any_order():
    compressor = hvc.Compression.dore(block=16)
    sets = [Reduced(compressor, shapes) for shapes in (SHAPES, [(50, 60)])]
    steps = [tf.function(lambda given, one=one: one.optimizer._allreduce_grads(given, one.variables)) for one in sets]
    if RANK == 0:
        steps[1].get_concrete_function([tf.TensorSpec((50, 60))])
    for step, one in zip(steps, sets):
        got = step([tf.constant(g) for g in given_grads(0, RANK, one.shapes)])
        assert all(np.isfinite(g).all() for g in got)


@check_on_two
def a_train_step_that_averages_nothing_is_told_of():
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = LOSS(y, self(x))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
            return {"loss": loss}

    model = Own([keras.Input((40,)), keras.layers.Dense(3)])
    optimizer = hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=identity())
    with pytest.warns(RuntimeWarning, match="no gradient was averaged"):
        fit(model, optimizer, [CompressionCallback()], epochs=1)


@check_on_two
def callbacks_go_with_a_tape_in_a_train_step():
    compressor = hvc.Compression.topk(ratio=0.3, exchange="allgather", dense_below=100)

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = LOSS(y, self(x))
            tape = hvc.DistributedGradientTape(tape, compressor)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
            return {"loss": loss}

    model = Own([keras.Input((40,)), keras.layers.Dense(50), keras.layers.Dense(3)])
    with tempfile.TemporaryDirectory() as directory:
        callbacks = [
            CompressionCallback(compressor, bind=False),
            CompressionSchedule(compressor, ratio={0: 0.3, 1: 0.02}),
            CompressionCheckpoint(directory, compression=compressor),
        ]
        history = fit(model, keras.optimizers.SGD(0.1), callbacks)
        assert (Path(directory) / f"compression-{RANK}.npz").exists()
    first, second = history.history["compression_bytes"]
    assert 0 < second < first / 2 and compressor.stats().steps == 8


@check_on_two
def figures_are_right_with_several_sets():
    """Those of an epoch are of what was trained in it, and do not fall when the variables of an earlier one are gone."""
    compressor = hvc.Compression.dore(block=16, dense_below=100)
    seen = []
    for hidden in (50, 60, 70):
        history = fit(
            dense_model(hidden),
            hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor),
            [CompressionCallback()],
        )
        stats = compressor.stats()
        seen.append((stats.steps, stats.total.wire))
        assert_allclose(history.history["compression_bytes"][-1], stats.last.wire, rtol=0.2)
        assert stats.metrics["uplink_noise"] > 0
    assert [steps for steps, _ in seen] == [8, 16, 24] and seen[0][1] < seen[1][1] < seen[2][1], seen


@check_on_two
def what_is_no_compression_is_refused():
    for wrong in (hvc.Compression.dore, "dore", hvc.Compressor):
        with pytest.raises(ValueError, match="is no compression"):
            hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), wrong)
        with pytest.raises(ValueError, match="is no compression"):
            hvc.DistributedGradientTape(tf.GradientTape(), wrong)
    source = tf.ones((40, 50))
    with tf.GradientTape() as tape:
        tape.watch(source)
        loss = tf.reduce_sum(source)
    with pytest.raises(ValueError, match="by variables, not by tensors"):
        hvc.DistributedGradientTape(tape, identity()).gradient(loss, [source])


@check_on_two
def a_saved_memory_of_another_rank_is_refused_in_the_first_step():
    reduced = Reduced(hvc.Compression.dore(block=16))
    reduced(given_grads(0, RANK))
    every = everyone(reduced.compressor.state_dict())
    other = Reduced(hvc.Compression.dore(block=16))
    other.compressor.load_state_dict(every[(RANK + 1) % SIZE] if RANK == 0 else every[RANK])
    raised_everywhere(lambda: other(given_grads(1, RANK)), "each rank loads its own")


@check_on_two
def models_are_loaded_with_horovods_load_model():
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.h5"
        model = dense_model()
        fit(
            model,
            hvdk.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=identity()),
            [CompressionCallback()],
            epochs=1,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save(path)
        compressor = identity()
        loaded = hvdk.load_model(str(path), compression=compressor)
        same_bits(weights(loaded), weights(model))
        x, y = images()
        loaded.fit(x, y, batch_size=16, verbose=0, callbacks=[CompressionCallback()])
        assert compressor.stats().steps == 4 and bound_to(loaded.optimizer) is compressor
        assert int(loaded.optimizer.iterations) == 8


@check_on_two
def traces_are_constant_after_the_first_batch_sizes():
    model, compressor = dense_model(), hvc.Compression.dore(block=16, dense_below=100)
    optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor)
    with Traces() as traces:
        fit(model, optimizer, data=images(samples=60), epochs=2)  # the last batch has 12
        before = traces.count
        x, y = images(samples=60)
        model.fit(x, y, batch_size=16, epochs=3, verbose=0)
        assert traces.count == before <= 2, (traces.count, before)


@check_on_two
def local_layers_are_left_to_their_rank():
    model, compressor = dense_model(), identity()
    optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor)
    for variable in model.layers[1].trainable_variables:
        optimizer.register_local_var(variable)
    fit(model, optimizer, epochs=1)
    names = [variable.name for held in compressor._held.values() for variable in held.reduction.variables]
    assert names == ["a/kernel", "a/bias", "c/kernel", "c/bias"], names
    kernels = everyone(model.layers[1].kernel.numpy())
    assert (kernels[0] != kernels[1]).any()


@check_on_two
def what_is_named_goes_out_under_that_name():
    """Horovod takes names for equal across ranks: they may hold no scope, which differs from trace to trace."""
    reduced = Reduced(hvc.Compression.dore(block=32, exchange="sharded", bucket_mb=0.008))
    step = tf.function(lambda given: reduced.optimizer._allreduce_grads(given, reduced.variables))
    graph = step.get_concrete_function([tf.TensorSpec(shape) for shape in SHAPES]).graph
    operations = [op for op in graph.get_operations() if op.type.startswith("Horovod")]
    assert all(op.get_attr("ignore_name_scope") for op in operations)
    names = [op.name for op in operations]
    assert len(set(names)) == 6 and all(name.startswith("hvdcompress_0_") for name in names), names
    assert_array_equal(*(everyone(names)[i] for i in (0, 1)))


@check_on_two
def eager_steps_are_traced_once_whatever_the_optimizer():
    """One that is made anew in every epoch would be kept, with its trace, as long as the compressor."""
    reduced = Reduced(hvc.Compression.dore(block=32))
    with Traces() as traces:
        for step in range(4):
            reduced.optimizer = hvc.DistributedOptimizer(keras.optimizers.SGD(0.1), reduced.compressor)
            reduced(given_grads(step, RANK))
    assert traces.count == len(reduced.reduction._functions) == 1, traces.count


@check_on_two
def no_gather_has_the_shape_that_it_had_the_last_time():
    """Horovod would make it from memory, with a rank that has called `hvd.join()` as well, and never end."""
    seen = defaultdict(list)

    def watched(operation):
        def call(tensor, *args, name, **options):
            looked = tf.numpy_function(lambda array: seen[name].append(array.shape) or array, [tensor], tensor.dtype)
            return operation(looked, *args, name=name, **options)

        return call

    gather, exchange = hvd.allgather, hvd.alltoall
    hvd.allgather, hvd.alltoall = watched(gather), watched(exchange)
    try:
        for width in (50, 60):
            v, table = tf.Variable(tf.zeros((40, width))), tf.Variable(tf.zeros((9, 2)))
            compressor = hvc.Compression.dore(exchange="sharded")
            for _ in range(4):
                with tf.GradientTape() as tape:
                    loss = given_loss([v], [np.ones((40, width), np.float32)]) + tf.reduce_sum(tf.gather(table, [1, 2]))
                hvc.DistributedGradientTape(tape, compressor).gradient(loss, [v, table])
    finally:
        hvd.allgather, hvd.alltoall = gather, exchange
    assert sorted(map(len, seen.values())) == [2, *[4] * 10], seen  # the handshakes of both; a step has five
    for name, shapes in seen.items():
        assert all(a != b for a, b in zip(shapes, shapes[1:])), f"{name}: {shapes}"


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()
    main(RANK, SIZE)
