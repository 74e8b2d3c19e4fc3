"""How ci/demo trains with PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from demo_methods import BATCH, WARM_UP, Method, Run
from pytorch_fashion_mnist import CNN, accuracy
from torch.nn import functional

import hvdcompress.torch as hvc
from hvdcompress import traffic


class Counted:
    """One of Horovod's own compressors, with its bytes counted."""

    def __init__(self, compression: Any):
        self.compression, self.sent = compression, traffic.Traffic()

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        compressed, context = self.compression.compress(tensor)
        self.sent += traffic.allreduced(compressed.numel() * compressed.element_size(), hvd.size())
        self.sent += traffic.dense(tensor.numel() * tensor.element_size(), hvd.size())
        return compressed, context

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return self.compression.decompress(tensor, context)


def train(
    method: Method,
    lr: float,
    seed: int,
    epochs: int,
    max_steps: int | None,
    splits: Any,
    tick: Callable[[], None],
    output: Path,
) -> Run:
    images, tested = splits
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = CNN(side=images.x.shape[-1])
    compression = hvc.Compression.parse(method.compression, model)
    if not isinstance(compression, hvc.Compressor):
        compression = Counted(compression)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=method.momentum),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x, y = torch.from_numpy(images.x), torch.from_numpy(images.y)
    per_rank = len(y) // hvd.size()
    epoch_steps = min(per_rank // BATCH, max_steps or per_rank)
    total, shuffle, run = epochs * epoch_steps, torch.Generator().manual_seed(seed), Run()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, (total - step) / total))
    elements = sum(p.numel() for p in model.parameters())
    for _ in range(epochs):
        own = torch.randperm(len(y), generator=shuffle)[hvd.rank() :: hvd.size()]
        for batch in own.split(BATCH)[:epoch_steps]:
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            run.seconds.append(time.perf_counter() - began)
            schedule.step()
            run.losses.append(loss.item())
            if isinstance(compression, hvc.Compressor):
                run.formula += compression.predicted_bytes() / total
            tick()
        run.accuracies.append(accuracy(model, tested))
    if method.bytes_per_element:
        run.formula = 2 * (hvd.size() - 1) / hvd.size() * elements * method.bytes_per_element
        run.counted, run.dense = compression.sent.wire / total, compression.sent.dense / total
    else:
        run.take(compression.stats(), total)
    return run
