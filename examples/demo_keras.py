"""How ci/demo trains with Keras."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import tensorflow as tf
from demo_methods import BATCH, WARM_UP, Method, Run
from keras_fashion_mnist import callbacks, cnn, compiled, part

import hvdcompress.tensorflow as hvc

keras = tf.keras


class Steps(keras.callbacks.Callback):
    """Sets the learning rate of each step, which rises at first and then falls to zero; writes down what the step came to."""

    def __init__(self, run: Run, compression: Any, lr: float, total: int, tick: Callable[[], None]):
        super().__init__()
        self.run, self.compression, self.lr, self.total, self.tick = run, compression, lr, total, tick

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = len(self.run.losses)
        self.model.optimizer.learning_rate = self.lr * min((step + 1) / WARM_UP, (self.total - step) / self.total)
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.run.seconds.append(time.perf_counter() - self.began)
        # Keras gives the mean of the epoch's losses so far.
        so_far, self.mean = (batch * self.mean if batch else 0.0), logs["loss"]
        self.run.losses.append((batch + 1) * self.mean - so_far)
        if isinstance(self.compression, hvc.Compressor):
            self.run.formula += self.compression.predicted_bytes() / self.total
        self.tick()


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
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.backend.clear_session()
    keras.utils.set_random_seed(1000 * seed + hvd.rank())
    images, tested = splits
    x, y = part(images, BATCH, max_steps)
    total, run = epochs * (len(y) // BATCH), Run()
    compression = hvc.Compression.parse(method.compression)
    model = compiled(cnn(x.shape[1]), compression, lr, method.momentum)
    logs = str(output / "tensorboard" / f"{method.name}, lr {lr:g}, seed {seed}".replace(" ", "-").replace(",", ""))
    seen = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        validation_data=part(tested, 1),
        validation_batch_size=500,
        verbose=0,
        callbacks=[*callbacks(compression, logs), Steps(run, compression, lr, total, tick)],
    )
    run.accuracies = seen.history["val_accuracy"]
    dense = 4 * sum(v.shape.num_elements() for v in model.trainable_variables) * 2 * (hvd.size() - 1) / hvd.size()
    if method.bytes_per_element:  # by the formula: Horovod itself does not count
        run.formula = run.counted = dense * method.bytes_per_element / 4
        run.dense = dense
        return run
    run.take(compression.stats(), total)
    return run
