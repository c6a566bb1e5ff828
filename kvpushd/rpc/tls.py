# SPDX-License-Identifier: Apache-2.0
"""Who a peer is, and whether it may be one.

Three ways to deal with peers, one contract: `MutualTls` proves names by certificates, `InsecurePeers`
believes what it is told because the operator said so, `NoPeers` is a node whose operator said neither.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog

from kvpushd.errors import ConfigError, Forbidden, Unreachable

Options = Sequence[tuple[str, Any]]


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


@dataclass(frozen=True, slots=True)
class NoPeers:
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
class InsecurePeers:
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


@dataclass(frozen=True, slots=True)
class _Files:
    """The three files as they were read at one moment."""

    ca: bytes
    cert: bytes
    key: bytes
    context: ssl.SSLContext
    stamp: tuple[tuple[int, int, int], ...]


class MutualTls:
    """Both sides show a certificate that `ca` signed.

    The files are read again when they change: at each handshake on the port, and at each dial. Files that
    don't fit each other (a rotation half done) change nothing: the former ones stay in use.
    """

    word = "mtls"

    def __init__(self, ca: Path, cert: Path, key: Path, allowed: Sequence[str]) -> None:
        """Raises ConfigError if a file can't be read, or if the files don't fit each other."""
        self._paths = (ca, cert, key)
        self._allowed = tuple(allowed)
        self._log = structlog.get_logger("kvpushd.tls")
        self._files = self._read()

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
                f"the node calls itself {node!r}, its certificate {_listed(names)}: "
                "set `node` to a name of the certificate"
            )

    async def _certified_names(self, address: str, files: _Files) -> tuple[str, ...]:
        # gRPC verifies that the certificate covers the host, but does not show a client the certificate.
        # So it is read by a handshake of its own, which verifies the same.
        host, port = split(address)
        try:
            _, writer = await asyncio.open_connection(host, port, ssl=files.context, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise Forbidden(f"{address} does not prove that it is {host}: {error.verify_message}") from error
        except ssl.SSLError as error:
            raise Unreachable(f"no TLS with {address}: {error.reason or error}") from error
        except OSError as error:
            raise Unreachable(f"can't connect to {address}: {error.strerror or error}") from error
        shown = writer.get_extra_info("peercert")
        writer.transport.abort()
        names = tuple(name for _, name in shown.get("subjectAltName", ()))
        common = tuple(
            value for part in shown.get("subject", ()) for key, value in part if key == "commonName"
        )
        return names or common

    def _current(self) -> _Files:
        try:
            if self._stamp() != self._files.stamp:
                self._files = self._read()
                self._log.info("certificates read again", cert=str(self._paths[1]))
        except (OSError, ConfigError) as error:
            self._log.warning("the former certificates stay in use", error=str(error))
        return self._files

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        stats = [os.stat(path) for path in self._paths]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def _read(self) -> _Files:
        ca, cert, key = self._paths
        try:
            stamp = self._stamp()
            authorities = ca.read_bytes()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            # Never the system's authorities, which an empty `cadata` would mean elsewhere.
            context.load_verify_locations(cadata=authorities.decode())
            context.load_cert_chain(cert, key, password=_no_password)
            context.set_alpn_protocols(["h2"])
            files = _Files(authorities, cert.read_bytes(), key.read_bytes(), context, stamp)
            whole = self._stamp() == stamp
        except ssl.SSLError as error:  # an OSError too
            raise ConfigError(f"tls: {ca}, {cert} and {key} do not fit each other: {error}") from error
        except OSError as error:
            raise ConfigError(f"tls: {error.filename or cert}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"tls: {ca} is no PEM file with certificates: {error}") from error
        if not whole:
            raise ConfigError(f"tls: {ca}, {cert} or {key} changed while they were read")
        return files


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


def choose(files: Files, *, insecure: bool, allowed: Sequence[str]) -> PeerSecurity:
    """What the configuration asks for. Raises ConfigError if the files are no good."""
    if files.ca and files.cert and files.key:
        return MutualTls(files.ca, files.cert, files.key, allowed)
    return InsecurePeers(tuple(allowed)) if insecure else NoPeers()


def covers(name: str, node: str) -> bool:
    """Whether a certificate's name is the node's, or a wildcard for its first label."""
    name, node = name.lower(), node.lower()
    return name == node or (name.startswith("*.") and node.partition(".")[2] == name[2:])


def split(address: str) -> tuple[str, int]:
    """Host (an IPv6 address without brackets) and port of "host:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def target(address: str) -> str:
    """What gRPC dials. The scheme is said, since a host called "unix" would otherwise be taken for one."""
    return f"dns:///{address}"


def _configuration(files: _Files) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], root_certificates=files.ca)


def _allow(names: Sequence[str], allowed: Sequence[str]) -> None:
    if not any(fnmatch.fnmatchcase(n.lower(), p.lower()) for n in names for p in allowed):
        raise Forbidden(f"{_listed(names)} is not among allowed_peers ({', '.join(allowed)})")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"


def _bound(bind: Callable[[], int], address: str) -> int:
    try:
        return bind()
    except RuntimeError as error:  # gRPC knows no other, and no reason
        raise ConfigError(
            f"can't listen on {address}: is the port taken, the address this host's?"
        ) from error


def _no_password() -> str:
    raise ConfigError("tls: the key is encrypted; give one that is not")
