"""A small CNN on Fashion-MNIST, with stock Horovod and one more argument.

    mpirun -np 2 python examples/pytorch_fashion_mnist.py --compression dore

On several hosts: mpirun -np 4 --hostfile hosts python examples/pytorch_fashion_mnist.py --compression dore
"""

from __future__ import annotations

import argparse

import datasets
import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional

import hvdcompress.torch as hvc


class CNN(nn.Module):
    """Two convolutions and two linear layers; `side` is the images' height and width."""

    def __init__(self, side: int = 28):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.norm = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * (side // 4) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.norm(self.conv2(x))), 2)
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def average_batch_norm(model: nn.Module) -> None:
    """Each rank has seen other images: the running statistics that evaluation uses are averaged."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(hvd.allreduce(buffer, name=f"buffer.{name}"))


@torch.no_grad()
def accuracy(model: nn.Module, images: datasets.Images) -> float:
    """The share of images that is classified rightly; each rank looks at a part of them."""
    average_batch_norm(model)
    model.eval()
    x, y = (torch.from_numpy(a[hvd.rank() :: hvd.size()]) for a in images)
    right = sum((model(xs).argmax(1) == ys).sum() for xs, ys in zip(x.split(500), y.split(500)))
    model.train()
    return hvd.allreduce(torch.as_tensor(right).float(), op=hvd.Sum, name="right").item() / len(images.y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default="dore:block=64,scales=byte", help="none, fp16, or a method with options")
    parser.add_argument("--data", choices=["fashion-mnist", "digits"], default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--max-steps", type=int, default=None, help="end after so many steps")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    splits = datasets.load(args.data)
    train = datasets.join(splits.train, splits.validation)
    x, y = torch.from_numpy(train.x), torch.from_numpy(train.y)

    model = CNN(side=x.shape[-1])
    compression = hvc.Compression.parse(args.compression, model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    per_rank = len(y) // hvd.size()
    steps = args.epochs * (per_rank // args.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    shuffle, step = torch.Generator().manual_seed(1), 0
    for epoch in range(args.epochs):
        own = torch.randperm(len(y), generator=shuffle)[hvd.rank() :: hvd.size()][:per_rank]
        for batch in own.split(args.batch_size):
            if len(batch) < args.batch_size or step == args.max_steps:
                break
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
        test = accuracy(model, splits.test)
        if hvd.rank() == 0:
            left = ""
            if isinstance(compression, hvc.Compressor) and hvd.size() > 1:
                left = f", {compression.stats().last.ratio:.1%} of the dense bytes"
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {test:.2%}{left}", flush=True)
        if step == args.max_steps:
            break


if __name__ == "__main__":
    main()
