# SPDX-License-Identifier: Apache-2.0
"""What people type to start the router."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvpush_router.coordinates import Coordinates
from kvpush_router.engine import EngineSpec


@dataclass(frozen=True, slots=True)
class Flags:
    """The router's configuration."""

    prefill: tuple[EngineSpec, ...]
    decode: tuple[EngineSpec, ...]
    host: str
    port: int


@dataclass(slots=True)
class _Named:
    """An engine as it is read, item by item."""

    url: str
    said: dict[str, str] = field(default_factory=dict)


def parse_engines(text: str, *, coordinates: bool) -> tuple[EngineSpec, ...]:
    """`URL[,engine=ID,daemon=HOST:PORT][,URL...]` as specs; the two facts belong to the URL before them.

    They are allowed only where `coordinates` is true, and only together. Raises ValueError, whose message
    says what was read and what was expected.
    """
    named: list[_Named] = []
    for item in (part.strip() for part in text.split(",")):
        if item.startswith(("http://", "https://")):
            named.append(_Named(_checked_url(item)))
            continue
        key, equals, value = item.partition("=")
        if not equals or key not in ("engine", "daemon") or not value:
            raise ValueError(f"{item!r} is no URL (http://HOST:PORT), engine=ID or daemon=HOST:PORT")
        if not named:
            raise ValueError(f"{item!r} stands before any URL: it belongs to the URL that it follows")
        if not coordinates:
            raise ValueError(f"{item!r}: only prefill engines have coordinates")
        if key in named[-1].said:
            raise ValueError(f"{key}= is said twice of {named[-1].url}")
        named[-1].said[key] = value
    return tuple(EngineSpec(one.url, _coordinates(one)) for one in named)


def _checked_url(text: str) -> str:
    url = urlsplit(text)
    try:
        port = url.port
    except ValueError:
        raise ValueError(f"{text!r}: the port is not a number from 1 to 65535") from None
    if not url.hostname or port == 0:
        raise ValueError(f"{text!r} names no host and port, as in http://10.0.0.1:8100")
    if url.path.rstrip("/") or url.query or url.fragment:
        raise ValueError(f"{text!r}: leave out all that follows the port; the router adds the paths")
    return f"{url.scheme}://{url.netloc}"


def _coordinates(named: _Named) -> Coordinates | None:
    if not named.said:
        return None
    if len(named.said) == 1:
        have = next(iter(named.said))
        lack = "daemon=HOST:PORT" if have == "engine" else "engine=ID"
        raise ValueError(f"{named.url} has {have}= but no {lack}: give both, or none and they are learned")
    host, _, port = named.said["daemon"].rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"daemon={named.said['daemon']} is not HOST:PORT, as in daemon=10.0.0.1:7766")
    return Coordinates(named.said["engine"], host.strip("[]"), int(port))


class _EnginesAction(argparse.Action):
    """Adds the engines of one flag to those of the same flag before it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            engines = parse_engines(str(values), coordinates=self.dest == "prefill")
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        have: tuple[EngineSpec, ...] = getattr(namespace, self.dest) or ()
        twice = {one.url for one in have} & {one.url for one in engines} or _repeated(engines)
        if twice:
            raise argparse.ArgumentError(self, f"{', '.join(sorted(twice))} is named twice")
        setattr(namespace, self.dest, have + engines)


def _repeated(engines: Sequence[EngineSpec]) -> set[str]:
    urls = [one.url for one in engines]
    return {url for url in urls if urls.count(url) > 1}


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def parse(arguments: Sequence[str] | None = None) -> Flags:
    """Reads the command line; on a wrong one says what is wrong on stderr and exits with 2."""
    parser = argparse.ArgumentParser(
        prog="kvpush-router",
        description="OpenAI-compatible router that sends a request to a prefill and a decode engine at once.",
    )
    parser.add_argument(
        "--prefill",
        required=True,
        action=_EnginesAction,
        metavar="URL[,engine=ID,daemon=HOST:PORT][,URL...]",
        help="prefill engines, one URL per engine. engine= and daemon= are its engine id and where its "
        "kvpushd listens for peers; without them both are learned from the engine's first answer. Leave them "
        "out where it has --data-parallel-size: its engines are learned one by one",
    )
    parser.add_argument(
        "--decode", required=True, action=_EnginesAction, metavar="URL[,URL...]", help="decode engines"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", required=True, type=_port, help="port to listen on")
    given = parser.parse_args(arguments)
    return Flags(prefill=given.prefill, decode=given.decode, host=given.host, port=given.port)
