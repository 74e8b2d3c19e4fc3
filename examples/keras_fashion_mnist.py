"""A small CNN on Fashion-MNIST with Keras, stock Horovod and one more argument.

    mpirun -np 2 python examples/keras_fashion_mnist.py --compression dore --logs logs
    tensorboard --logdir logs

The callback binds the compressor to the optimizer and puts what it does into History and TensorBoard.
"""

from __future__ import annotations

import argparse
from typing import Any

import datasets
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.keras import DistributedOptimizer
from horovod.tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback

import hvdcompress.tensorflow as hvc
from hvdcompress.keras import CompressionCallback

keras = tf.keras


def cnn(side: int = 28) -> Any:
    """Two convolutions and two dense layers; `side` is the images' height and width."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((side, side, 1)),
            layers.Conv2D(16, 5, padding="same", activation="relu"),
            layers.MaxPool2D(),
            layers.Conv2D(32, 5, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(128, "relu"),
            layers.Dense(10),
        ]
    )


def part(images: datasets.Images, batch: int, steps: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """This rank's images, channels last, and labels: whole batches, as many on every rank."""
    size = len(images.y) // hvd.size() // batch * batch
    own = slice(hvd.rank(), None, hvd.size())
    size = min(size, batch * steps) if steps else size
    return np.moveaxis(images.x[own][:size], 1, -1), images.y[own][:size]


class AverageBatchNorm(keras.callbacks.Callback):
    """Each rank has seen other images: the running statistics that evaluation uses are averaged."""

    def on_test_begin(self, logs: Any = None) -> None:
        for variable in self.model.non_trainable_variables:
            variable.assign(hvd.allreduce(variable))


def compiled(model: Any, compression: Any, rate: Any, momentum: float = 0.9) -> Any:
    """The model, with Horovod's optimizer; `rate` is a learning rate or a schedule of it."""
    optimizer = DistributedOptimizer(keras.optimizers.SGD(rate, momentum=momentum), compression=compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def callbacks(compression: Any, logs: str | None = None) -> list[Any]:
    """Those that a distributed training has; TensorBoard's figures are written by the first rank."""
    made = [BroadcastGlobalVariablesCallback(0), AverageBatchNorm(), MetricAverageCallback()]
    if isinstance(compression, hvc.Compressor):
        made.append(CompressionCallback())
    if logs and hvd.rank() == 0:
        made.append(keras.callbacks.TensorBoard(logs))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default="dore:block=64,scales=byte", help="none, fp16, or a method with options")
    parser.add_argument("--data", choices=["fashion-mnist", "digits"], default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--max-steps", type=int, default=None, help="of an epoch")
    parser.add_argument("--logs", default=None, help="where TensorBoard's files go")
    args = parser.parse_args()

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(hvd.rank())
    splits = datasets.load(args.data)
    x, y = part(datasets.join(splits.train, splits.validation), args.batch_size, args.max_steps)
    decay = keras.optimizers.schedules.PolynomialDecay(args.lr, args.epochs * (len(y) // args.batch_size), 0.0)
    compression = hvc.Compression.parse(args.compression)
    model = compiled(cnn(x.shape[1]), compression, decay)
    model.fit(
        x,
        y,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=part(splits.test, 1),
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=callbacks(compression, args.logs),
    )


if __name__ == "__main__":
    main()
