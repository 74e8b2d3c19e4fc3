"""What ci/demo compares, and what a training comes to, with either framework."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdcompress.session import Stats

BATCH = 32  # of each rank
WARM_UP = 50  # steps
GRID = (0.00625, 0.0125, 0.025, 0.05, 0.1)  # of learning rates, with momentum
GRID_WITHOUT_MOMENTUM = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Method:
    name: str
    compression: str  # as Compression.parse takes it
    lr: float  # the best of its grid on the validation split, by --grid
    momentum: float = 0.9  # of the optimizer

    @property
    def bytes_per_element(self) -> int | None:
        """Of a plain allreduce, which Horovod's own methods are."""
        return {"none": 4, "fp16": 2}.get(self.compression)

    @property
    def grid(self) -> tuple[float, ...]:
        return GRID if self.momentum else GRID_WITHOUT_MOMENTUM


METHODS = [
    Method("dense", "none", lr=0.05),
    Method("fp16", "fp16", lr=0.05),
    Method("DORE, block 64", "dore:block=64,scales=byte", lr=0.025),
    # Masking throws momentum away at this compression: without it, and with a larger rate, the sketch does better.
    Method("Sketched-SGD", "sketch:ratio=0.096,momentum=0", lr=0.2, momentum=0),
    Method("ATOMO, spectral", "atomo:atoms=spectral,budget=6", lr=0.05),
]
SHOWN = {"pytorch": METHODS[:4], "keras": [METHODS[0], *METHODS[2:]]}


@dataclass
class Run:
    """What one training came to."""

    accuracies: list[float] = field(default_factory=list)  # after each epoch
    losses: list[float] = field(default_factory=list)  # of each step
    seconds: list[float] = field(default_factory=list)  # of each step
    counted: float = 0.0  # bytes a step and rank
    formula: float = 0.0
    dense: float = 0.0
    paper: float | None = None  # share of the dense bytes by the method's own accounting
    parts: dict[str, float] = field(default_factory=dict)  # seconds a step to encode, wait and decode
    noise: float | None = None  # of both compressions, relative to ||gradient||^2

    def take(self, stats: Stats, steps: int) -> None:
        """What a compressor says of its steps, for each."""
        self.counted, self.dense = stats.total.wire / steps, stats.total.dense / steps
        self.paper = stats.total.paper_ratio
        self.parts = {name: seconds / steps for name, seconds in stats.seconds.items()}
        noises = [value for name, value in stats.metrics.items() if name.endswith("noise")]
        self.noise = sum(noises) if noises else None
