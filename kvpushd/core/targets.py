# SPDX-License-Identifier: Apache-2.0
"""All targets of the node, and what is looked up of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpushd.core.target import Target
from kvpushd.core.words import Incarnation, LinkId, ReceiverKey, TargetKey, Transfer


@dataclass(slots=True)
class Load:
    """What is held for one link."""

    halves: int = 0
    blocks: int = 0


class Targets:
    """By key, by receiver, and, while no handoff fills them, by the transfer that they wait for."""

    def __init__(self) -> None:
        self._all: dict[TargetKey, Target] = {}
        self._of_receiver: dict[ReceiverKey, dict[TargetKey, Target]] = {}
        self._waiting: dict[Transfer, dict[TargetKey, Target]] = {}
        self._loads: dict[LinkId, Load] = {}

    def get(self, key: TargetKey) -> Target | None:
        """The target, while it is held."""
        return self._all.get(key)

    def these(self, keys: Iterable[TargetKey]) -> list[Target]:
        """Those of these that are held."""
        return [target for key in keys if (target := self._all.get(key)) is not None]

    def add(self, target: Target) -> None:
        """Holds one, that waits for a handoff."""
        self._all[target.key] = target
        self._of_receiver.setdefault(target.owner, {})[target.key] = target
        self._waiting.setdefault(target.transfer, {})[target.key] = target
        load = self._loads.setdefault(target.said.link, Load())
        load.halves += 1
        load.blocks += target.block_count

    def settle(self, target: Target) -> None:
        """It does not wait for a handoff any more."""
        waiting = self._waiting.get(target.transfer, {})
        waiting.pop(target.key, None)
        if not waiting:
            self._waiting.pop(target.transfer, None)

    def remove(self, target: Target) -> None:
        """Lets go of one, if it is held."""
        if self._all.pop(target.key, None) is None:
            return
        self.settle(target)
        mine = self._of_receiver[target.owner]
        del mine[target.key]
        if not mine:
            del self._of_receiver[target.owner]
        load = self._loads[target.said.link]
        load.halves -= 1
        load.blocks -= target.block_count
        if not load.halves:
            del self._loads[target.said.link]

    def waiting_for(self, transfer: Transfer) -> list[Target]:
        """Those that a handoff of this transfer would fill, oldest first."""
        return list(self._waiting.get(transfer, {}).values())

    def waiting_for_engine(self, incarnation: Incarnation) -> list[Target]:
        """Those that wait for any handoff of an engine."""
        mine = [waiting for (owner, _), waiting in self._waiting.items() if owner == incarnation]
        return [target for waiting in mine for target in waiting.values()]

    def of_receiver(self, receiver: ReceiverKey) -> list[Target]:
        """All that a receiver announced on a link."""
        return list(self._of_receiver.get(receiver, {}).values())

    def count(self, receiver: ReceiverKey) -> int:
        """How many a receiver announced."""
        return len(self._of_receiver.get(receiver, ()))

    def on(self, link: LinkId) -> Load:
        """How much the receivers of a link have announced."""
        return self._loads.get(link, Load())

    def __len__(self) -> int:
        return len(self._all)
