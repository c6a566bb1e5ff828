# SPDX-License-Identifier: Apache-2.0
"""Who a peer is, and whether it may be one.

Three ways to deal with peers, one contract: `MutualTls` proves names by certificates, `InsecurePeers`
believes what it is told because the operator said so, `NoPeers` is a node whose operator said neither.
"""

from __future__ import annotations

import asyncio
import fnmatch
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog

from kvpushd.errors import ConfigError, Forbidden, Unreachable
from kvpushd.logs import Sparing
from kvpushd.rpc.papers import Papers, covers, listed, names_of, stamp_of

Options = Sequence[tuple[str, Any]]
LOOK = 3600.0
"""Seconds between looks at this node's own certificate."""
_ANSWER = 1.0
"""Seconds in which a peer that took this node's certificate says its first word. Else it counts as taken."""


class PeerSecurity(Protocol):
    """How links are opened, and whom they are opened with."""

    word: str
    """For people: "mtls", "insecure" or "none"."""

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Opens the peer port; returns the port. Raises ConfigError if it may not or cannot be opened."""

    async def connect(self, address: str, options: Options) -> tuple[grpc.aio.Channel, tuple[str, ...]]:
        """A new channel to a peer, and the names that were proven.

        Raises Unreachable if the peer does not answer, Forbidden if it can't prove that it is `address`.
        """

    def names(self, context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, ...]:
        """The names that the caller has proven."""

    def admit(self, node: str, names: Sequence[str]) -> None:
        """Raises Forbidden if whoever has proven `names` may not be here, or may not call itself `node`."""

    def doubts(self) -> list[str]:
        """What peers don't like about what this node shows of itself, or soon will not; for people."""

    async def watch(self) -> None:
        """Logs the doubts in time. Runs until it is cancelled, or returns if there never will be any."""


class _NothingShown:
    """Of what proves nothing, nothing can go wrong."""

    __slots__ = ()

    def doubts(self) -> list[str]:
        """None."""
        return []

    async def watch(self) -> None:
        """Nothing to look at."""


@dataclass(frozen=True, slots=True)
class NoPeers(_NothingShown):
    """Neither certificates nor insecure_peers: engines of this node only."""

    word = "none"
    why = "no peers: give [tls] ca, cert and key, or say insecure_peers = true"

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Never."""
        raise ConfigError(self.why)

    async def connect(self, address: str, options: Options) -> tuple[grpc.aio.Channel, tuple[str, ...]]:
        """Never."""
        raise Forbidden(self.why)

    def names(self, context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, ...]:
        """None."""
        return ()

    def admit(self, node: str, names: Sequence[str]) -> None:
        """Never."""
        raise Forbidden(self.why)


@dataclass(frozen=True, slots=True)
class InsecurePeers(_NothingShown):
    """Links without certificates. The allowed names keep strays apart; they stop nobody."""

    allowed: tuple[str, ...]
    word = "insecure"

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """As the contract says."""
        return _bound(lambda: server.add_insecure_port(address), address)

    async def connect(self, address: str, options: Options) -> tuple[grpc.aio.Channel, tuple[str, ...]]:
        """As the contract says; nothing is proven."""
        return grpc.aio.insecure_channel(target(address), options=options), ()

    def names(self, context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, ...]:
        """None: nothing is proven."""
        return ()

    def admit(self, node: str, names: Sequence[str]) -> None:
        """As the contract says."""
        _allow((node,), self.allowed)


class MutualTls:
    """Both sides show a certificate that `ca` signed.

    The files are read again when they change: at each handshake on the port, and at each dial. Files that
    don't fit each other (a rotation half done), or that no peer would take, change nothing: the former ones
    stay in use.
    """

    word = "mtls"

    def __init__(
        self, ca: Path, cert: Path, key: Path, allowed: Sequence[str], *, node: str = "", host: str = ""
    ) -> None:
        """For the node of this name, which others dial as `host`.

        Raises ConfigError if a file can't be read, if the files don't fit each other, or if no peer will take
        them for the node's. One that is not valid yet is taken: the clock may not be right yet.
        """
        self._paths = (ca, cert, key)
        self._allowed = tuple(allowed)
        self._node, self._host = node, host
        self._log = structlog.get_logger("kvpushd.tls")
        self._sparing = Sparing(self._log)
        self._files = Papers.read(self._paths)
        self._files.check(node, now=False)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """As the contract says."""
        served = self._current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            # Called by gRPC before every handshake, perhaps not on the loop's thread.
            nonlocal served
            if (files := self._current()) is served:
                return None
            served = files
            return _configuration(files)

        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(served),
            changed,  # type: ignore[arg-type]  # None = no change, which the stubs do not know
            require_client_authentication=True,
        )
        return _bound(lambda: server.add_secure_port(address, credentials), address)

    async def connect(self, address: str, options: Options) -> tuple[grpc.aio.Channel, tuple[str, ...]]:
        """As the contract says: the peer's certificate must cover the host that is dialed."""
        files = self._current()
        names = await self._certified_names(address, files)
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
        return grpc.aio.secure_channel(target(address), credentials, options=options), names

    def names(self, context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, ...]:
        """Subject alternative names of the caller's certificate, or its common name if it has none."""
        proven = context.auth_context()
        found = proven.get("x509_subject_alternative_name") or proven.get("x509_common_name") or ()
        return tuple(name.decode("utf-8", "replace") for name in found)

    def admit(self, node: str, names: Sequence[str]) -> None:
        """As the contract says: the node's name must be one that the certificate covers."""
        _allow((node, *names), self._allowed)
        if not any(covers(name, node) for name in names):
            raise Forbidden(
                f"the node calls itself {node!r}, its certificate {listed(names)}: "
                "set `node` to a name of the certificate"
            )

    async def _certified_names(self, address: str, files: Papers) -> tuple[str, ...]:
        # gRPC verifies that the certificate covers the host, but does not show a client the certificate.
        # So it is read by a handshake of its own, which verifies the same.
        host, port = split(address)
        try:
            reader, writer = await asyncio.open_connection(host, port, ssl=files.dials, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise Forbidden(f"{address} does not prove that it is {host}: {error.verify_message}") from error
        except ssl.SSLError as error:
            raise Unreachable(f"no TLS with {address}: {error.reason or error}") from error
        except OSError as error:
            raise Unreachable(f"can't connect to {address}: {error.strerror or error}") from error
        try:
            shown = writer.get_extra_info("peercert")
            if not await _taken(reader):
                raise Unreachable(f"{address} does not take this node's certificate: {self._why(files)}")
        finally:
            writer.transport.abort()
        return names_of(shown)

    def _why(self, files: Papers) -> str:
        """Why a peer might not, as far as this node can see."""
        try:
            files.check(self._node)
        except ConfigError as error:
            return str(error)
        return "here it is good; does the peer's `ca` have who signed it, and is its clock right?"

    def doubts(self) -> list[str]:
        """As the contract says."""
        return self._current().doubts(self._node, self._host)

    async def watch(self) -> None:
        """As the contract says: each once a day."""
        sparing = Sparing(self._log, interval=86400 - LOOK / 2)
        while True:
            for doubt in self.doubts():
                sparing.warning(doubt, "this node's certificate", doubt=doubt)
            await asyncio.sleep(LOOK)

    def _current(self) -> Papers:
        try:
            if stamp_of(self._paths) != self._files.stamp:
                files = Papers.read(self._paths)
                files.check(self._node)
                self._files = files
                self._log.info("certificates read again", cert=str(self._paths[1]))
        except (OSError, ConfigError) as error:
            # At every handshake, which is anybody's.
            self._sparing.warning(str(error), "the former certificates stay in use", error=str(error))
        return self._files


class Files(Protocol):
    """The files that prove who a node is, as the configuration has them: all three, or none."""

    @property
    def ca(self) -> Path | None:
        """Of the authorities."""
        ...

    @property
    def cert(self) -> Path | None:
        """The node's chain."""
        ...

    @property
    def key(self) -> Path | None:
        """The node's own."""
        ...


def choose(
    files: Files, *, insecure: bool, allowed: Sequence[str], node: str = "", host: str = ""
) -> PeerSecurity:
    """What the configuration asks for, for the node of this name, which others dial as `host`. Raises
    ConfigError if the files are no good."""
    if files.ca and files.cert and files.key:
        return MutualTls(files.ca, files.cert, files.key, allowed, node=node, host=host)
    return InsecurePeers(tuple(allowed)) if insecure else NoPeers()


def split(address: str) -> tuple[str, int]:
    """Host (an IPv6 address without brackets) and port of "host:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def target(address: str) -> str:
    """What gRPC dials. The scheme is said, since a host called "unix" would otherwise be taken for one."""
    return f"dns:///{address}"


def _configuration(files: Papers) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], root_certificates=files.ca)


def _allow(names: Sequence[str], allowed: Sequence[str]) -> None:
    if not any(fnmatch.fnmatchcase(n.lower(), p.lower()) for n in names for p in allowed):
        raise Forbidden(f"{listed(names)} is not among allowed_peers ({', '.join(allowed)})")


async def _taken(reader: asyncio.StreamReader) -> bool:
    """Whether the peer goes on after the handshake. In TLS 1.3 a client's handshake is over before the server
    has looked at its certificate; gRPC then speaks first, or hangs up without a word."""
    try:
        async with asyncio.timeout(_ANSWER):
            return bool(await reader.read(1))
    except TimeoutError:
        return True
    except OSError:  # an alert is one too
        return False


def _bound(bind: Callable[[], int], address: str) -> int:
    try:
        return bind()
    except RuntimeError as error:  # gRPC knows no other, and no reason
        raise ConfigError(
            f"can't listen on {address}: is the port taken, the address this host's, are files left to open?"
        ) from error
