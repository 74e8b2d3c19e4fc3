"""What `hvdcompress doctor` looks at; each finding that is no good says what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .. import __version__, kernels

HOROVOD = (0, 28)
START_SECONDS = 90  # that mpirun may take, with the frameworks' imports
BUILD = "build it as ci/setup does: HOROVOD_WITH_MPI=1 HOROVOD_WITH_{0}=1 pip install --no-build-isolation horovod==0.28.1"
FRAMEWORKS = {"torch": ("PyTorch", "PYTORCH"), "tensorflow": ("TensorFlow", "TENSORFLOW")}


class Finding(NamedTuple):
    """One line. `good` is None for what is only worth to know."""

    what: str
    good: bool | None
    found: str
    remedy: str = ""


def findings(ranks: int, launcher: Sequence[str]) -> Iterator[Finding]:
    """One after the other, the quick ones first.

    Args:
        ranks: to start.
        launcher: further words for mpirun, such as --hostfile.
    """
    yield Finding("hvdcompress", True, f"{__version__}, Python {platform.python_version()}, {platform.machine()}")
    yield _kernels()
    yield from _horovod()
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        yield Finding("mpirun", False, "is not there", "install Open MPI or MPICH (apt-get install openmpi-bin), on every host")
        return
    said = _output([mpirun, "--version"])
    yield Finding("mpirun", True, said.splitlines()[0] if said else mpirun)
    yield from _ranks(mpirun, "Open MPI" in said or "OpenRTE" in said, ranks, launcher)


def _kernels() -> Finding:
    which = kernels.implementation()
    remedy = "install hvdcompress where there is a C++ compiler: NumPy's kernels are many times slower"
    return Finding("kernels", which != "numpy", which if which == "numpy" else f"compiled, {which}", remedy)


def _horovod() -> Iterator[Finding]:
    if importlib.util.find_spec("horovod") is None:
        yield Finding("horovod", False, "is not installed", BUILD.format("PYTORCH"))
        return
    import horovod

    version = tuple(int(part) for part in horovod.__version__.split(".")[:2])
    yield Finding(
        "horovod", version >= HOROVOD, horovod.__version__, f"hvdcompress is for {HOROVOD[0]}.{HOROVOD[1]}: install 0.28.1"
    )
    usable = []
    for module, (name, flag) in FRAMEWORKS.items():
        if importlib.util.find_spec(module) is None:
            yield Finding(name, None, "is not installed")
            continue
        # In a process of its own: one process does not hold both frameworks well.
        program = f"import horovod.{module} as hvd; print(hvd.mpi_built(), hvd.gloo_built())"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
            yield Finding(f"horovod with {name}", False, last, BUILD.format(flag))
            continue
        mpi = done.stdout.split()[-2] == "True"
        usable.append(name)
        found = "built with MPI" if mpi else "built without MPI"
        yield Finding(f"horovod with {name}", mpi, found, f"horovodrun --gloo works without; for mpirun, {BUILD.format(flag)}")
    if not usable:
        yield Finding("a framework", False, "neither PyTorch nor TensorFlow works with Horovod here", BUILD.format("PYTORCH"))


def _ranks(mpirun: str, open_mpi: bool, ranks: int, launcher: Sequence[str]) -> Iterator[Finding]:
    words = [mpirun, "-np", str(ranks), *launcher]
    if open_mpi and not launcher:
        words.append("--oversubscribe")
    environment = dict(os.environ)
    if open_mpi and hasattr(os, "geteuid") and not os.geteuid():
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    what = f"mpirun with {ranks} ranks"
    try:
        done = subprocess.run(
            [*words, sys.executable, "-m", __name__], env=environment, capture_output=True, text=True, timeout=START_SECONDS
        )
    except subprocess.TimeoutExpired:
        yield Finding(what, False, f"has not ended in {START_SECONDS} s", "can the hosts log in to each other by ssh?")
        return
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(said) != ranks:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        remedy = f"try it by hand: {' '.join([*words, sys.executable, '-m', __name__])}"
        yield Finding(what, False, f"{len(said)} of {ranks} answered: {last}", remedy)
        return
    hosts = sorted({one["host"] for one in said})
    sizes = {one["size"] for one in said}
    alone = "every rank believes to be alone: mpi4py or Horovod is built against another MPI than mpirun's"
    yield Finding(what, sizes == {ranks}, f"answer from {', '.join(hosts)}", alone)
    differing = [name for name in said[0]["versions"] if len({str(one["versions"].get(name)) for one in said}) > 1]
    found = "; ".join(f"{name}: {sorted({str(one['versions'].get(name)) for one in said})}" for name in differing)
    yield Finding("versions", not differing, found or "the same on every rank", "install the same versions on every host")


def _output(words: list[str]) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def answer() -> dict[str, Any]:
    """What a rank says of itself: where it is, how many there are, and what is installed."""
    import importlib.metadata as metadata

    versions: dict[str, str] = {"python": platform.python_version(), "kernels": kernels.implementation()}
    for package in ("hvdcompress", "horovod", "numpy", "torch", "tensorflow", "tensorflow-cpu", "mpi4py"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"host": platform.node(), "size": _size(), "versions": versions}


def _size() -> int:
    """Ranks, as Horovod sees them; else as the launcher tells."""
    for module in ("torch", "tensorflow"):
        if importlib.util.find_spec(module) is not None and importlib.util.find_spec("horovod") is not None:
            try:
                hvd = importlib.import_module(f"horovod.{module}")
            except ImportError:
                continue
            hvd.init()
            return int(hvd.size())
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)


if __name__ == "__main__":
    print(json.dumps(answer()), flush=True)
