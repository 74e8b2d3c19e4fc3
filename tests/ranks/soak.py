"""A long training: soak.py <steps> <method> ... Memory stays what it was, and the weights of all ranks are the same to the bit.

Fashion-MNIST and an MLP of 0.1M parameters. Prints a line for each method.
"""

from __future__ import annotations

import gc
import hashlib
import sys

import datasets
import horovod.torch as hvd
import psutil
import torch
from torch import nn

import hvdcompress.torch as hvc

BATCH = 16
SETTLED = 0.1  # of the steps, after which memory is looked at
LOOKS = 50


def soak(method: str, steps: int) -> None:
    torch.manual_seed(0)
    train = datasets.load().train
    x, y = (torch.from_numpy(array[hvd.rank() :: hvd.size()]) for array in train)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    named = [(f"{method}.{name}", parameter) for name, parameter in model.named_parameters()]
    compression = hvc.Compression.parse(method, model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=named, compression=compression
    )
    process, resident, first = psutil.Process(), [], int(SETTLED * steps)
    for step in range(steps):
        start = step * BATCH % (len(y) - BATCH)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[start : start + BATCH]), y[start : start + BATCH])
        loss.backward()
        optimizer.step()
        if step >= first and (step - first) % max(1, (steps - first) // LOOKS) == 0:
            gc.collect()
            resident.append(process.memory_info().rss)
    growth = max(abs(one / resident[0] - 1) for one in resident)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    gathered = hvd.allgather_object((growth, digest))
    assert max(growth for growth, _ in gathered) <= 0.02, f"{method}: resident memory has changed by {gathered}"
    assert len({digest for _, digest in gathered}) == 1, f"{method}: the ranks' weights differ"
    assert compression.stats().steps == steps and compression.stats().abandoned == 0
    assert loss.item() < 1.0, f"{method}: has not learnt, loss {loss.item()}"
    if hvd.rank() == 0:
        shown = f"resident memory within {max(growth for growth, _ in gathered):.2%} of {resident[0] / 2**20:.0f} MiB"
        print(f"soaked: {method}, {steps} steps, {shown}, last loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    for method in sys.argv[2:]:
        soak(method, int(sys.argv[1]))
