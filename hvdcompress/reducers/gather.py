"""Methods without memory: every rank's code by allgather, decoded in rank order; ATOMO, QSGD, TernGrad."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from .. import codecs, options
from ..codecs import Codec, Levels, PerTensor, Ternary, codec_of
from ..core import Facts, Layout
from .two_pass import Settings, TwoPass


@dataclass(frozen=True)
class Gather(TwoPass):
    """Any codec, with the memories of `Settings` that are asked for; by default none: G = mean Q(g_i).

    Payload, bias: the codec's. Memory: what is asked for, as for `Dore` (alpha, eta) and `MemSGD` (feedback).

    Args:
        codec: of what a rank sends; or its name with options, such as "levels:levels=7;block=256".
        downlink: of the mean.
        per_tensor: a payload for each tensor, by its shape, and not for the whole bucket.
        alpha, feedback, eta: in [0, 1]; see `Settings`. A codec that is biased wants feedback=1: without, a warning says
            that what it leaves out is lost.
        exchange, rescale: as for `Dore`.

    Raises:
        ValueError: an option is out of its range.
    """

    facts: ClassVar[Facts] = Facts(
        title="any codec",
        source="",
        travels="the codec's payload",
        wire="(W - 1) payloads, or (payload + 4 d) (W - 1) / W",
        bias="the codec's, with feedback if asked for",
        memory="none unless asked for",
        exact_for="the codec's",
        use="trying out a codec",
    )

    codec: Codec | str = "identity"
    downlink: Codec | str = "identity"
    per_tensor: bool = False
    alpha: float = 0.0
    feedback: float = 0.0
    eta: float = 0.0
    exchange: str = "auto"
    rescale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        options.flag("per_tensor", self.per_tensor)
        for codec, kept in ((self.codec, self.feedback), (self.downlink, self.eta)):
            if not codec_of(codec).unbiased and not kept:
                warnings.warn(
                    f"{codec} is biased, and what it leaves out is lost without error feedback: feedback=1, of the mean eta=1",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def settings(self, layout: Layout) -> Settings:
        codec = codec_of(self.codec)
        return Settings(
            PerTensor.of(codec, layout) if self.per_tensor else codec,
            codec_of(self.downlink),
            alpha=self.alpha,
            feedback=self.feedback,
            eta=self.eta,
            exchange=self.exchange,
            rescale=self.rescale,
        )


@dataclass(frozen=True)
class QSGD(TwoPass):
    """Stochastic rounding to levels of each block's norm: G = mean Q(g_i).

    Payload: of one level scales, mask and signs (`Ternary`); of more, norms and fixed-width codes (`Levels`). Bias: none.
    Memory: none. With one level and the Euclidean norm it is ATOMO with entries as atoms and budget="l2".

    Args:
        levels: 1, 3, 7, ... are 2, 3, 4, ... bits an element (of one level, 1 bit and one for each non-zero).
        block: the paper's bucket: elements that share a norm.
        norm: "l2" or "max".
        exchange: as for `Dore`: gathered codes, or codes to owners and a dense mean back.

    Raises:
        ValueError: an option is out of its range.

    Source: D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient
    Quantization and Encoding", 2017, section 3.
    """

    facts: ClassVar[Facts] = Facts(
        title="QSGD",
        source="Alistarh et al. 2017, section 3",
        travels="norms and codes of levels; the mean as float32 unless gathered",
        wire="(W - 1) c d, or (c + 4) d (W - 1) / W; c = (ceil(log2(2 levels + 1)) + 32 / block) / 8; of one level as DORE",
        bias="unbiased",
        memory="none",
        exact_for="every optimizer: the mean is unbiased",
        use="stateless training; 4 or 8 bits for accuracy first",
    )

    levels: int = 7
    block: int = 512
    norm: str = "l2"
    exchange: str = "auto"

    def settings(self, layout: Layout) -> Settings:
        usual: Codec = Levels(self.levels, self.block, self.norm)
        return Settings(Ternary(self.block, norm=self.norm) if self.levels == 1 else usual, exchange=self.exchange)


@dataclass(frozen=True)
class Atomo(TwoPass):
    """Atomic sparsification, tensor by tensor: G = mean Q(g_i), Q of the least variance for a budget of atoms.

    Payload: see `Spectral`, `Entrywise`, `Fourier`, with 4 bytes a tensor and a tensor that atoms would not shrink as it
    is. Bias: none. Memory: none. Bytes grow with the ranks: against a dense allreduce it pays while W times a payload is
    less than twice the model.

    Args:
        atoms: "spectral", "entrywise" or "fourier".
        budget, unit: per tensor: a number of "atoms", "bytes", or "ratio" of the tensor's bytes; or "l2" or "max".
        reshape, factors, values: of `Spectral`.
        block: of `Fourier`.
        exchange: "auto": a dense allreduce for a bucket that would not save bytes; or "allgather".

    Raises:
        ValueError: an option is out of its range, or is not one of these atoms'.

    Source: H. Wang, S. Sievert, Z. Charles, S. Liu, S. Wright, D. Papailiopoulos, "ATOMO: Communication-efficient Learning
    via Atomic Sparsification", 2018.
    """

    facts: ClassVar[Facts] = Facts(
        title="ATOMO",
        source="Wang et al. 2018",
        travels="factors of drawn singular vectors, or places and signs of drawn entries; allgather",
        wire="(W - 1) sum over tensors of 2 s (m + n + 2); entries: s (3 + log2(d / s)) / 8",
        bias="unbiased, of least variance for its budget",
        memory="none",
        exact_for="every optimizer: the mean is unbiased",
        use="few ranks, large matrices with few large singular values",
    )

    atoms: str = "spectral"
    budget: float | str = 3.0
    unit: str = "atoms"
    reshape: str | None = None
    factors: str | None = None
    values: str | None = None
    block: int | None = None
    exchange: str = "auto"

    def settings(self, layout: Layout) -> Settings:
        options.choice("atoms", self.atoms, ("spectral", "entrywise", "fourier"))
        own: dict[str, Any] = {name: getattr(self, name) for name in ("reshape", "factors", "values", "block")}
        codec = codecs.make(
            self.atoms, budget=self.budget, unit=self.unit, **{name: value for name, value in own.items() if value is not None}
        )
        return Settings(PerTensor.of(codec, layout), exchange=self.exchange)
