# SPDX-License-Identifier: Apache-2.0
"""All that can be set: one model, whose fields give the names everywhere.

The field `ca` of the table `[tls]` is `KVPUSHD_TLS_CA` in the environment and `--tls-ca` as a flag. Where
values come from is for `config` to say.
"""

from __future__ import annotations

import grp
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)

PREFIX = "KVPUSHD_"

# Tables that are one value: their keys are the user's.
_WHOLE = frozenset({"ucx.env"})
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
_EVERYWHERE = ("0.0.0.0", "::")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(value: object) -> object:
    if isinstance(value, str) and (found := re.fullmatch(r"\s*([0-9.]+)\s*(ms|s|m|h)\s*", value)):
        return float(found[1]) * _UNITS[found[2]]
    return value


def _listed(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


def _mapped(value: object) -> object:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError("expected NAME=value,NAME=value")
        return {name.strip(): text for name, _, text in pairs}
    return value


def _mode(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(r"(0o?)?[0-7]{3}", value):
        raise ValueError('expected an octal mode, such as "0660"')
    return int(value.removeprefix("0o"), 8)


def _environment(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not name or "=" in name:
            raise ValueError(f"{name!r} is no variable's name")
    return variables


def _host(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError("expected a host's name or its address")
    return value


def _elsewhere(value: str) -> str:
    if value in _EVERYWHERE:
        raise ValueError("expected a host that other nodes reach, not the address of all interfaces")
    return value


def _endpoint(value: str) -> str:
    if value:
        parts = urlsplit(value)  # raises ValueError, as its port does
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError('expected a URL, such as "http://collector:4317"')
        _host(parts.hostname)
    return value


def _texts(value: object) -> Iterator[str]:
    """All text in a value as a file, a variable or a flag gives it."""
    if isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in _texts(part))
    elif isinstance(value, list | tuple):
        yield from (text for part in value for text in _texts(part))
    elif isinstance(value, str | Path):
        yield str(value)


Seconds = Annotated[float, BeforeValidator(_seconds)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Variables = Annotated[dict[str, str], BeforeValidator(_mapped), AfterValidator(_environment)]
Host = Annotated[str, AfterValidator(_host)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
# Text only: a bare 440 would be a number, and another mode.
Mode = Annotated[
    int, BeforeValidator(_mode), Field(ge=0, le=0o777), PlainSerializer(lambda mode: f"{mode:04o}")
]
Port = Annotated[int, Field(ge=0, le=65535)]
Size = Annotated[ByteSize, PlainSerializer(int)]


class Part(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        """No path, name or variable takes what is not text: whoever is given it raises ValueError."""
        for text in _texts(value):
            if "\x00" in text or text.encode("utf-8", "replace").decode() != text:
                raise ValueError("expected text, without NUL and in UTF-8")
        return value


class Tls(Part):
    """The files that prove who this node is, and who its peers are. All three, or none."""

    ca: Path | None = None
    """PEM file with the certificates of the authorities that sign the nodes' certificates."""
    cert: Path | None = None
    """PEM file with this node's certificate chain; its names must cover `node` and `advertised_host`."""
    key: Path | None = None
    """PEM file with this node's private key, unencrypted."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        files = {"ca": self.ca, "cert": self.cert, "key": self.key}
        missing = [name for name, file in files.items() if file is None]
        if missing and len(missing) < len(files):
            raise ValueError(f"{' and '.join(missing)} missing: give ca, cert and key, or none")
        return self

    @property
    def given(self) -> bool:
        """Whether there are files."""
        return self.ca is not None


class Ucx(Part):
    """What movers tell UCX."""

    tls: str = "tcp,self"
    """UCX_TLS of the movers: the transports between nodes, e.g. "rc,cuda" or "tcp,self"."""
    net_devices: str = "all"
    """UCX_NET_DEVICES of the movers. UCX's own listener authenticates nobody: name a closed network's."""
    env: Variables = {}
    """More environment for the movers, by name."""


class Log(Part):
    """What is written to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is written."""
    format: Literal["auto", "human", "json"] = "auto"
    """auto: for people on a terminal, JSON lines elsewhere."""


class Limits(Part):
    """What one caller may ask for; beyond it, it is refused with a reason."""

    halves_per_engine: int = Field(default=20_000, ge=1, le=1_000_000)
    """Reservations, and as many handoffs, that an engine may hold."""
    message_bytes: Size = Field(default=ByteSize(16 << 20), ge=1 << 16, le=1 << 30)
    """Largest message on a link to a peer; the sockets of this node take 16 MiB."""
    items_per_message: int = Field(default=4096, ge=512, le=1_000_000)
    """Most items or events in one message; engines send up to 512."""
    queued_items: int = Field(default=65536, ge=64, le=10_000_000)
    """Items that may wait for a peer or an engine that does not take them; beyond it, it is cut off."""
    links_per_node: int = Field(default=16, ge=1, le=1024)
    """Links that one node may have open to this one: one for each address that it knows this one by."""
    history: int = Field(default=1024, ge=0, le=1_000_000)
    """Transfers remembered after they ended."""


class Faults(Part):
    """Wrong on purpose, for tests of the tests. Refused unless KVPUSHD_ALLOW_FAULTS=1."""

    corrupt_writes: bool = False
    """Flip a byte in writes."""


class Settings(Part):
    """All that can be set. Durations are seconds, or text such as "500ms"; sizes bytes, or "64MiB"."""

    node: str = Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._-]+$")
    """The node's name, for people and for peers' lists of allowed names. Default: the host's name."""
    runtime_dir: Path
    """Where the sockets are. Default: $RUNTIME_DIRECTORY, /run/kvpushd, $XDG_RUNTIME_DIR/kvpushd, /tmp."""
    socket_mode: Mode = 0o660
    """Mode of the sockets, octal, as a string."""
    socket_group: str = ""
    """Group that owns the sockets and their folder; empty = the daemon's own."""

    peer_host: Host = "0.0.0.0"
    """Address on which other nodes' daemons are listened to."""
    peer_port: Port = 7766
    """Port on which other nodes' daemons are listened to; 0 = any free one."""
    advertised_host: Annotated[Host, AfterValidator(_elsewhere)]
    """Host under which other nodes reach this one. Default: peer_host, or the address of the first route."""
    allowed_peers: Names = ("*",)
    """Patterns of the names that peers' certificates may carry; "*" = whoever the authority signed."""
    insecure_peers: bool = False
    """Take and make links without certificates: any host that reaches the port can write into KV caches."""
    tls: Tls = Tls()
    link_silence: Seconds = Field(default=10.0, ge=0.1, le=600)
    """Silence after which a link to a peer is given up."""
    engine_silence: Seconds = Field(default=30.0, ge=1, le=600)
    """Silence after which an engine counts as dead, as it stands still; who waits for it waits so long."""
    connect_timeout: Seconds = Field(default=5.0, gt=0, le=600)
    """Time that a link may take to come up."""

    http_host: Host = "127.0.0.1"
    """Address of /metrics, /healthz and /readyz."""
    http_port: Port = 7767
    """Port of /metrics, /healthz and /readyz; 0 = any free one."""

    lease: Seconds = Field(default=30.0, gt=0, le=86400)
    """How long an unmatched half lives."""
    fence_patience: Seconds = Field(default=2.0, gt=0, le=3600)
    """How long a fence waits for the sender before the receiving agent is destroyed."""
    pinned_share: float = Field(default=0.25, gt=0, le=1)
    """Share of a sender's blocks that unmatched handoffs may hold."""
    drain_timeout: Seconds = Field(default=30.0, ge=0, le=86400)
    """How long running transfers may take to end after SIGTERM."""

    window_bytes: Size = Field(default=ByteSize(64 << 20), ge=1 << 12)
    """Most bytes of one write."""
    peer_bytes_in_flight: Size = Field(default=ByteSize(256 << 20), ge=1 << 12)
    """Most bytes posted to one peer at a time."""
    link_floor: Size = Field(default=ByteSize(0), ge=0)
    """Bytes per second below which a busy link to a peer is an alarm: a transport fell back; 0 = none."""
    verify: Literal["off", "sample", "all"] = "off"
    """Of which writes what has landed is compared with what was sent, by checksums: none, one of 16, all."""
    mover_silence: Seconds = Field(default=15.0, ge=2, le=600)
    """Silence after which a mover counts as stuck and is killed, at the cost of all its transfers."""
    ucx: Ucx = Ucx()

    limits: Limits = Limits()
    log: Log = Log()
    otlp_endpoint: Endpoint = ""
    """Where traces go (OTLP over gRPC, kvpushd[tracing]), e.g. "http://collector:4317"; empty = nowhere."""
    faults: Faults = Faults()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.insecure_peers and self.tls.given:
            raise ValueError("insecure_peers = true and [tls] are both given: choose one")
        if self.peer_bytes_in_flight < self.window_bytes:
            raise ValueError(
                f"peer_bytes_in_flight is {int(self.peer_bytes_in_flight)}, less than window_bytes, "
                f"{int(self.window_bytes)}: no whole write would ever fit"
            )
        if self.socket_group:
            try:
                grp.getgrnam(self.socket_group)
            except KeyError:
                raise ValueError(f"socket_group: this host has no group {self.socket_group!r}") from None
        return self

    def flat(self) -> dict[str, Any]:
        """Dotted field name to plain value (as JSON has it), in the order of the model."""
        return dict(flatten(self.model_dump(mode="json")))


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be set, under its three names."""

    path: tuple[str, ...]
    help: str
    boolean: bool

    @property
    def field(self) -> str:
        """As in the TOML file, dotted."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """As in the environment."""
        return PREFIX + "_".join(self.path).upper()

    @property
    def flag(self) -> str:
        """As on the command line."""
        return "--" + "-".join(self.path).replace("_", "-")


def options() -> tuple[Option, ...]:
    """All that can be set, in the order of the model."""
    return tuple(_options(Settings, ()))


def _options(part: type[Part], path: tuple[str, ...]) -> Iterator[Option]:
    for name, field in part.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Part):
            yield from _options(kind, (*path, name))
        else:
            yield Option((*path, name), field.description or "", kind is bool)


def flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as pairs of dotted field name and value, tables that are one value kept whole."""
    for name, value in tree.items():
        field = f"{path}.{name}" if path else name
        if isinstance(value, dict) and field not in _WHOLE:
            yield from flatten(value, field)
        else:
            yield field, value
