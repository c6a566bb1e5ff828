# SPDX-License-Identifier: Apache-2.0
"""Whether a sending and a receiving engine fit, and what of theirs goes where."""

from __future__ import annotations

from collections.abc import Sequence

from kvpush_client.events import Fault, Reason
from kvpushd.core.engines import Engine
from kvpushd.core.fingerprint import compare
from kvpushd.core.handoff import Handoff
from kvpushd.core.lane import Lane, Pair
from kvpushd.core.layout import GroupKind
from kvpushd.core.overlap import (
    bytes_per_position,
    covers,
    granularity,
    mappable,
    sends,
    shared_groups,
    shared_layers,
    whole,
)
from kvpushd.core.reservation import Reservation
from kvpushd.core.target import Target
from kvpushd.core.words import ReceiverView
from kvpushd.errors import LayoutMismatch


def pair_up(engine: Engine, receiver: ReceiverView) -> tuple[Pair, ...]:
    """The pairs of ranks that have bytes to move from `engine` to `receiver`, whose KV must mean the same.

    Raises FingerprintMismatch or LayoutMismatch, naming the field and both values.
    """
    compare(engine.fingerprint, receiver.fingerprint)
    pairs = []
    for target_rank, target in receiver.pools.items():
        for source_rank, source in engine.pools.items():
            mappable(source, target)
            if not sends(source, target):
                continue
            pair = Pair(
                source_rank=source_rank,
                target_rank=target_rank,
                layers=shared_layers(source, target),
                groups=shared_groups(source, target),
                granularity=granularity(source, target),
                whole=whole(source, target),
                bytes_per_position=int(bytes_per_position(source, target).sum()),
            )
            pairs.append(pair)
        if engine.local_ranks == engine.world_size:
            covers(list(engine.pools.values()), target)
    return tuple(pairs)


def lanes_between(pairs: Sequence[Pair], start: int, end: int) -> list[Lane]:
    """One lane for every pair.

    Raises LayoutMismatch if `start` lies where a layer can't be cut.
    """
    for pair in pairs:
        if start % pair.granularity:
            raise LayoutMismatch(
                f"the reservation starts at position {start}, inside a block of {pair.granularity}: the "
                "layers are packed so that blocks move whole; reserve from a block's first position"
            )
    return [Lane(pair, start, end) for pair in pairs]


def prompt_fault(target: Target, handoff: Handoff) -> Fault | None:
    """That the two engines compute different prompts, where both have said what of; None if nothing is amiss.

    KV of another prompt is as good as any in all else, and would be taken for that of the receiver's own, by
    this request and by all that share its prefix.
    """
    wanted, theirs = target.said.prompt, handoff.prompts.get(target.said.end, b"")
    if not wanted or not theirs or wanted == theirs:
        return None
    return Fault(
        Reason.PROMPT_MISMATCH,
        f"the first {target.said.end} positions are of one prompt at the sender, and of another at the "
        "receiver: both engines need the same tokenizer and chat template",
    )


def coverage_fault(target: Target, handoff: Handoff, engine: Engine) -> Fault | None:
    """What of a target's positions the handoff does not name, or never will; None if nothing is amiss.

    Blocks are only ever appended, so a list that begins too late is known to be wrong at once; that it ends
    too soon, only at the seal. Of a sliding window what the receiver names is wanted: it takes the whole of
    its first block for computed, and shares it with other requests.
    """
    said = target.said
    if handoff.seal is not None and said.end > handoff.seal:
        return Fault(
            Reason.POSITIONS_MISSING,
            f"positions up to {said.end} are wanted, but the transfer comprises {handoff.seal}",
        )
    for pair in (lane.pair for lane in target.lanes):
        layout = engine.pools[pair.source_rank]
        for group, theirs in pair.groups.items():
            blocks = handoff.blocks.get(group)
            start = said.start
            if layout.groups[group].kind is not GroupKind.FULL:
                start = max(start, min((b.start for b in said.blocks if b.group in theirs), default=start))
            if blocks is not None and blocks.start > start:
                return Fault(
                    Reason.POSITIONS_MISSING,
                    f"positions from {start} are wanted, but group {group} begins at {blocks.start}",
                )
            named = handoff.named([group], layout)
            if handoff.seal is not None and named < said.end:
                return Fault(
                    Reason.POSITIONS_MISSING,
                    f"positions up to {said.end} are wanted, but group {group} ends at {named}",
                )
    return None


def shortfall(reservation: Reservation, engine: Engine) -> Fault | None:
    """What is missing where all parts have landed; None if nothing is.

    A sending node knows its own ranks, and only the receiver which nodes it has asked. So if a reservation
    does not name all that hold something of it, that shows in how much has come. What sliding windows still
    hold comes on top of what is counted here, so of a model with such layers a part may be missing unseen.
    """
    due = engine.takes(reservation.said.end - reservation.said.start)
    if not reservation.landed or reservation.counts.bytes >= due:
        return None
    return Fault(
        Reason.LAYOUT_MISMATCH,
        f"all that its senders hold has landed, {reservation.counts.bytes} bytes, but it takes {due}: a "
        "reservation must name the sending engine on every node where it has ranks",
    )
