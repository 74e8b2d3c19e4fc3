"""Files of memories: what is read is what was written, and anything else is said in the first step."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from hvdcompress import CompressionError, checkpoint, make, testing
from hvdcompress.drivers.simulate import Simulation

METHOD = "dore:block=16,exchange=sharded"


class Kept:
    """A rank of a simulation, as an adapter's compressor offers it; of TensorFlow's, if it has sets."""

    def __init__(self, simulation: Simulation, rank: int, sets: bool = False):
        self.session, self.sets = simulation.sessions[rank], sets
        self.method, self.place = self.session.reducer, (rank, len(simulation.sessions))
        self.failure: CompressionError | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"sets": [self.session.state_dict()]} if self.sets else self.session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.session.load_state_dict(state["sets"][0] if self.sets else state)

    def fail(self, error: CompressionError) -> None:
        self.failure = error


def trained(ranks: int, steps: int = 3, method: str = METHOD) -> Simulation:
    simulation = Simulation(make(method), testing.LAYOUTS, ranks)
    for step in range(steps):
        simulation.step(testing.gradients(testing.LAYOUTS, step, ranks))
    return simulation


def saved(simulation: Simulation, directory: Path, sets: bool = False, **further: Any) -> None:
    for rank in range(len(simulation.sessions)):
        checkpoint.save(Kept(simulation, rank, sets), directory, **further)


@pytest.mark.parametrize("sets", [False, True])
def test_the_same_ranks_go_on_bit_for_bit_and_others_alike(tmp_path: Path, sets: bool) -> None:
    whole = trained(3, 3)
    saved(whole, tmp_path, sets, epoch=7, name="a", rates=[0.1, 0.2])
    for ranks in (3, 2, 5):
        other = Simulation(make(METHOD), testing.LAYOUTS, ranks)
        for rank in range(ranks):
            kept = Kept(other, rank, sets)
            assert checkpoint.restore(kept, tmp_path, epoch=7, rates=[0.1, 0.2]) and kept.failure is None, kept.failure
        means = other.step(testing.gradients(testing.LAYOUTS, 3, ranks))
        assert means is not None and other.sessions[0].committed == 4
        if ranks == 3:
            for mean, expected in zip(means, whole.step(testing.gradients(testing.LAYOUTS, 3, 3))):
                assert_array_equal(mean, expected)


def test_nothing_there_is_an_empty_memory(tmp_path: Path) -> None:
    kept = Kept(trained(2, 0), 0)
    assert not checkpoint.restore(kept, tmp_path / "nowhere") and kept.failure is None


def refused(directory: Path, told: str, rank: int = 0, ranks: int = 2, method: str = METHOD, **expected: Any) -> None:
    simulation = Simulation(make(method), testing.LAYOUTS, ranks)
    kept, before = Kept(simulation, rank), simulation.sessions[rank].state_dict()
    assert checkpoint.restore(kept, directory, **expected)
    assert kept.failure is not None and told in str(kept.failure), kept.failure
    for name, array in simulation.sessions[rank].state_dict()["arrays"].items():
        assert_array_equal(array, before["arrays"][name])
    assert simulation.sessions[rank].committed == 0


def test_what_is_of_another_training_or_incomplete_is_told(tmp_path: Path) -> None:
    saved(trained(2), tmp_path, epoch=3)
    refused(tmp_path, "saved with epoch=3, and epoch=4 is wanted", epoch=4)
    refused(tmp_path, "saved with step=None, and step=1 is wanted", step=1)
    refused(tmp_path, "of what was saved and what is here, method: ", method="dore:block=32,exchange=sharded")
    refused(tmp_path, "of what was saved and what is here, method: ", method="topk", ranks=3)
    (tmp_path / "compression-1.npz").rename(tmp_path / "elsewhere")
    refused(tmp_path, "saved by one of 2 ranks, compression-1.npz is missing, and there are 3 ranks now", ranks=3, rank=2)
    refused(tmp_path, "compression-1.npz is missing", rank=1)
    saved(trained(2, 5), tmp_path / "later")
    shutil.copy(tmp_path / "later" / "compression-1.npz", tmp_path)
    refused(tmp_path, "ranks 0 and 1 are of steps 3 and 5", ranks=3)
    shutil.copy(tmp_path / "later" / "compression-1.npz", tmp_path / "compression-0.npz")
    refused(tmp_path, "of rank 1, this is rank 0")


def test_files_of_ranks_that_are_no_longer_there_do_not_matter(tmp_path: Path) -> None:
    saved(trained(4), tmp_path)
    saved(trained(2, 5), tmp_path)
    for ranks in (2, 4):
        other = Simulation(make(METHOD), testing.LAYOUTS, ranks)
        for rank in range(ranks):
            kept = Kept(other, rank)
            assert checkpoint.restore(kept, tmp_path) and kept.failure is None, kept.failure
            assert kept.session.committed == 5


def test_a_spoilt_file_is_told_or_reads_as_it_was(tmp_path: Path) -> None:
    simulation = trained(2)
    saved(simulation, tmp_path)
    path, rng = tmp_path / "compression-0.npz", np.random.default_rng(0)
    whole, expected = path.read_bytes(), simulation.sessions[0].state_dict()["arrays"]
    spoilt = [whole[: int(cut)] for cut in rng.integers(0, len(whole), 60)]
    spoilt += [b"", b"GIF89a", b"\x80\x04\x95" + whole]
    for place in rng.integers(0, len(whole), 300):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(rng.integers(8))
        spoilt.append(bytes(flipped))
    told = 0
    for content in spoilt:
        path.write_bytes(content)
        kept = Kept(Simulation(make(METHOD), testing.LAYOUTS, 2), 0)
        assert checkpoint.restore(kept, tmp_path)
        if kept.failure is not None:
            assert "compression-0.npz" in str(kept.failure) or "the saved memory" in str(kept.failure), kept.failure
            told += 1
            continue
        for name, array in kept.session.state_dict()["arrays"].items():
            assert_array_equal(array, expected[name])
    assert told > 300


def test_a_save_that_breaks_off_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = trained(2)
    saved(simulation, tmp_path)
    before = (tmp_path / "compression-0.npz").read_bytes()

    def broken(file: Any, **arrays: Any) -> None:
        file.write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint.np, "savez", broken)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(Kept(simulation, 0), tmp_path)
    assert (tmp_path / "compression-0.npz").read_bytes() == before


def test_what_would_need_pickle_is_refused(tmp_path: Path) -> None:
    kept = Kept(trained(2), 0)
    kept.state_dict = lambda: {"arrays": {"0.h": object()}}  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="is a object, which is not saved"):
        checkpoint.save(kept, tmp_path)
