"""A slow network of several hosts on this machine. As root, on Linux:

python benchmarks/netlab up --hosts 4 --rate 100mbit
python benchmarks/netlab run -np 4 -- .venv/bin/python examples/pytorch_fashion_mnist.py --compression dore
python benchmarks/netlab rate 1gbit
python benchmarks/netlab exec h1 -- ip addr
python benchmarks/netlab down
"""

from __future__ import annotations

import argparse
import os
import sys

from lab import Lab, LabError


def main() -> int:
    words, command = sys.argv[1:], []
    if "--" in words:
        words, command = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="netlab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", default="lab", help="its name, where there are several")
    what = parser.add_subparsers(dest="what", required=True)
    up = what.add_parser("up", help="make the hosts and the network")
    up.add_argument("--hosts", type=int, default=4)
    up.add_argument("--rate", default="100mbit", help="of each host, each way: 100mbit, 1gbit, unlimited")
    what.add_parser("rate", help="change the rate").add_argument("rate")
    run = what.add_parser("run", help="mpirun a command over the hosts, one rank each: run -np 4 -- COMMAND")
    run.add_argument("-np", type=int, required=True, help="ranks")
    run.add_argument("--timeout", type=float, default=3600.0, help="seconds, after which it is stopped")
    run.add_argument("--stock", action="store_true", help="Open MPI's own protocol for long messages")
    run.add_argument("--spin", action="store_true", help="who waits spins")
    what.add_parser("exec", help="a command on one host: exec h0 -- COMMAND").add_argument("host")
    what.add_parser("down", help="stop what runs in the lab, and remove it")
    args = parser.parse_args(words)
    lab = Lab(args.lab)
    if args.what in ("run", "exec") and not command:
        parser.error("after -- there must be a command")
    if args.what == "up":
        lab.up(args.hosts, args.rate)
    elif args.what == "rate":
        lab.limit(args.rate)
    elif args.what == "run":
        return lab.mpirun(args.np, command, timeout=args.timeout, stock=args.stock, spin=args.spin)
    elif args.what == "exec":
        if args.host not in lab.hosts:
            raise LabError(f"there is no host {args.host!r}; there are {', '.join(lab.hosts)}")
        os.execvp("ip", [*lab.enter(args.host), *command])
    else:
        lab.down()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        sys.exit(f"netlab: {error}")
