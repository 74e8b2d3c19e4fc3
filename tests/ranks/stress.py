"""A random training: stress.py <steps> <seed>. Every step's mean is that of the simulation, bit for bit.

Parameters are used once, several times or not at all, in any order, differently on each rank; some are frozen for a while; two
backward passes make a step, or one that is left over; gradients are not finite, backward passes are given up. Whole numbers
make sums independent of their order.
"""

from __future__ import annotations

import collections
import faulthandler
import random
import sys

import horovod.torch as hvd
import numpy as np
import torch

import hvdcompress.torch as hvc
from hvdcompress.drivers.simulate import Simulation
from ranks.harness import same_bits

METHODS = (
    "dore:block=32,exchange=sharded,scales=byte",
    "sketch:ratio=0.5,exact_below=10,momentum=0",
    "atomo:budget=0.3,unit=ratio,exchange=allgather",
)
SHAPES = [(20 + i, 30) for i in range(10)] + [(4, 3, 5, 7), (5,), (9,), (1,), (), (0, 4)]
PATIENCE = 60  # seconds that a step may take


class Chances:
    """What happens in a step: on all ranks, and on each of them."""

    def __init__(self, seed: int, step: int):
        common = random.Random(f"{seed} {step}")
        self.order = [random.Random(f"{seed} {step} {rank}") for rank in range(hvd.size())]
        self.thaw = common.sample(range(len(SHAPES)), common.randint(0, 2)) if common.random() < 0.1 else []
        self.passes = 1 if common.random() < 0.2 else 2  # one of two is left over
        self.given_up = common.random() < 0.05
        self.spoilt = common.randrange(hvd.size()) if common.random() < 0.05 else None

    def uses(self, rank: int) -> list[int]:
        """Numbers of the parameters, as often as they are used in a backward pass of a rank."""
        chance = self.order[rank]
        used = chance.sample(range(len(SHAPES)), len(SHAPES) if self.given_up else chance.randint(1, len(SHAPES)))
        return chance.sample([*used, *used[:2], *used[:1]], len(used) + len(used[:2]) + len(used[:1]))


def train(method: str, steps: int, seed: int) -> collections.Counter:
    rank, size, seen = hvd.rank(), hvd.size(), collections.Counter()
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    names = [(f"w.{i}", w) for i, w in enumerate(weights)]
    compressor = hvc.Compression.parse(method, names, bucket_mb=0.005, dense_below=100)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=0.5), named_parameters=names, compression=compressor, backward_passes_per_step=2
    )
    layouts = compressor.binding.layouts
    simulation, frozen = Simulation(compressor.method, layouts, size), set()
    for step in range(steps):
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        chances = Chances(seed, step)
        for number in chances.thaw:
            frozen ^= {number}
            weights[number].requires_grad_(number not in frozen)
        total = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(size)]
        for once in range(chances.passes):
            losses = []
            for member in range(size):
                rng = np.random.default_rng([seed, step, once, member])
                for number in (n for n in chances.uses(member) if n not in frozen):
                    gradient = rng.integers(-64, 65, SHAPES[number]).astype(np.float32)
                    if member == chances.spoilt and once == 0:
                        gradient = gradient * np.float32("nan")
                    total[member][number] += gradient
                    if member == rank:
                        losses.append((weights[number] * torch.from_numpy(np.asarray(gradient))).sum())
            seen["backward passes"] += 1
            if losses:
                sum(losses).backward()
        if chances.given_up:
            hvd.barrier()  # Horovod does not take a name again before it is done with it, on all ranks
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            seen["given up"] += 1
            continue
        optimizer.synchronize()
        flat = [
            [np.concatenate([total[m][int(name[2:])].ravel() for name in layout.names]) for layout in layouts]
            for m in range(size)
        ]
        # The simulation has no tensors beside the buckets, whose values make a step what it is too.
        finite = all(np.isfinite(t).all() for of_rank in total for t in of_rank)
        expected = simulation.step(flat) if finite else None
        got = [w.grad.numpy() if w.grad is not None else np.zeros(w.shape, np.float32) for w in weights]
        where = f"{method}, step {step}"
        if expected is None:
            assert all(np.isnan(g).all() for g, w in zip(got, weights) if w.requires_grad), where
            seen["not finite"] += 1
        else:
            for layout, mean in zip(layouts, expected):
                same_bits([np.concatenate([got[int(name[2:])].ravel() for name in layout.names])], [mean], where)
            for number in {*range(len(SHAPES))} - {int(name[2:]) for layout in layouts for name in layout.names}:
                np.testing.assert_allclose(
                    got[number], np.mean([t[number] for t in total], axis=0, dtype=np.float64), rtol=1e-6, err_msg=where
                )
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
        seen["steps"] += 1
        seen["with frozen parameters"] += bool(frozen)
    faulthandler.cancel_dump_traceback_later()
    gathered = hvd.allgather(torch.cat([w.detach().reshape(-1) for w in weights])[None], name="weights").numpy()
    for others in gathered:
        same_bits([others], [gathered[0]], method)
    assert np.isfinite(gathered).all() and np.abs(gathered).max() > 0
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    seen = sum((train(method, int(sys.argv[1]), int(sys.argv[2])) for method in METHODS), collections.Counter())
    if hvd.rank() == 0:
        print("\nseen:", dict(seen), flush=True)
