# SPDX-License-Identifier: Apache-2.0
"""What a mover may have of its transport with nothing to do."""

from __future__ import annotations

from kvpush_client._proto import admin_pb2


def handles(mover: admin_pb2.Mover, since_unix_ns: int, pools: int, receivers: int) -> list[str]:
    """What a mover with nothing to do has of its transport that it should not, or lacks.

    It maps `pools`, those of engines of one each where they receive, and sends to no more than `receivers`.
    """
    if mover.counted_unix_ns < since_unix_ns:
        return ["its mover has not counted yet what it has of its transport"]
    wrong = []
    if mover.transfers:
        wrong.append(f"{mover.transfers} transfers are under way at its transport")
    if mover.outlets > receivers:
        wrong.append(f"{mover.outlets} outlets for {receivers} engines to send to")
    registrations = pools * (1 + mover.outlets) + mover.inlets
    if mover.registrations != registrations:
        wrong.append(
            f"{mover.registrations} registrations, not {registrations}, of {pools} pools with "
            f"{mover.outlets} outlets and {mover.inlets} inlets"
        )
    return wrong
