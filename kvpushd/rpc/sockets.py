# SPDX-License-Identifier: Apache-2.0
"""Unix sockets of the daemon: bound with the right mode, never over a live daemon's, nor removed as one."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc.aio

from kvpushd.errors import ConfigError
from kvpushd.rpc.file import File

MODE = 0o660
"""Owner and group: whoever may talk to the daemon is put into its group."""

_LONGEST = 107  # bytes of a path that fit sockaddr_un


def listen(
    path: Path, kind: socket.SocketKind, *, mode: int = MODE, backlog: int = 128
) -> tuple[socket.socket, File]:
    """A listening, non-blocking socket, and its file at `path`. Whoever closes the one removes the other.

    Raises ConfigError as `make_way` does, or where the path can't be bound.
    """
    make_way(path, kind)
    born = _birthplace(path)
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        sock.setblocking(False)
        with _closed_to_all():
            sock.bind(str(born))
        sock.listen(backlog)
        return sock, _settle(born, path, mode)
    except OSError as error:
        sock.close()
        born.unlink(missing_ok=True)
        raise ConfigError(f"can't listen on {path}: {error.strerror}") from error


def add_port(server: grpc.aio.Server, path: Path, *, mode: int = MODE) -> File:
    """Has a gRPC server listen at `path`; returns the file, which is the caller's to remove.

    gRPC takes no bound descriptor, and unlinks the path that it was told, as it binds and as it stops,
    whoever listens there: so it is told one that nobody else has, and the socket is moved from there.

    Raises ConfigError as `make_way` does, or where the path can't be bound.
    """
    make_way(path, socket.SOCK_STREAM)
    born = _birthplace(path)
    try:
        with _closed_to_all():
            server.add_insecure_port(f"unix:{born}")
        return _settle(born, path, mode)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"can't listen on {path}: {error}") from error


def _birthplace(path: Path) -> Path:
    """A path beside it for a moment, no longer than that of the shortest of our sockets."""
    return path.with_name(f".{secrets.token_hex(3)}")


def _settle(born: Path, path: Path, mode: int) -> File:
    born.chmod(mode)
    file = File.of(path, born.lstat())
    born.rename(path)
    return file


def make_way(path: Path, kind: socket.SocketKind) -> None:
    """Removes a socket that nobody listens on any more; returns if the path is free.

    Raises ConfigError where somebody listens, where it is no socket, or where the path is too long for one.
    """
    length = len(os.fsencode(path))
    if length > _LONGEST:
        raise ConfigError(f"{path} is {length} bytes; a socket's path has at most {_LONGEST}: shorten it")
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"can't look at {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path} exists and is not a socket: remove it, or choose another runtime_dir")
    if _somebody_listens(path, kind):
        raise ConfigError(f"another kvpushd listens on {path}: stop it, or choose another runtime_dir")
    path.unlink(missing_ok=True)


def _somebody_listens(path: Path, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # Backlog full, another kind of socket, no permission: alive for all we know.
            return True
        return True


@contextlib.contextmanager
def _closed_to_all() -> Iterator[None]:
    # A socket that is born without any permission can't be connected to before chmod gives it its own. The
    # umask is the process's: for these microseconds it can only make other files less open.
    before = os.umask(0o777)
    try:
        yield
    finally:
        os.umask(before)
