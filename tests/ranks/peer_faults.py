"""A rank that is frozen, slow, killed or ends in the middle of a training: peer_faults.py <framework> <fault>.

It is the last rank, in its sixth step; before it is frozen it is slow once, in its third. What is told, and that a rank came to
the end, is printed with the time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np

STEPS, SLOW_AT, AT = 8, 2, 5


def happen(fault: str) -> None:
    say(fault)
    if fault == "frozen":
        subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "slow":
        time.sleep(5)
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "ended":
        raise RuntimeError("the data are gone")


def say(what: str) -> None:
    print(f"\n[{time.time():.3f}] {what}", flush=True)


def with_torch() -> tuple[int, int, Callable[[int], None]]:
    import horovod.torch as hvd
    import torch

    import hvdcompress.torch as hvc

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 30))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=hvc.Compression.dore(model, block=16, exchange="sharded", bucket_mb=0.002),
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()

    return hvd.rank(), hvd.size(), step


def with_tensorflow() -> tuple[int, int, Callable[[int], None]]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import hvdcompress.tensorflow as hvc

    hvd.init()
    variables, compression = [tf.Variable(tf.ones([40, 60]))], hvc.Compression.dore(block=16, exchange="sharded")

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ variables[0])
        return hvc.DistributedGradientTape(tape, compression).gradient(loss, variables)

    def step(number: int) -> None:
        gradients(tf.random.normal([8, 40]))

    return hvd.rank(), hvd.size(), step


def with_mpi() -> tuple[int, int, Callable[[int], None]]:
    from mpi4py import MPI

    from hvdcompress import Dore
    from hvdcompress.drivers.mpi import DistributedMean

    mean = DistributedMean(Dore(block=16, exchange="sharded"))

    def step(number: int) -> None:
        mean([np.random.default_rng(number).normal(size=(40, 60))])

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, step


if __name__ == "__main__":
    framework, fault = sys.argv[1:]
    rank, size, step = {"torch": with_torch, "tensorflow": with_tensorflow, "mpi": with_mpi}[framework]()
    warnings.showwarning = lambda message, *where: say(f"told: {message}")
    for number in range(STEPS):
        if rank == size - 1 and number in ({SLOW_AT, AT} if fault == "frozen" else {AT}):
            happen("slow" if number == SLOW_AT else fault)
        step(number)
    say(f"rank {rank} came to the end")
