"""A training under elastic Horovod, whose ranks become more or fewer: elastic.py <directory> <method> <what happens>.

Each rank writes what it has seen, step by step, to a file of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch

import hvdcompress.torch as hvc

STEPS, AT = 30, 8
directory, event = Path(), ""  # of this start


def note(**seen) -> None:
    with (directory / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"rank": hvd.rank(), "size": hvd.size(), **seen}) + "\n")


def happen(step: int) -> None:
    """What happens to the ranks, after a step that was committed."""
    if step != AT or (directory / "happened").exists():
        return
    if event == "killed" and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
        (directory / "happened").touch()
        os._exit(1)
    if event != "killed" and hvd.rank() == 0:
        (directory / "happened").touch()
        (directory / "hosts").write_text({"more": "localhost:3", "fewer": "localhost:2"}[event] + "\n")


@hvd.elastic.run
def train(state, model, optimizer, compression) -> None:
    while state.step < STEPS:
        rng = torch.Generator().manual_seed(1000 * state.step + hvd.rank())
        x = torch.randn(16, 20, generator=rng)
        optimizer.zero_grad()
        model(x).sub(x[:, :10].sin()).square().mean().backward()
        optimizer.step()
        state.step += 1
        weights = np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
        note(
            step=state.step,
            weights=hashlib.sha256(weights.tobytes()).hexdigest(),
            finite=bool(np.isfinite(weights).all()),
            committed=compression.stats().steps,
            residual=compression.residual_norm(),
        )
        happen(state.step)
        if state.step >= AT and hvd.size() != {"more": 3, "fewer": 2, "killed": 2}[event]:
            time.sleep(0.5)  # until the driver has noticed
        state.commit()


if __name__ == "__main__":
    directory, text, event = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.ReLU(), torch.nn.Linear(60, 10))
    compression = hvc.Compression.parse(text, model, dense_below=100)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02), named_parameters=model.named_parameters(), compression=compression
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, step=0)
    train(state, model, optimizer, compression)
    note(step="end")
