"""Faults that end a job: each needs a start of its own. Every rank prints how it ended."""

from __future__ import annotations

import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import horovod.tensorflow as hvd
import tensorflow as tf

import hvdcompress.tensorflow as hvc


def train(method: str, steps: int) -> None:
    v, compressor = tf.Variable(tf.zeros((40, 60))), hvc.Compression.parse(method)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * tf.random.normal(v.shape))
        hvc.DistributedGradientTape(tape, compressor).gradient(loss, [v])


def join(method: str) -> None:
    train(method, 5 if hvd.rank() == 0 else 3)
    hvd.join()


def join_before_the_first_step(method: str) -> None:
    train(method, 5 if hvd.rank() == 0 else 0)
    hvd.join()


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    started = time.monotonic()
    try:
        globals()[sys.argv[1]](sys.argv[2])
        ending = "no error"
    except Exception as error:
        ending = f"{type(error).__name__}: {error}".partition("\n")[0]
    print(f"\nrank {hvd.rank()} ended after {time.monotonic() - started:.1f} s: {ending}", flush=True)
