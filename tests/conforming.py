"""The methods and codecs that are checked for conformance, each with options that make something happen on small tensors."""

from __future__ import annotations

from hvdcompress import codecs
from hvdcompress.codecs import Entrywise, Fourier, Levels, Spectral, Ternary, TopK

# A momentum of 1/2 keeps sums of whole numbers exact, whatever their order.
METHODS = {
    "atomo:atoms=spectral,budget=0.3,unit=ratio,values=float32,exchange=allgather",
    "atomo:atoms=spectral,budget=2,values=float16,reshape=paper,factors=svd,exchange=allgather",
    "atomo:atoms=entrywise,budget=0.1,unit=ratio,exchange=allgather",
    "atomo:atoms=fourier,budget=200,unit=bytes,exchange=allgather",
    "dense",
    "diana:block=32",
    "diana:block=32,exchange=sharded",
    "dore:block=32,exchange=allgather",
    "dore:downlink=identity,exchange=allgather",
    "gather:codec=spectral:budget=2,per_tensor=True,exchange=allgather",
    "dore:block=32,exchange=sharded,scales=byte",
    "double_squeeze:block=16",
    "double_squeeze:block=16,exchange=sharded",
    "double_squeeze_topk:ratio=0.2,exchange=allgather",
    "fetchsgd:k=200,columns=8192,exact_below=10,momentum=0.5",
    "gather:codec=levels:levels=3;block=64,downlink=levels,exchange=sharded",
    "gather",
    "gather:codec=topk:ratio=0.2,feedback=1,downlink=ternary:block=16,eta=1,exchange=allgather",
    "local_topk:ratio=0.1,exact_below=10,momentum=0.5",
    "mem_sgd:block=16",
    "qsgd:levels=1,block=64",
    "qsgd:levels=7,block=64,exchange=sharded",
    "sketch:ratio=0.5,exact_below=10,momentum=0.5",
    "sketch:ratio=0.5,P=0,exact_below=10,momentum=0.5",
    "terngrad",
    "terngrad_shared",
    "topk:ratio=0.1,exchange=allgather",
    "true_topk:ratio=0.1,exact_below=10,momentum=0.5",
}
CODECS = [
    *(make_codec() for make_codec in codecs.codecs.values()),
    Ternary(16, "byte"),
    Ternary(32, norm="l2"),
    Levels(1, 64),
    Levels(127, 100, "max"),
    Levels(1000, 7),
    TopK(k=3),
    Entrywise(40),
    Entrywise("l2"),
    Entrywise("max"),
    Entrywise(0.5),
    Entrywise(100, "bytes"),
    Fourier(0.3, "ratio", block=16),
    Spectral(1.5, reshape="paper", factors="svd"),
    Spectral("l2"),
    Spectral(0.3, "ratio", values="float32"),
]
