# SPDX-License-Identifier: Apache-2.0
"""A session and the real service, over real sockets."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvpush_client.errors import DaemonRefused, DaemonUnreachable
from kvpush_client.events import (
    Connected,
    Disconnected,
    Draining,
    Fault,
    HandoffEnded,
    Matched,
    Reason,
    Rejected,
    ReservationEnded,
    ReservationReleased,
    Side,
    TransferKey,
)
from kvpush_client.item_wire import MAX_LAYER
from kvpush_client.items import (
    Advance,
    Cancel,
    Decline,
    DescribePool,
    FirstToken,
    Handoff,
    Identity,
    Item,
    Reserve,
    Sender,
)
from kvpush_client.layout import Blocks
from kvpush_client.link import Link
from kvpush_client.pool import Pool
from kvpush_client.session import Session
from kvpush_client.wire import Malformed
from kvpushd.errors import BadMemory, FingerprintMismatch, OverLimit, Unreachable
from testing.front import (
    BLOCKS,
    DEADLINE,
    LAYOUT,
    LOCK,
    ROOT,
    SENDERS,
    Daemon,
    DaemonProcess,
    Desk,
    Engine,
    new_key,
    scheduler,
    until,
    worker,
)

Daemons = Callable[..., Daemon]
Processes = Callable[[], DaemonProcess]
Engines = Callable[..., Engine]

LOST = Fault(Reason.PEER_UNREACHABLE, "")


def connected(engine: Engine) -> Engine:
    engine.session.wait_ready(DEADLINE)
    engine.await_event(Connected)
    return engine


def ends(engine: Engine, key: TransferKey) -> list[type]:
    return [type(event) for event in engine.of(key)]


# --- saying and hearing -----------------------------------------------------------------------------------


def test_what_a_scheduler_says_arrives_as_it_was_said_and_in_order(
    daemons: Daemons, engines: Engines
) -> None:
    daemon, engine = daemons(), connected(engines())
    key = new_key()
    session = engine.session
    session.reserve(key, SENDERS, 16, 64, BLOCKS, lease=2.5, priority=-3, label="request-1")
    session.handoff(key, BLOCKS, seal=48, lease=1, receiver_engine_id="decode", label="request-2")
    session.cancel(key, Side.SENDER, "aborted")
    session.decline(key, SENDERS)
    session.first_token(key)
    said = [daemon.desk.items.get(timeout=DEADLINE) for _ in range(5)]
    assert said[:4] == [
        Reserve(key, SENDERS, 16, 64, BLOCKS, 2.5, -3, "request-1"),
        Handoff(key, BLOCKS, 48, 1.0, "decode", "request-2"),
        Cancel(key, Side.SENDER, "aborted"),
        Decline(key, SENDERS),
    ]
    assert isinstance(said[4], FirstToken)
    assert said[4].unix_ns > 0


def test_a_worker_registers_its_pool_and_then_says_what_is_final(daemons: Daemons, engines: Engines) -> None:
    daemon, engine = daemons(), connected(engines(worker()))
    key = new_key()
    before = time.monotonic_ns()
    engine.session.advance(key, 32, first_layer=1, end_layer=3)
    describe, first = (daemon.desk.items.get(timeout=DEADLINE) for _ in range(2))
    engine.session.advance(key, 48)
    second = daemon.desk.items.get(timeout=DEADLINE)
    assert daemon.desk.pools.get(timeout=DEADLINE) == (LAYOUT.pool_bytes, LAYOUT.pool_bytes, os.getuid())
    assert describe == DescribePool(b"pool", LAYOUT)
    assert isinstance(first, Advance)
    assert isinstance(second, Advance)
    assert (first.positions, first.first_layer, first.end_layer) == (32, 1, 3)
    assert (second.positions, second.first_layer, second.end_layer) == (48, 0, None)
    assert before <= first.at <= second.at <= time.monotonic_ns()


def test_ten_thousand_items_at_once_keep_their_order_and_all_end(daemons: Daemons, engines: Engines) -> None:
    daemon, engine = daemons(), connected(engines())
    keys = [new_key() for _ in range(10_000)]
    for key in keys:
        engine.reserve(key, "land")
    engine.await_event(ReservationEnded, count=len(keys))
    said = [daemon.desk.items.get(timeout=DEADLINE) for _ in keys]
    assert [item.key for item in said if isinstance(item, Reserve)] == keys
    assert [event.key for event in engine.seen if isinstance(event, ReservationEnded)] == keys
    assert all(event.fault is None for event in engine.seen if isinstance(event, ReservationEnded))


def test_blocks_named_in_a_list_may_be_changed_after_the_call(daemons: Daemons, engines: Engines) -> None:
    daemon, engine = daemons(), connected(engines())
    ids = [1, 2, 3]
    engine.session.handoff(new_key(), [Blocks(0, 0, ids)])
    ids.clear()
    said = daemon.desk.items.get(timeout=DEADLINE)
    assert isinstance(said, Handoff)
    assert said.blocks == (Blocks(0, 0, (1, 2, 3)),)


def test_a_worker_hears_of_its_engines_halves(daemons: Daemons, engines: Engines) -> None:
    daemon, engine = daemons(), connected(engines(worker()))
    key = new_key()
    daemon.tell(Matched(key, Side.RECEIVER), ReservationEnded(key, None, released=True), Draining())
    engine.await_event(Draining)
    assert engine.of(key) == [Matched(key, Side.RECEIVER), ReservationEnded(key, None, released=True)]


def test_a_wait_ends_with_the_daemons_word(daemons: Daemons, engines: Engines) -> None:
    daemon, engine = daemons(), connected(engines(worker()))
    teller = threading.Timer(0.05, daemon.tell, [Draining()])
    teller.start()
    engine.session.wait(threading.TIMEOUT_MAX)
    assert engine.session.poll() == [Draining()]
    teller.join()


def test_a_wait_has_an_end_without_one(daemons: Daemons, engines: Engines) -> None:
    daemons()
    engine = connected(engines(worker()))
    engine.session.wait(0.001)
    assert engine.session.poll() == []


# --- exactly one end --------------------------------------------------------------------------------------


def test_late_and_doubled_events_are_dropped(daemons: Daemons, engines: Engines) -> None:
    daemon, engine = daemons(), connected(engines())
    key, stranger = new_key(), new_key()
    fault = Fault(Reason.EXPIRED, "nobody came")
    engine.reserve(key)
    engine.session.handoff(key, BLOCKS)
    said = (
        Matched(key, Side.RECEIVER),
        ReservationEnded(key, fault, released=False),
        HandoffEnded(key, None),
        ReservationReleased(key),
    )
    daemon.desk.items.get(timeout=DEADLINE)
    daemon.desk.items.get(timeout=DEADLINE)
    daemon.tell(*said, *said, HandoffEnded(stranger, None), ReservationEnded(stranger, None, released=True))
    daemon.tell(*said, Draining())
    engine.await_event(Draining)
    assert engine.of(key) == list(said)
    assert engine.of(stranger) == []


def test_a_reservation_under_a_live_key_is_rejected_and_the_live_one_stays(
    daemons: Daemons, engines: Engines
) -> None:
    daemon, engine = daemons(), connected(engines())
    key = new_key()
    engine.reserve(key)
    engine.reserve(key)
    assert engine.await_event(Rejected).fault.reason is Reason.DUPLICATE
    daemon.desk.items.get(timeout=DEADLINE)
    daemon.tell(ReservationEnded(key, None, released=True))
    engine.await_event(ReservationEnded)
    assert ends(engine, key) == [Rejected, ReservationEnded]


def test_a_half_that_the_daemon_rejects_ends_with_the_reason(daemons: Daemons, engines: Engines) -> None:
    desk = Desk()
    desk.item_refusal = OverLimit("64 reservations are open")
    daemons(desk)
    engine = connected(engines())
    key = new_key()
    engine.reserve(key)
    engine.session.handoff(key, BLOCKS)
    engine.await_event(HandoffEnded)
    fault = Fault(Reason.OVER_LIMIT, "64 reservations are open")
    assert engine.of(key) == [ReservationEnded(key, fault, released=True), HandoffEnded(key, fault)]


def test_a_handoff_of_which_an_append_is_rejected_is_taken_back(daemons: Daemons, engines: Engines) -> None:
    daemon, engine = daemons(), connected(engines())
    key = new_key()
    engine.session.handoff(key, BLOCKS)
    engine.session.handoff(key, BLOCKS)
    for _ in range(2):
        daemon.desk.items.get(timeout=DEADLINE)
    fault = Fault(Reason.INVALID, "block 9 of 4")
    daemon.tell(Rejected(key, Side.SENDER, fault))
    assert isinstance(daemon.desk.items.get(timeout=DEADLINE), Cancel)
    engine.await_event(HandoffEnded)
    assert engine.of(key) == [HandoffEnded(key, fault)]


def test_an_item_that_fits_no_message_ends_its_half(daemons: Daemons, engines: Engines) -> None:
    daemons()
    engine = connected(engines())
    key, short = new_key(), TransferKey(b"short")
    engine.session.reserve(key, SENDERS, 0, 16, [Blocks(0, 0, [-1])])
    engine.session.handoff(short, BLOCKS)
    assert engine.await_event(ReservationEnded).released
    assert engine.await_event(HandoffEnded).key == short
    engine.reserve(new_key(), "land")
    engine.await_event(ReservationEnded, count=2)  # the session goes on


ODD = (
    float("inf"),
    float("nan"),
    -1,
    1 << 70,
    "3",
    None,
    b"x",
    [],
    (),
    1.5,
    "\ud800",
    "x" * (1 << 20),
    object(),
)


@pytest.mark.parametrize("first", [-1, 1 << 40, "x"])
def test_an_advance_that_fits_no_message_is_one_that_ends_its_transfer(
    first: Any, daemons: Daemons, engines: Engines
) -> None:
    daemon, engine = daemons(), connected(engines(worker()))
    key = new_key()
    engine.session.advance(key, 16, first_layer=first)
    said = [daemon.desk.items.get(timeout=DEADLINE) for _ in range(2)]
    assert isinstance(said[1], Advance)
    assert (said[1].key, said[1].first_layer, said[1].end_layer) == (key, MAX_LAYER - 1, MAX_LAYER)


def test_a_cancel_whose_detail_fits_no_message_cancels(daemons: Daemons, engines: Engines) -> None:
    daemon, engine = daemons(), connected(engines())
    key, detail = new_key(), cast("str", None)
    engine.session.handoff(key, BLOCKS)
    engine.session.cancel(key, Side.SENDER, detail)
    assert _taken(daemon, Cancel) == Cancel(key, Side.SENDER, "")
    assert engine.await_event(HandoffEnded).key == key


def test_a_wait_ends_with_what_the_session_says_itself(engines: Engines) -> None:
    alone = engines()
    waited = threading.Thread(target=alone.session.wait, args=[threading.TIMEOUT_MAX])
    waited.start()
    alone.session.reserve(new_key(), SENDERS, 0, 16, BLOCKS)
    waited.join(DEADLINE)
    assert not waited.is_alive()


def test_an_offer_that_comes_as_the_session_has_ended_is_tried_again(
    daemons: Daemons, engines: Engines
) -> None:
    daemon = daemons()
    daemon.desk.pool_refusal = Unreachable("the session has ended")
    rank = engines(worker())
    with pytest.raises(DaemonUnreachable, match="the session has ended"):
        rank.session.wait_ready(1)
    daemon.desk.pool_refusal = None
    connected(rank)


def test_nothing_that_an_engine_says_ends_its_session(daemons: Daemons, engines: Engines) -> None:
    daemon = daemons()
    say: Any = connected(engines())  # any values
    tell: Any = connected(engines(worker()))
    session, live = say.session, new_key()
    say.reserve(live)
    odd = [each for each in ODD if getattr(each, "__hash__", None)]
    for value in ODD:
        session.reserve(new_key(), SENDERS, 0, 16, BLOCKS, lease=value)
        session.reserve(new_key(), SENDERS, value, 16, BLOCKS, priority=value, label=value)
        session.reserve(new_key(), [value], 0, 16, BLOCKS)
        session.reserve(new_key(), [Sender(value, value, value)], 0, 16, [Blocks(value, 0, (1,))])
        session.reserve(new_key(), SENDERS, 0, 16, [Blocks(0, 0, (value,))])
        session.handoff(new_key(), BLOCKS, seal=value, lease=value, receiver_engine_id=value, label=value)
        session.handoff(live, BLOCKS)
        session.cancel(live, Side.SENDER, value)
        session.decline(live, [value])
        for first, end in ((0, 1), (value, 2), (1, value)):
            tell.session.advance(live, value, first_layer=first, end_layer=end)
            tell.session.advance(live, 16, first_layer=first, end_layer=end)
    for value in odd:
        session.reserve(value, SENDERS, 0, 16, BLOCKS)
        session.handoff(TransferKey(value, value), BLOCKS)
        session.decline(value, SENDERS)
        session.first_token(value)
        tell.session.advance(value, 16)
    tell.session.advance([], 16)
    session.reserve(new_key(), SENDERS * 1000, 0, 16, BLOCKS)
    session.reserve(new_key(), SENDERS, 0, 16, BLOCKS * (1 << 17))
    for _ in range(300):  # together far more than one message takes
        session.decline(live, [Sender("e" * 512, "h" * 512, 1)] * 256)
    last = new_key()
    say.reserve(last, "land")
    until(lambda: bool(say.of(last)))
    tell.session.advance(last, 16)
    until(lambda: _taken(daemon, Advance).key == last)
    assert ReservationEnded not in ends(say, live)
    tell.poll()
    assert not [event for event in say.seen + tell.seen if isinstance(event, Disconnected)]
    refused = [event.fault for event in say.seen if isinstance(event, ReservationEnded) and event.fault]
    assert refused
    assert {fault.reason for fault in refused} == {Reason.INVALID}
    assert any("lease is inf s" in fault.detail for fault in refused)
    assert any("senders=(None,)" in fault.detail for fault in refused)


def _taken(daemon: Daemon, kind: type[Any]) -> Any:
    """The next item of a kind that the daemon takes."""
    while not isinstance(item := daemon.desk.items.get(timeout=DEADLINE), kind):
        pass
    return item


def test_a_handoff_whose_append_fits_no_message_is_taken_back_and_ends(
    daemons: Daemons, engines: Engines
) -> None:
    daemons()
    engine, key = connected(engines()), new_key()
    engine.session.handoff(key, BLOCKS)
    engine.session.handoff(key, BLOCKS, receiver_engine_id="\ud800")
    ended = engine.await_event(HandoffEnded)
    assert ended.key == key
    assert ended.fault is not None
    assert ended.fault.reason is Reason.INVALID


def test_a_session_that_no_daemon_could_be_told_of_is_not_made(runtime_dir: Path) -> None:
    wrong: Any = 7
    with pytest.raises(ValueError, match="engine_id=7"):
        Session(runtime_dir, replace(scheduler(), engine_id=wrong))
    with pytest.raises(ValueError, match="rank=-1"):
        Session(runtime_dir, replace(scheduler(), rank=-1))
    with (
        closing(Pool.create(LAYOUT.pool_bytes, "pool")) as pool,
        pytest.raises(ValueError, match=r"DescribePool.*-1"),
    ):
        Session(runtime_dir, worker(), pool, replace(LAYOUT, blocks=-1))


def test_nothing_was_handed_off_is_not_what_a_seal_can_say(daemons: Daemons, engines: Engines) -> None:
    daemons()
    engine, key = connected(engines()), new_key()
    engine.session.handoff(key, BLOCKS, seal=0, lease=0.1)
    assert engine.await_event(HandoffEnded).fault == Fault(
        Reason.INVALID, "Handoff: seal is 0, not from 1 to 2147483647"
    )


# --- the daemon is away -----------------------------------------------------------------------------------


def test_without_a_daemon_everything_ends_at_once(engines: Engines) -> None:
    engine = engines()
    key = new_key()
    engine.reserve(key)
    engine.session.handoff(key, BLOCKS)
    engine.session.handoff(key, BLOCKS)
    engine.session.cancel(key, Side.SENDER)
    engine.poll()
    reserved, handed_off = engine.of(key)
    assert isinstance(reserved, ReservationEnded)
    assert reserved.released
    assert reserved.fault is not None
    assert reserved.fault.reason is Reason.PEER_UNREACHABLE
    assert isinstance(handed_off, HandoffEnded)
    with pytest.raises(DaemonUnreachable, match=r"kvpushd\.sock does not exist: is kvpushd running\?"):
        engine.session.wait_ready(0.5)


def test_advances_without_a_daemon_are_dropped(engines: Engines) -> None:
    engine = engines(worker())
    for position in range(1000):
        engine.session.advance(new_key(), position)
    assert not engine.session.ready
    assert engine.session.poll() == []


def test_a_session_connects_when_the_daemon_comes(daemons: Daemons, engines: Engines) -> None:
    engine = engines(worker())
    with pytest.raises(DaemonUnreachable):
        engine.session.wait_ready(0.2)
    daemons()
    connected(engine)


ANOTHER_USERS = """
import os
import sys
from pathlib import Path
from kvpush_client.errors import DaemonUnreachable
from kvpush_client.session import Session
from testing.front import scheduler
os.setgroups([]), os.setgid(65534), os.setuid(65534)
session = Session(Path(sys.argv[1]), scheduler())
session.start()
for _ in range(2):
    try:
        session.wait_ready(3)
    except DaemonUnreachable as error:
        print(error, flush=True)
    sys.stdin.readline()
session.wait_ready(20)
print("connected")
session.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_session_that_may_not_come_to_the_daemon_says_so_and_connects_once_it_may(
    daemons: Daemons, runtime_dir: Path
) -> None:
    daemons()
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER_USERS, str(runtime_dir)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as another:
        assert another.stdin is not None
        assert another.stdout is not None
        for closed, verb, mode in (
            (runtime_dir, "enter", 0o755),
            (runtime_dir / "kvpushd.sock", "open", 0o666),
        ):
            said = another.stdout.readline()
            assert f"this user may not {verb} {closed} (" in said
            assert "group root): " in said
            (runtime_dir / "fd.sock").chmod(0o666)
            closed.chmod(mode)
            another.stdin.write("\n")
            another.stdin.flush()
        assert another.stdout.readline() == "connected\n"


def test_a_file_in_the_place_of_the_folder_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o644)
    session = Session(tmp_path / "file", scheduler())
    session.start()
    with pytest.raises(DaemonUnreachable, match=f"{tmp_path}/file is no folder"):
        session.wait_ready(1.0)
    session.close()


def test_a_folder_that_can_not_be_looked_at_is_named_with_the_reason(runtime_dir: Path) -> None:
    session = Session(runtime_dir / ("x" * 256), scheduler())
    session.start()
    with pytest.raises(DaemonUnreachable, match=r"/x+/kvpushd\.sock: File name too long"):
        session.wait_ready(0.5)
    session.close()


@pytest.mark.parametrize(
    "error", [OSError("none to be had"), RuntimeError("can't start new thread")], ids=repr
)
def test_an_attempt_that_the_system_refuses_is_followed_by_another(
    error: Exception, daemons: Daemons, runtime_dir: Path
) -> None:
    attempts = iter([error])

    def dial(
        socket: Path, identity: Identity, unsayable: Callable[[Item, Malformed], None], silence: float
    ) -> Link:
        for refused in attempts:
            raise refused
        return Link(socket, identity, unsayable, silence)

    daemons()
    session = Session(runtime_dir, scheduler(), link=dial)
    session.start()
    session.wait_ready(10)
    session.close()


def test_halves_of_a_killed_daemon_end_once_and_the_lifeline_releases_them(
    processes: Processes, engines: Engines
) -> None:
    daemon, engine = processes(), connected(engines())
    key, landed = new_key(), new_key()
    engine.reserve(landed, "land")
    engine.await_event(ReservationEnded)
    engine.reserve(key)
    engine.session.handoff(key, BLOCKS)
    daemon.kill()
    engine.await_event(HandoffEnded)
    engine.await_event(ReservationReleased)
    assert ends(engine, landed) == [ReservationEnded]
    assert sorted(kind.__name__ for kind in ends(engine, key)) == [
        "HandoffEnded",
        "ReservationEnded",
        "ReservationReleased",
    ]
    kinds = [type(event) for event in engine.seen]
    assert kinds.index(Disconnected) < kinds.index(ReservationReleased)
    (lost,) = (event for event in engine.of(key) if isinstance(event, ReservationEnded))
    assert not lost.released


def test_a_session_registers_again_after_a_restart(processes: Processes, engines: Engines) -> None:
    daemon, engine, rank = processes(), connected(engines()), connected(engines(worker()))
    first = engine.await_event(Connected).incarnation
    daemon.kill()
    engine.await_event(Disconnected)
    processes()
    assert engine.await_event(Connected, count=2).incarnation != first
    rank.await_event(Connected, count=2)
    engine.reserve(new_key(), "land")
    assert engine.await_event(ReservationEnded).fault is None


def test_a_stopped_daemon_is_noticed_and_its_halves_wait_for_the_fence(
    processes: Processes, engines: Engines
) -> None:
    daemon, engine = processes(), connected(engines())
    key = new_key()
    engine.reserve(key)
    engine.session.handoff(key, BLOCKS)
    daemon.send(signal.SIGSTOP)
    engine.await_event(Disconnected)
    assert ends(engine, key) == [ReservationEnded]  # it may still write and read
    daemon.send(signal.SIGCONT)
    engine.await_event(Connected, count=2)
    assert ends(engine, key) == [ReservationEnded, ReservationReleased, HandoffEnded]


def test_how_long_a_stopped_daemon_is_waited_for_is_the_engines_to_say(
    processes: Processes, engines: Engines
) -> None:
    daemon = processes()
    hasty = connected(engines(replace(scheduler(), engine_id="hasty"), daemon_silence=1))
    patient = connected(engines(replace(scheduler(), engine_id="patient"), daemon_silence=60))
    daemon.send(signal.SIGSTOP)
    hasty.await_event(Disconnected)
    daemon.send(signal.SIGCONT)
    hasty.await_event(Connected, count=2)
    key = new_key()
    patient.reserve(key, "land")
    assert patient.await_event(ReservationEnded).fault is None
    assert not any(isinstance(event, Disconnected) for event in patient.seen)


def test_a_machine_that_stands_still_for_longer_than_that_loses_no_session(
    processes: Processes, engines: Engines
) -> None:
    daemon, engine = processes(), connected(engines(daemon_silence=2))
    daemon.send(signal.SIGSTOP)
    ctypes.PyDLL(None).usleep(4_000_000)  # holding the interpreter's lock: no thread of this process runs
    daemon.send(signal.SIGCONT)
    key = new_key()
    engine.reserve(key, "land")
    assert engine.await_event(ReservationEnded).fault is None
    assert not any(isinstance(event, Disconnected) for event in engine.seen)


def test_a_daemon_that_has_nothing_to_say_to_one_who_talks_all_the_time_is_not_silent(
    daemons: Daemons, engines: Engines
) -> None:
    daemons()
    rank, key = connected(engines(worker(), daemon_silence=1)), new_key()
    enough = time.monotonic() + 3
    while time.monotonic() < enough:
        rank.session.advance(key, 16)
        time.sleep(0.01)
    rank.poll()
    assert not any(isinstance(event, Disconnected) for event in rank.seen)


def test_while_movers_live_nothing_is_released_until_a_daemon_welcomes_the_launch(
    daemons: Daemons, engines: Engines
) -> None:
    first, engine = daemons(), connected(engines())
    key = new_key()
    engine.reserve(key)
    engine.session.handoff(key, BLOCKS)
    first.desk.items.get(timeout=DEADLINE)
    first.stop(movers_live=True)
    engine.await_event(Disconnected)
    desk = Desk()
    desk.refusal = OverLimit("not yet")
    second = daemons(desk)
    with pytest.raises(DaemonRefused):
        until(lambda: engine.session.wait_ready(DEADLINE) is None)
    assert ends(engine, key) == [ReservationEnded]
    second.desk.refusal = None
    engine.await_event(Connected, count=2)
    assert ends(engine, key) == [ReservationEnded, ReservationReleased, HandoffEnded]


@pytest.mark.parametrize(("formers", "lock"), [(LOCK, b"another"), (LOCK, b""), (b"", b"")])
def test_a_daemon_with_another_lock_vouches_for_nothing_of_the_former_one(
    daemons: Daemons, engines: Engines, formers: bytes, lock: bytes
) -> None:
    first, engine = daemons(lock=formers), connected(engines())
    key, later = new_key(), new_key()
    engine.reserve(key)
    engine.session.handoff(key, BLOCKS)
    first.desk.items.get(timeout=DEADLINE)
    first.stop(movers_live=True)
    engine.await_event(Disconnected)
    second = daemons(lock=lock)
    engine.await_event(Connected, count=2)
    assert ends(engine, key) == [ReservationEnded]
    # What the second held is fenced by its own end, and nothing else is.
    engine.reserve(later)
    second.stop()
    engine.await_event(ReservationReleased)
    assert ends(engine, later) == [ReservationEnded, ReservationReleased]
    daemons(lock=lock)
    engine.await_event(Connected, count=3)
    assert ends(engine, key) == [ReservationEnded]
    first.end_movers()
    engine.await_event(HandoffEnded)
    assert ends(engine, key) == [ReservationEnded, ReservationReleased, HandoffEnded]


def test_a_former_daemons_lock_vouches_also_after_a_stranger_was_there(
    daemons: Daemons, engines: Engines
) -> None:
    first, engine = daemons(), connected(engines())
    key = new_key()
    engine.reserve(key)
    first.stop(movers_live=True)
    stranger = daemons(lock=b"another")
    engine.await_event(Connected, count=2)
    stranger.stop(movers_live=True)
    assert ends(engine, key) == [ReservationEnded]
    daemons()
    engine.await_event(Connected, count=3)
    assert ends(engine, key) == [ReservationEnded, ReservationReleased]


def test_movers_that_die_after_their_daemon_release_what_they_held(
    daemons: Daemons, engines: Engines
) -> None:
    daemon, engine = daemons(), connected(engines())
    key = new_key()
    engine.reserve(key)
    daemon.stop(movers_live=True)
    engine.await_event(Disconnected)
    assert ends(engine, key) == [ReservationEnded]
    daemon.end_movers()
    engine.await_event(ReservationReleased)
    assert ends(engine, key) == [ReservationEnded, ReservationReleased]


# --- refusals ---------------------------------------------------------------------------------------------


def test_a_refusal_is_shown_at_once_and_tried_again(daemons: Daemons, engines: Engines) -> None:
    desk = Desk()
    desk.refusal = FingerprintMismatch("model is 'a' here and 'b' there")
    daemons(desk)
    engine = engines()
    with pytest.raises(DaemonRefused, match="model is 'a' here") as refused:
        engine.session.wait_ready(DEADLINE)
    assert refused.value.reason is Reason.FINGERPRINT_MISMATCH
    desk.refusal = None
    engine.await_event(Connected)


def test_a_refused_pool_is_shown(daemons: Daemons, engines: Engines) -> None:
    desk = Desk()
    desk.pool_refusal = BadMemory("the descriptor is not sealed")
    daemons(desk)
    with pytest.raises(DaemonRefused, match="not sealed") as refused:
        engines(worker()).session.wait_ready(DEADLINE)
    assert refused.value.reason is Reason.BAD_MEMORY


def test_a_refused_layout_is_shown(daemons: Daemons, engines: Engines) -> None:
    desk = Desk()
    desk.item_refusal = BadMemory("layer.0 lies outside of the pool")
    daemons(desk)
    with pytest.raises(DaemonRefused, match="outside of the pool"):
        engines(worker()).session.wait_ready(DEADLINE)


def test_a_welcome_may_take_its_time(daemons: Daemons, engines: Engines) -> None:
    daemon = daemons()
    daemon.set_hold(True)
    engine = engines()
    with pytest.raises(DaemonUnreachable):
        engine.session.wait_ready(0.3)
    daemon.set_hold(False)
    connected(engine)


def test_a_daemon_that_lets_wait_for_a_welcome_is_not_silent(daemons: Daemons, engines: Engines) -> None:
    daemon = daemons()
    daemon.set_hold(True)
    engine = engines(daemon_silence=1)
    with pytest.raises(DaemonUnreachable, match="no answer at"):
        engine.session.wait_ready(3)
    daemon.set_hold(False)
    connected(engine)


def test_a_daemon_that_stops_before_its_welcome_is_given_up(processes: Processes, engines: Engines) -> None:
    daemon = processes()
    daemon.send(signal.SIGSTOP)
    with pytest.raises(DaemonUnreachable, match="silent for 1 s"):
        engines(daemon_silence=1).session.wait_ready(4)
    daemon.send(signal.SIGCONT)


# --- its own end ------------------------------------------------------------------------------------------


def test_what_was_posted_before_close_is_still_sent(daemons: Daemons, engines: Engines) -> None:
    daemon, engine = daemons(), connected(engines())
    keys = [new_key() for _ in range(1000)]
    for key in keys:
        engine.reserve(key)
    engine.session.close()
    assert daemon.desk.gone.get(timeout=DEADLINE) == scheduler()
    assert daemon.desk.items.qsize() == len(keys)


def test_close_waits_for_nobody(daemons: Daemons, engines: Engines, processes: Processes) -> None:
    alone = engines()
    alone.session.close()
    alone.session.close()
    stopped = processes()
    engine = connected(engines())
    stopped.send(signal.SIGSTOP)
    engine.session.close()
    assert engine.session.poll() is not None


def test_sessions_leave_no_descriptors_and_no_threads(processes: Processes, runtime_dir: Path) -> None:
    processes()

    def live_and_die() -> None:
        session = Session(runtime_dir, scheduler())
        session.start()
        session.wait_ready(DEADLINE)
        session.close()

    live_and_die()  # gRPC opens what it keeps for the process
    descriptors, threads = open_descriptors(), threading.active_count()
    for _ in range(5):
        live_and_die()
    until(lambda: open_descriptors() <= descriptors and threading.active_count() <= threads)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


LEFT_OPEN = """
import os
import sys
from pathlib import Path
from kvpush_client.session import Session
from testing.front import new_key, scheduler
session = Session(Path(sys.argv[1]), scheduler())
session.start()
if sys.argv[2] == "connected":
    session.wait_ready(20)
if sys.argv[3] == "forked":
    child = os.fork()
    if child == 0:
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    assert sys.argv[2] != "connected" or session.ready
print("end")
"""


@pytest.mark.parametrize("then", ["alone", "forked"])
@pytest.mark.parametrize("how", ["connected", "searching"])
def test_an_interpreter_exits_with_a_session_open(
    how: str, then: str, processes: Processes, runtime_dir: Path
) -> None:
    if how == "connected":
        processes()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT_OPEN, str(runtime_dir), how, then],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def test_only_a_scheduler_opens_halves_and_only_a_worker_advances(engines: Engines) -> None:
    with pytest.raises(RuntimeError, match="scheduler"):
        engines(worker()).session.reserve(new_key(), SENDERS, 0, 16, BLOCKS)
    with pytest.raises(RuntimeError, match="worker"):
        engines().session.advance(new_key(), 16)
