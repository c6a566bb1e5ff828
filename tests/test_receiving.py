# SPDX-License-Identifier: Apache-2.0
"""The receiving room where there is nobody to dial."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpush_client.events import Reason, TransferKey
from kvpush_client.layout import Group
from kvpushd.core.engines import Limits
from kvpushd.core.events import EngineJoined, EngineLeft, PoolMapped, Reserved
from kvpushd.core.instructions import Account, CloseInlet, LetGo, TellReservationEnded
from kvpushd.core.ledger import Ledger
from kvpushd.core.words import Incarnation, LinkId, SenderAddress
from kvpushd.node.hub import Hub
from kvpushd.node.receiving import ReceivingRoom
from kvpushd.rpc.links import Links
from kvpushd.rpc.terms import Terms
from kvpushd.rpc.tls import InsecurePeers
from tests.core.pools import Model, Shape, listed, rank

LAYOUT = rank(Model((0, 0), heads=2, planes=(1,)), Shape((Group(4),), blocks=16))
D = Incarnation(b"d" * 16)


@pytest.mark.parametrize("peers", [True, False], ids=["peers", "no peers"])
def test_an_address_that_can_not_be_dialed_leaves_nothing_behind(peers: bool) -> None:
    """Each name that an engine could make up would, until the engine left."""

    async def scene() -> None:
        hub = Hub(Ledger(Limits()))
        ended: list[TellReservationEnded] = []
        hub.on(TellReservationEnded, ended.append)
        hub.on(Account, lambda account: None)
        # No engine and no mover is asked, as nobody is reached.
        nobody: Any = None
        room = ReceivingRoom(hub, nobody, nobody, "n", lambda role, fault: None, lambda: None)
        if peers:
            terms = Terms(node="n", boot=bytes(16), software="test")
            room.use(Links(terms, InsecurePeers(("*",)), room))
        hub.feed(EngineJoined(D, "D", {"model": "m"}, 1, 1))
        hub.feed(PoolMapped(D, 0, LAYOUT))
        for count in range(3):
            sender = SenderAddress("P", LinkId(f"no such/host {count}:1"))
            key = TransferKey(count.to_bytes(16, "big"))
            hub.feed(Reserved(D, key, (sender,), 0, 7, (listed(0, 0, 1),)))
        for _ in range(20):
            await asyncio.sleep(0)
        expected = Reason.INVALID if peers else Reason.PEER_UNREACHABLE
        assert [each.fault and each.fault.reason for each in ended] == [expected] * 3
        orders: list[CloseInlet | LetGo] = []
        hub.on(CloseInlet, orders.append)
        hub.on(LetGo, orders.append)
        hub.feed(EngineLeft(D, "done"))
        assert orders == [LetGo(D)]
        await room.close()

    asyncio.run(scene())
