# SPDX-License-Identifier: Apache-2.0
"""The node as its operator sees it (AdminView), and as the gauges do."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpush_client._proto import admin_pb2
from kvpush_client.events import Counts, Fault, Side
from kvpushd.core.engines import is_local
from kvpushd.core.handoff import Handoff
from kvpushd.core.instructions import Account
from kvpushd.core.ledger import Ledger
from kvpushd.core.reservation import Reservation, names_of
from kvpushd.core.target import Target, counts_of, phase_of
from kvpushd.core.words import LinkId, Phase, Times
from kvpushd.metrics import Holding
from kvpushd.node.engines import MEMORY, EngineRoom
from kvpushd.node.floor import Floor
from kvpushd.node.history import History
from kvpushd.node.hub import now
from kvpushd.node.movers import Movers
from kvpushd.node.receiving import ReceivingRoom
from kvpushd.node.sending import SendingRoom
from kvpushd.rpc import wire
from kvpushd.rpc.admin import Row
from kvpushd.rpc.peer_wire import times_to_wire, unix_offset

PHASES = {
    Phase.OPEN: admin_pb2.PHASE_OPEN,
    Phase.MATCHED: admin_pb2.PHASE_MATCHED,
    Phase.MOVING: admin_pb2.PHASE_MOVING,
    Phase.FENCING: admin_pb2.PHASE_FENCING,
    Phase.ENDED: admin_pb2.PHASE_ENDED,
}
MILLISECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What does not change while the daemon runs."""

    node: str
    software: str
    started_unix_ns: int
    peer_security: str


class View:
    """Reads all rooms, changes none; but for `drain`, which it passes on."""

    def __init__(
        self,
        facts: NodeFacts,
        ledger: Ledger,
        engines: EngineRoom,
        movers: Movers,
        receiving: ReceivingRoom,
        sending: SendingRoom,
        history: History,
        floor: Floor,
        *,
        peer_address: Callable[[], tuple[str, int]],
        problems: Callable[[], Sequence[str]],
        draining: Callable[[], bool],
        drain: Callable[[], None],
    ) -> None:
        self._facts = facts
        self._ledger = ledger
        self._engines = engines
        self._movers = movers
        self._receiving = receiving
        self._sending = sending
        self._history = history
        self._floor = floor
        self._peer_address = peer_address
        self._problems = problems
        self._draining = draining
        self._drain = drain

    # --- AdminView ---------------------------------------------------------------------------------------

    def status(self) -> admin_pb2.GetStatusResponse:
        """One look at the whole node."""
        problems = list(self._problems())
        host, port = self._peer_address()
        history = self._history
        return admin_pb2.GetStatusResponse(
            node=self._facts.node,
            software=self._facts.software,
            started_unix_ns=self._facts.started_unix_ns,
            ready=not problems,
            draining=self._draining(),
            problems=problems,
            movers=[self._mover()],
            held=self.held(),
            totals=admin_pb2.Totals(
                bytes_sent=history.bytes_sent,
                bytes_received=history.bytes_received,
                landed=history.landed,
                failed=history.failed,
            ),
            peer_address=f"{host}:{port}" if port else "",
            peer_security=self._facts.peer_security,
        )

    def _mover(self) -> admin_pb2.Mover:
        movers = self._movers
        handle = movers.handle
        said = handle.beat if handle else None
        return admin_pb2.Mover(
            name="mover",
            pid=handle.pid if handle else 0,
            alive=handle is not None,
            restarts=movers.restarts,
            pools=len(movers.pools),
            inlets=len(movers.inlets),
            transports=handle.transports if handle else (),
            outlets=said.outlets if said else 0,
            transfers=said.transfers if said else 0,
            registrations=said.registrations if said else 0,
            counted_unix_ns=said.counted_unix_ns if said else 0,
        )

    def held(self) -> admin_pb2.Held:
        """Counts of what is held now."""
        entries = list(self._engines)
        return admin_pb2.Held(
            engines=sum(entry.live for entry in entries),
            pools=sum(len(entry.pools) for entry in entries),
            pool_bytes=sum(entry.pool_bytes for entry in entries),
            reservations=len(self._ledger.reservations()),
            handoffs=len(self._ledger.handoffs()),
            quarantined_blocks=self._ledger.quarantined_blocks,
            links=sum(link.up for link in self._receiving) + sum(link.up for link in self._sending),
            writes=self._ledger.writes,
        )

    def engines(self) -> list[Row[admin_pb2.Engine]]:
        """By engine_id."""
        reservations = Counter(half.incarnation for half in self._ledger.reservations())
        handoffs = Counter(half.incarnation for half, _ in self._ledger.handoffs())
        blocks: Counter[bytes] = Counter()
        for half in self._ledger.reservations():
            blocks[half.incarnation] += half.block_count
        for handoff, _ in self._ledger.handoffs():
            blocks[handoff.incarnation] += handoff.block_count
        rows = []
        for entry in self._engines:
            known = self._ledger.engines.get(entry.incarnation)
            message = admin_pb2.Engine(
                engine_id=entry.engine_id,
                incarnation=entry.incarnation.hex(),
                ranks_ready=len(known.mapped) if known else 0,
                local_ranks=entry.identity.local_ranks,
                world_size=entry.identity.world_size,
                pool_bytes=entry.pool_bytes,
                blocks=known.blocks if known else 0,
                reservations=reservations[entry.incarnation],
                handoffs=handoffs[entry.incarnation],
                held_blocks=blocks[entry.incarnation],
                fingerprint=wire.fingerprint_to_wire(entry.identity.fingerprint),
                software=entry.identity.software,
                since_unix_ns=entry.since_unix_ns,
                memory=MEMORY,
            )
            rows.append(Row((entry.engine_id, entry.incarnation.hex()), message))
        return sorted(rows, key=lambda row: row.key)

    def reservations(self, engine_id: str) -> list[Row[admin_pb2.Half]]:
        """Oldest first."""
        rows = [
            Row((half.times.opened, half.key.transfer_id.hex(), half.key.attempt), self._reservation(half))
            for half in self._ledger.reservations()
        ]
        return _of(engine_id, rows)

    def handoffs(self, engine_id: str) -> list[Row[admin_pb2.Half]]:
        """Oldest first."""
        rows = [
            Row(
                (half.times.opened, half.key.transfer_id.hex(), half.key.attempt),
                self._handoff(half, targets),
            )
            for half, targets in self._ledger.handoffs()
        ]
        return _of(engine_id, rows)

    def transfers(self, transfer_id: str, live_only: bool) -> list[Row[admin_pb2.Transfer]]:
        """In flight, oldest first; then those that ended, newest first."""
        rows = []
        for half in self._ledger.reservations():
            message = _transfer(
                self._reservation(half), Side.RECEIVER, half.times, half.counts, half.fault, half.sender_times
            )
            rows.append(Row((0, half.times.opened, message.half.transfer_id), message))
        for handoff, targets in self._ledger.handoffs():
            said, counts = self._handoff(handoff, targets), counts_of(handoff, targets)
            message = _transfer(said, Side.SENDER, handoff.times, counts, handoff.fault)
            rows.append(Row((0, handoff.times.opened, message.half.transfer_id), message))
        rows.sort(key=lambda row: row.key)
        if not live_only:
            for entry in self._history:
                message = _ended(entry.account, entry.first_token_unix_ns)
                rows.append(Row((1, -entry.number, message.half.transfer_id), message))
        return [row for row in rows if transfer_id in ("", row.message.half.transfer_id)]

    def peers(self) -> list[Row[admin_pb2.Peer]]:
        """By address: links up or coming up, and those that went down last."""
        rows: dict[tuple[str, int], Row[admin_pb2.Peer]] = {}
        faults = self._receiving.faults
        live: Counter[str] = Counter()
        for half in self._ledger.reservations():
            live.update(half.parts.keys())
        for address, fault in faults.items():
            down = admin_pb2.Peer(address=address, receiving=True, last_fault=fault)
            rows[address, 0] = Row((address, 0), down)
        for out in self._receiving:
            message = admin_pb2.Peer(
                address=out.address,
                node=out.hello.node if out.hello else "",
                receiving=True,
                up=out.up,
                transport=self._transport(),
                bytes=self._history.moved[LinkId(out.address)],
                transfers=live[out.address],
                last_fault=faults.get(out.address, ""),
                software=out.hello.software if out.hello else "",
            )
            rows[out.address, 0] = Row((out.address, 0), message)
        for guest in self._sending.guests():
            link = guest.link
            message = admin_pb2.Peer(
                address=link.address,
                node=link.hello.node,
                up=link.up,
                transport=self._transport(),
                bytes=self._history.moved[guest.name],
                transfers=self._ledger.announced(guest.name),
                software=link.hello.software,
                bytes_per_second=int(self._ledger.rate(guest.name)),
                below_floor=self._floor.is_undercut_by(guest.name),
            )
            rows[link.address, 1] = Row((link.address, 1), message)
        return [row for _, row in sorted(rows.items())]

    def drain(self) -> admin_pb2.Held:
        """Takes no new work from now on."""
        self._drain()
        return self.held()

    # --- gauges ------------------------------------------------------------------------------------------

    def holding(self) -> Holding:
        """What the gauges show."""
        halves: Counter[tuple[Side, str]] = Counter()
        quarantined: defaultdict[str, int] = defaultdict(int)
        pinned: defaultdict[str, int] = defaultdict(int)
        for half in self._ledger.reservations():
            halves[Side.RECEIVER, half.phase.value] += 1
            if half.phase is Phase.FENCING:
                quarantined[self._name(half.incarnation)] += half.block_count
        for handoff, targets in self._ledger.handoffs():
            phase = phase_of(handoff, targets)
            halves[Side.SENDER, phase.value] += 1
            if phase is Phase.FENCING:
                quarantined[handoff.engine_id] += handoff.block_count
            elif phase is Phase.OPEN:
                pinned[handoff.engine_id] += handoff.block_count
        held = self.held()
        receiving = [link for link in self._receiving if link.up]
        sending = [link for link in self._sending if link.up]
        transports = {link.hello.node: self._transport() for link in receiving if link.hello}
        guests = [guest for guest in self._sending.guests() if guest.link.up]
        transports |= {guest.link.hello.node: self._transport() for guest in guests}
        return Holding(
            ready=not self._problems(),
            engines=held.engines,
            pools=held.pools,
            pool_bytes=held.pool_bytes,
            writes=held.writes,
            halves=halves,
            quarantined_blocks=quarantined,
            pinned_blocks=pinned,
            links={"receiving": len(receiving), "sending": len(sending)},
            transports=transports,
            rates={guest.link.hello.node: self._ledger.rate(guest.name) for guest in guests},
            below_floor={guest.link.hello.node: self._floor.is_undercut_by(guest.name) for guest in guests},
        )

    # --- parts -------------------------------------------------------------------------------------------

    def _transport(self) -> str:
        handle = self._movers.handle
        remote = [name for name in handle.transports if name != "local"] if handle else []
        lanes = f" ({' '.join(handle.lanes)})" if handle and handle.lanes else ""
        return ", ".join(remote) + lanes

    def _name(self, incarnation: bytes) -> str:
        entry = next((e for e in self._engines if e.incarnation == incarnation), None)
        return entry.engine_id if entry else ""

    def _reservation(self, half: Reservation) -> admin_pb2.Half:
        runs = half.fault is None and not half.matched
        return admin_pb2.Half(
            transfer_id=half.key.transfer_id.hex(),
            attempt=half.key.attempt,
            engine_id=self._name(half.incarnation),
            other=names_of(half.said.senders),
            phase=PHASES[half.phase],
            age_ms=(now() - half.times.opened) // MILLISECOND,
            blocks=half.block_count,
            start=half.said.start,
            end=half.said.end,
            label=half.said.label,
            lease_left_ms=max(0, half.deadline - now()) // MILLISECOND if runs else 0,
        )

    def _handoff(self, half: Handoff, targets: list[Target]) -> admin_pb2.Half:
        left = max(0, half.deadline - now()) // MILLISECOND if half.deadline is not None else 0
        names = sorted({(t.receiver.engine_id, t.said.link) for t in targets})
        return admin_pb2.Half(
            transfer_id=half.key.transfer_id.hex(),
            attempt=half.key.attempt,
            engine_id=half.engine_id,
            other=", ".join(name if is_local(link) else f"{name}@{link}" for name, link in names),
            phase=PHASES[phase_of(half, targets)],
            age_ms=(now() - half.times.opened) // MILLISECOND,
            blocks=half.block_count,
            start=min((b.start for b in half.blocks.values()), default=0),
            end=half.seal or 0,
            label=half.label,
            lease_left_ms=left,
        )


def _of(engine_id: str, rows: list[Row[admin_pb2.Half]]) -> list[Row[admin_pb2.Half]]:
    found = [row for row in rows if engine_id in ("", row.message.engine_id)]
    return sorted(found, key=lambda row: row.key)


def _transfer(
    half: admin_pb2.Half,
    side: Side,
    times: Times,
    counts: Counts,
    fault: Fault | None,
    sender_times: Times | None = None,
) -> admin_pb2.Transfer:
    message = admin_pb2.Transfer(
        half=half,
        sending=side is Side.SENDER,
        times=times_to_wire(times),
        counts=wire.counts_to_wire(counts),
    )
    if sender_times is not None:
        message.sender_times.CopyFrom(times_to_wire(sender_times))
    if fault is not None:
        message.fault.CopyFrom(wire.fault_to_wire(fault))
    return message


def _ended(account: Account, first_token_unix_ns: int) -> admin_pb2.Transfer:
    half = admin_pb2.Half(
        transfer_id=account.key.transfer_id.hex(),
        attempt=account.key.attempt,
        engine_id=account.engine_id,
        other=account.other,
        phase=admin_pb2.PHASE_ENDED,
        age_ms=(time.time_ns() - unix_offset() - account.times.opened) // MILLISECOND,
        blocks=account.blocks,
        start=account.start,
        end=account.end,
        label=account.label,
    )
    sender_times = account.sender_times if account.side is Side.RECEIVER else None
    message = _transfer(half, account.side, account.times, account.counts, account.fault, sender_times)
    message.first_token_unix_ns = first_token_unix_ns
    return message
