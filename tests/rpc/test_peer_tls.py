# SPDX-License-Identifier: Apache-2.0
"""Links with certificates: who may be here, and what a rotation does."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path

import pytest
import trustme

from kvpush_client.events import Reason
from kvpushd.errors import ConfigError
from kvpushd.rpc.tls import InsecurePeers, MutualTls, NoPeers, choose, covers
from kvpushd.settings import Tls
from tests.rpc.peer_kit import fenced, in_loop, number_of, receiving, sending, soon, withdraw


class Papers:
    """One node's three files."""

    def __init__(self, folder: Path, authority: trustme.CA, *names: str) -> None:
        self.ca, self.cert, self.key = (folder / f"{names[0]}.{part}" for part in ("ca", "cert", "key"))
        self.issue(authority, *names)

    def issue(self, authority: trustme.CA, *names: str, **how: datetime.datetime) -> None:
        made = authority.issue_cert(*names, **how)
        self.ca.write_bytes(authority.cert_pem.bytes())
        self.cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        self.key.write_bytes(made.private_key_pem.bytes())

    def trust(self, *authorities: trustme.CA) -> None:
        self.ca.write_bytes(b"".join(authority.cert_pem.bytes() for authority in authorities))

    def security(self, *allowed: str, **own: str) -> MutualTls:
        return MutualTls(self.ca, self.cert, self.key, allowed or ("*",), **own)


def from_now(**how: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(**how)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def sender_papers(tmp_path: Path, authority: trustme.CA) -> Papers:
    return Papers(tmp_path, authority, "p.nodes", "127.0.0.1")


@pytest.fixture
def receiver_papers(tmp_path: Path, authority: trustme.CA) -> Papers:
    return Papers(tmp_path, authority, "d.nodes")


@in_loop
async def test_nodes_of_one_authority_link_and_both_names_are_proven(
    sender_papers: Papers, receiver_papers: Papers
) -> None:
    async with (
        sending("p.nodes", sender_papers.security("d.*")) as sender,
        receiving("d.nodes", receiver_papers.security("p.*")) as (links, heard),
    ):
        links.dial(sender.address).send(withdraw(7))
        back = await soon(sender.notes.ups.get())
        back.send(fenced(8))
        assert number_of(await soon(sender.notes.items.get())) == 7
        assert number_of(await soon(heard.items.get())) == 8
        assert back.names == ("d.nodes",)


@in_loop
async def test_a_sender_of_another_authority_is_not_spoken_to(tmp_path: Path, sender_papers: Papers) -> None:
    stranger = Papers(tmp_path, trustme.CA(), "d.nodes")
    async with (
        sending("p.nodes", sender_papers.security()) as sender,
        receiving("d.nodes", stranger.security()) as (links, heard),
    ):
        links.dial(sender.address)
        _, fault = await soon(heard.downs.get())
        assert fault.reason is Reason.FORBIDDEN
        assert sender.notes.ups.empty()


@in_loop
async def test_a_receiver_whose_certificate_another_authority_signed_never_reaches_the_service(
    tmp_path: Path, authority: trustme.CA, sender_papers: Papers
) -> None:
    another = trustme.CA()
    stranger = Papers(tmp_path, another, "d.nodes")
    stranger.trust(another, authority)  # it trusts the sender; the sender does not trust it
    async with (
        sending("p.nodes", sender_papers.security()) as sender,
        receiving("d.nodes", stranger.security()) as (links, heard),
    ):
        links.dial(sender.address)
        _, fault = await soon(heard.downs.get())
        assert fault.reason is Reason.PEER_UNREACHABLE
        assert "does not take this node's certificate: here it is good" in fault.detail
        assert sender.notes.ups.empty()
        assert sender.notes.refused.empty()


@pytest.mark.parametrize(
    ("limit", "seconds", "words"),
    [("not_before", 3600, "certificate is not yet valid"), ("not_after", 3, "certificate has expired")],
)
@in_loop
async def test_a_receiver_whose_own_certificate_is_what_is_wrong_is_told_so_when_it_dials(
    authority: trustme.CA,
    sender_papers: Papers,
    receiver_papers: Papers,
    limit: str,
    seconds: float,
    words: str,
) -> None:
    receiver_papers.issue(authority, "d.nodes", **{limit: from_now(seconds=seconds)})
    security = receiver_papers.security(node="d.nodes")
    async with (
        sending("p.nodes", sender_papers.security()) as sender,
        receiving("d.nodes", security) as (links, heard),
    ):
        for _ in range(100):
            if any(words in doubt for doubt in security.doubts()):
                break
            await asyncio.sleep(0.1)
        links.dial(sender.address)
        _, fault = await soon(heard.downs.get())
        assert fault.reason is Reason.PEER_UNREACHABLE
        assert f"{sender.address} does not take this node's certificate" in fault.detail
        assert f"{receiver_papers.cert}, or what signed it" in fault.detail
        assert words in fault.detail


@in_loop
async def test_a_caller_without_a_certificate_never_reaches_the_service(sender_papers: Papers) -> None:
    async with (
        sending("p.nodes", sender_papers.security()) as sender,
        receiving("d.nodes", InsecurePeers(("*",))) as (links, heard),
    ):
        links.dial(sender.address)
        assert (await soon(heard.downs.get()))[1].reason is Reason.PEER_UNREACHABLE
        assert sender.notes.ups.empty()


@in_loop
async def test_a_host_whose_certificate_does_not_cover_its_address_is_not_spoken_to(
    tmp_path: Path, authority: trustme.CA, receiver_papers: Papers
) -> None:
    elsewhere = Papers(tmp_path, authority, "p.nodes", "10.9.9.9")
    async with (
        sending("p.nodes", elsewhere.security()) as sender,
        receiving("d.nodes", receiver_papers.security()) as (links, heard),
    ):
        links.dial(sender.address)
        _, fault = await soon(heard.downs.get())
        assert fault.reason is Reason.FORBIDDEN
        assert "127.0.0.1" in fault.detail
        assert sender.notes.ups.empty()


@pytest.mark.parametrize(
    ("node", "allowed", "words"),
    [("d.nodes", "x.*", "not among allowed_peers"), ("x.nodes", "*", "calls itself 'x.nodes'")],
)
@in_loop
async def test_a_receiver_that_is_not_allowed_or_lies_about_its_name_is_told_so(
    sender_papers: Papers, receiver_papers: Papers, node: str, allowed: str, words: str
) -> None:
    async with (
        sending("p.nodes", sender_papers.security(allowed)) as sender,
        receiving(node, receiver_papers.security()) as (links, heard),
    ):
        links.dial(sender.address)
        _, fault = await soon(heard.downs.get())
        assert fault.reason is Reason.FORBIDDEN
        assert words in fault.detail
        assert (await soon(sender.notes.refused.get())).reason is Reason.FORBIDDEN


@pytest.mark.parametrize(("node", "allowed"), [("p.nodes", "x.*"), ("x.nodes", "*")])
@in_loop
async def test_a_sender_that_is_not_allowed_or_lies_about_its_name_gets_nothing(
    sender_papers: Papers, receiver_papers: Papers, node: str, allowed: str
) -> None:
    async with (
        sending(node, sender_papers.security()) as sender,
        receiving("d.nodes", receiver_papers.security(allowed)) as (links, heard),
    ):
        links.dial(sender.address).send(withdraw(1))
        assert (await soon(heard.downs.get()))[1].reason is Reason.FORBIDDEN
        await soon(sender.notes.downs.get())
        assert sender.notes.items.empty()


@in_loop
async def test_a_sender_whose_certificates_were_replaced_shows_them_without_a_restart_and_old_links_live(
    tmp_path: Path, sender_papers: Papers, receiver_papers: Papers
) -> None:
    async with (
        sending("p.nodes", sender_papers.security()) as sender,
        receiving("d.nodes", receiver_papers.security()) as (links, heard),
    ):
        old = links.dial(sender.address)
        await soon(heard.ups.get())
        renewed = trustme.CA()
        sender_papers.issue(renewed, "p.nodes", "127.0.0.1")
        knows_only_the_new = Papers(tmp_path, renewed, "d2.nodes").security()
        async with receiving("d2.nodes", knows_only_the_new) as (new_links, new_heard):
            new_links.dial(sender.address)
            await soon(new_heard.ups.get())
        assert old.up


@in_loop
async def test_a_receiver_whose_certificates_were_replaced_dials_with_them_without_a_restart(
    tmp_path: Path, receiver_papers: Papers
) -> None:
    renewed = trustme.CA()
    knows_only_the_new = Papers(tmp_path, renewed, "p.nodes", "127.0.0.1").security()
    async with (
        sending("p.nodes", knows_only_the_new) as sender,
        receiving("d.nodes", receiver_papers.security()) as (links, heard),
    ):
        links.dial(sender.address)
        assert (await soon(heard.downs.get()))[1].reason is Reason.FORBIDDEN
        receiver_papers.issue(renewed, "d.nodes")
        links.dial(sender.address)
        await soon(heard.ups.get())


@in_loop
async def test_a_rotation_half_done_leaves_the_former_certificates_in_use(
    sender_papers: Papers, receiver_papers: Papers
) -> None:
    async with (
        sending("p.nodes", sender_papers.security()) as sender,
        receiving("d.nodes", receiver_papers.security()) as (links, heard),
    ):
        sender_papers.key.write_bytes(receiver_papers.key.read_bytes())  # fits no longer
        receiver_papers.cert.unlink()
        links.dial(sender.address)
        await soon(heard.ups.get())


@pytest.mark.parametrize("wrong", ["expired", "not valid yet", "another authority", "another name"])
@in_loop
async def test_a_rotation_to_what_no_peer_would_take_leaves_the_former_certificates_in_use(
    authority: trustme.CA, sender_papers: Papers, receiver_papers: Papers, wrong: str
) -> None:
    sender, receiver = sender_papers.security(node="p.nodes"), receiver_papers.security(node="d.nodes")
    async with sending("p.nodes", sender) as port, receiving("d.nodes", receiver) as (links, heard):
        for papers, *names in ((sender_papers, "p.nodes", "127.0.0.1"), (receiver_papers, "d.nodes")):
            spoil(papers, authority, wrong, *names)
        links.dial(port.address)
        await soon(heard.ups.get())


def spoil(papers: Papers, authority: trustme.CA, wrong: str, *names: str) -> None:
    match wrong:
        case "expired":
            papers.issue(authority, *names, not_after=from_now(hours=-1))
        case "not valid yet":
            papers.issue(authority, *names, not_before=from_now(hours=1))
        case "another authority":
            papers.issue(trustme.CA(), *names)
            papers.trust(authority)
        case "another name":
            papers.issue(authority, "x.nodes", *names[1:])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("expired", "certificate has expired"),
        ("another authority", "unable to get local issuer certificate"),
        ("another name", "is for 'x.nodes', and this node is 'd.nodes'"),
    ],
)
def test_what_no_peer_would_take_is_refused_at_the_start_saying_why(
    authority: trustme.CA, receiver_papers: Papers, wrong: str, words: str
) -> None:
    spoil(receiver_papers, authority, wrong, "d.nodes")
    with pytest.raises(ConfigError, match=words) as raised:
        receiver_papers.security(node="d.nodes")
    assert receiver_papers.cert.name in str(raised.value)


def test_what_peers_will_not_take_for_long_or_not_to_dial_is_a_doubt(
    authority: trustme.CA, receiver_papers: Papers
) -> None:
    def doubts(host: str, *names: str, **how: datetime.datetime) -> list[str]:
        receiver_papers.issue(authority, "d.nodes", *names, **how)
        return receiver_papers.security(node="d.nodes", host=host).doubts()

    assert doubts("d.nodes") == []
    assert doubts("10.0.0.7", "10.0.0.7") == []
    for host in ("10.0.0.8", "e.nodes", "::1", "no host"):
        (doubt,) = doubts(host, "10.0.0.7")
        assert f"without advertised_host {host!r}" in doubt
    when = from_now(days=13)
    (doubt,) = doubts("d.nodes", not_before=from_now(days=-365), not_after=when)
    assert f"expires {when:%Y-%m-%d %H:%M}" in doubt
    # One of a day is not to be renewed from its first hour on.
    assert doubts("d.nodes", not_before=from_now(hours=-1), not_after=from_now(hours=23)) == []
    assert doubts("d.nodes", not_before=from_now(hours=-23), not_after=from_now(hours=1)) != []
    (doubt,) = doubts("d.nodes", not_before=from_now(hours=1))
    assert "not yet valid" in doubt


@pytest.mark.parametrize("part", ["ca", "cert", "key"])
@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"\xff\xfe"])
def test_files_that_cannot_be_used_are_refused_at_the_start_with_their_names(
    sender_papers: Papers, part: str, content: bytes | None
) -> None:
    file: Path = getattr(sender_papers, part)
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=file.name):
        sender_papers.security()


def test_certificates_win_and_insecure_must_be_said_and_without_either_there_are_no_peers(
    sender_papers: Papers,
) -> None:
    assert isinstance(choose(sender_papers, insecure=False, allowed=["*"]), MutualTls)
    assert isinstance(choose(Tls(), insecure=True, allowed=["*"]), InsecurePeers)
    assert isinstance(choose(Tls(), insecure=False, allowed=["*"]), NoPeers)


@in_loop
async def test_a_node_without_certificates_does_not_open_the_peer_port() -> None:
    with pytest.raises(ConfigError, match="insecure_peers = true"):
        async with sending("p.nodes", NoPeers()):
            pass


@in_loop
async def test_a_port_that_is_taken_is_said_at_the_start() -> None:
    async with sending() as sender:
        with pytest.raises(ConfigError, match="taken"):
            async with sending(port=sender.port):
                pass


@pytest.mark.parametrize(
    ("name", "node", "covered"),
    [
        ("a.nodes", "A.nodes", True),
        ("*.nodes", "a.nodes", True),
        ("*.nodes", "b.a.nodes", False),
        ("*.nodes", "nodes", False),
        ("a.nodes", "a", False),
        ("*", "a", False),
    ],
)
def test_a_certificates_name_covers_itself_and_a_wildcard_one_label(
    name: str, node: str, covered: bool
) -> None:
    assert covers(name, node) is covered
