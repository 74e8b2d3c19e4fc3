"""Watches the steps of this process: a peer that keeps it waiting is named, with what it waits for.

A rank that has done its part of a step waits for the others. If that takes longer than `HVDCOMPRESS_STALL_SECONDS` (60 unless
told, 0: never looked at) it asks each of them where it is, over a connection of its own, for Horovod has stopped with the
rank that has stopped. Each process listens on a port that the system chooses; address, port and a random key go out with
the first handshake, and whoever does not know the key gets no answer.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import settings
from .session import Session

KEY_BYTES = 16
MOST_BYTES = 1 << 16  # of a question or an answer
SIOCGIFADDR = 0x8915
ANSWER_SECONDS = 3.0  # that a peer has to say where it is


def over(session: Session) -> None:
    """Watches a session from now on, which has not shaken hands yet."""
    seconds = settings.number("HVDCOMPRESS_STALL_SECONDS", 60.0, zero=True)
    if not seconds:
        return
    try:
        session.contact = _watch_of(os.getpid()).add(session, seconds)
    except (OSError, RuntimeError) as error:  # no file, no thread, no network to be had: training goes on without
        warnings.warn(f"ranks that keep others waiting will not be named: {error}", RuntimeWarning, stacklevel=2)


class Watch:
    """One process's: a thread that answers peers, and one that looks at the sessions."""

    def __init__(self) -> None:
        self._sessions: list[tuple[weakref.ref[Session], float]] = []
        self._reported: dict[int, int] = {}  # the step, by number of session
        self._key = secrets.token_hex(KEY_BYTES)
        self._listener = socket.create_server(("", 0), backlog=64)
        for run in (self._answer, self._look):
            threading.Thread(target=run, name=f"hvdcompress{run.__name__}", daemon=True).start()

    def add(self, session: Session, seconds: float) -> dict[str, Any]:
        """Returns how peers may ask where the session is."""
        self._sessions.append((weakref.ref(session), seconds))
        return {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "addresses": [*_addresses(), "127.0.0.1"],
            "port": self._listener.getsockname()[1],
            "key": self._key,
            "session": len(self._sessions) - 1,
        }

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                with connection:
                    asked = json.loads(_received(connection))
                    if secrets.compare_digest(str(asked["key"]), self._key):
                        connection.sendall(json.dumps(self._standing(asked["session"])).encode())
            except (OSError, ValueError, KeyError, TypeError, RecursionError):  # whatever a stranger sends
                time.sleep(0.01)  # there may be no room for a connection

    def _standing(self, number: int) -> dict[str, Any]:
        session = self._sessions[number][0]() if 0 <= number < len(self._sessions) else None
        if session is None:
            return {}
        return {"step": _step(session), "waits": _waits(session), "idle": session.idle()}

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            for number, (reference, seconds) in enumerate(tuple(self._sessions)):
                session = reference()
                if session is None or not _waits(session) or session.idle() < seconds:
                    continue
                step = _step(session)
                if self._reported.get(number) != step:
                    self._reported[number] = step
                    try:
                        warnings.warn(_report(session, seconds), RuntimeWarning, stacklevel=1)
                    except RuntimeWarning as told:  # where warnings are errors; there is nobody to raise it to
                        print(told, file=sys.stderr)


def _waits(session: Session) -> bool:
    return bool(session.awaited()) and session.blocked()


def _step(session: Session) -> int:
    """Number of the step that is going on, from 1, those that were abandoned counted too."""
    return session.committed + session.abandoned + 1


def _report(session: Session, seconds: float) -> str:
    own, step, awaited, told = session.group.rank, _step(session), ", ".join(session.awaited()), []
    peers = [(rank, contact) for rank, contact in enumerate(session.contacts) if rank != own]
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(_ask, (contact for _, contact in peers)))
    for (rank, contact), answer in zip(peers, answers):
        who = f"rank {rank} (process {contact.get('process')} on {contact.get('host')})"
        if answer is None:
            told.append(f"{who} does not answer: it has stopped, or cannot be reached")
        elif answer.get("step") != step or not answer.get("waits"):
            told.append(f"{who} runs, but has not done its part: nothing came of it for {answer.get('idle', 0):.0f} s")
    return f"rank {own} has waited for {seconds:g} s in step {step}, for {awaited}: " + (
        "; ".join(told) or "all other ranks wait as well, so it is Horovod or the network that has stopped"
    )


def _ask(contact: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where a peer is; None if it does not say."""
    for address in contact.get("addresses", ()):
        try:
            connection = socket.create_connection((address, contact["port"]), ANSWER_SECONDS)
        except OSError:
            continue
        try:
            with connection:
                connection.sendall(json.dumps({"key": contact["key"], "session": contact["session"]}).encode())
                connection.shutdown(socket.SHUT_WR)
                answer = json.loads(_received(connection))
                return answer if isinstance(answer, dict) else {}
        except TimeoutError:  # the system took the call, and nobody came
            return None
        except (OSError, ValueError):  # somebody else
            continue
    return None


def _received(connection: socket.socket) -> bytes:
    """All that the other end sends, of which there is little; raises TimeoutError if it is not there in time."""
    content, deadline = b"", time.monotonic() + ANSWER_SECONDS
    while len(content) < MOST_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(4096)
        if not part:
            break
        content += part
    return content


def _addresses() -> list[str]:
    """This machine's IPv4 addresses, but for that of the machine to itself."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
            except OSError:  # an interface without one
                continue
            found.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in found if not address.startswith("127.")]


_watches: dict[int, Watch] = {}  # by process: threads do not survive a fork


def _watch_of(process: int) -> Watch:
    if process not in _watches:
        _watches[process] = Watch()
    return _watches[process]
