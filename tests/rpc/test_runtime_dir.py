# SPDX-License-Identifier: Apache-2.0
"""A runtime directory has one owner at a time, and its group can reach what is in it."""

from __future__ import annotations

import asyncio
import grp
import os
from pathlib import Path

import pytest

from kvpushd.errors import ConfigError
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
