# SPDX-License-Identifier: Apache-2.0
"""Whether a sending and a receiving engine fit, and the lanes between their ranks."""

from __future__ import annotations

from kvpush_client.events import Fault, Reason
from kvpushd.core.engines import Engine
from kvpushd.core.fingerprint import compare
from kvpushd.core.lane import Lane
from kvpushd.core.layout import GroupKind, Layout
from kvpushd.core.messages import ReceiverView
from kvpushd.core.plan import bytes_per_position, covers, granularity, mappable, sends, shared_layers
from kvpushd.core.target import Handoff, Target
from kvpushd.errors import LayoutMismatch


def verify(engine: Engine, receiver: ReceiverView) -> None:
    """Returns if KV of `engine` means the same to `receiver` and can be mapped into its pools.

    Raises FingerprintMismatch or LayoutMismatch, naming the field and both values.
    """
    compare(engine.fingerprint, receiver.fingerprint)
    for target in receiver.pools.values():
        for source in engine.pools.values():
            mappable(source, target)
        if engine.local_ranks == engine.world_size:
            covers(list(engine.pools.values()), target)


def lanes_between(engine: Engine, receiver: ReceiverView, start: int, end: int) -> list[Lane]:
    """One lane for every pair of ranks that have bytes to move.

    Raises LayoutMismatch if `start` lies where a layer can't be cut.
    """
    lanes = []
    for source_rank, source in engine.pools.items():
        for target_rank, target in receiver.pools.items():
            if not sends(source, target):
                continue
            unit = granularity(source, target)
            if start % unit:
                raise LayoutMismatch(
                    f"the reservation starts at position {start}, inside a block of {unit}: the layers are "
                    "packed so that blocks move whole; reserve from a block's first position"
                )
            size = float(bytes_per_position(source, target).sum())
            layers = shared_layers(source, target)
            lanes.append(Lane(source_rank, target_rank, layers, unit, size, start, end))
    return lanes


def coverage_fault(target: Target, handoff: Handoff, engine: Engine) -> Fault | None:
    """What is wrong if a sealed handoff does not name all that a target needs; None if it does.

    Only groups that hold all positions can be held to that: of a sliding window each side names what it
    still has.
    """
    assert handoff.seal is not None
    said = target.said
    if said.end > handoff.seal:
        return Fault(
            Reason.POSITIONS_MISSING,
            f"positions up to {said.end} are wanted, but the transfer comprises {handoff.seal}",
        )
    for group in _full_groups(next(iter(engine.pools.values()))):
        blocks = handoff.blocks.get(group)
        if blocks is None or blocks.start > said.start:
            first = "none" if blocks is None else str(blocks.start)
            return Fault(
                Reason.POSITIONS_MISSING,
                f"positions from {said.start} are wanted, but group {group} names blocks from {first}",
            )
    return None


def _full_groups(layout: Layout) -> list[int]:
    return [i for i, group in enumerate(layout.groups) if group.kind is GroupKind.FULL]
