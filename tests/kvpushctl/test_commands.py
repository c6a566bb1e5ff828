# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvpush_client._proto import admin_pb2, types_pb2
from tests.kvpushctl.admin_server import AdminServer
from tests.kvpushctl.conftest import REPOSITORY, Ctl

SECOND = 1_000_000_000
START = 1_800_000_000 * SECOND


def half(number: int, engine: str = "d0", phase: int = admin_pb2.PHASE_MOVING) -> admin_pb2.Half:
    return admin_pb2.Half(
        transfer_id=f"{number:032x}",
        attempt=1,
        engine_id=engine,
        other="p0@10.0.0.1:7766",
        phase=phase,
        age_ms=4100,
        blocks=24,
        start=0,
        end=2999,
        label=f"cmpl-{number}",
        lease_left_ms=25900,
    )


def received(number: int, phase: int = admin_pb2.PHASE_ENDED) -> admin_pb2.Transfer:
    return admin_pb2.Transfer(
        half=half(number, phase=phase),
        times=types_pb2.TransferTimes(
            opened_unix_ns=START,
            matched_unix_ns=START + 2_000_000,
            first_landed_unix_ns=START + 300_000_000,
            landed_unix_ns=START + 905_000_000,
        ),
        sender_times=types_pb2.TransferTimes(
            first_post_unix_ns=START + 250_000_000, sealed_unix_ns=START + 900_000_000
        ),
        first_token_unix_ns=START + 930_000_000,
        counts=types_pb2.TransferCounts(bytes=3 << 20, chunks=6, chunks_before_seal=5, runs=96),
    )


def test_status_shows_the_node_and_its_movers(node: AdminServer, ctl: Ctl) -> None:
    node.content.status = admin_pb2.GetStatusResponse(
        node="n0",
        software="kvpushd 0.1.0",
        started_unix_ns=START,
        ready=False,
        problems=["mover m0 is being replaced"],
        movers=[admin_pb2.Mover(name="m0", pid=7, alive=False, restarts=1, transports=["nixl-ucx", "local"])],
        held=admin_pb2.Held(engines=1, pools=1, pool_bytes=1 << 30, reservations=2, quarantined_blocks=3),
        totals=admin_pb2.Totals(bytes_sent=1536, landed=4),
        peer_address="10.0.0.2:7766",
        peer_security="mtls",
    )
    table = ctl("status")
    for text in (
        "not ready",
        "mover m0 is being replaced",
        "1.0 GiB",
        "1.5 KiB",
        "3 blocks",
        "nixl-ucx, local",
    ):
        assert text in table.out
    found = ctl("status", "--output", "json").document
    assert found["held"]["pool_bytes"] == 1 << 30
    assert found["totals"]["sent_bytes"] == 1536
    assert found["movers"][0]["transports"] == ["nixl-ucx", "local"]
    assert found["ready"] is False


def test_lists_are_fetched_whole_and_come_in_a_stable_order(node: AdminServer, ctl: Ctl) -> None:
    node.content.engines = [admin_pb2.Engine(engine_id=f"e{number}") for number in (4, 2, 0, 3, 1)]
    found = ctl("engines", "-o", "json").document["engines"]
    assert [one["engine_id"] for one in found] == ["e0", "e1", "e2", "e3", "e4"]


def test_an_engine_is_shown_with_units_and_told_in_base_units(node: AdminServer, ctl: Ctl) -> None:
    node.content.engines = [
        admin_pb2.Engine(
            engine_id="d0",
            incarnation="ab",
            ranks_ready=1,
            local_ranks=2,
            world_size=4,
            pool_bytes=96 << 20,
            blocks=4096,
            fingerprint=types_pb2.Fingerprint(fields={"model": "qwen", "dtype": "fp32"}),
            memory="memfd",
        )
    ]
    table = ctl("engines").out
    for text in ("1/2 of 4", "96.0 MiB", "4,096", "memfd"):
        assert text in table
    (one,) = ctl("engines", "-o", "json").document["engines"]
    assert one["pool_bytes"] == 96 << 20
    assert one["fingerprint"] == {"dtype": "fp32", "model": "qwen"}


@pytest.mark.parametrize("noun", ["reservations", "handoffs"])
def test_halves_can_be_asked_of_one_engine(node: AdminServer, ctl: Ctl, noun: str) -> None:
    halves = [half(1, "a"), half(2, "b"), half(3, "a"), half(4, "a")]
    getattr(node.content, noun).extend(halves)
    found = ctl(noun, "--engine", "a", "-o", "json").document[noun]
    assert [int(one["transfer_id"], 16) for one in found] == [1, 3, 4]
    assert found[0]["phase"] == "moving"
    assert found[0]["age_ms"] == 4100
    table = ctl(noun).out
    for text in ("moving", "4.1 s", "[0, 2999)", "cmpl-2", "p0@10.0.0.1:7766"):
        assert text in table


def test_a_half_that_is_not_sealed_has_no_end(node: AdminServer, ctl: Ctl) -> None:
    open_half = half(1)
    open_half.end = 0
    node.content.handoffs = [open_half]
    assert ctl("handoffs", "-o", "json").document["handoffs"][0]["end"] is None
    assert "[0, ...)" in ctl("handoffs").out


def test_live_transfers_come_before_those_that_ended(node: AdminServer, ctl: Ctl) -> None:
    node.content.transfers = [received(3), received(2, admin_pb2.PHASE_MOVING), received(1)]
    found = ctl("transfers", "-o", "json").document["transfers"]
    assert [int(one["transfer_id"], 16) for one in found] == [2, 3, 1]
    live = ctl("transfers", "--live", "-o", "json").document["transfers"]
    assert [int(one["transfer_id"], 16) for one in live] == [2]


def test_a_transfer_has_its_phases_with_the_senders_moments_in_place(node: AdminServer, ctl: Ctl) -> None:
    node.content.transfers = [received(1), received(2)]
    (one,) = ctl("transfers", f"{1:032x}", "-o", "json").document["transfers"]
    assert one["phases_ms"] == {
        "reserve": 0,
        "announce": 2,
        "first_byte": 250,
        "first_landed": 300,
        "seal": 900,
        "landed": 905,
        "first_token": 930,
    }
    assert [step["clock"] for step in one["timeline"] if step["name"] in ("seal", "landed")] == [
        "sender",
        "here",
    ]
    table = ctl("transfers", f"{1:032X}").out
    for text in (
        "905.000 ms",
        "3.0 MiB in 6 chunks (96 runs), 5 before the seal",
        "the first token came out",
    ):
        assert text in table


def test_a_fault_is_shown_with_its_reason_and_detail(node: AdminServer, ctl: Ctl) -> None:
    failed = received(1)
    failed.fault.reason = types_pb2.REASON_PEER_UNREACHABLE
    failed.fault.detail = "link to 10.0.0.1:7766 broke"
    node.content.transfers = [failed]
    assert "peer_unreachable" in ctl("transfers").out
    assert "link to 10.0.0.1:7766 broke" in ctl("transfers", f"{1:032x}").out


def test_a_transfer_that_is_not_known_is_a_failure(node: AdminServer, ctl: Ctl) -> None:
    ran = ctl("transfers", "0" * 32)
    assert (ran.status, ran.out) == (1, "")
    assert "no transfer" in ran.err


def test_peers_come_by_address(node: AdminServer, ctl: Ctl) -> None:
    node.content.peers = [
        admin_pb2.Peer(address="b:1", node="b", receiving=True, up=False, last_fault="silence", bytes=2048),
        admin_pb2.Peer(
            address="a:1",
            node="a",
            up=True,
            transport="nixl-ucx (tcp)",
            bytes_per_second=3 << 20,
            below_floor=True,
        ),
    ]
    found = ctl("peers", "-o", "json").document["peers"]
    assert [one["address"] for one in found] == ["a:1", "b:1"]
    assert [one["direction"] for one in found] == ["sending", "receiving"]
    table = ctl("peers").out
    assert [one["bytes_per_second"] for one in found] == [3 << 20, None]
    for text in ("nixl-ucx (tcp)", "2.0 KiB", "silence", "down", "3.0 MiB/s BELOW FLOOR"):
        assert text in table


def test_an_empty_list_is_no_data_and_no_failure(node: AdminServer, ctl: Ctl) -> None:
    ran = ctl("peers")
    assert (ran.status, ran.out) == (0, "")
    assert "no other node" in ran.err
    assert ctl("peers", "-o", "json").document == {"peers": []}


def test_drain_says_what_is_left_and_does_not_wait(node: AdminServer, ctl: Ctl) -> None:
    node.content.left = [admin_pb2.Held(handoffs=2, writes=1)]
    ran = ctl("drain", "-o", "json")
    assert ran.status == 0
    assert (ran.document["idle"], ran.document["held"]["handoffs"]) == (False, 2)
    assert node.drains == 1


def test_drain_waits_until_the_node_is_idle(node: AdminServer, ctl: Ctl) -> None:
    node.content.left = [
        admin_pb2.Held(handoffs=1),
        admin_pb2.Held(quarantined_blocks=1),
        admin_pb2.Held(engines=2),
    ]
    ran = ctl("drain", "--wait", "30", "-o", "json")
    assert (ran.status, ran.document["idle"], node.drains) == (0, True, 3)


def test_drain_fails_when_the_time_is_over(node: AdminServer, ctl: Ctl) -> None:
    node.content.left = [admin_pb2.Held(reservations=1)]
    ran = ctl("drain", "--wait", "0.01")
    assert ran.status == 1
    assert "transfers --live" in ran.err


def test_version_names_both_programs(node: AdminServer, ctl: Ctl) -> None:
    node.content.status = admin_pb2.GetStatusResponse(software="kvpushd 9.9")
    assert ctl("version", "-o", "json").document["kvpushd"] == "kvpushd 9.9"


def test_version_needs_no_daemon(ctl: Ctl) -> None:
    ran = ctl("version", "-o", "json")
    assert ran.status == 0
    assert ran.document["kvpushd"] is None


@pytest.mark.parametrize(
    "noun", ["status", "engines", "reservations", "handoffs", "transfers", "peers", "drain"]
)
def test_without_a_daemon_the_status_is_three_and_stderr_says_what_to_do(ctl: Ctl, noun: str) -> None:
    ran = ctl(noun)
    assert (ran.status, ran.out) == (3, "")
    assert "systemctl start kvpushd" in ran.err
    assert ran.err.count("\n") == 1


def test_a_socket_that_nobody_serves_is_a_daemon_that_does_not_answer(ctl: Ctl, tmp_path: Path) -> None:
    (tmp_path / "admin.sock").touch()
    ran = ctl("status")
    assert ran.status == 3
    assert "nobody answers" in ran.err


ANOTHER_USERS = """
import os, sys
from pathlib import Path
from kvpushctl.admin import connect
from kvpushctl.errors import DaemonUnreachable
from kvpushctl.runtime import default_runtime_dir
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(default_runtime_dir({"XDG_RUNTIME_DIR": sys.argv[1]}, Path("/nowhere")))
try:
    connect(Path(sys.argv[1])).__enter__()
except DaemonUnreachable as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("mode", "shown", "remedy"),
    [
        (0o750, "drwxr-x---", "make it a member of that group"),
        (0o700, "drwx------", "be its owner, or open it to a group"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_user_who_may_not_enter_the_folder_is_told_whose_member_to_become(
    mode: int, shown: str, remedy: str
) -> None:
    with tempfile.TemporaryDirectory() as closed:
        Path(closed).chmod(mode)
        ran = subprocess.run(
            [sys.executable, "-c", ANOTHER_USERS, closed],
            env={"PYTHONPATH": str(REPOSITORY / "client")},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    owned = f"({shown}, group root): {remedy}"
    assert ran.stdout == f"/nowhere\nthis user may not enter {closed} {owned}\n"


ANOTHER_USERS_COMMAND = """
import contextlib, io, os, sys
from kvpushctl.__main__ import main
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    with contextlib.redirect_stdout(io.StringIO()):
        main([sys.argv[1], "--runtime-dir", "/nowhere"])  # imports what another user can't
os.setgroups([]), os.setgid(65534), os.setuid(65534)
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("command", "how"), [("status", "flag"), ("version", "variable"), ("doctor", "variable")]
)
@pytest.mark.parametrize(
    ("mode", "said"), [(0o750, "may not enter {closed}"), (0o711, "{closed}/admin.sock does not exist")]
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_folder_need_not_be_readable_for_another_user_to_ask_there(
    mode: int, said: str, command: str, how: str
) -> None:
    with tempfile.TemporaryDirectory() as closed:
        Path(closed).chmod(mode)
        env = {"PYTHONPATH": str(REPOSITORY / "client"), "COLUMNS": "300"}
        flag = ["--runtime-dir", closed] if how == "flag" else []
        if how == "variable":
            env["KVPUSHD_RUNTIME_DIR"] = closed
        ran = subprocess.run(
            [sys.executable, "-c", ANOTHER_USERS_COMMAND, command, *flag],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ran.returncode in (0, 1, 3), ran.stderr
    assert said.format(closed=closed) in ran.stdout + ran.stderr


@pytest.mark.parametrize("arguments", [["nonsense"], ["transfers", "xyz"], ["status", "-o", "xml"]])
def test_wrong_usage_exits_with_two(ctl: Ctl, arguments: list[str]) -> None:
    ran = ctl(*arguments)
    assert (ran.status, ran.out) == (2, "")


def test_doctor_names_what_lacks_with_its_mend(ctl: Ctl) -> None:
    ran = ctl("doctor", "-o", "json")
    checks = {one["check"]: one for one in ran.document["checks"]}
    assert ran.status == 1
    assert not checks["daemon"]["ok"]
    assert "systemctl start kvpushd" in checks["daemon"]["mend"]


def test_looking_loads_nothing_heavy() -> None:
    code = "import sys, kvpushctl.app as a; a.build(); print(*sys.modules)"
    env = {"PYTHONPATH": str(REPOSITORY / "client")}
    loaded = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    heavy = {
        "aiohttp",
        "torch",
        "transformers",
        "tokenizers",
        "vllm",
        "numpy",
        "cryptography",
        "trustme",
        "kvpushd",
    }
    assert heavy.isdisjoint(loaded)
