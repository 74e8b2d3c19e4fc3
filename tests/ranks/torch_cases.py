"""What went wrong for others who train with compressed gradients in PyTorch, and must not here."""

from __future__ import annotations

import horovod.torch as hvd
import torch

import hvdcompress.torch as hvc
from ranks import torch_checks
from ranks.harness import check_on_two, each, main, same_bits
from ranks.torch_checks import SHAPES, Given, given_grads, memory, reduce, wrap

RANK, SIZE = 0, 1  # set when Horovod is

# Options that make something happen on small tensors.
OPTIONS = {
    "sketch": "sketch:ratio=0.5,exact_below=10,momentum=0.5",
    "atomo": "atomo:budget=0.3,unit=ratio,exchange=allgather",
    "dore": "dore:block=32,exchange=sharded,scales=byte",
}


def compression(method: str, model: torch.nn.Module, **options) -> hvc.Compressor:
    return hvc.Compression.parse(OPTIONS[method], model, **options)


@check_on_two
@each
def one_value_that_is_not_finite_is_forgotten_after_its_step(method):
    for value in (float("inf"), float("-inf"), float("nan")):
        model = Given(*SHAPES)
        compressor = compression(method, model)
        optimizer = wrap(model, compressor)
        for step in range(6):
            before, grads = memory(compressor) if step else {}, given_grads(step, RANK)
            if step == 3 and RANK == 1:
                grads[0][1, 2] = value
            got = reduce(model, optimizer, grads)
            assert all(torch.isfinite(g).all() for g in got) == (step != 3), (value, step)
            if step == 3:
                same_bits(memory(compressor).values(), before.values(), str(value))


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()
    torch_checks.RANK, torch_checks.SIZE = RANK, SIZE
    main(RANK, SIZE)
