"""What must hold of the PyTorch adapter under real Horovod, on any number of ranks."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import random
import warnings

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from conforming import METHODS
from mpi4py import MPI
from numpy.testing import assert_allclose

import hvdcompress.torch as hvc
from hvdcompress import CompressionError, Dore, Group, methods
from hvdcompress.core import AllGather, AllReduce
from hvdcompress.drivers.mpi import DistributedMean
from hvdcompress.drivers.simulate import Simulation
from ranks.harness import check, check_of_three, check_of_two, everyone, main, raised_everywhere, same_bits

RANK, SIZE = 0, 1  # set when Horovod is


class Given(torch.nn.Module):
    """Parameters whose gradients are whatever the test says."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes)

    def loss(self, grads: list[torch.Tensor], order: list[int] | None = None) -> torch.Tensor:
        order = list(range(len(grads))) if order is None else order
        return sum((self.weights[i] * grads[i]).sum() for i in order)


SHAPES = [(40, 50), (7,), (3, 5, 7, 11), (30, 40), ()]  # with dense_below=1000 the first, third and fourth are compressed


def given_grads(step: int, rank: int, shapes=SHAPES, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def wrap(model: Given, compression, **options) -> torch.optim.Optimizer:
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), compression=compression, **options)


def reduce(model: Given, optimizer, grads: list[torch.Tensor], order: list[int] | None = None) -> list[torch.Tensor]:
    """One step, in the way that Horovod goes: backward with hooks, synchronize, step. Returns the averaged gradients."""
    optimizer.zero_grad()
    model.loss(grads, order).backward()
    optimizer.synchronize()
    averaged = [p.grad.clone() for p in model.weights]
    with optimizer.skip_synchronize():
        optimizer.step()
    return averaged


def reduce_alone(model: Given, compressor, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same without Horovod's optimizer, which does nothing where there is one rank."""
    for p, g in zip(model.weights, grads):
        p.grad = g.clone()
    taken = [compressor.compress(p.grad) for p in reversed(model.weights)]
    reduced = [(hvd.allreduce(token, name=f"alone.{i}"), context) for i, (token, context) in enumerate(taken)]
    return [compressor.decompress(token, context) for token, context in reversed(reduced)]


def reduce_anyhow(model: Given, optimizer, compressor, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    return reduce(model, optimizer, grads) if SIZE > 1 else reduce_alone(model, compressor, grads)


def forget(optimizer) -> None:
    """Horovod's optimizer as it is before a step, after one that ended with an error."""
    optimizer.load_state_dict(optimizer.state_dict())


def memory(compressor) -> dict[str, np.ndarray]:
    return {name: array.numpy().copy() for name, array in compressor.state_dict()["arrays"].items()}


def flattened(layouts, grads: list[torch.Tensor]) -> list[np.ndarray]:
    """A rank's gradients as its buckets hold them."""
    return [np.concatenate([grads[_number(name)].numpy().ravel() for name in layout.names]) for layout in layouts]


def _number(name: str) -> int:
    return int(name.split(".")[1])


@check
def simulated_mpi_and_horovod_give_the_same_bits():
    for exchange, scales, bucket_mb in itertools.product(("allgather", "sharded"), ("float32", "byte"), (0.008, 4)):
        method, model = Dore(block=32, scales=scales, exchange=exchange), Given(*SHAPES)
        compressor = hvc.Compressor(model, method, bucket_mb=bucket_mb, seed=5)
        optimizer, layouts = wrap(model, compressor), compressor.binding.layouts
        assert len(layouts) == (1 if bucket_mb == 4 else 2), layouts
        simulation, mpi_mean = Simulation(method, layouts, SIZE, seed=5), DistributedMean(method, MPI.COMM_WORLD, seed=5)
        for step in range(9):
            by_rank = [given_grads(step, rank) for rank in range(SIZE)]
            if step == 3:
                by_rank[-1][0][1, 2] = float("nan")
            flat = [flattened(layouts, grads) for grads in by_rank]
            expected = simulation.step(flat)
            got = reduce_anyhow(model, optimizer, compressor, by_rank[RANK])
            where = f"{method}, {len(layouts)} buckets, {SIZE} ranks, step {step}"
            through_mpi = mpi_mean(flat[RANK]) if len(layouts) == 1 else None  # mpi4py's driver has one bucket
            if step == 3:
                assert expected is None, where
                assert all(torch.isnan(g).all() for g in got), where
                assert through_mpi is None or np.isnan(through_mpi[0]).all(), where
                continue
            same_bits(flattened(layouts, got), expected, where)
            same_bits(through_mpi or (), expected, f"mpi4py, {where}")
            for small in (1, 4):
                mean = sum(g[small].double() for g in by_rank) / SIZE
                assert_allclose(got[small], mean, rtol=1e-5, atol=1e-7, err_msg=where)


@check
def every_method_is_the_same_simulated_over_mpi_and_under_horovod():
    """Where floats are summed the gradients are whole numbers: the order in which a network adds then does not show."""
    for text in sorted(METHODS):
        model = Given(*SHAPES)
        compressor = hvc.Compression.parse(text, model, seed=5)
        optimizer, layouts, method = wrap(model, compressor), compressor.binding.layouts, compressor.method
        assert len(layouts) == 1, text
        summed = any(stage.kind is AllReduce for stage in method.stages(layouts[0], Group(RANK, SIZE)))
        # mpi4py's driver names tensors by number, and the draws go by places: the same tensors in the same order.
        simulation, mpi_mean = Simulation(method, layouts, SIZE, seed=5), DistributedMean(method, MPI.COMM_WORLD, seed=5)
        for step in range(6):
            by_rank = [[torch.round(16 * g) if summed else g for g in given_grads(step, rank)] for rank in range(SIZE)]
            if step == 3:
                by_rank[-1][0][1, 2] = float("nan")
            flat = [flattened(layouts, grads) for grads in by_rank]
            expected = simulation.step(flat)
            got = reduce_anyhow(model, optimizer, compressor, by_rank[RANK])
            through_mpi = mpi_mean([by_rank[RANK][_number(name)].numpy() for name in layouts[0].names])
            where = f"{text}, {SIZE} ranks, step {step}"
            if step == 3:
                assert expected is None, where
                assert all(torch.isnan(g).all() for g in got), where
                assert all(np.isnan(m).all() for m in through_mpi), where
                continue
            same_bits(flattened(layouts, got), expected, where)
            same_bits([np.concatenate([m.ravel() for m in through_mpi])], expected, f"mpi4py, {where}")
            assert np.count_nonzero(expected[0]) > 0, where


@check_of_two
def sketches_of_real_gradients_end_with_the_same_weights_on_all_ranks():
    model = Given(*SHAPES)
    compressor = hvc.Compression.sketch(model, ratio=0.2)
    optimizer = wrap(model, compressor)
    for step in range(20):
        reduce(model, optimizer, given_grads(step, RANK))
    weights = torch.cat([p.detach().reshape(-1) for p in model.weights]).numpy()
    for others in everyone(weights):
        same_bits([weights], [others])
    assert_allclose(compressor.predicted_bytes(), compressor.stats().last.wire, rtol=1e-9)


@check_of_two
def two_momenta_are_refused_on_every_rank():
    for base in (torch.optim.SGD, torch.optim.Adam):
        model = Given(*SHAPES)
        options = {"momentum": 0.9} if base is torch.optim.SGD else {}
        compressor = hvc.Compression.sketch(model)
        optimizer = hvd.DistributedOptimizer(
            base(model.parameters(), lr=0.1, **options), named_parameters=model.named_parameters(), compression=compressor
        )
        raised_everywhere(lambda: reduce(model, optimizer, given_grads(0, RANK)), "momentum of 0.9", "momentum=0")
    model = Given(*SHAPES)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvc.Compression.sketch(model, momentum=0.0),
    )
    reduce(model, optimizer, given_grads(0, RANK))


@check_of_two
def ranks_that_choose_other_candidates_are_found_out():
    model = Given(*SHAPES)
    compressor = hvc.Compression.sketch(model, ratio=0.2)
    optimizer = wrap(model, compressor)
    reduce(model, optimizer, given_grads(0, RANK))
    original, before = compressor._transport.wait, memory(compressor)

    def wait(handle):
        reply = original(handle)
        if RANK == 0 and handle.request.__class__.__name__ == "AllReduce" and reply.size > 500:
            compressor._transport.wait = original
            reply = reply[::-1].copy()
        return reply

    compressor._transport.wait = wait
    raised_everywhere(lambda: reduce(model, optimizer, given_grads(1, RANK)), "did not choose the same candidates")
    same_bits(memory(compressor).values(), before.values())


@check_of_two
def a_step_with_a_nan_leaves_no_trace():
    for culprit, value in ((0, float("nan")), (1, float("inf")), (4, float("-inf")), (3, float("nan"))):
        models, compressors = [Given(*SHAPES), Given(*SHAPES)], []
        for model in models:
            compressors.append(hvc.Compression.dore(model, block=16, bucket_mb=0.008))
        optimizers = [wrap(m, c) for m, c in zip(models, compressors)]
        for step in range(6):
            clean = given_grads(step, RANK)
            expected = reduce(models[0], optimizers[0], clean)
            if step == 3:
                before, spoilt = memory(compressors[1]), given_grads(99, RANK)
                if RANK == SIZE - 1:
                    spoilt[culprit].reshape(-1)[0] = value
                with warnings.catch_warnings(record=True) as told:
                    got = reduce(models[1], optimizers[1], spoilt)
                assert [f"a gradient of rank {SIZE - 1} was not finite" in str(w.message) for w in told] == [True] * (RANK == 0)
                assert all(torch.isnan(g).all() for g in got), f"tensor {culprit}: {got}"
                after = memory(compressors[1])
                assert before.keys() == after.keys()
                same_bits(after.values(), before.values(), f"tensor {culprit}")
                assert compressors[1].stats().abandoned == 1
            got = reduce(models[1], optimizers[1], clean)
            same_bits(got, expected, f"tensor {culprit}, step {step}")


@check_of_two
def orders_of_arrival_and_unused_parameters_do_not_matter():
    shapes = [(20 + i, 60) for i in range(12)] + [(5 + i,) for i in range(6)]
    model = Given(*shapes)
    compressor = hvc.Compression.dore(model, block=64, bucket_mb=0.01, exchange="sharded")
    optimizer = wrap(model, compressor)
    assert len(compressor.binding.layouts) >= 4
    simulation = Simulation(compressor.method, compressor.binding.layouts, SIZE)
    for step in range(200):
        by_rank = []
        for rank in range(SIZE):
            chance = random.Random(1000 * step + rank)
            used = chance.sample(range(len(shapes)), k=chance.randint(1, len(shapes)))
            by_rank.append((given_grads(step, rank, shapes), used))
        got = reduce(model, optimizer, *by_rank[RANK])
        flat = []
        for grads, used in by_rank:
            flat.append(
                flattened(compressor.binding.layouts, [g if i in used else torch.zeros_like(g) for i, g in enumerate(grads)])
            )
        same_bits(flattened(compressor.binding.layouts, got), simulation.step(flat), f"step {step}")


@check
def dtypes_and_strides_are_kept():
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 1.6e-2), (torch.float64, 1e-6), (torch.float32, 1e-6)):
        model = Given((40, 50), (9,), (), (0, 4), (2, 0), dtype=dtype)
        model.weights[0] = torch.nn.Parameter(torch.zeros(50, 40, dtype=dtype).t())  # gradients that are not contiguous
        compressor = hvc.Compression.dense(model)
        optimizer = wrap(model, compressor)
        by_rank = [given_grads(7, rank, [(40, 50), (9,), (), (0, 4), (2, 0)], dtype) for rank in range(SIZE)]
        got = reduce_anyhow(model, optimizer, compressor, by_rank[RANK])
        for g, parameter, *all_ranks in zip(got, model.weights, *by_rank):
            assert g.dtype == dtype and g.shape == parameter.shape, (g.dtype, g.shape)
            mean = sum(x.double() for x in all_ranks) / SIZE
            assert_allclose(g.double(), mean, rtol=tolerance, atol=tolerance, err_msg=str(dtype))
    model = Given((40, 50), dtype=torch.float16)
    compressor = hvc.Compression.dore(model, block=50, alpha=0.0, eta=0.0)
    large = [torch.full((40, 50), 3e4, dtype=torch.float16)]
    optimizer = wrap(model, compressor)
    got = reduce_anyhow(model, optimizer, compressor, large)
    assert_allclose(got[0].double(), 3e4, rtol=2e-3, err_msg="a sum of halves must not overflow")
    assert all(array.dtype == np.float32 for array in memory(compressor).values())


@check_of_two
def what_is_returned_shares_no_storage_with_the_memory():
    model = Given(*SHAPES)
    compressor = hvc.Compression.dore(model)
    optimizer = wrap(model, compressor)
    twin = Given(*SHAPES)
    other = wrap(twin, hvc.Compression.dore(twin))
    for step in range(4):
        grads = given_grads(step, RANK)
        got, expected = reduce(model, optimizer, grads), reduce(twin, other, grads)
        same_bits(got, expected, f"step {step}")
        for p in model.weights:
            p.grad.mul_(100).add_(7)
        grads[0].mul_(3)


@check_of_two
def every_way_of_combining_is_that_of_horovod():
    options = [
        {},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 3.0},
        {"num_groups": 2},
        {"groups": "first two"},
        {"backward_passes_per_step": 2},
    ]
    for chosen in options:
        chosen, results = dict(chosen), []
        for compressed in (False, True):
            model = Given(*SHAPES)
            kwargs = dict(chosen)
            if kwargs.get("groups"):
                kwargs["groups"] = [list(model.weights)[:2], list(model.weights)[2:4]]
            optimizer = wrap(model, hvc.Compression.dense(model) if compressed else hvc.Compression.none, **kwargs)
            for step in range(2):
                optimizer.zero_grad()
                for once in range(kwargs.get("backward_passes_per_step", 1)):
                    model.loss(given_grads(10 * step + once, RANK)).backward()
                optimizer.step()
            results.append([p.detach().clone() for p in model.weights])
        for plain, ours in zip(*results):
            assert_allclose(ours, plain, rtol=1e-6, atol=1e-6, err_msg=str(chosen))


@check_of_two
def sum_is_the_mean_times_the_number_of_ranks():
    results = []
    for op in (hvd.Average, hvd.Sum):
        model = Given(*SHAPES)
        optimizer = wrap(model, hvc.Compression.dore(model, block=64), op=op)
        results.append(reduce(model, optimizer, given_grads(0, RANK)))
    for mean, total in zip(*results):
        assert_allclose(total, mean * SIZE, rtol=1e-6, atol=1e-6)


@check_of_two
def sparse_gradients_made_dense_find_their_parameters():
    results = []
    for compressed in (False, True):
        torch.manual_seed(3)
        model = torch.nn.ModuleDict(
            {name: torch.nn.Embedding(60, 40, sparse=True) for name in "ab"} | {"c": torch.nn.Linear(40, 50)}
        )
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            named_parameters=model.named_parameters(),
            sparse_as_dense=True,
            compression=hvc.Compression.dense(model) if compressed else hvc.Compression.none,
        )
        for step in range(3):
            optimizer.zero_grad()
            words = torch.arange(4) + RANK + step
            model["c"](model["a"](words) - 2 * model["b"](words + 1)).square().mean().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for plain, ours in zip(*results):
        assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


@check_of_two
def two_optimizers_do_not_mix():
    alone = []
    for shift in (0, 50):
        model = Given(*SHAPES)
        optimizer = wrap(model, hvc.Compression.dore(model, block=32, seed=shift))
        alone.append([reduce(model, optimizer, given_grads(step + shift, RANK)) for step in range(4)])
    models = [Given(*SHAPES), Given(*SHAPES)]
    compressors = [hvc.Compression.dore(m, block=32, seed=shift) for m, shift in zip(models, (0, 50))]
    assert len({hash(c) for c in compressors}) == 2 and compressors[0] != compressors[1]
    optimizers = [
        wrap(m, c, named_parameters=[(f"{i}.{name}", p) for name, p in m.named_parameters()])
        for i, (m, c) in enumerate(zip(models, compressors))
    ]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Both backward passes before either synchronize: the collectives of both are under way together.
        sum(m.loss(given_grads(step + shift, RANK)) for m, shift in zip(models, (0, 50))).backward()
        for i in (1, 0):
            optimizers[i].synchronize()
        for i, model in enumerate(models):
            same_bits([p.grad for p in model.weights], alone[i][step], f"optimizer {i}, step {step}")
            with optimizers[i].skip_synchronize():
                optimizers[i].step()


@check_of_three
def a_process_set_is_its_own_world():
    members = hvd.add_process_set([0, 2])
    try:
        if RANK in (0, 2):
            model = Given(*SHAPES)
            compressor = hvc.Compression.dore(model, block=32, process_set=members)
            optimizer = wrap(model, compressor, process_set=members)
            simulation = Simulation(compressor.method, compressor.binding.layouts, 2)
            for step in range(3):
                by_rank = [given_grads(step, rank) for rank in (0, 2)]
                got = reduce(model, optimizer, by_rank[RANK // 2])
                expected = simulation.step([flattened(compressor.binding.layouts, grads) for grads in by_rank])
                same_bits(flattened(compressor.binding.layouts, got), expected, f"step {step}")
                assert_allclose(got[1], sum(g[1] for g in by_rank) / 2, rtol=1e-5)
    finally:
        MPI.COMM_WORLD.Barrier()
        hvd.remove_process_set(members)


@check_of_two
def counted_bytes_are_those_of_the_formulas():
    for exchange, scales in itertools.product(("allgather", "sharded"), ("float32", "byte")):
        model = Given((41, 53), (9,), (30, 40))  # 3373 elements: no multiple of block * W
        compressor = hvc.Compression.dore(model, block=32, exchange=exchange, scales=scales)
        optimizer = wrap(model, compressor)
        for step in range(3):
            reduce(model, optimizer, given_grads(step, RANK, [(41, 53), (9,), (30, 40)]))
            stats = compressor.stats()
            status, small, tokens = 28 + 16, 4 * (9 + 2), 2 * 8
            dense = 2 * (SIZE - 1) / SIZE * 4 * (41 * 53 + 9 + 30 * 40)
            assert_allclose(stats.last.dense, dense, rtol=1e-12)
            method_bytes = compressor.method.wire_bytes(compressor.binding.layouts[0], compressor._session.group, stats.metrics)
            beside = 2 * (SIZE - 1) / SIZE * (small + tokens) + (SIZE - 1) * status
            everyones = everyone(stats.last.wire - beside)
            if step == 0:
                everyones = [n - (SIZE - 1) * _handshake_bytes(compressor) for n in everyones]
            # The formula goes by mean shares of non-zeros; each payload rounds its signs to whole bytes.
            assert_allclose(np.mean(everyones), method_bytes, rtol=0.02, err_msg=f"{compressor.method}, W={SIZE}")
            assert_allclose(compressor.predicted_bytes(), method_bytes + beside, rtol=1e-9)


def _handshake_bytes(compressor) -> int:
    return compressor._session.handshake().size


@check_of_two
def a_saved_memory_goes_on_bit_for_bit():
    model = Given(*SHAPES)
    compressor = hvc.Compression.dore(model, block=32)
    optimizer = wrap(model, compressor)
    for step in range(3):
        reduce(model, optimizer, given_grads(step, RANK))
    saved = compressor.state_dict()
    expected = [reduce(model, optimizer, given_grads(step, RANK)) for step in (3, 4)]
    again = Given(*SHAPES)
    restored = hvc.Compression.dore(again, block=32)
    restored.load_state_dict(saved)
    assert restored.state_dict()["step"] == 3
    optimizer = wrap(again, restored)
    for step in (3, 4):
        same_bits(reduce(again, optimizer, given_grads(step, RANK)), expected[step - 3], f"step {step}")
    model = Given(*SHAPES)
    other = hvc.Compression.dore(model, block=64)
    other.load_state_dict(saved)
    optimizer = wrap(model, other)
    raised_everywhere(lambda: reduce(model, optimizer, given_grads(0, RANK)), "saved memory", "block=32", "block=64")


@check_of_two
def rescaling_goes_by_the_rates_of_the_parameter_groups():
    model = Given(*SHAPES)
    groups = [
        {"params": [model.weights[i] for i in (0, 2)], "lr": 0.5},
        {"params": [model.weights[i] for i in (1, 3, 4)], "lr": 0.25},
    ]
    base = torch.optim.SGD(groups)
    compressor = hvc.Compression.dore(model, block=32, rescale=True, optimizer=base)
    optimizer = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters(), compression=compressor)
    assert [set(layout.names) for layout in compressor.binding.layouts] == [{"weights.3"}, {"weights.2", "weights.0"}]
    simulations = [Simulation(compressor.method, [layout], SIZE) for layout in compressor.binding.layouts]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(5):
        by_rank = [given_grads(step, rank) for rank in range(SIZE)]
        got = flattened(compressor.binding.layouts, reduce(model, optimizer, by_rank[RANK]))
        for number, (simulation, first) in enumerate(zip(simulations, (0.25, 0.5))):
            flat = [[flattened(compressor.binding.layouts, grads)[number]] for grads in by_rank]
            same_bits([got[number]], simulation.step(flat, first * 0.5**step), f"step {step}, bucket {number}")
        schedule.step()


@check_of_two
def rates_that_differ_between_ranks_are_an_error_when_they_matter():
    model = Given(*SHAPES)
    base = torch.optim.SGD(model.parameters(), lr=0.5 if RANK else 0.25)
    compressor = hvc.Compression.dore(model, rescale=True, optimizer=base)
    optimizer = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters(), compression=compressor)
    raised_everywhere(lambda: reduce(model, optimizer, given_grads(0, RANK)), "learning rate")


# Failures


@check_of_two
def differing_options_are_an_error_on_every_rank():
    for mine, theirs, fragment in (
        ({"alpha": 0.1}, {"alpha": 0.2}, "alpha=0.2"),
        ({"bucket_mb": 4}, {"bucket_mb": 0.001}, "bucket"),
        ({"seed": 1}, {"seed": 2}, "seed: 1 and 2"),
        ({"dense_below": 1000}, {"dense_below": 1500}, "weights.2"),
    ):
        model = Given(*SHAPES)
        compressor = hvc.Compression.dore(model, **(theirs if RANK == SIZE - 1 else mine))
        optimizer = wrap(model, compressor)
        raised_everywhere(lambda: reduce(model, optimizer, given_grads(0, RANK)), f"ranks 0 and {SIZE - 1} differ", fragment)


@check_of_two
def other_shapes_are_an_error_on_every_rank():
    shapes = [(40, 50), (7,)] if RANK else [(40, 50), (8,)]
    model = Given(*shapes)
    optimizer = wrap(model, hvc.Compression.dore(model))
    raised_everywhere(lambda: reduce(model, optimizer, given_grads(0, RANK, shapes)), "tensor weights.1", "[8]", "[7]")


@check_of_two
def spoilt_frames_are_an_error_on_every_rank():
    for exchange, stage in (("allgather", 0), ("sharded", 0), ("sharded", 1)):
        for spoil, fragment in (
            (lambda frame: frame[:-3], "bytes"),
            (lambda frame: np.concatenate([np.frombuffer(b"RIFF", np.uint8), frame[4:]]), "RIFF"),
            (lambda frame: np.concatenate([frame[:8], np.uint8([9, 9, 0, 0]), frame[12:]]), "step"),
            (lambda frame: np.concatenate([frame[:28], frame[28:] ^ 0xFF]), "decode"),
        ):
            model = Given(*SHAPES)
            compressor = hvc.Compression.dore(model, block=32, exchange=exchange)
            optimizer = wrap(model, compressor)
            reduce(model, optimizer, given_grads(0, RANK))
            original = compressor._transport.submit

            def submit(request, name, original=original, spoil=spoil, stage=stage):
                if RANK == SIZE - 1 and name == f"0.{stage}":
                    if isinstance(request, AllGather):
                        request = request._replace(payload=spoil(request.payload))
                    else:
                        request = request._replace(payloads=[spoil(request.payloads[0]), *request.payloads[1:]])
                return original(request, name)

            compressor._transport.submit = submit
            before = memory(compressor)
            raised_everywhere(lambda: reduce(model, optimizer, given_grads(1, RANK)), f"rank {SIZE - 1}", fragment)
            same_bits(memory(compressor).values(), before.values())


@check_of_two
def an_exception_on_one_rank_is_raised_on_all():
    for exchange, when in itertools.product(("allgather", "sharded"), ("encode", "decode")):
        model = Given(*SHAPES)
        compressor = hvc.Compression.dore(model, block=32, exchange=exchange)
        optimizer = wrap(model, compressor)
        reduce(model, optimizer, given_grads(0, RANK))
        if RANK == 0:
            session = compressor._session
            original = session.reducer.reduce

            class Failing:
                rescale, stages = False, session.reducer.stages

                def reduce(self, grad, state, step):
                    generator = original(grad, state, step)
                    if when == "encode":
                        raise MemoryError("no room for the codes")
                    yield (yield from _first(generator))
                    raise MemoryError("no room for the codes")

            session.reducer = Failing()
        if when == "encode" or exchange == "sharded":
            raised_everywhere(lambda: reduce(model, optimizer, given_grads(1, RANK)), "rank 0", "no room for the codes")
        else:  # nothing is owed after the failure: the others hear of it with the next step's records
            if RANK == 0:
                with pytest.raises(CompressionError, match="no room"):
                    reduce(model, optimizer, given_grads(1, RANK))
                forget(optimizer)
            else:
                reduce(model, optimizer, given_grads(1, RANK))
            raised_everywhere(lambda: reduce(model, optimizer, given_grads(2, RANK)), "rank 0", "no room for the codes")


def _first(generator):
    return next(generator)
    yield


@check_of_two
def adasum_is_refused_on_every_rank():
    model = Given(*SHAPES)
    compressor = hvc.Compression.dore(model)
    try:
        optimizer = wrap(model, compressor, op=hvd.Adasum)
    except NotImplementedError as error:  # Horovod wants a power of two
        assert SIZE & (SIZE - 1), error
        return
    raised_everywhere(lambda: model.loss(given_grads(0, RANK)).backward() or optimizer.step(), "Adasum", "hvd.Average")


@check_of_two
def a_parameter_in_no_optimizer_is_an_error_on_every_rank():
    model = Given(*SHAPES)
    compressor = hvc.Compression.dore(model)
    some = list(model.named_parameters())[1:]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in some], lr=0.1), named_parameters=some, compression=compressor
    )
    raised_everywhere(lambda: reduce(model, optimizer, given_grads(0, RANK)), "'weights.0'", "no gradient of it came")


@check_of_two
def an_unbound_gradient_is_an_error_on_every_rank():
    model = Given(*SHAPES)
    compressor = hvc.Compression.dore(list(model.named_parameters())[1:])
    optimizer = wrap(model, compressor)
    raised_everywhere(lambda: reduce(model, optimizer, given_grads(0, RANK)), "[40, 50]", "unbound='dense'")
    model = Given(*SHAPES)
    compressor = hvc.Compression.dore(list(model.named_parameters())[1:], unbound="dense")
    got = reduce(model, wrap(model, compressor), given_grads(0, RANK))
    assert_allclose(got[0], sum(given_grads(0, rank)[0] for rank in range(SIZE)) / SIZE, rtol=1e-5, atol=1e-6)


@check_of_two
def a_step_of_unbound_gradients_only_is_an_error_on_every_rank():
    model, other = Given(*SHAPES), Given((2, 2), (2,))
    compressor = hvc.Compression.dore(model)
    optimizer = wrap(model, compressor)
    reduce(model, optimizer, given_grads(0, RANK))
    stranger = wrap(other, compressor, named_parameters=[(f"other.{n}", p) for n, p in other.named_parameters()])
    grads = given_grads(0, RANK, [(2, 2), (2,)])
    raised_everywhere(lambda: reduce(other, stranger, grads), "belongs to none of the")


@check_of_two
def names_and_parameters_are_checked_when_the_compressor_is_made():
    model = Given(*SHAPES)
    twice = [("w", p) for p in model.weights]
    for wrong, told in ((twice, "have the name 'w'"), (model.parameters(), "pairs of name and parameter"), ([], "no parameter")):
        with pytest.raises(ValueError, match=told):
            hvc.Compression.dore(wrong)
    shared = [*model.named_parameters(), ("again", model.weights[0])]
    optimizer = wrap(model, hvc.Compression.dore(shared))
    reduce(model, optimizer, given_grads(0, RANK))
    for options in ({"unbound": "skip"}, {"bucket_mb": 0}, {"rescale": True}, {"block": "64"}, {"alpha": "0.1"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            hvc.Compression.dore(model, **options)
    with pytest.raises(AttributeError, match="there are none, fp16, atomo, dense, diana, dore"):
        hvc.Compression.gzip(model)
    assert {"none", "fp16", *methods} <= set(dir(hvc.Compression))


@check_of_two
def who_saves_nothing_is_told():
    """On the first rank, once: a method that sends as much as no compression, or whose `auto` has chosen to."""
    for text, told in (
        ("true_topk", "100% of what it is given"),
        ("atomo:budget=1000", "1 of 1 buckets"),
        ("dore:block=1", "1 of 1 buckets"),
        ("dore", ""),
        ("dense", ""),
    ):
        model = Given(*SHAPES)
        optimizer = wrap(model, hvc.Compression.parse(text, model))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                reduce(model, optimizer, given_grads(step, RANK))
        messages = [str(w.message) for w in caught if "no fewer bytes" in str(w.message)]
        assert len(messages) == (1 if told and RANK == 0 else 0), (text, messages)
        assert all(told in message for message in messages), (text, messages)


@check_of_two
def a_line_of_text_makes_the_same_as_a_call():
    model = Given(*SHAPES)
    for text, made in (
        ("dore", hvc.Compression.dore(model)),
        ("dore:block=64,scales=byte", hvc.Compression.dore(model, block=64, scales="byte")),
        ("atomo:atoms=spectral,budget=3", hvc.Compression.atomo(model, atoms="spectral", budget=3)),
        ("gather:codec=levels:levels=3;block=64", hvc.Compression.gather(model, codec="levels:levels=3;block=64")),
    ):
        parsed = hvc.Compression.parse(text, model)
        assert parsed.method == made.method, text
    parsed = hvc.Compression.parse("sketch:momentum=0,seed=7", model, exact_below=10)
    assert parsed.method == hvc.Compression.sketch(model, momentum=0, exact_below=10).method
    assert hvc.Compression.parse("none", model) is hvc.Compression.none
    assert hvc.Compression.parse("fp16", model) is hvc.Compression.fp16
    for text, told in (
        ("gzip", "there is no compression 'gzip'; there are none, fp16, atomo"),
        ("fp16:block=3", "fp16 has no options"),
        ("dore:blocks=3", "the compression 'dore' has no option 'blocks'; it has alpha"),
        ("dore:block", "not of the form name=value"),
        ("dore:block=3,block=4", "block is given twice"),
        ("dore:block=x", "block must be a whole number"),
        ("atomo:atoms=temporal", "atoms must be"),
    ):
        with pytest.raises(ValueError, match=told):
            hvc.Compression.parse(text, model)


@check_of_two
def rescaling_goes_by_the_optimizer_that_is_used_after_its_state_was_loaded():
    model = Given(*SHAPES)
    base = torch.optim.SGD(model.parameters(), lr=0.5)
    compressor = hvc.Compression.dore(model, block=32, rescale=True, optimizer=base)
    optimizer = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters(), compression=compressor)
    simulation = Simulation(compressor.method, compressor.binding.layouts, SIZE)
    for step, lr in enumerate((0.5, 0.5, 0.125, 0.125)):
        if step == 2:
            state = optimizer.state_dict()
            state["param_groups"][0]["lr"] = lr
            optimizer.load_state_dict(state)
        by_rank = [given_grads(step, rank) for rank in range(SIZE)]
        got = flattened(compressor.binding.layouts, reduce(model, optimizer, by_rank[RANK]))
        same_bits(got, simulation.step([flattened(compressor.binding.layouts, grads) for grads in by_rank], lr), f"step {step}")


@check_of_two
def a_backward_pass_that_was_given_up_leaves_no_trace():
    results = []
    for given_up in (False, True):
        model = Given(*SHAPES)
        compressor = hvc.Compression.dore(model, block=16, bucket_mb=0.008)
        optimizer = wrap(model, compressor)
        reduce(model, optimizer, given_grads(0, RANK))
        if given_up:
            spoilt = given_grads(9, RANK)
            spoilt[3][0] = float("nan")
            optimizer.zero_grad()
            model.loss(spoilt).backward()
            forget(optimizer)
        results.append([reduce(model, optimizer, given_grads(step, RANK)) for step in (1, 2)])
        assert compressor.stats().abandoned == 0
    for one, other in zip(*results):
        same_bits(other, one)


@check_of_two
def a_backward_pass_that_one_rank_gave_up_is_an_error_on_every_rank():
    model = Given(*SHAPES)
    compressor = hvc.Compression.dore(model, block=16)
    optimizer = wrap(model, compressor)
    reduce(model, optimizer, given_grads(0, RANK))
    session = compressor._session
    if RANK == 0:
        session.restart()
    raised_everywhere(lambda: reduce(model, optimizer, given_grads(1, RANK)), "a backward pass was given up")


@check_of_two
def unused_compressors_on_one_rank_do_not_matter():
    if RANK == 0:
        for _ in range(3):
            hvc.Compression.dore(Given(*SHAPES))
    models = [Given(*SHAPES), Given(*SHAPES)]
    compressors = [hvc.Compression.dore(models[0]), hvc.Compression.dore(models[1], process_set=hvd.global_process_set)]
    optimizers = [
        wrap(m, c, named_parameters=[(f"{i}.{n}", p) for n, p in m.named_parameters()])
        for i, (m, c) in enumerate(zip(models, compressors))
    ]
    for optimizer in optimizers:
        optimizer.zero_grad()
    sum(m.loss(given_grads(0, RANK)) for m in models).backward()
    for optimizer in optimizers:
        optimizer.step()
    same_bits([p.grad for p in models[0].weights], [p.grad for p in models[1].weights])


@check_of_two
def a_sparse_gradient_is_named_with_the_way_out():
    model = torch.nn.ModuleDict({"a": torch.nn.Embedding(60, 40, sparse=True), "c": torch.nn.Linear(40, 50)})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        named_parameters=model.named_parameters(),
        compression=hvc.Compression.dore(model),
    )

    def step():
        model["c"](model["a"](torch.arange(4))).square().mean().backward()
        optimizer.step()

    raised_everywhere(step, "'a.weight'", "sparse_as_dense=True")


@check
def a_memory_is_given_back_as_it_was_before_the_first_step():
    model = Given(*SHAPES)
    compressor = hvc.Compression.dore(model)
    assert compressor.state_dict() == {}
    with pytest.raises(CompressionError, match="no memory of a compressor"):
        compressor.load_state_dict({"model": 1})
    layouts = compressor.binding.layouts
    saved = Simulation(compressor.method, layouts, 1).sessions[0].state_dict()
    compressor.load_state_dict(saved)
    assert all(isinstance(array, torch.Tensor) for array in compressor.state_dict()["arrays"].values())


@check_of_two
def other_operations_are_refused_on_every_rank():
    for op in (hvd.Min, hvd.Max, hvd.Product):
        model = Given(*SHAPES)
        optimizer = wrap(model, hvc.Compression.dore(model), op=op)
        raised_everywhere(lambda: reduce(model, optimizer, given_grads(0, RANK)), "op=hvd.Average or hvd.Sum")


@check_of_two
def options_change_by_a_schedule_and_the_bytes_with_them():
    for text, option, values in (
        ("sketch:momentum=0", "ratio", {0: 0.4, 2: 0.1}),
        ("topk:exchange=allgather", "ratio", {0: 0.3, 2: 0.02}),
    ):
        model = Given(*SHAPES)
        compressor = hvc.Compression.parse(text, model)
        optimizer, schedule, sent = wrap(model, compressor), hvc.CompressionSchedule(compressor, ratio=values), []
        for epoch in range(4):
            reduce(model, optimizer, given_grads(epoch, RANK))
            sent.append(compressor.stats().last.wire)
            if epoch:  # the first step has the handshake too
                assert_allclose(compressor.predicted_bytes(), sent[-1], rtol=0.05, err_msg=text)
            schedule.step()
        assert sent[2] < 0.7 * sent[1] and sent[3] < 0.7 * sent[1], (text, sent)
        assert compressor.residual_norm() > 0
    with pytest.raises(ValueError, match="no option 'ratios'"):
        compressor.change(ratios=1)
    model = Given(*SHAPES)
    compressor = hvc.Compression.dore(model, exchange="allgather")
    optimizer = wrap(model, compressor)
    reduce(model, optimizer, given_grads(0, RANK))
    with pytest.raises(ValueError, match="cannot become"):
        compressor.change(exchange="sharded")
    compressor.change(beta=0.5 if RANK else 0.25)
    raised_everywhere(lambda: reduce(model, optimizer, given_grads(1, RANK)), "no longer agree: on the options")


@check_of_two
def a_schedule_goes_on_where_a_saved_training_was():
    """The memory is of the options that it was made with; those of the epoch come again by the schedule."""
    values, runs = {0: 0.3, 1: 0.05}, []
    for interrupted in (False, True):
        model = Given(*SHAPES)
        compressor = hvc.Compression.topk(model, ratio=0.2, exchange="allgather", seed=1)
        optimizer, schedule = wrap(model, compressor), hvc.CompressionSchedule(compressor, ratio=values)
        for epoch in range(4):
            if interrupted and epoch == 2:
                saved, model = compressor.state_dict(), Given(*SHAPES)
                compressor = hvc.Compression.topk(model, ratio=0.2, exchange="allgather", seed=1)
                compressor.load_state_dict(saved)
                optimizer, schedule = wrap(model, compressor), hvc.CompressionSchedule(compressor, epoch=2, ratio=values)
            last = reduce(model, optimizer, given_grads(epoch, RANK))
            schedule.step()
        runs.append((last, memory(compressor)))
    same_bits(runs[0][0], runs[1][0])
    same_bits(runs[0][1].values(), runs[1][1].values())


@check_of_two
def a_memory_is_emptied_on_all_ranks_or_the_next_step_raises():
    model, twin = Given(*SHAPES), Given(*SHAPES)
    compressors = [hvc.Compression.dore(m, block=16, seed=1) for m in (model, twin)]
    optimizers = [wrap(m, c) for m, c in zip((model, twin), compressors)]
    reduce(model, optimizers[0], given_grads(0, RANK))
    assert compressors[0].residual_norm() > 0
    compressors[0].reset()
    assert compressors[0].residual_norm() == 0 and not any(array.any() for array in memory(compressors[0]).values())
    got = reduce(model, optimizers[0], given_grads(1, RANK))
    assert all(torch.isfinite(g).all() for g in got)
    if RANK == 0:
        compressors[0].reset()
    raised_everywhere(lambda: reduce(model, optimizers[0], given_grads(2, RANK)), "no longer agree", "memory emptied")


@check_of_two
def a_loss_scale_is_divided_out_and_skipped_steps_leave_no_trace():
    """As without scaling, bit for bit, since scales are powers of two; a step that overflows on one rank is skipped on all."""
    for text in ("dore:block=16", "sketch:ratio=0.5,exact_below=10", "atomo:budget=0.3,unit=ratio", "topk:ratio=0.1"):
        results = []
        for scaled in (False, True):
            model, scaler = Given(*SHAPES), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4, enabled=scaled)
            compressor = hvc.Compression.parse(text, model, scaler=scaler)
            optimizer, scales = wrap(model, compressor), []
            for step in range(14):
                grads, before = given_grads(step, RANK), memory(compressor) if step > 1 else {}
                spoilt = step in (0, 6, 7)  # the first step too
                if spoilt and not scaled:
                    continue
                if spoilt and RANK == SIZE - 1:
                    grads[step % 5].view(-1)[0] = float("inf")
                optimizer.zero_grad()
                scaler.scale(model.loss(grads)).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 20.0)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                if spoilt and step:
                    same_bits(memory(compressor).values(), before.values(), f"{text}, step {step}")
            assert not scaled or (min(scales), max(scales)) == (2.0**8, 2.0**10), scales
            for others in everyone(scales):
                assert others == scales, text
            results.append([*[p.detach().numpy().copy() for p in model.weights], *memory(compressor).values()])
            assert compressor.stats().abandoned == (3 if scaled else 0), text
        same_bits(results[1], results[0], text)


@check_of_two
def a_mean_that_overflows_when_it_is_scaled_is_a_skipped_step():
    model = Given((40, 50), dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    compressor = hvc.Compression.dense(model, scaler=scaler)
    optimizer = wrap(model, compressor, op=hvd.Sum)
    reduce(model, optimizer, [torch.ones(40, 50, dtype=torch.float16) * 2.0**12])
    before = compressor.stats()
    got = reduce(model, optimizer, [torch.full((40, 50), 6e4, dtype=torch.float16)])
    assert torch.isnan(got[0]).all() and compressor.stats().abandoned == before.abandoned + 1


@check_of_two
def loss_scales_that_differ_between_ranks_are_an_error_on_every_rank():
    model, scaler = Given(*SHAPES), torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + RANK))
    compressor = hvc.Compression.dore(model, scaler=scaler)
    raised_everywhere(lambda: reduce(model, wrap(model, compressor), given_grads(0, RANK)), "no longer agree", "loss scale")


@check_of_two
def copies_have_the_memory_and_no_handles():
    """Also in what Horovod's elastic states copy and send: a compressor is kept on its rank, whatever rank 0 has."""
    for text in ("sketch:ratio=0.5,exact_below=10", "atomo:budget=0.3,unit=ratio", "dore:block=16", "topk:ratio=0.1"):
        model = Given(*SHAPES)
        compressor = hvc.Compression.parse(text, model)
        optimizer = wrap(model, compressor)
        for step in range(2):
            reduce(model, optimizer, given_grads(step, RANK))
        before = memory(compressor)
        pairs = [copy.deepcopy((model, compressor)), pickle.loads(pickle.dumps((model, compressor)))]
        scheduler = torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(model.parameters(), lr=0.1), 0.1, total_steps=9)
        file = io.BytesIO()
        torch.save({"compression": compressor.state_dict(), "scheduler": scheduler.state_dict()}, file)
        file.seek(0)
        third = Given(*SHAPES)
        pairs.append((third, hvc.Compression.parse(text, third)))
        pairs[-1][1].load_state_dict(torch.load(file, weights_only=True)["compression"])
        state = hvd.elastic.TorchState(model=model, compression=compressor, step=RANK)
        state.sync()
        assert state.step == 0 and state.compression is compressor, text
        same_bits(memory(compressor).values(), before.values(), f"{text}, rank {RANK}")
        expected = reduce(model, optimizer, given_grads(2, RANK))
        for other, its in pairs:
            same_bits(memory(its).values(), before.values(), text)
            same_bits(reduce(other, wrap(other, its), given_grads(2, RANK)), expected, text)
        state.restore()
        same_bits(memory(compressor).values(), before.values(), f"{text}, rank {RANK}")


@check_of_two
def groups_with_unused_members_are_averaged():
    """Horovod submits the members of a group that is not complete one by one, at the end of the step."""
    results = []
    for compressed in (False, True):
        model = Given(*SHAPES)
        weights = list(model.weights)
        optimizer = wrap(
            model, hvc.Compression.dense(model) if compressed else hvc.Compression.none, groups=[weights[:2], weights[2:4]]
        )
        for step in range(3):
            reduce(model, optimizer, given_grads(step, RANK), order=[0, 2])
        results.append([p.detach().clone() for p in model.weights])
    for one, other in zip(*results):
        assert_allclose(other, one, rtol=1e-6, atol=1e-7)


@check_of_two
def memories_of_two_runs_are_not_mixed():
    """Though they are of the same training and the same step."""
    runs = []
    for _ in range(2):
        model = Given(*SHAPES)
        compressor = hvc.Compression.dore(model, block=16, exchange="allgather")
        optimizer = wrap(model, compressor)
        for step in range(2):
            reduce(model, optimizer, given_grads(step, RANK))
        runs.append(compressor.state_dict())
    for mine, fine in ((runs[0], True), (runs[RANK % 2], False)):
        model = Given(*SHAPES)
        compressor = hvc.Compression.dore(model, block=16, exchange="allgather")
        compressor.load_state_dict(mine)
        optimizer = wrap(model, compressor)
        if fine:
            reduce(model, optimizer, given_grads(2, RANK))
            if RANK == 0:
                compressor.load_state_dict({**mine, "step": 3})
            raised_everywhere(lambda: reduce(model, optimizer, given_grads(3, RANK)), "no longer agree", "loaded")
        else:
            raised_everywhere(lambda: reduce(model, optimizer, given_grads(2, RANK)), "memory taken up: of run")


@check_of_two
def memory_is_changed_between_two_steps_only():
    model = Given(*SHAPES)
    compressor = hvc.Compression.dore(model, block=16, exchange="sharded")
    optimizer = wrap(model, compressor)
    reduce(model, optimizer, given_grads(0, RANK))
    saved = compressor.state_dict()
    optimizer.zero_grad()
    model.loss(given_grads(1, RANK)).backward()
    for change in (compressor.reset, lambda: compressor.load_state_dict(saved), lambda: compressor.change(alpha=0.2)):
        with pytest.raises(CompressionError, match="between two steps only"):
            change()
    optimizer.step()
    forgotten = memory(compressor)
    optimizer.zero_grad()
    model.loss(given_grads(2, RANK)).backward()
    forget(optimizer)
    compressor.load_state_dict(saved)
    for name, array in memory(compressor).items():
        same_bits([array], [saved["arrays"][name].numpy()], name)
    assert any((array != forgotten[name]).any() for name, array in memory(compressor).items())
    reduce(model, optimizer, given_grads(1, RANK))


@check_of_two
def gradients_that_are_unscaled_too_early_are_an_error_on_every_rank():
    model, scaler = Given(*SHAPES), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrap(model, hvc.Compression.dore(model, scaler=scaler))
    optimizer.zero_grad()
    scaler.scale(model.loss(given_grads(0, RANK))).backward()
    raised_everywhere(lambda: scaler.step(optimizer), "unscaled before they were averaged", "skip_synchronize")


@check_of_two
def a_failure_that_comes_after_the_record_is_told_with_the_next_one():
    model = Given(*SHAPES)
    compressor = hvc.Compression.qsgd(model, exchange="allgather")
    optimizer = wrap(model, compressor)
    reduce(model, optimizer, given_grads(0, RANK))
    wind_up = compressor._wind_up

    def failing(session, factor):
        session.fail(CompressionError("on purpose"))
        return wind_up(session, factor)

    if RANK == 0:
        compressor._wind_up = failing
        with pytest.raises(CompressionError, match="on purpose"):
            reduce(model, optimizer, given_grads(1, RANK))
        compressor._wind_up = wind_up
        for handle, _ in optimizer._handles.values():  # other ranks may not have sent theirs, and a name goes once only
            hvd.synchronize(handle)
        forget(optimizer)
    else:
        reduce(model, optimizer, given_grads(1, RANK))
    raised_everywhere(lambda: reduce(model, optimizer, given_grads(2, RANK)), "rank 0: on purpose")


@check_of_two
def gradients_that_grow_in_the_memory_of_a_mean_are_averaged_alike():
    def means(in_place: bool) -> list[torch.Tensor]:
        model = Given((300, 300))  # alone in its bucket, so it is not copied; and so large that memory is used again
        optimizer, found = wrap(model, hvc.Compression.dore(model)), []
        for step in range(5):
            if in_place and step:
                model.weights[0].grad.zero_()
            else:
                optimizer.zero_grad()
            model.loss(given_grads(step, RANK, [(300, 300)])).backward()
            optimizer.synchronize()
            found.append(model.weights[0].grad.clone())
            with optimizer.skip_synchronize():
                optimizer.step()
        return found

    for step, (anew, in_place) in enumerate(zip(means(False), means(True))):
        same_bits([anew.numpy()], [in_place.numpy()], f"step {step}")


@check
def without_horovods_hooks_statistics_are_zero():
    model = Given(*SHAPES)
    stats = hvc.Compression.dore(model).stats()
    assert stats.steps == 0 and stats.last.ratio is None and stats.total.paper_ratio is None


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()
    main(RANK, SIZE)
