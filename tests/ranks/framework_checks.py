"""PyTorch's adapter and TensorFlow's in one process: the same gradients give the same bits.

A start of its own: two Horovods in a process do not always part in peace.
"""

from __future__ import annotations

import horovod.tensorflow as hvd
import horovod.torch
import torch
from conforming import METHODS
from numpy.testing import assert_allclose

import hvdcompress.tensorflow
import hvdcompress.torch
from hvdcompress.core import AllReduce, Group
from ranks import tensorflow_checks, torch_checks
from ranks.harness import check, main, same_bits
from ranks.tensorflow_checks import SHAPES, Reduced, given_grads


@check
def every_method_gives_the_same_means_and_memory():
    rank, size = hvd.rank(), hvd.size()
    for text in sorted(METHODS):
        reduced, model = Reduced(hvdcompress.tensorflow.Compression.parse(text, seed=5)), torch_checks.Given(*SHAPES)
        compressor = hvdcompress.torch.Compression.parse(text, model, seed=5)
        optimizer = torch_checks.wrap(model, compressor)
        layout = reduced.reduction.session.layouts[0]
        summed = any(stage.kind is AllReduce for stage in compressor.method.stages(layout, Group(rank, size)))
        for step in range(3):
            grads = given_grads(step, rank, whole=summed)
            expected = torch_checks.reduce_anyhow(model, optimizer, compressor, [torch.from_numpy(g.copy()) for g in grads])
            got, where = reduced(grads), f"{text}, {size} ranks, step {step}"
            same_bits(reduced.flattened(got), reduced.flattened([g.numpy() for g in expected]), where)
            for small in (1, 4):
                assert_allclose(got[small], expected[small], rtol=1e-6, atol=1e-7, err_msg=where)
        theirs, ours = torch_checks.memory(compressor), tensorflow_checks.memory(reduced.compressor)
        assert [name.partition(".")[2] for name in ours] == list(theirs), text
        same_bits(ours.values(), theirs.values(), text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    horovod.torch.init()
    hvd.init()
    for module in (torch_checks, tensorflow_checks):
        module.RANK, module.SIZE = hvd.rank(), hvd.size()
    main(hvd.rank(), hvd.size())
