# SPDX-License-Identifier: Apache-2.0
"""The daemon's configuration: defaults < TOML file < environment < flags.

One model, `Settings`, is the only list of what can be set. Its fields give the names everywhere: the field
`ca` of the table `[tls]` is `KVPUSHD_TLS_CA` in the environment and `--tls-ca` as a flag. Every value
remembers where it came from, so that an error can say so.
"""

from __future__ import annotations

import argparse
import difflib
import grp
import os
import re
import socket
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from kvpushd.errors import ConfigError

PREFIX = "KVPUSHD_"
# In the environment, yet no fields: the file to read, and the consent to faults.
CONFIG = "KVPUSHD_CONFIG"
ALLOW_FAULTS = "KVPUSHD_ALLOW_FAULTS"

# Tables that are one value: their keys are the user's.
_WHOLE = frozenset({"ucx.env"})
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


Seconds = Annotated[float, BeforeValidator(_seconds)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Variables = Annotated[dict[str, str], BeforeValidator(_mapped)]
# Text only: a bare 440 would be a number, and another mode.
Mode = Annotated[
    int, BeforeValidator(_mode), Field(ge=0, le=0o777), PlainSerializer(lambda mode: f"{mode:04o}")
]
Port = Annotated[int, Field(ge=0, le=65535)]
Size = Annotated[ByteSize, PlainSerializer(int)]


class Part(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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

    reservations_per_engine: int = Field(default=4096, ge=1, le=1_000_000)
    """Receiver halves that an engine may hold."""
    handoffs_per_engine: int = Field(default=4096, ge=1, le=1_000_000)
    """Sender halves that an engine may hold."""
    message_bytes: Size = Field(default=ByteSize(16 << 20), ge=1 << 16, le=1 << 30)
    """Largest message on any socket."""
    items_per_message: int = Field(default=4096, ge=1, le=1_000_000)
    """Most items or events in one message."""
    queued_items: int = Field(default=65536, ge=64, le=10_000_000)
    """Items that may wait for a peer or an engine that does not take them; beyond it, it is cut off."""
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
    """Group that owns the sockets; empty = the daemon's own."""

    peer_host: str = "0.0.0.0"
    """Address on which other nodes' daemons are listened to."""
    peer_port: Port = 7766
    """Port on which other nodes' daemons are listened to; 0 = any free one."""
    advertised_host: str
    """Host under which other nodes reach this one. Default: peer_host, or the address of the first route."""
    allowed_peers: Names = ("*",)
    """Patterns of the names that peers' certificates may carry; "*" = whoever the authority signed."""
    insecure_peers: bool = False
    """Take and make links without certificates: any host that reaches the port can write into KV caches."""
    tls: Tls = Tls()
    link_silence: Seconds = Field(default=3.0, ge=0.1, le=600)
    """Silence after which a link to a peer is given up."""
    connect_timeout: Seconds = Field(default=5.0, gt=0, le=600)
    """Time that a link may take to come up."""

    http_host: str = "127.0.0.1"
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
    movers: int = Field(default=1, ge=1, le=64)
    """Processes that move bytes."""
    ucx: Ucx = Ucx()

    limits: Limits = Limits()
    log: Log = Log()
    otlp_endpoint: str = ""
    """Where traces go (OTLP over gRPC), e.g. "http://collector:4317"; empty = nowhere."""
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
        return dict(_flatten(self.model_dump(mode="json")))


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


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `read` found: the settings, where each given field came from, and what to do with them."""

    settings: Settings
    sources: Mapping[str, str]
    check_only: bool


class ConfigErrors(ConfigError):
    """The configuration is wrong; `lines` has one line per error."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)


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


def parser() -> argparse.ArgumentParser:
    """The command line. Values are kept as text: the model says what is allowed."""
    made = argparse.ArgumentParser(
        prog="kvpushd",
        description="Moves the KV cache between LLM engines. Flags win over KVPUSHD_* variables, "
        "which win over the file, which wins over the defaults.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    made.add_argument("--config", metavar="FILE", help=f"TOML file to read (or {CONFIG})")
    made.add_argument(
        "--check-config", action="store_true", help="print the effective configuration, or what is wrong"
    )
    for option in options():
        text = option.help.replace("%", "%%")
        if option.boolean:
            made.add_argument(
                option.flag, dest=option.field, nargs="?", const="true", metavar="BOOL", help=text
            )
        else:
            made.add_argument(option.flag, dest=option.field, metavar="VALUE", help=text)
    return made


def load(argv: Sequence[str], env: Mapping[str, str]) -> Settings:
    """The settings that flags, environment and file give together. Raises ConfigErrors."""
    return read(argv, env).settings


def read(argv: Sequence[str], env: Mapping[str, str]) -> Loaded:
    """As `load`, and where everything came from.

    Raises ConfigErrors, one line each. Unknown flags and `--help` end the process as argparse does.
    """
    given = vars(parser().parse_args(list(argv)))
    check_only = bool(given.pop("check_config", False))
    file = given.pop("config", None) or env.get(CONFIG)
    errors: list[str] = []
    known = {option.field: option for option in options()}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file:
        for field, value in _from_file(Path(file), known, errors).items():
            values[field], sources[field] = value, file
    for field, value in _from_env(env, known, errors).items():
        values[field], sources[field] = value, f"environment {known[field].variable}"
    for field, value in given.items():
        values[field], sources[field] = value, f"flag {known[field].flag}"
    if errors:
        raise ConfigErrors(errors)
    settings = _validated(values, sources, env)
    if settings.faults != Faults() and env.get(ALLOW_FAULTS) != "1":
        where = ", ".join(f"{f} from {s}" for f, s in sources.items() if f.startswith("faults."))
        raise ConfigErrors([f"faults: only for tests; set {ALLOW_FAULTS}=1 to mean it ({where})"])
    return Loaded(settings, sources, check_only)


def describe(loaded: Loaded) -> str:
    """The effective configuration, one field a line, each with where it came from."""
    lines = [
        (f"{field} = {_toml(value)}", loaded.sources.get(field, "default"))
        for field, value in loaded.settings.flat().items()
    ]
    width = max(len(text) for text, _ in lines)
    return "\n".join(f"{text:<{width}}  # {source}" for text, source in lines)


def _from_file(file: Path, known: Mapping[str, Option], errors: list[str]) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            tables = tomllib.load(opened)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        errors.append(f"{file}: {reason}")
        return {}
    found: dict[str, Any] = {}
    for field, value in _flatten(tables):
        if field in known:
            found[field] = value
        else:
            errors.append(_unknown(field, known, str(file)))
    return found


def _from_env(env: Mapping[str, str], known: Mapping[str, Option], errors: list[str]) -> dict[str, str]:
    by_variable = {option.variable: field for field, option in known.items()}
    found: dict[str, str] = {}
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable in (CONFIG, ALLOW_FAULTS):
            continue
        if variable in by_variable:
            found[by_variable[variable]] = text
        else:
            errors.append(_unknown(variable, by_variable, "environment"))
    return found


def _unknown(name: str, known: Mapping[str, object], source: str) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else "; kvpushd --help lists what there is"
    return f"{name}: there is no such setting{hint} (from {source})"


def _validated(values: Mapping[str, Any], sources: Mapping[str, str], env: Mapping[str, str]) -> Settings:
    tree: dict[str, Any] = {}
    for field, value in values.items():
        *tables, name = field.split(".")
        inner = tree
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    tree.setdefault("node", socket.gethostname())
    tree.setdefault("runtime_dir", default_runtime_dir(env))
    tree.setdefault("advertised_host", default_advertised_host(str(tree.get("peer_host", "0.0.0.0"))))
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise ConfigErrors([_line(dict(found), sources) for found in error.errors()]) from None


def _line(found: dict[str, Any], sources: Mapping[str, str]) -> str:
    path = [str(part) for part in found["loc"]]
    prefixes = [".".join(path[:length]) for length in range(len(path), 0, -1)]
    field = next((prefix for prefix in prefixes if prefix in sources), "")
    wanted = str(found["msg"]).removeprefix("Value error, ")
    if not field:  # about several fields together: the message names them
        table = f"{path[0]}." if path else ""
        named = {name for name in sources if (table and name.startswith(table)) or name in wanted}
        origins = ", ".join(sorted({sources[name] for name in named}))
        return (f"{path[0]}: " if path else "") + wanted + (f" (from {origins})" if origins else "")
    wanted = wanted[:1].lower() + wanted[1:]
    allowed = "" if found["type"] == "value_error" else _allowed(field)
    return f"{field} = {_toml(found['input'])}: {wanted}{allowed} (from {sources[field]})"


def _allowed(field: str) -> str:
    part: type[Part] = Settings
    *tables, name = field.split(".")
    for table in tables:
        kind = part.model_fields[table].annotation
        assert isinstance(kind, type)
        part = kind
    info = part.model_fields[name]
    if get_origin(info.annotation) is Literal:
        return ""  # pydantic's own message lists them
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = [
        f"{word} {value}"
        for attribute, word in words.items()
        for value in (getattr(meta, attribute, None) for meta in info.metadata)
        if value is not None
    ]
    return f"; allowed: {', '.join(bounds)}" if bounds else ""


def _flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        field = f"{path}.{name}" if path else name
        if isinstance(value, dict) and field not in _WHOLE:
            yield from _flatten(value, field)
        else:
            yield field, value


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Path):
        text = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(inner) for inner in value) + "]"
    return '""' if value is None else str(value)


def default_runtime_dir(env: Mapping[str, str]) -> Path:
    """Where the sockets are if nobody says: systemd's choice, the system's place, the user's, /tmp."""
    if given := env.get("RUNTIME_DIRECTORY"):
        return Path(given.split(":")[0])
    system = Path("/run/kvpushd")
    if os.access(system if system.exists() else system.parent, os.W_OK):
        return system
    if user := env.get("XDG_RUNTIME_DIR"):
        return Path(user) / "kvpushd"
    return Path(f"/tmp/kvpushd-{os.getuid()}")


def default_advertised_host(peer_host: str) -> str:
    """Where others reach this node if nobody says: where it listens, else its address on the first route."""
    if peer_host not in ("", "0.0.0.0", "::"):
        return peer_host
    # Connecting a datagram socket sends nothing; it asks the kernel which address a packet would carry.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as asked:
                asked.connect((target, 9))
                return str(asked.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()
