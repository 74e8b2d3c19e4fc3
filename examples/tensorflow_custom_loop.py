"""A training loop of one's own in TensorFlow, with stock Horovod and one more argument.

mpirun -np 2 python examples/tensorflow_custom_loop.py --compression sketch:momentum=0 --lr 0.2
"""

from __future__ import annotations

import argparse

import datasets
import horovod.tensorflow as hvd
import tensorflow as tf
from keras_fashion_mnist import cnn, part

import hvdcompress.tensorflow as hvc

keras = tf.keras


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default="dore:block=64,scales=byte", help="none, fp16, or a method with options")
    parser.add_argument("--data", choices=["fashion-mnist", "digits"], default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--max-steps", type=int, default=None, help="of an epoch")
    args = parser.parse_args()

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    splits = datasets.load(args.data)
    x, y = part(datasets.join(splits.train, splits.validation), args.batch_size, args.max_steps)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(y), seed=1).batch(args.batch_size)
    model = cnn(x.shape[1])
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.PolynomialDecay(args.lr, args.epochs * len(batches), 0.0))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compression = hvc.Compression.parse(args.compression)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        # Each step has a tape of its own; the memory is kept by the compressor.
        tape = hvc.DistributedGradientTape(tape, compression, optimizer=optimizer)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    hvd.broadcast_variables(model.variables, root_rank=0)
    for epoch in range(args.epochs):
        for images, labels in batches:
            loss = step(images, labels)
        for variable in model.non_trainable_variables:  # the running statistics of batch norm
            variable.assign(hvd.allreduce(variable))
        own_x, own_y = part(splits.test, 1)
        right = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(model.predict(own_x, 500, verbose=0), 1), own_y), tf.float32))
        right = hvd.allreduce(right)
        if hvd.rank() == 0:
            left = ""
            if isinstance(compression, hvc.Compressor) and hvd.size() > 1:
                left = f", {compression.stats().last.ratio:.1%} of the dense bytes"
            print(f"epoch {epoch + 1}: loss {float(loss):.3f}, test accuracy {float(right):.2%}{left}", flush=True)


if __name__ == "__main__":
    main()
