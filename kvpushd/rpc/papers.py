# SPDX-License-Identifier: Apache-2.0
"""What proves who this node is: its certificate, read and held against what peers will ask of it."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvpushd.errors import ConfigError

SOON = 14 * 86400.0
"""Seconds before its end from which on a certificate ends soon; or a tenth of its life, if that is less."""

# What OpenSSL calls what it found (X509_V_ERR_…).
_NOT_YET_VALID = 9
_OTHER_NAME, _OTHER_ADDRESS = 62, 64

Stamp = tuple[tuple[int, int, int], ...]
Paths = tuple[Path, Path, Path]


@dataclass(frozen=True, slots=True)
class Papers:
    """The three files of [tls] as they were read at one moment."""

    paths: Paths
    """Of the authorities, the node's chain, its key."""
    ca: bytes
    cert: bytes
    key: bytes
    dials: ssl.SSLContext
    """To dial a peer with."""
    stamp: Stamp
    _ends: tuple[ssl.SSLContext, ssl.SSLContext]
    """A client that asks nobody's name, and a server: both show the certificate, and ask for one."""

    @classmethod
    def read(cls, paths: Paths) -> Papers:
        """Raises ConfigError if a file can't be read, or if the files don't fit each other."""
        ca, cert, key = paths
        try:
            stamp = stamp_of(paths)
            authorities = ca.read_bytes()
            dials = _context(ssl.PROTOCOL_TLS_CLIENT, authorities, cert, key)
            dials.set_alpn_protocols(["h2"])
            client = _context(ssl.PROTOCOL_TLS_CLIENT, authorities, cert, key)
            client.check_hostname = False
            server = _context(ssl.PROTOCOL_TLS_SERVER, authorities, cert, key)
            server.verify_mode = ssl.CERT_REQUIRED
            read = (authorities, cert.read_bytes(), key.read_bytes())
            whole = stamp_of(paths) == stamp
        except ssl.SSLError as error:  # an OSError too
            raise ConfigError(f"tls: {ca}, {cert} and {key} do not fit each other: {error}") from error
        except OSError as error:
            raise ConfigError(f"tls: {error.filename or cert}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"tls: {ca} is no PEM file with certificates: {error}") from error
        if not whole:
            raise ConfigError(f"tls: {ca}, {cert} or {key} changed while they were read")
        return cls(paths, *read, dials, stamp, (client, server))

    def check(self, node: str, *, now: bool = True) -> None:
        """Raises ConfigError where no peer will take this for `node`: expired, signed by none of `ca`, not
        for both ends of a connection, or without the name. Of one that is not valid yet only if it is to be
        used `now`. An empty `node` is not looked for."""
        try:
            names = names_of(_met(*self._ends))
        except ssl.SSLCertVerificationError as error:
            if now or error.verify_code != _NOT_YET_VALID:
                ca, cert, _ = self.paths
                raise ConfigError(
                    f"tls: {cert}, or what signed it, does not hold against {ca}: {error.verify_message}"
                ) from error
            return
        except ssl.SSLError as error:
            raise ConfigError(f"tls: {self.paths[1]} does for no handshake: {error}") from error
        if node and not any(covers(name, node) for name in names):
            raise ConfigError(
                f"tls: {self.paths[1]} is for {listed(names)}, and this node is {node!r}: peers want that "
                "name in it; issue one that has it, or set `node`"
            )

    def doubts(self, node: str, host: str) -> list[str]:
        """What peers don't like about it, or soon will not; for people."""
        client, server = self._ends
        try:
            self.check(node)
            shown = _met(client, server)
        except (ConfigError, ssl.SSLError) as error:
            return [str(error)]
        found = []
        try:
            if host:
                _met(self.dials, server, host)
        except ValueError as error:  # of names that can be none, too
            code = error.verify_code if isinstance(error, ssl.SSLCertVerificationError) else _OTHER_NAME
            if code not in (_OTHER_NAME, _OTHER_ADDRESS):
                return [str(error)]
            names = listed(names_of(shown))
            found.append(
                f"tls: {self.paths[1]} is for {names}, without advertised_host {host!r}: no other node can "
                "dial this one"
            )
        begins, ends = (ssl.cert_time_to_seconds(shown[at]) for at in ("notBefore", "notAfter"))
        if ends - time.time() < min(SOON, (ends - begins) / 10):
            when = datetime.fromtimestamp(ends, UTC).isoformat(" ", "minutes")
            found.append(f"tls: {self.paths[1]} expires {when}: renew it, no restart is needed")
        return found


def stamp_of(paths: Paths) -> Stamp:
    """Changes with the files. Raises OSError."""
    stats = [os.stat(path) for path in paths]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def names_of(shown: dict[str, Any]) -> tuple[str, ...]:
    """Subject alternative names of a certificate as `ssl` gives it, or its common name if it has none."""
    names = tuple(name for _, name in shown.get("subjectAltName", ()))
    parts = (pair for part in shown.get("subject", ()) for pair in part)
    return names or tuple(value for key, value in parts if key == "commonName")


def covers(name: str, node: str) -> bool:
    """Whether a certificate's name is the node's, or a wildcard for its first label."""
    name, node = name.lower(), node.lower()
    return name == node or (name.startswith("*.") and node.partition(".")[2] == name[2:])


def listed(names: Sequence[str]) -> str:
    """For people."""
    return ", ".join(repr(name) for name in names) or "nothing"


def _context(kind: ssl._SSLMethod, authorities: bytes, cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    # Never the system's authorities, which an empty `cadata` would mean elsewhere.
    context.load_verify_locations(cadata=authorities.decode())
    context.load_cert_chain(cert, key, password=_no_password)
    return context


def _met(client: ssl.SSLContext, server: ssl.SSLContext, host: str | None = None) -> dict[str, Any]:
    """A handshake of the node with itself, in memory: each end checks the certificate as a peer will, the one
    that takes it for a server's and the one that takes it for a client's. Returns it.

    Raises ssl.SSLError, of which SSLCertVerificationError says what an end does not like.
    """
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialer = client.wrap_bio(down, up, server_hostname=host)
    waiting = [dialer, server.wrap_bio(up, down, server_side=True)]
    for _ in range(8):  # of TLS 1.3 three
        for end in list(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
    if waiting:
        raise ssl.SSLError("the handshake does not end")
    return dialer.getpeercert() or {}


def _no_password() -> str:
    raise ConfigError("tls: the key is encrypted; give one that is not")
