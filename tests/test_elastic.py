"""Elastic Horovod: ranks come and go, and the training goes on with what those that are left have kept."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import RANKS
from launch import horovodrun_elastic

METHODS = {
    "sketch": "sketch:ratio=0.3,exact_below=10,momentum=0",
    "atomo": "atomo:budget=0.3,unit=ratio,exchange=allgather",
    "dore": "dore:block=16,exchange=sharded",
}
EVENTS = {"more": (2, 3), "fewer": (3, 2), "killed": (3, 2)}  # numbers of ranks before and after


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("event", EVENTS)
def test_ranks_come_and_go(tmp_path: Path, method: str, event: str) -> None:
    before, after = EVENTS[event]
    # Two names of this machine: elastic Horovod gives up the host on which a rank was killed, the second.
    hosts = "localhost:2\n127.0.0.1:1\n" if event == "killed" else f"localhost:{before}\n"
    done = horovodrun_elastic(before, hosts, tmp_path, RANKS / "elastic.py", tmp_path, METHODS[method], event, timeout=150)
    assert done.returncode == 0, done.stdout[-4000:]
    steps: dict[int, dict[int, dict]] = defaultdict(dict)
    for file in tmp_path.glob("*.jsonl"):
        for seen in map(json.loads, file.read_text().splitlines()):
            steps[seen["step"]][seen["rank"]] = seen
    assert sorted(map(str, steps)) == sorted([*map(str, range(1, 31)), "end"]) and len(steps["end"]) == after
    sizes = {step: seen[0]["size"] for step, seen in steps.items() if step != "end"}
    assert sizes[8] == before and sizes[30] == after, sizes
    for step, size in sizes.items():
        assert sorted(steps[step]) == list(range(size)), f"step {step}: {sorted(steps[step])}"
        for rank, seen in steps[step].items():
            where = f"step {step}, rank {rank}: {seen}"
            assert seen["finite"] and seen["weights"] == steps[step][0]["weights"] and seen["committed"] == step, where
            assert (seen["residual"] > 0) == (method != "atomo"), where
    changed = min(step for step, size in sizes.items() if size == after)
    if method == "sketch":  # it goes on accumulating, from nearly what there was
        first, last = (max(seen["residual"] for seen in steps[step].values()) for step in (changed, changed - 1))
        assert 0.7 * last < first < 1.3 * last, (first, last)
