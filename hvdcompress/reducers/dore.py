"""DORE, and the other methods of two passes that its paper compares with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..codecs import Codec, Ternary, TopK, codec_of
from ..core import Facts, Layout
from .two_pass import Settings, TwoPass


@dataclass(frozen=True)
class Dore(TwoPass):
    """Double residual compression.

    With h = mean h_i, gh = h + mean D_i and q = gh + eta e:

        rank i:  D_i = Q(g_i - h_i),   h_i += alpha D_i
        master:  G = beta Q(q),        e = q - Q(q)

    and G is the mean that the optimizer is given.

    Payload: Q's codes, see `Ternary`: scales, mask, signs. Bias: each Q is unbiased; e carries the error of the second
    to the next step. Memory, float32: W d for `allgather` with e d more; d + (W + 1) d / W for `sharded`.

    The paper compresses the *model* residual, -lr q, and applies it to the model. Here e stays in gradient units and G
    goes through the optimizer. The two are the same when: the optimizer is plain SGD, x -= lr G, with nothing after G
    (no momentum, no adaptivity, no clipping; weight decay inside g_i); there is no proximal term; one lr holds inside
    each block; Q is homogeneous and odd for given draws, as the ternary codec is; and lr is constant, or `rescale` is
    on. They are bitwise the same where lr, its ratio, beta and eta are powers of two or sums of few of them; else
    rounding flips single draws and both are correct runs of DORE. With another optimizer this is error feedback on the
    mean gradient, before the optimizer.

    Args:
        alpha: rate of the memories h_i, in [0, 1]; 0 is no memory.
        beta: share of the code that is applied, in (0, 1].
        eta: share of the error that is fed back, in [0, 1]. 1 is the experiments' value and the fragile one: it holds
            for small steps only; 0.5 holds for steps 4 to 8 times larger.
        block: elements that share a scale. Smaller blocks have less noise and more bytes of scales.
        scales: "float32" or "byte" (rounded up; a quarter of the size).
        exchange: "allgather", "sharded", or "auto": what is predicted to be faster, or a dense allreduce without memory for a
            bucket so small, or so many ranks, that neither would save bytes.
        rescale: multiplies e by lr_old / lr_new, which keeps it the same in model units when the rate changes. Each
            step must then be told its rate. A rate of zero changes nothing.
        uplink, downlink: another codec than Ternary(block, scales), or its name with options, for the first or the second
            residual.

    Raises:
        ValueError: an option is out of its range.

    >>> Dore(block=64, scales="byte").alpha
    0.1

    Source: X. Liu, Y. Li, J. Tang, M. Yan, "A Double Residual Compression Algorithm for Efficient Distributed
    Learning", 2020, Algorithm 1; alpha, beta, eta, block and the norm are those of its experiments.
    """

    facts: ClassVar[Facts] = Facts(
        title="DORE",
        source="Liu et al. 2020, Algorithm 1",
        travels="ternary codes of both residuals; alltoall + allgather, or allgather",
        wire="2 c d (W - 1) / W, or (W - 1) c d; c = (1 + p + 32 / block) / 8",
        bias="unbiased codes; the second's error is fed back",
        memory="2 d + d / W; (W + 1) d if gathered",
        exact_for="plain SGD at a constant rate, or with rescale; else error feedback before the optimizer",
        use="first choice: bytes that do not grow with W, converges to the optimum",
    )

    alpha: float = 0.1
    beta: float = 1.0
    eta: float = 1.0
    block: int = 256
    scales: str = "float32"
    exchange: str = "auto"
    rescale: bool = False
    uplink: Codec | str | None = None
    downlink: Codec | str | None = None

    def settings(self, layout: Layout) -> Settings:
        usual = Ternary(self.block, self.scales)
        return Settings(
            usual if self.uplink is None else codec_of(self.uplink),
            usual if self.downlink is None else codec_of(self.downlink),
            alpha=self.alpha,
            beta=self.beta,
            eta=self.eta,
            exchange=self.exchange,
            rescale=self.rescale,
        )


@dataclass(frozen=True)
class Diana(TwoPass):
    """Gradient residuals against a memory, and a dense mean: DORE without its second compression.

        rank i:  D_i = Q(g_i - h_i),   h_i += alpha D_i
        master:  G = mean (h_i + D_i)

    Payload: see `Ternary`; the mean comes back as float32, or not at all where every rank is the master. Bias: none.
    Memory, float32: W d for `allgather`, 2 d for `sharded`.

    Args:
        alpha, block, scales, exchange: as for `Dore`.

    Raises:
        ValueError: an option is out of its range.

    Source: K. Mishchenko, E. Gorbunov, M. Takac, P. Richtarik, "Distributed Learning with Compressed Gradient
    Differences", 2019; here as DORE's paper compares it, with the maximum norm.
    """

    facts: ClassVar[Facts] = Facts(
        title="DIANA",
        source="Mishchenko et al. 2019",
        travels="ternary codes of the gradient residual; the mean as float32 unless gathered",
        wire="(W - 1) c d, or (c + 4) d (W - 1) / W; c as for DORE",
        bias="unbiased",
        memory="W d; 2 d if sharded",
        exact_for="every optimizer: the mean is unbiased",
        use="few ranks, and no tuning of error feedback wanted",
    )

    alpha: float = 0.1
    block: int = 256
    scales: str = "float32"
    exchange: str = "auto"

    def settings(self, layout: Layout) -> Settings:
        return Settings(Ternary(self.block, self.scales), alpha=self.alpha, exchange=self.exchange)


@dataclass(frozen=True)
class MemSGD(TwoPass):
    """Quantised gradients with each rank's error fed back: D_i = Q(g_i + e_i), e_i = g_i + e_i - D_i, G = mean D_i.

    Payload, exchange: as for `Diana`. Bias: unbiased for given errors, but Q with a block of many elements is no
    contraction, so the errors, though bounded for small steps, keep the method at a distance from the optimum.
    Memory: d float32.

    Args:
        block, scales, exchange: as for `Dore`.
        rescale: the paper's error is in model units: multiplies e_i by lr_old / lr_new when the rate changes.

    Raises:
        ValueError: an option is out of its range.

    Source: S. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", 2018; here with the quantiser with which
    DORE's paper compares it. With the paper's own operator it is `TopKSGD`.
    """

    facts: ClassVar[Facts] = Facts(
        title="MEM-SGD",
        source="Stich et al. 2018; quantiser of Liu et al. 2020",
        travels="ternary codes of gradient + error; the mean as float32 unless gathered",
        wire="as DIANA",
        bias="error feedback; no contraction at block > 16",
        memory="d",
        exact_for="plain SGD at a constant rate, or with rescale",
        use="comparison",
    )

    block: int = 256
    scales: str = "float32"
    exchange: str = "auto"
    rescale: bool = False

    def settings(self, layout: Layout) -> Settings:
        return Settings(Ternary(self.block, self.scales), feedback=1.0, exchange=self.exchange, rescale=self.rescale)


@dataclass(frozen=True)
class DoubleSqueeze(TwoPass):
    """Gradients quantised both ways, with both errors fed back.

        rank i:  D_i = Q(g_i + e_i),   e_i = g_i + e_i - D_i
        master:  q = mean D_i + e,     G = Q(q),   e = q - G

    Payload, exchange: as for `Dore`. Bias: error feedback with a quantiser that is no contraction: it diverges at steps at
    which DORE converges. Memory, float32: d + d / W; 2 d if gathered.

    Args:
        block, scales, exchange, rescale: as for `Dore`.

    Raises:
        ValueError: an option is out of its range.

    Source: H. Tang, X. Lian, C. Yu, T. Zhang, J. Liu, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass
    Error-Compensated Compression", 2019; here with the quantiser with which DORE's paper compares it.
    """

    facts: ClassVar[Facts] = Facts(
        title="DoubleSqueeze",
        source="Tang et al. 2019; quantiser of Liu et al. 2020",
        travels="ternary codes both ways",
        wire="as DORE",
        bias="error feedback both ways; no contraction at block > 16",
        memory="d + d / W; 2 d if gathered",
        exact_for="plain SGD at a constant rate, or with rescale",
        use="comparison",
    )

    block: int = 256
    scales: str = "float32"
    exchange: str = "auto"
    rescale: bool = False

    def settings(self, layout: Layout) -> Settings:
        codec = Ternary(self.block, self.scales)
        return Settings(codec, codec, feedback=1.0, eta=1.0, exchange=self.exchange, rescale=self.rescale)


@dataclass(frozen=True)
class DoubleSqueezeTopK(TwoPass):
    """`DoubleSqueeze` with the largest elements in place of codes, both ways.

    Every rank is the master: the k largest of a mean are the same for all only where all of it is seen.

    Payload: see `TopK`; (W - 1) payloads. Bias: a contraction with error feedback both ways. Memory: 2 d float32.

    Args:
        ratio: k over the number of elements of a bucket, in (0, 1].
        exchange: "allgather", or "auto": a dense allreduce without memory where that would send more.
        rescale: as for `Dore`.

    Raises:
        ValueError: an option is out of its range.

    Source: as of `DoubleSqueeze`.
    """

    facts: ClassVar[Facts] = Facts(
        title="DoubleSqueeze (top-k)",
        source="Tang et al. 2019",
        travels="places and values of the k largest; allgather",
        wire="(W - 1) k (34 + log2(d / k)) / 8",
        bias="contraction, error feedback both ways",
        memory="2 d",
        exact_for="plain SGD at a constant rate, or with rescale",
        use="comparison; few ranks",
    )

    ratio: float = 0.05
    exchange: str = "auto"
    rescale: bool = False

    def settings(self, layout: Layout) -> Settings:
        codec = TopK(self.ratio)
        return Settings(codec, codec, feedback=1.0, eta=1.0, exchange=self.exchange, rescale=self.rescale)


@dataclass(frozen=True)
class TopKSGD(TwoPass):
    """The largest elements of gradient + error of each rank: D_i = top_k(g_i + e_i), e_i = the rest, G = mean D_i.

    Payload: see `TopK`; (W - 1) payloads. Bias: a contraction with error feedback. Memory: d float32.

    Args:
        ratio: k over the number of elements of a bucket, in (0, 1].
        exchange: as for `DoubleSqueezeTopK`.
        rescale: as for `MemSGD`.

    Raises:
        ValueError: an option is out of its range.

    Source: S. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", 2018, Algorithm 1.
    """

    facts: ClassVar[Facts] = Facts(
        title="top-k with error feedback (MEM-SGD's own operator)",
        source="Stich et al. 2018, Algorithm 1",
        travels="places and values of the k largest; allgather",
        wire="(W - 1) k (34 + log2(d / k)) / 8",
        bias="contraction, error feedback",
        memory="d",
        exact_for="plain SGD at a constant rate, or with rescale",
        use="few ranks and a high ratio",
    )

    ratio: float = 0.01
    exchange: str = "auto"
    rescale: bool = False

    def settings(self, layout: Layout) -> Settings:
        return Settings(TopK(self.ratio), feedback=1.0, exchange=self.exchange, rescale=self.rescale)
