# SPDX-License-Identifier: Apache-2.0
"""The mover's process: one thread that serves a link until its daemon stops it, or is gone.

Started by `handle.MoverHandle.prepare` as `python -m kvpushd.mover`. It begins as a spare: it loads all that
a mover needs, which is nearly all of a start, and reads its stdin. A line there makes a mover of it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpush_client._proto import mover_pb2
from kvpushd.errors import ConfigError
from kvpushd.memory.host import anonymous
from kvpushd.mover.lanes import Lanes
from kvpushd.mover.link import Letter, Link, LinkClosed
from kvpushd.mover.mover import Mover
from kvpushd.mover.transport.base import Carrier, Transport
from kvpushd.mover.transport.corrupt import WRONG_BYTES, Corrupting
from kvpushd.mover.transport.local import LocalCarrier
from kvpushd.mover.transport.nixl import NixlTransport
from kvpushd.mover.verify import SAMPLED, Verifying

FAULTS = ("corrupt-writes",)
VERIFY = {"off": 0, "sample": SAMPLED, "all": 1}
"""Of how many writes one is inspected; 0 = none."""

SPARE, MOVER = b"kvpushd-spare", b"kvpushd-mover"
"""What the process is called in ps and top, once it stands by, and once it was told to begin."""

STEP_SECONDS = 0.0005
"""Between two commands that came together the mover makes a round if its last one is longer ago than this."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, slots=True)
class Parts:
    """What a mover is made of; a test build has others."""

    link: Callable[[socket.socket], Link] = Link
    mover: Callable[..., Mover] = Mover
    local: Callable[[], Carrier] = LocalCarrier
    transport: Callable[[str], Transport] = NixlTransport
    """Of the sending agent's name."""


def main(argv: Sequence[str] | None = None, parts: Parts = Parts()) -> int:
    """Entry point of the child. Returns the exit status, or ends the process where the daemon is gone."""
    parser = argparse.ArgumentParser(prog="python -m kvpushd.mover", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the link's descriptor, inherited")
    parser.add_argument("--parent", type=int, required=True, help="process id of the daemon")
    parser.add_argument("--agent", required=True, help="name of the sending agent, unique for ever")
    parser.add_argument("--verify", choices=VERIFY, default="off", help="check what has landed")
    parser.add_argument("--fault", choices=FAULTS, help="damage what is carried, to test who checks it")
    options = parser.parse_args(argv)
    _settle(options.parent)
    lanes = Lanes.of_stdout()
    try:
        _stand_by(options.agent)
        link = parts.link(socket.socket(fileno=options.fd))
        transport = parts.transport(options.agent)
    except ConfigError as error:
        sys.stderr.write(f"kvpushd mover: {error}\n")
        return os.EX_CONFIG
    local, outgoing = (_wrapped(each, options) for each in (parts.local(), transport))
    mover = parts.mover(local, transport, outgoing=outgoing, lanes=lanes.names)
    try:
        serve(link, mover)
    except LinkClosed:
        # The daemon is dead. Whoever waits for that proof waits for this process too: no tidying.
        os._exit(0)
    mover.close()
    return 0


def _stand_by(agent: str) -> None:
    """Waits for the word to begin."""
    libc = ctypes.CDLL(None)
    if not select.select([0], [], [], 0)[0]:
        # The first agent loads UCX, and takes seven times as long as the next. Nothing else is left of it.
        NixlTransport(f"{agent}-rehearsal").close()
        libc.prctl(_PR_SET_NAME, SPARE, 0, 0, 0)
    if not os.read(0, 1):
        os._exit(0)  # the daemon is dead
    libc.prctl(_PR_SET_NAME, MOVER, 0, 0, 0)


def serve(link: Link, mover: Mover) -> None:
    """Goes round until StopMover. Raises LinkClosed where the other end closed."""
    with select.epoll() as events:
        events.register(link, select.EPOLLIN)
        if mover.bell is not None:
            events.register(mover.bell, select.EPOLLIN)
        link.send(mover.ready().SerializeToString())
        _rounds(link, mover, events)


def _rounds(link: Link, mover: Mover, events: select.epoll) -> None:
    waiting_to_send = rang = False
    stepped = 0.0
    while True:
        if link.pending != waiting_to_send:
            waiting_to_send = link.pending
            events.modify(link, select.EPOLLIN | (select.EPOLLOUT if waiting_to_send else 0))
        if rang:
            time.sleep(mover.rest)
        # By select(2), since epoll_wait(2) counts in milliseconds.
        select.select([events], [], [], mover.wait)
        ready = {descriptor for descriptor, _ in events.poll(0)}
        rang = mover.bell in ready
        messages: list[Letter] = []
        if link.fileno() in ready:
            link.flush()
            messages = link.receive()
        for message, descriptor in messages:
            command = mover_pb2.MoverCommand.FromString(message)
            if command.HasField("stop"):
                return
            _say(link, mover.handle(command, descriptor))
            # UCX may carry most of a write as it begins. Then the daemon shall hear of its end before the
            # next one begins, so that it has another ready when that ends. Small writes come in scores, and
            # a step for each would cost more than they do.
            if time.monotonic() - stepped > STEP_SECONDS:
                _say(link, mover.step(rang))
                stepped = time.monotonic()
        _say(link, mover.step(rang))
        stepped = time.monotonic()


def _say(link: Link, reports: Iterable[mover_pb2.MoverReport]) -> None:
    for report in reports:
        link.send(report.SerializeToString())


def _settle(parent: int) -> None:
    """Ties this process's life to the daemon's, and to nothing else."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    # A service manager, or a terminal's Ctrl-C, signals the whole group; a daemon that drains needs its
    # movers until it says StopMover.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The default of 50 us would make a nap of 100 us one of 150.
    libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def _wrapped(carrier: Carrier, options: argparse.Namespace) -> Carrier:
    """The carrier as the options have it."""
    if options.fault is not None:
        carrier = Corrupting(carrier, anonymous(WRONG_BYTES))
    every = VERIFY[options.verify]
    return Verifying(carrier, every) if every else carrier
