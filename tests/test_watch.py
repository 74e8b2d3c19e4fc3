"""Who asks a process where it is: with the key it hears, without it does not, and nothing that is sent does harm."""

from __future__ import annotations

import json
import socket
import time

import numpy as np
import pytest

from hvdcompress import Dense, Group, Layout, watch
from hvdcompress.session import Session

LAYOUT = Layout.of([("w", (3,))])


def ask(contact: dict, message: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", contact["port"]), 5) as connection:
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1000)


def test_a_stranger_hears_nothing_and_does_no_harm() -> None:
    session = Session(Dense(), [LAYOUT], Group(0, 1))
    watch.over(session)
    contact = dict(session.contact)
    assert json.loads(ask(contact, json.dumps(contact).encode())) == {"step": 1, "waits": False, "idle": pytest.approx(0, abs=5)}
    for message in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[]", b"{}", b'{"key": 3}', b"[" * 60_000, bytes(range(256)) * 200):
        assert ask(contact, message) == b"", message[:20]
    wrong = {**contact, "key": "0" * 32}
    assert ask(contact, json.dumps(wrong).encode()) == b""
    unknown = {**contact, "session": 10**6}
    assert json.loads(ask(contact, json.dumps(unknown).encode())) == {}
    assert json.loads(ask(contact, json.dumps(contact).encode()))["step"] == 1


def test_a_session_says_what_it_waits_for_once_it_has_done_its_part() -> None:
    session = Session(Dense(), [LAYOUT, LAYOUT], Group(0, 1))
    session.check_handshake([session.handshake()])
    grad = np.ones(3, np.float32)
    session.start(0, grad)
    session.start(1, grad)
    assert session.awaited() == []
    record = session.record()
    buckets = [f"bucket {bucket} in stage 1 of 1 (allreduce)" for bucket in range(2)]
    assert session.awaited() == [*buckets, "the status records"]
    session.agree([record])
    session.advance(0, grad)
    assert session.awaited() == buckets[1:]
    session.advance(1, grad)
    assert session.finish() is not None and session.awaited() == []


def test_the_waits_of_a_peer_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others wait as well: it is nobody's fault that can be named."""
    monkeypatch.setenv("HVDCOMPRESS_STALL_SECONDS", "1")
    told: list[str] = []
    monkeypatch.setattr(watch.warnings, "warn", lambda message, *rest, **further: told.append(message))
    sessions = [Session(Dense(), [LAYOUT], Group(rank, 2)) for rank in range(2)]
    for session in sessions:
        watch.over(session)
    greetings = [session.handshake() for session in sessions]
    for session in sessions:
        session.check_handshake(greetings)
        session.start(0, np.ones(3, np.float32))
        session.record()
    deadline = time.monotonic() + 10
    while len(told) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.5)
    assert len(told) == 2, told
    for message in told:
        assert "in step 1, for bucket 0 in stage 1 of 1 (allreduce), the status records: all other ranks wait as well" in message


@pytest.mark.parametrize("bad", ["soon", "-1", "nan"])
def test_a_bad_number_of_seconds_is_named(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDCOMPRESS_STALL_SECONDS", bad)
    with pytest.raises(ValueError, match="HVDCOMPRESS_STALL_SECONDS must be a positive number or 0"):
        watch.over(Session(Dense(), [LAYOUT], Group(0, 1)))
