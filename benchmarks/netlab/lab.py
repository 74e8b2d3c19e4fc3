"""Several hosts on one machine, joined by a slow network, and mpirun over them.

A host is a network namespace with a hostname of its own, by which Open MPI tells nodes apart; its one interface, `lab0`, hangs
on a bridge in a further namespace, and is limited in both directions by a token bucket. Nothing of it is in, or routed to, the
machine's own network. What is emulated is bandwidth: there is no delay and no loss.

All hosts share the machine's cores, each always the same one, so that none takes another's share. Whatever a rank computes is
overpriced by hosts per core, and a rank that waits must not spin: `idle.c` sees to that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wire import NIC

ROOT = Path("/run/hvdcompress-netlab")
UNLIMITED = "unlimited"
MTU = 1500
QUEUE = "50ms"  # the longest that a packet waits for the limit
UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}

# As root, which a lab needs; and one thread a rank, since the ranks share the cores.
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}


class LabError(RuntimeError):
    """The lab cannot be made, or used so."""


def bits_per_second(rate: str) -> float:
    """Of "100mbit", "2.5gbit", ...; infinite for "unlimited".

    >>> bits_per_second("2.5gbit")
    2500000000.0
    """
    if rate == UNLIMITED:
        return float("inf")
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?)(?:bit)?", rate.lower())
    if match is None or not float(match[1]):
        raise LabError(f"a rate is written as 100mbit, 2.5gbit or {UNLIMITED}, not {rate!r}")
    return float(match[1]) * UNITS[match[2]]


class Lab:
    """A lab by its name; it may be up or not."""

    def __init__(self, name: str = "lab"):
        if not re.fullmatch(r"[a-z0-9]{1,20}", name):
            raise LabError(f"a lab's name is 1 to 20 of a to z and 0 to 9, not {name!r}")
        self.name = name
        self.directory = ROOT / name
        self.switch = self.namespace("switch")

    def namespace(self, host: str) -> str:
        return f"hvdlab-{self.name}-{host}"

    @property
    def hosts(self) -> list[str]:
        """Raises LabError if it is not up."""
        try:
            return list(json.loads((self.directory / "hosts.json").read_text()))
        except FileNotFoundError:
            raise LabError(f"the lab {self.name!r} is not up: make it with `up --hosts N`") from None

    def up(self, hosts: int, rate: str) -> None:
        """Makes the hosts and the network between them; nothing is left of it where that fails."""
        if os.geteuid():
            raise LabError("a lab needs root, for network namespaces")
        bits_per_second(rate)  # raises if it is none
        missing = [tool for tool in ("ip", "tc", "nsenter", "taskset", "mpirun", "cc") if shutil.which(tool) is None]
        if missing:
            raise LabError(f"a lab needs {', '.join(missing)}: install iproute2, util-linux, Open MPI and a C compiler")
        if self.directory.exists():
            raise LabError(f"the lab {self.name!r} is up, or half up: take it down first")
        if not 1 <= hosts <= 64:
            raise LabError(f"a lab has 1 to 64 hosts, not {hosts}")
        names = [f"h{number}" for number in range(hosts)]
        (self.directory / "tmp").mkdir(parents=True)
        try:
            self._make_switch()
            for host in names:
                self._make_host(host, names)
            self._make_remote_shell(names)
            _run("cc", "-O2", "-shared", "-fPIC", "-o", self._idle, Path(__file__).with_name("idle.c"))
            (self.directory / "hosts.json").write_text(json.dumps(names))
            self.limit(rate)
        except BaseException:
            self.down()
            raise

    def limit(self, rate: str) -> None:
        """Changes the rate of all hosts, each way: "100mbit" or "unlimited"."""
        per_second = bits_per_second(rate) / 8
        if rate == UNLIMITED:
            queue, segment = ["pfifo", "limit", "10000"], 65536  # it counts the bytes, too
        else:
            # What an idle link may send at once, for nothing, is no more than half a millisecond's worth.
            burst = int(max(2 * (MTU + 14) + 100, per_second * 0.0005))
            queue, segment = ["tbf", "rate", f"{8 * per_second:.0f}bit", "burst", str(burst), "latency", QUEUE], 16384
            segment = 65536 if burst >= 4 * 65536 else segment
        for host in self.hosts:
            _run("ip", "-n", self.namespace(host), "link", "set", NIC, "gso_max_size", segment)
            _run("tc", "-n", self.namespace(host), "qdisc", "replace", "dev", NIC, "root", *queue)
            _run("tc", "-n", self.switch, "qdisc", "replace", "dev", f"p{host}", "root", *queue)

    def down(self) -> None:
        """Stops what runs in the lab and removes it; also of half a lab, or of none."""
        listed = _run("ip", "netns", "list").splitlines()
        mine = [line.split()[0] for line in listed if line.startswith(self.namespace(""))]
        _stop(pid for namespace in mine for pid in _processes(namespace))
        for namespace in mine:
            _run("ip", "netns", "del", namespace, check=False)
            shutil.rmtree(f"/etc/netns/{namespace}", ignore_errors=True)
        if self.directory.is_dir():
            for hostname in self.directory.glob("*.uts"):
                _run("umount", "-l", hostname, check=False)
            shutil.rmtree(self.directory)
        for empty in (Path("/etc/netns"), ROOT):
            with contextlib.suppress(OSError):
                empty.rmdir()

    def enter(self, host: str) -> list[str]:
        """The words that, before a command, run it on a host."""
        cores = sorted(os.sched_getaffinity(0))
        core = cores[_number(host) % len(cores)]
        space = ["ip", "netns", "exec", self.namespace(host), "nsenter", f"--uts={self._hostname(host)}", "--"]
        return [*space, "taskset", "--cpu-list", str(core)]

    def mpirun(
        self,
        ranks: int,
        command: Sequence[str],
        *,
        timeout: float,
        stock: bool = False,
        spin: bool = False,
        environment: Mapping[str, str] | None = None,
        output: Any = None,
    ) -> int:
        """Runs a command on `ranks` hosts, one rank each; returns its exit status, 124 after `timeout` seconds.

        Args:
            stock: Open MPI's own protocol for long messages, which on a slow link often goes one way at a time; else plain
                fragments, which go both ways at once.
            spin: who waits spins, as on hosts of their own.
            environment: further variables for the ranks.
            output: a file for what is printed.
        """
        hosts = self.hosts[:ranks]
        if not 1 <= ranks <= len(self.hosts):
            raise LabError(f"{ranks} ranks do not fit {len(self.hosts)} hosts")
        told = {**ENVIRONMENT, **({} if spin else {"LD_PRELOAD": str(self._idle)}), **(environment or {})}
        options = {
            "plm_rsh_agent": self._remote_shell,
            "plm_rsh_no_tree_spawn": 1,
            "orte_tmpdir_base": self.directory / "tmp",
            "oob_tcp_if_include": NIC,
            "pml": "ob1",
            "btl": "tcp,self",
            "btl_tcp_if_include": NIC,
            "mpi_yield_when_idle": 1,
            **({} if stock else {"btl_tcp_flags": "send"}),
        }
        words = [
            *self.enter(hosts[0]),
            "mpirun",
            "-np",
            ranks,
            "--host",
            ",".join(f"{host}:1" for host in hosts),
            "--bind-to",
            "none",
        ]
        for name, value in options.items():
            words += ["--mca", name, value]
        for name, value in told.items():
            words += ["-x", f"{name}={value}"]
        run = uuid.uuid4().hex  # found in the environment of whatever this leaves behind
        path = f"{self._remote_shell.parent}:{os.environ['PATH']}"
        return self._watched(
            [str(word) for word in [*words, *command]],
            {**os.environ, **ENVIRONMENT, "PATH": path, "NETLAB_RUN": run},
            run,
            timeout,
            output,
        )

    def _watched(self, words: list[str], environment: dict[str, str], run: str, timeout: float, output: Any) -> int:
        # The kernel shares the processor between sessions; the first host's rank is in mpirun's, the others in their daemons'.
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"netlab: stopped after {timeout:g} s", file=sys.stderr)
            return 124
        finally:
            _stop([process.pid] if process.poll() is None else [])
            process.wait()
            marker = f"NETLAB_RUN={run}".encode()
            _stop(pid for host in self.hosts for pid in _processes(self.namespace(host)) if marker in _environment_of(pid))

    @property
    def _idle(self) -> Path:
        return self.directory / "idle.so"

    @property
    def _remote_shell(self) -> Path:
        return self.directory / "bin" / "ssh"

    def _hostname(self, host: str) -> Path:
        return self.directory / f"{host}.uts"

    def _make_switch(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _set(self.switch, "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1")
        _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        _run("ip", "-n", self.switch, "link", "set", "br0", "up")

    def _make_host(self, host: str, all_hosts: Sequence[str]) -> None:
        namespace, port = self.namespace(host), f"p{host}"
        _run("ip", "netns", "add", namespace)
        # Every run begins afresh, and congestion control is one that every namespace may use.
        _set(namespace, "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1")
        _set(namespace, "net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_no_metrics_save=1")
        ends = ["type", "veth", "peer", "name", NIC, "mtu", MTU, "address", _hardware_address(host), "netns", namespace]
        _run("ip", "-n", self.switch, "link", "add", port, "mtu", MTU, *ends)
        _run("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "addr", "add", f"{_address(host)}/24", "dev", NIC)
        _run("ip", "-n", namespace, "link", "set", NIC, "up")
        for other in all_hosts:  # or the first packets would ask who has which address, and be counted
            if other != host:
                where = ["lladdr", _hardware_address(other), "dev", NIC, "nud", "permanent"]
                _run("ip", "-n", namespace, "neigh", "replace", _address(other), *where)
        etc = Path("/etc/netns") / namespace  # `ip netns exec` shows it as /etc
        etc.mkdir(parents=True)
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{_address(name)} {name}\n" for name in all_hosts))
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        self._hostname(host).touch()
        _run("unshare", f"--uts={self._hostname(host)}", "hostname", host)

    def _make_remote_shell(self, hosts: Sequence[str]) -> None:
        """What mpirun starts its daemons with, in place of ssh: `ssh [options] host command`."""
        self._remote_shell.parent.mkdir()
        entries = "\n".join(f'{host}) exec {shlex.join(self.enter(host))} /bin/sh -c "$*" ;;' for host in hosts)
        self._remote_shell.write_text(
            f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=${{1#*@}}
shift
case "$host" in
{entries}
esac
echo "no host $host" >&2
exit 1
"""
        )
        self._remote_shell.chmod(0o755)


def _number(host: str) -> int:
    return int(host.removeprefix("h"))


def _address(host: str) -> str:
    return f"10.77.0.{_number(host) + 1}"


def _hardware_address(host: str) -> str:
    return f"02:77:00:00:00:{_number(host) + 1:02x}"


def _run(*words: object, check: bool = True) -> str:
    done = subprocess.run([str(word) for word in words], text=True, capture_output=True)
    if check and done.returncode:
        raise LabError(f"{shlex.join(map(str, words))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _set(namespace: str, *settings: str) -> None:
    for setting in settings:
        _run("ip", "netns", "exec", namespace, "sysctl", "-q", "-w", setting)


def _processes(namespace: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", namespace, check=False).split()]


def _environment_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _stop(pids: Iterable[int], grace: float = 3.0) -> None:
    left = [pid for pid in pids if pid != os.getpid()]
    for stop in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, stop)
        deadline = time.monotonic() + grace
        while left and time.monotonic() < deadline:
            left = [pid for pid in left if _alive(pid)]
            time.sleep(0.05)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False
