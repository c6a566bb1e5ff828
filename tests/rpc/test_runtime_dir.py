# SPDX-License-Identifier: Apache-2.0
"""A runtime directory has one owner at a time, and its group can reach what is in it."""

from __future__ import annotations

import asyncio
import grp
import os
import shutil
import socket
from pathlib import Path

import pytest

from kvpushd.errors import ConfigError
from kvpushd.rpc import sockets
from kvpushd.rpc.runtime_dir import RuntimeDir


def own(path: Path) -> int:
    return asyncio.run(RuntimeDir(path).own(patience=0.1))


def test_a_runtime_dir_has_one_owner_at_a_time(tmp_path: Path) -> None:
    owned = own(tmp_path / "made")
    with pytest.raises(ConfigError, match="another kvpushd runs in"):
        own(tmp_path / "made")
    os.close(owned)
    os.close(own(tmp_path / "made"))


def test_its_lock_is_waited_for(tmp_path: Path) -> None:
    async def after_another() -> None:
        place = RuntimeDir(tmp_path)
        former = await place.own()
        waits = asyncio.ensure_future(place.own())
        await asyncio.sleep(0)
        os.close(former)
        os.close(await waits)

    asyncio.run(after_another())


def test_a_lock_that_is_removed_while_it_is_waited_for_is_not_the_one_that_is_taken(tmp_path: Path) -> None:
    async def after_a_removal() -> None:
        former, later = RuntimeDir(tmp_path / "made"), RuntimeDir(tmp_path / "made")
        first = await former.own()
        waits = asyncio.ensure_future(later.own())
        await asyncio.sleep(0)
        shutil.rmtree(former.path)
        os.close(first)
        second = await waits
        assert later.problem() is None
        os.close(second)

    asyncio.run(after_a_removal())


def test_two_locks_that_are_held_have_two_names(tmp_path: Path) -> None:
    former, later = RuntimeDir(tmp_path / "made"), RuntimeDir(tmp_path / "made")
    first = asyncio.run(former.own())
    shutil.rmtree(former.path)
    second = asyncio.run(later.own())
    assert former.lock != later.lock
    os.close(first)
    os.close(second)


def test_a_lock_that_is_handed_on_keeps_its_name(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        place = RuntimeDir(tmp_path)
        os.close(asyncio.run(place.own()))
        names.append(place.lock)
    assert names[0] == names[1]


@pytest.mark.parametrize("lost", ["lock", "fd.sock"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_removed_or_replaced_below_its_owner_is_named(
    lost: str, replaced: bool, tmp_path: Path
) -> None:
    place = RuntimeDir(tmp_path)
    lock = asyncio.run(place.own())
    listener, file = sockets.listen(place.memory, socket.SOCK_SEQPACKET)
    with listener:
        place.keep(file)
        assert place.problem() is None
        (tmp_path / lost).unlink()
        if replaced:
            (tmp_path / lost).touch()
        problem = place.problem()
        assert problem is not None
        assert problem.startswith(f"{tmp_path / lost} was removed or replaced")
    os.close(lock)


def test_a_directory_that_is_renamed_is_missed(tmp_path: Path) -> None:
    place = RuntimeDir(tmp_path / "made")
    lock = asyncio.run(place.own())
    place.path.rename(tmp_path / "moved")
    assert place.problem() is not None
    os.close(lock)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to any group")
def test_the_group_is_given_the_sockets_and_the_way_to_them(tmp_path: Path) -> None:
    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (0, os.getegid()))
    place = RuntimeDir(tmp_path / "run", group.gr_name)
    os.close(asyncio.run(place.own()))
    place.let_in()
    assert place.path.stat().st_gid == group.gr_gid, "before there are sockets"
    for path in (place.engines, place.memory, place.admin):
        path.touch()
    place.hand_over()
    for path in (place.engines, place.memory, place.admin):
        assert path.stat().st_gid == group.gr_gid


def test_a_socket_that_can_not_be_given_to_the_group_is_named(tmp_path: Path) -> None:
    place = RuntimeDir(tmp_path, grp.getgrgid(os.getegid()).gr_name)
    with pytest.raises(ConfigError, match=r"socket_group: can't give .*/kvpushd\.sock to"):
        place.hand_over()
