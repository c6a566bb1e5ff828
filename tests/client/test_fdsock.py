# SPDX-License-Identifier: Apache-2.0
"""The lifeline of a process that is short of what it needs."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpush_client import fdsock
from kvpush_client.errors import DaemonUnreachable


def test_a_lifeline_that_gets_no_thread_is_refused_when_it_comes_and_not_when_it_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is due once the daemon has died: blocks that nobody watches it for would never come back."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = os.listdir("/proc/self/fd")
    reads, writes = os.pipe()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(DaemonUnreachable, match="can't be watched: can't start new thread"):
        fdsock.Lifeline(reads)
    os.close(writes)
    assert os.listdir("/proc/self/fd") == before


def test_a_socket_at_which_too_many_wait_is_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "fd.sock"
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(2)]
        socks[0].bind(str(path))
        socks[0].listen(0)
        socks[1].connect(str(path))
        with pytest.raises(DaemonUnreachable, match=r"fd\.sock: more processes wait to be let in"):
            fdsock.exchange(path, b"token", None, timeout=1.0, wake=socks[0].fileno())


def test_a_lifeline_that_nobody_watches_closes() -> None:
    reads, writes = os.pipe()
    fdsock.Lifeline(reads).close()
    os.close(writes)


def test_a_lifeline_tells_its_watcher_of_the_last_writers_end_also_where_that_came_first() -> None:
    reads, writes = os.pipe()
    lifeline, ended = fdsock.Lifeline(reads), threading.Event()
    os.close(writes)
    lifeline.watch(ended.set)
    assert ended.wait(20)
    lifeline.close()
