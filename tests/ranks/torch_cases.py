"""What went wrong for others who train with compressed gradients in PyTorch, and must not here."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time
from collections.abc import Callable

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import hvdcompress.torch as hvc
from hvdcompress.core import AllReduce
from hvdcompress.drivers.simulate import Simulation
from ranks import torch_checks
from ranks.harness import (
    check_of_one,
    check_on_four,
    check_on_three,
    check_on_two,
    each,
    everyone,
    main,
    raised_everywhere,
    same_bits,
)
from ranks.torch_checks import SHAPES, Given, forget, given_grads, memory, reduce, wrap

RANK, SIZE = 0, 1  # set when Horovod is

# Options that make something happen on small tensors.
OPTIONS = {
    "sketch": "sketch:ratio=0.5,exact_below=10,momentum=0.5",
    "atomo": "atomo:budget=0.3,unit=ratio,exchange=allgather",
    "dore": "dore:block=32,exchange=sharded,scales=byte",
}
# Nothing of two dimensions is so small that it would travel dense.
TINY = {"sketch": {"exact_below": 0}, "atomo": {"dense_below": 0}, "dore": {"dense_below": 0}}
# Nothing is left out but by the arithmetic of the wire.
LOSSLESS = {
    "sketch": "sketch:k=1000,columns=64,momentum=0,exact_below=0",
    "atomo": "atomo:budget=1000,values=float32,exchange=allgather,dense_below=0",
    "dore": "dore:block=2,alpha=0,eta=0,downlink=identity,exchange=sharded,dense_below=0",
}
# Buckets of one tensor each.
ONE = {"sketch": {}, "atomo": {"bucket_mb": 1e-6}, "dore": {"bucket_mb": 1e-6}}
HEADER = 28  # bytes of a frame before its payload

Named = dict[str, torch.Tensor]


def compression(method: str, model: torch.nn.Module, **options) -> hvc.Compressor:
    return hvc.Compression.parse(OPTIONS[method], model, **options)


def tiny(method: str, model: torch.nn.Module, **options) -> hvc.Compressor:
    return compression(method, model, **{**TINY[method], **options})


def where(method: str, *further: object) -> str:
    return ", ".join([method, f"{SIZE} ranks", *map(str, further)])


class Beside:
    """A simulation of all ranks, with the tensors and options of a compressor."""

    def __init__(self, compressor: hvc.Compressor, seed: int = 0):
        self.binding = compressor.binding
        self.simulation = Simulation(compressor.method, self.binding.layouts, SIZE, seed)

    def step(self, by_rank: list[Named]) -> dict[str, np.ndarray]:
        """What every parameter's gradient must become: all ranks' in, their mean out."""
        layouts = self.binding.layouts
        means = self.simulation.step(
            [[np.concatenate([np.float32(grads[n]).ravel() for n in layout.names]) for layout in layouts] for grads in by_rank]
        )
        outcome = {}
        for name, parameter, bucket in self.binding.bounds:
            if bucket is None:
                mean = sum(grads[name].double() for grads in by_rank).numpy() / SIZE
            else:
                mean = means[bucket][layouts[bucket].slices[name]]
            outcome[name] = mean.reshape(parameter.shape)
        return outcome


def trained(model: torch.nn.Module) -> Named:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def own_grads(model: torch.nn.Module, loss: torch.Tensor) -> Named:
    """This rank's gradients, without Horovod's hooks; zeros for what is not used."""
    parameters = trained(model)
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads)}


def train_beside(
    method: str, model: torch.nn.Module, compressor: hvc.Compressor, loss: Callable[[int], torch.Tensor], steps: int, **options
) -> None:
    """Trains, and compares every step's averaged gradients with those of a simulation, and the ranks' weights at the end."""
    optimizer, beside, dtypes = wrap(model, compressor, **options), Beside(compressor), {p.dtype for p in model.parameters()}
    rtol = max(1e-5, *(torch.finfo(dtype).eps for dtype in dtypes))
    for step in range(steps):
        expected = beside.step(everyone(own_grads(model, loss(step))))
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.synchronize()
        for name, p in trained(model).items():
            told = where(method, name, f"step {step}")
            assert (p.grad.shape, p.grad.dtype, p.grad.device) == (p.shape, p.dtype, p.device), told
            assert_allclose(p.grad.double(), expected[name], rtol=rtol, atol=1e-7, err_msg=told)
        with optimizer.skip_synchronize():
            optimizer.step()
    finite(model, compressor, method)
    same_weights(model, method)


def loss_of(model: Given, grads: list[torch.Tensor]) -> Callable[[int], torch.Tensor]:
    return lambda step: model.loss(grads)


def bits(model: torch.nn.Module) -> list[bytes]:
    return [p.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def same_weights(model: torch.nn.Module, told: str) -> None:
    digests = everyone(hashlib.sha256(b"".join(bits(model))).hexdigest())
    assert len(set(digests)) == 1, f"weights differ between the ranks: {told}"


def finite(model: torch.nn.Module, compressor: hvc.Compressor, told: str) -> None:
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all() and (p.grad is None or torch.isfinite(p.grad).all()), f"{name}: {told}"
    for name, array in memory(compressor).items():
        # A rate is not a number as long as there is none.
        assert np.isfinite(array).all() or name.endswith(".lr"), f"memory {name}: {told}"


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step_of(optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def collect() -> None:
    """Frees Horovod's optimizers that nothing refers to, and their hooks; after an error the step's graph has to go first."""
    for _ in range(2):
        gc.collect()


def give_up(optimizer) -> None:
    """Leaves a step: what Horovod has under way comes to its end, under names that the next step uses again."""
    for handle, _ in optimizer._handles.values():
        hvd.synchronize(handle)
    forget(optimizer)


@check_on_two
@each
def one_value_that_is_not_finite_is_forgotten_after_its_step(method):
    for value in (float("inf"), float("-inf"), float("nan")):
        model = Given(*SHAPES)
        compressor = compression(method, model)
        optimizer = wrap(model, compressor)
        for step in range(6):
            before, grads = memory(compressor) if step else {}, given_grads(step, RANK)
            if step == 3 and RANK == 1:
                grads[0][1, 2] = value
            got = reduce(model, optimizer, grads)
            assert all(torch.isfinite(g).all() for g in got) == (step != 3), (value, step)
            if step == 3:
                same_bits(memory(compressor).values(), before.values(), str(value))


@check_on_two
@each
def a_loop_that_skips_steps_that_are_not_finite_goes_on_with_finite_ones(method):
    for value in (float("inf"), float("-inf"), float("nan")):
        torch.manual_seed(1)
        model, spoilt = torch.nn.Linear(16, 8), torch.zeros(8, 16)
        model.weight.register_hook(lambda grad: grad + spoilt)
        compressor = tiny(method, model)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), compression=compressor
        )
        for step in range(10):
            told, before = where(method, value, f"step {step}"), memory(compressor) if step else {}
            spoilt[2, 3] = value if step == 3 and RANK == 1 else 0
            optimizer.zero_grad()
            model(randn(8, 16, seed=2 * step + RANK)).square().mean().backward()
            optimizer.synchronize()
            usable = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
            assert everyone(usable) == [step != 3] * SIZE, told
            if usable:
                with optimizer.skip_synchronize():
                    optimizer.step()
                finite(model, compressor, told)
            else:
                same_bits(memory(compressor).values(), before.values(), told)
        same_weights(model, where(method, value))


@check_on_four
def sums_of_halves_do_not_overflow_before_they_are_averaged():
    for text, steps, tolerance in (
        ("sketch:k=256,momentum=0,exact_below=0", 1, 2e-3),
        ("atomo:budget=16,exchange=allgather,dense_below=0", 1, 2e-3),
        ("atomo:atoms=entrywise,budget=256,exchange=allgather,dense_below=0", 1, 2e-3),
        ("dore:block=32,exchange=sharded,dense_below=0", 200, 2e-2),
    ):
        large = [torch.full((16, 16), 3e4, dtype=torch.float16)]
        model, applied = Given((16, 16), dtype=torch.float16), torch.zeros(16, 16, dtype=torch.float64)
        optimizer = wrap(model, hvc.Compression.parse(text, model))
        for _ in range(steps):
            applied += reduce(model, optimizer, large)[0].double()
        assert_allclose(applied / steps, 3e4, rtol=tolerance, err_msg=text)
        model = Given((16, 16), dtype=torch.float16)
        total = reduce(model, wrap(model, hvc.Compression.parse(text, model), op=hvd.Sum), large)[0]
        assert torch.isinf(total).all() and total.dtype == torch.float16, f"{text}: a sum of 1.2e5 is no half, but {total}"


@check_on_four
def a_sketch_of_halves_is_of_floats():
    model, sent = Given((16, 16), dtype=torch.float16), []
    compressor = hvc.Compression.sketch(model, columns=8, k=256, momentum=0, exact_below=0)
    optimizer = wrap(model, compressor)
    submit = compressor._transport_in_use.submit
    compressor._transport.submit = lambda request, name: (sent.append(request), submit(request, name))[1]
    got = reduce(model, optimizer, [torch.full((16, 16), 3e4, dtype=torch.float16)])
    table = next(request.array for request in sent if isinstance(request, AllReduce))
    assert table.dtype == np.float32 and np.abs(table).max() > 65504, f"no bucket sums past the largest half: {table}"
    assert_allclose(got[0].double(), 3e4, rtol=2e-3)
    finite(model, compressor, "sketch")


@check_on_two
@each
def a_rank_or_all_of_them_may_have_nothing_to_send(method):
    for dtype in (torch.float32, torch.float16):
        shapes = [(40,), (8, 5), (0, 4)]
        zeros = [torch.zeros(s, dtype=dtype) for s in shapes]
        model = Given(*shapes, dtype=dtype)
        grads = [randn(*s, seed=5, dtype=dtype) for s in shapes] if RANK else zeros
        train_beside(method, model, tiny(method, model), loss_of(model, grads), 3)
        model = Given(*shapes, dtype=dtype)
        compressor = tiny(method, model)
        optimizer, told = wrap(model, compressor), where(method, dtype)
        for step in range(3):
            got = reduce(model, optimizer, zeros)
            assert [g.shape for g in got] == [z.shape for z in zeros], f"{told}, step {step}"
            same_bits(got, zeros, f"{told}, step {step}")
        assert compressor.residual_norm() == 0, told
        assert not any(array.any() for array in memory(compressor).values()), told


class Small(torch.nn.Module):
    """Parameters of one element and of no dimension."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.temperature, self.shift = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Parameter(torch.zeros(1))
        self.linear, self.convolution = torch.nn.Linear(3, 1), torch.nn.Conv2d(1, 4, 1, bias=False)

    def forward(self, x):
        return (self.convolution(self.linear(x)[:, None, None]) * self.temperature + self.shift).square().mean()


@check_on_two
@each
def scalars_and_tensors_of_one_element_are_averaged(method):
    for options in ({}, TINY[method]):
        model = Small()
        compressor = compression(method, model, **options)
        train_beside(method, model, compressor, lambda step: model(randn(6, 3, seed=2 * step + RANK)), 5)
        assert model.temperature.grad.shape == (), where(method)


@check_on_three
def codes_of_any_number_of_elements_are_cut_between_three_masters():
    """Gradients of -1, 0 and 1 are their own codes, both ways: what is cut at a wrong byte, or filled up wrongly, is seen."""
    generator = torch.Generator().manual_seed(8)
    for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 1000003):
        codes = [torch.randint(-1, 2, (1, n), generator=generator).float(), *(torch.full((1, n), c) for c in (-1.0, 0.0, 1.0))]
        for block, scales in ((1, "float32"), (3, "float32"), (1, "byte")):
            model = Given((1, n))
            compressor = hvc.Compression.dore(
                model, block=block, scales=scales, alpha=0.0, eta=0.0, exchange="sharded", dense_below=0
            )
            optimizer = wrap(model, compressor)
            for code in codes if n < 100 else codes[:1]:
                got = reduce(model, optimizer, [code])
                assert_array_equal(got[0], code, f"n={n}, block={block}, scales={scales}")
                assert not (torch.signbit(got[0]) & (code == 0)).any(), f"n={n}: a zero has become -0"


@check_on_two
@each
def wide_and_narrow_floats_keep_their_type_and_their_range(method):
    """Nothing narrower than float32 is on the wire: the error does not depend on a factor beyond the range of halves."""
    errors = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for scale in (1.0, 1e6, 1e-9):
            told = where(method, dtype, scale)
            by_rank = [(scale * randn(64, 48, seed=rank).double()).to(dtype) for rank in range(SIZE)]
            model = Given((64, 48), dtype=dtype)
            compressor = compression(method, model)
            got = reduce(model, wrap(model, compressor), [by_rank[RANK]])[0]
            assert got.dtype == dtype and got.shape == (64, 48), told
            assert all(array.dtype in (np.float32, np.float64) for array in memory(compressor).values()), told
            mean = sum(g.double() for g in by_rank) / SIZE
            if dtype == torch.float16 and scale > 1:  # the gradient itself is infinite
                assert not torch.isfinite(got).any(), told
                continue
            errors[dtype, scale] = float((got.double() - mean).norm() / mean.norm().clamp_min(1e-300))
            if dtype != torch.float16:
                assert_allclose(errors[dtype, scale], errors[dtype, 1.0], rtol=0.05, err_msg=told)
    for scale in (1.0, 1e6, 1e-9):
        assert errors[torch.float64, scale] <= 1.0001 * errors[torch.float32, scale], where(method, scale)
    assert errors[torch.float16, 1e-9] == 0, f"zeros are averaged: {where(method)}"


@check_on_three
@each
def what_is_averaged_is_the_values_and_not_their_codes(method):
    """Codes (1, 1, 0) and (-1, -1, 0) of three ranks: their whole-number mean would be 0 and -1."""
    scale, results = 0.37, {}
    grads = [torch.tensor([[scale, -scale] if RANK < 2 else [0.0, 0.0]])]
    for name, options in {"mean": {}, "sum": {"op": hvd.Sum}, "predivided": {"gradient_predivide_factor": 2.0}}.items():
        model = Given((1, 2))
        results[name] = reduce(model, wrap(model, hvc.Compression.parse(LOSSLESS[method], model), **options), grads)[0]
        same_weights(model, where(method, name))
    assert_allclose(results["mean"], [[scale * 2 / 3, -scale * 2 / 3]], rtol=1e-6, err_msg=where(method))
    same_bits([results["sum"]], [3 * results["mean"]], where(method, "sum"))
    assert_allclose(results["predivided"], results["mean"], rtol=1e-6, err_msg=where(method, "predivided"))


class Partly(torch.nn.Module):
    """Twenty layers of twenty shapes that are not used, and one that is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.unused = torch.nn.ModuleList(torch.nn.Linear(5 + i, 9 + 2 * i) for i in range(20))
        self.used = torch.nn.Linear(40, 30)

    def forward(self, x):
        return self.used(x).square().mean()


@check_on_three
@each
def parameters_without_gradients_are_visited_in_one_order_on_all_ranks(method):
    assert len(set(everyone(hash("the order of a set")))) == SIZE, "the ranks' sets have the same order"
    strays = [object() for _ in range(1000 * RANK)]
    model = Partly()
    before = bits(model.unused)
    train_beside(method, model, tiny(method, model), lambda step: model(randn(8, 40, seed=3 * step + RANK)), 20)
    assert bits(model.unused) == before, f"unused weights have moved: {where(method)}"
    assert len(strays) == 1000 * RANK


@check_on_two
@each
def an_optimizer_is_wrapped_anew_with_the_same_compressor(method):
    """Each gradient is compressed once a step, and the memory goes on; the hooks of an optimizer that is kept are found out."""
    model, twin = Given(*SHAPES), Given(*SHAPES)
    compressor, other = compression(method, model), compression(method, twin)
    once = wrap(twin, other)
    compress, calls = compressor.compress, []
    compressor.compress = lambda tensor: (calls.append(tensor.shape), compress(tensor))[1]
    for epoch in range(3):
        optimizer = None
        collect()
        optimizer = wrap(model, compressor)
        for step in range(5 * epoch, 5 * epoch + 5):
            calls.clear()
            got = reduce(model, optimizer, given_grads(step, RANK))
            assert sorted(calls) == sorted(p.shape for p in model.weights), where(method, f"step {step}")
            same_bits(got, reduce(twin, once, given_grads(step, RANK)), where(method, f"step {step}"))
    assert compressor.stats().steps == 15, where(method)
    same_weights(model, where(method))
    both = [optimizer, wrap(model, compressor)]
    raised_everywhere(lambda: reduce(model, both[1], given_grads(0, RANK)), "two of Horovod's optimizers", "gc.collect()")


@check_on_two
@each
def layers_are_thawed_and_the_optimizer_wrapped_anew(method):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    body, head = model
    body.requires_grad_(False)
    base = torch.optim.SGD(head.parameters(), lr=0.1)

    def wrapped(compressor):
        return hvd.DistributedOptimizer(base, named_parameters=model.named_parameters(), compression=compressor)

    def loss(step):
        return model(randn(8, 40, seed=2 * step + RANK)).square().mean()

    optimizer, before = wrapped(tiny(method, model)), bits(body)
    for step in range(5):
        step_of(optimizer, loss(step))
    assert bits(body) == before, f"frozen weights have moved: {where(method)}"
    body.requires_grad_(True)
    optimizer.add_param_group({"params": list(body.parameters())})
    raised_everywhere(lambda: step_of(optimizer, loss(5)), "not when Horovod wrapped the optimizer", "anew")
    assert bits(body) == before, where(method)
    optimizer = None
    collect()
    model.zero_grad()
    base.add_param_group({"params": list(body.parameters())})
    optimizer = wrapped(tiny(method, model))
    for step in range(6, 11):
        step_of(optimizer, loss(step))
    assert all(now != then for now, then in zip(bits(body), before)), f"thawed weights have not moved: {where(method)}"
    same_weights(model, where(method))


@check_on_two
@each
def a_layer_of_another_size_under_the_same_name_starts_without_memory(method):
    def model_of(words):
        torch.manual_seed(5)
        return torch.nn.ModuleDict({"words": torch.nn.Embedding(words, 4), "out": torch.nn.Linear(4, 6)})

    def loss(step):
        return model["out"](model["words"](torch.arange(6) + step % 3)).square().mean() * (1 + RANK)

    model = model_of(10)
    compressor = tiny(method, model)
    optimizer = wrap(model, compressor)
    for step in range(3):
        step_of(optimizer, loss(step))
    saved = compressor.state_dict()
    resized = model_of(12)["words"].weight.data
    in_place, model["words"].weight.data, model["words"].weight.grad = model["words"].weight.data, resized, None
    raised_everywhere(lambda: step_of(optimizer, loss(0)), "[10, 4]", "[12, 4]", error=RuntimeError)
    give_up(optimizer)
    model["words"].weight.data = in_place

    model = model_of(12)
    stale = wrap(model, compressor)
    raised_everywhere(lambda: step_of(stale, loss(0)), "belongs to none of the")
    give_up(stale)
    model = model_of(12)
    restored = tiny(method, model)
    restored.load_state_dict(saved)
    optimizer = wrap(model, restored)
    raised_everywhere(lambda: step_of(optimizer, loss(0)), "saved memory")
    model = model_of(12)
    fresh = tiny(method, model)
    train_beside(method, model, fresh, loss, 3)


@check_on_two
@each
def a_parameter_that_is_used_more_than_once_has_one_gradient(method):
    torch.manual_seed(6)
    tied = torch.nn.ModuleDict({"words": torch.nn.Embedding(50, 16), "out": torch.nn.Linear(16, 50, bias=False)})
    tied["out"].weight = tied["words"].weight
    thrice = torch.nn.Linear(16, 16)

    def tied_loss(step):
        return tied["out"](tied["words"](torch.arange(8) + 5 * step + RANK)).square().mean()

    def thrice_loss(step):
        return thrice(thrice(thrice(randn(8, 16, seed=2 * step + RANK)))).square().mean()

    for model, loss in ((tied, tied_loss), (thrice, thrice_loss)):
        compressor = tiny(method, model)
        compress, calls = compressor.compress, []
        compressor.compress = lambda tensor, compress=compress, calls=calls: (calls.append(tensor.shape), compress(tensor))[1]
        train_beside(method, model, compressor, loss, 4)
        assert len(calls) == 4 * len(list(model.parameters())), where(method, calls)


@check_on_two
@each
def two_backward_passes_before_a_step_are_one_gradient_where_horovod_is_told(method):
    results = []
    for passes in (1, 2):
        model = Given(*SHAPES)
        compressor = compression(method, model)
        optimizer = wrap(model, compressor, backward_passes_per_step=passes)
        for step in range(3):
            losses = [model.loss([torch.round(8 * g) for g in given_grads(10 * step + i, RANK)]) for i in range(2)]
            optimizer.zero_grad()
            if passes == 1:
                sum(losses).backward()
            else:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            optimizer.step()
        assert compressor.stats().steps == 3, where(method)
        results.append(bits(model))
        same_weights(model, where(method))
    assert results[0] == results[1], where(method)


@check_on_two
@each
def two_backward_passes_before_a_step_are_an_error_where_horovod_is_not_told(method):
    """An error on every rank, after which both can begin the step anew."""
    results = []
    for twice in (False, True):
        model = Given(*SHAPES)
        optimizer = wrap(model, compression(method, model))
        reduce(model, optimizer, given_grads(0, RANK))
        if twice:
            loss = model.loss(given_grads(1, RANK))
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            raised_everywhere(loss.backward, "backward_passes_per_step", error=AssertionError)
            give_up(optimizer)
        results.append(reduce(model, optimizer, given_grads(2, RANK)))
    same_bits(*results, where(method))


@check_on_two
@each
def gradients_are_cleared_in_any_way(method):
    """In place, by None, or by hand in random order: nothing is known by where a gradient lies."""
    chance, results = random.Random(RANK), []
    for way in ("in place", "none", "by hand"):
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 30))
        compressor, trajectory, strays = tiny(method, model), [], []
        optimizer = wrap(model, compressor)
        for step in range(20):
            model(randn(8, 30, seed=2 * step + RANK)).square().mean().backward()
            optimizer.step()
            if way == "by hand":
                for p in chance.sample(list(model.parameters()), k=4):
                    p.grad = None
                    strays = [torch.zeros(chance.choice([(20, 30), (30,), (20,)])) for _ in range(2)]
            else:
                model.zero_grad(set_to_none=way == "none")
            trajectory += bits(model)
        assert len(strays) == (2 if way == "by hand" else 0)
        assert len(compressor.binding.bounds) == 4 and compressor.stats().steps == 20, where(method, way)
        results.append((trajectory, sorted(memory(compressor))))
        same_weights(model, where(method, way))
    assert results[0] == results[1] == results[2], where(method)


def wrap_with(model: torch.nn.Module, compressor: hvc.Compressor, lr: float) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), named_parameters=model.named_parameters(), compression=compressor
    )


@check_on_two
@each
def gradients_are_clipped_between_synchronize_and_step(method):
    """Averaged once where step() is told to skip it; twice, with Horovod's warning, where not. Edits reach no memory."""
    results = {}
    for way in ("skipped", "edited", "twice"):
        torch.manual_seed(8)
        model = torch.nn.Linear(40, 30)
        compressor = compression(method, model)
        optimizer, compress, calls, averaged = wrap(model, compressor), compressor.compress, [], []
        compressor.compress = lambda tensor, compress=compress, calls=calls: (calls.append(tensor.shape), compress(tensor))[1]
        for step in range(4):
            told = where(method, way, f"step {step}")
            calls.clear()
            optimizer.zero_grad()
            (100 * model(randn(8, 40, seed=2 * step + RANK)).square().mean()).backward()
            optimizer.synchronize()
            averaged += [p.grad.clone() for p in model.parameters()]
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1, f"nothing to clip: {told}"
            if way == "twice":
                with pytest.warns(UserWarning, match="skip_synchronize"):
                    optimizer.step()
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
            assert len(calls) == (4 if way == "twice" else 2), told
            assert compressor.stats().steps == (step + 1) * (2 if way == "twice" else 1), told
            if way == "edited":
                for p in model.parameters():
                    p.grad.mul_(100)
                    p.grad.zero_()
        finite(model, compressor, told)
        same_weights(model, told)
        results[way] = (averaged, list(memory(compressor).values()), [p.detach() for p in model.parameters()])
    for skipped, edited in zip(results["skipped"], results["edited"]):
        same_bits(edited, skipped, where(method))


@check_on_two
def what_is_small_is_applied_in_the_end():
    """A gradient of [1, 0.01, 0, 0] with one coordinate a step: the small one waits, and what is owed of it does not grow."""
    gradient = torch.tensor([[1.0, 0.01], [0.0, 0.0]])
    for text, owed in (
        ("sketch:k=1,momentum=0,columns=64,exact_below=0", 1.01),
        ("dore:block=4,exchange=sharded,dense_below=0", 3.0),
    ):
        model = Given((2, 2))
        compressor = hvc.Compression.parse(text, model)
        optimizer, beside, total = wrap(model, compressor), Beside(compressor), np.zeros((2, 2))
        for step in range(1, 301):
            told, mean = f"{text}, step {step}", beside.step([{"weights.0": gradient}] * SIZE)["weights.0"]
            if step <= 150:  # from then on the simulation, which has the same bits, is enough
                same_bits(reduce(model, optimizer, [gradient]), [mean], told)
            total += mean
            assert_allclose(total, step * gradient.numpy(), atol=owed, rtol=0, err_msg=told)
            if text.startswith("sketch"):
                assert total[0, 1] <= 0.01 * step + 1e-5, f"{told}: {total}"
            assert step != 150 or total[0, 1] > 0, f"{told}: nothing of the small coordinate"


@check_on_two
@each
def what_was_handed_over_may_be_overwritten_at_once(method):
    model, twin = Given(*SHAPES), Given(*SHAPES)
    compressors = [compression(method, m) for m in (model, twin)]
    optimizers = [wrap(m, c) for m, c in zip((model, twin), compressors)]
    for step in range(4):
        grads = given_grads(step, RANK)
        expected = reduce(twin, optimizers[1], grads)
        optimizers[0].zero_grad()
        model.loss(grads).backward()
        for p in model.weights:
            p.grad.fill_(1e9)
        optimizers[0].synchronize()
        same_bits([p.grad for p in model.weights], expected, where(method, f"step {step}"))
        same_bits(memory(compressors[0]).values(), memory(compressors[1]).values(), where(method, f"step {step}"))
        with optimizers[0].skip_synchronize():
            optimizers[0].step()


def least_squares(columns: int = 100) -> tuple[torch.nn.Linear, Callable[[], torch.Tensor]]:
    torch.manual_seed(9)
    model = torch.nn.Linear(columns, 1)
    inputs, truth = randn(400, columns, seed=10 + RANK), randn(columns, 1, seed=12)
    return model, lambda: (model(inputs) - inputs @ truth).square().mean() / 2


@check_on_two
def a_learning_rate_that_falls_meets_no_residual_of_the_old_one():
    for text in ("sketch:ratio=0.5,momentum=0,exact_below=0", "dore:block=32,exchange=sharded,eta=0.5,dense_below=0"):
        model, loss = least_squares()
        compressor = hvc.Compression.parse(text, model)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters(), compression=compressor)
        first = float(hvd.allreduce(loss().detach(), name="loss"))
        for step in range(110):
            told, falls = f"{text}, step {step}", step == 100
            if falls:
                optimizer.param_groups[0]["lr"] = 0.001
                before, owed = float(hvd.allreduce(loss().detach(), name="loss")), residual_of(compressor)
                grad = hvd.allreduce(torch.autograd.grad(loss(), model.weight)[0], name="gradient")
            weight = model.weight.detach().clone()
            step_of(optimizer, loss())
            if falls:
                moved, allowed = float((model.weight - weight).norm()), float(grad.norm()) + owed
                assert moved <= 3 * 0.001 * allowed, f"{told}: {moved} for {allowed}"
                after = float(hvd.allreduce(loss().detach(), name="loss"))
                assert after <= 1.05 * before, f"{told}: from {before} to {after}"
        assert before < 0.1 * first, f"{text}: nothing is learned: {first}, {before}"
        finite(model, compressor, text)
        same_weights(model, text)


def residual_of(compressor: hvc.Compressor) -> float:
    """The norm of what all ranks keep, as it enters the mean."""
    return float(np.mean(everyone(compressor.residual_norm())))


@check_on_two
@each
def learning_rates_of_zero_leave_weights_as_they_are(method):
    """A warm-up from zero; and a group of parameters whose rate is zero, with and without rescaling."""
    for options in ({}, {"rescale": True}) if method == "dore" else ({},):
        model, loss = least_squares()
        base = torch.optim.SGD([{"params": [model.weight], "lr": 0.0}, {"params": [model.bias], "lr": 0.0}])
        compressor = tiny(method, model, **options, **({"optimizer": base} if options else {}))
        optimizer = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters(), compression=compressor)
        first = bits(model)
        for step in range(25):
            told = where(method, options, f"step {step}")
            optimizer.param_groups[0]["lr"] = 0.1 * min(step, 20) / 20 if method != "sketch" else 0.02 * min(step, 20) / 20
            step_of(optimizer, loss())
            finite(model, compressor, told)
            assert (bits(model)[0] == first[0]) == (step == 0), told
            assert bits(model)[1] == first[1], told
        same_weights(model, told)


class Randomness:
    """The states of the generators of Python, NumPy and PyTorch."""

    def __init__(self):
        self.states = [repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state().tolist()]  # noqa: NPY002

    def __eq__(self, other):
        return self.states == other.states


@check_on_three
@each
def draws_are_shared_and_are_no_others(method):
    """Global generators differ between the ranks, and are left alone; equal layers in equal steps have draws of their own."""
    runs = []
    for _ in range(2):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(RANK)
        model, trajectory = Given((32, 32), (32, 32)), []
        compressor = compression(method, model, seed=3)
        optimizer = wrap(model, compressor)
        for step in range(50):
            told = where(method, f"step {step}")
            if RANK == 0:
                torch.rand(5), [random.random() for _ in range(5)], np.random.rand(5)  # noqa: NPY002
            before = Randomness()
            grad = randn(32, 32, seed=step // 2 if method == "sketch" else 1)  # the same for both layers and all ranks
            got = reduce(model, optimizer, [grad, grad] if method != "sketch" else given_grads(step, RANK, [(32, 32)] * 2))
            assert Randomness() == before, f"global generators have moved: {told}"
            if method == "atomo":  # without memory
                assert not torch.equal(*got), f"two layers have the same draws: {told}"
                assert not trajectory or not torch.equal(got[0], trajectory[-1]), f"two steps have the same draws: {told}"
            trajectory.append(got[0])
        if method == "dore":
            assert not torch.equal(model.weights[0], model.weights[1]), f"two layers have the same draws: {told}"
        same_weights(model, told)
        runs.append(model.weights[0].detach())
    if os.environ.get("HOROVOD_FUSION_THRESHOLD") == "0":
        same_bits(runs[1:], runs[:1], where(method))
    assert_allclose(runs[1], runs[0], rtol=1e-6, atol=1e-9, err_msg=where(method))


@check_on_three
@each
def what_a_rank_sends_is_hashed_alike_or_drawn_apart(method):
    """Of equal gradients all ranks send the same sketch, and each its own draws of codes."""
    model, sent = Given((32, 32)), []
    compressor = compression(method, model)
    optimizer, submit = wrap(model, compressor), compressor._transport_in_use.submit
    compressor._transport.submit = lambda request, name: (sent.append((name, request)), submit(request, name))[1]
    payloads = []
    for step in range(2):
        sent.clear()
        reduce(model, optimizer, [randn(32, 32, seed=1)])
        request = next(request for name, request in sent if name == "0.0")
        payloads.append(np.concatenate([np.atleast_1d(array).view(np.uint8) for array in parts(request)])[HEADER:].tobytes())
        assert len(set(everyone(payloads[-1]))) == (1 if method == "sketch" else SIZE), where(method, f"step {step}")
    assert payloads[0] != payloads[1], where(method)


def parts(request) -> list[np.ndarray]:
    """The arrays that a collective is given."""
    return list(getattr(request, "payloads", None) or [getattr(request, "payload", getattr(request, "array", None))])


@check_on_two
@each
def a_step_is_not_many_times_slower_than_without_compression(method):
    """Medians of one run, taken in turns; what the ratio is is printed, and the bound is wide."""
    torch.manual_seed(10)
    models = [torch.nn.Sequential(torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 784)) for _ in range(2)]
    usual = getattr(hvc.Compression, method)(models[1])
    optimizers = [wrap(m, c) for m, c in zip(models, (hvc.Compression.none, usual))]
    seconds: list[list[float]] = [[], []]
    for step in range(7):
        for model, optimizer, taken in zip(models, optimizers, seconds):
            inputs = randn(64, 784, seed=2 * step + RANK)
            everyone(None)
            began = time.perf_counter()
            step_of(optimizer, (model(inputs) - inputs).square().mean())
            taken.append(time.perf_counter() - began)
    dense, compressed = (float(np.median(taken[1:])) for taken in seconds)
    print(f"{method}: a step of 1.6M parameters takes {compressed / dense:.1f} times as long as without compression")
    assert compressed < 30 * dense + 0.1, where(method, seconds)


@check_of_one
@each
def alone_in_the_world_training_is_as_without_compression(method):
    results = []
    for wrapped in (False, True):
        model, loss = least_squares()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compressor = tiny(method, model)
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compressor)
        first = float(loss())
        for _ in range(50):
            step_of(optimizer, loss())
        assert float(loss()) < 0.5 * first, f"{method}: {first}, {float(loss())}"
        results.append(bits(model))
    assert results[0] == results[1], method
    stats = compressor.stats()
    assert stats.last.ratio in (None, 1.0) and stats.total.ratio in (None, 1.0) and compressor.residual_norm() == 0, stats


@check_of_one
@each
def alone_in_the_world_a_gradient_comes_back(method):
    """By a direct call, without Horovod's optimizer and without peers."""
    model = Given((20, 30))
    compressor, total = hvc.Compression.parse(LOSSLESS[method], model), torch.zeros(20, 30)
    for step in range(20):
        model.weights[0].grad = randn(20, 30, seed=1)
        got = compressor.decompress(*compressor.compress(model.weights[0].grad))
        assert got.shape == (20, 30) and got.dtype == torch.float32, method
        total += got
        if method != "dore":
            assert_allclose(got, randn(20, 30, seed=1), rtol=1e-3, atol=1e-3, err_msg=f"{method}, step {step}")
    # Codes of blocks of two keep the larger, and draw the other: 20 means of what is no more than once the larger.
    assert float((total / 20 - randn(20, 30, seed=1)).abs().max()) < 1.0, method
    assert compressor.stats().steps == 20 and compressor.stats().total.ratio in (None, 1.0), compressor.stats()


@check_on_two
def sketches_of_few_rows_learn_beside_tensors_that_are_sent_as_they_are():
    for rows in (1, 5):
        torch.manual_seed(11)
        model = torch.nn.Sequential(torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        truth, losses = randn(784, 10, seed=1), []
        compressor = hvc.Compression.sketch(model, rows=rows, momentum=0)
        optimizer = wrap_with(model, compressor, lr=0.2)
        for step in range(100):
            inputs = randn(32, 784, seed=2 * (step % 5) + RANK)
            loss = torch.nn.functional.cross_entropy(model(inputs), (inputs @ truth).argmax(1))
            before = bits(model)
            step_of(optimizer, loss)
            assert bits(model)[0] != before[0] and bits(model)[2] != before[2], f"rows={rows}, step {step}: no update"
            assert compressor.stats().last.wire > 4 * rows, f"rows={rows}, step {step}: {compressor.stats().last}"
            losses.append(float(loss.detach()))
        assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5]), f"rows={rows}: {losses[:5]}, {losses[-5:]}"
        finite(model, compressor, f"rows={rows}")
        same_weights(model, f"rows={rows}")
    with pytest.raises(ValueError, match="rows must be odd"):
        hvc.Compression.sketch(model, rows=2)


@check_on_two
@each
def every_parameter_has_its_own_gradient_back(method):
    shapes = [(7, 5), (11,), (3, 3, 3), (), (64, 20), (1, 1), (40,), (12, 12)]
    grads = [torch.full(shape, float(number)) for number, shape in enumerate(shapes, 1)]
    model = Given(*shapes)
    compressor = hvc.Compression.parse(LOSSLESS[method], model, **({"k": 10000} if method == "sketch" else {}), **ONE[method])
    got = reduce(model, wrap(model, compressor), grads)
    for number, (mean, grad) in enumerate(zip(got, grads)):
        assert_allclose(mean, grad, rtol=1e-5, err_msg=where(method, f"parameter {number}"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()
    torch_checks.RANK, torch_checks.SIZE = RANK, SIZE
    main(RANK, SIZE)
