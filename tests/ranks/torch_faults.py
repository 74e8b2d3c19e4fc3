"""Faults that end a job: each needs a start of its own. Every rank prints how it ended."""

from __future__ import annotations

import sys
import time

import horovod.torch as hvd
import torch

import hvdcompress.torch as hvc


def optimizer_of(model: torch.nn.Module, compression) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), compression=compression
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()


def no_compression_on_one_rank(model: torch.nn.Module) -> None:
    compression = hvc.Compression.none if hvd.rank() == 1 else hvc.Compression.dore(model)
    train(model, optimizer_of(model, compression), 2)


def join(model: torch.nn.Module, method: str) -> None:
    train(model, optimizer_of(model, hvc.Compression.parse(method, model)), 5 if hvd.rank() == 0 else 3)
    hvd.join()


def join_before_the_first_step(model: torch.nn.Module, method: str) -> None:
    train(model, optimizer_of(model, hvc.Compression.parse(method, model)), 5 if hvd.rank() == 0 else 0)
    hvd.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    started = time.monotonic()
    try:
        globals()[sys.argv[1]](torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 3)), *sys.argv[2:])
        ending = "no error"
    except Exception as error:
        ending = f"{type(error).__name__}: {error}"
    print(f"\nrank {hvd.rank()} ended after {time.monotonic() - started:.1f} s: {ending}", flush=True)
