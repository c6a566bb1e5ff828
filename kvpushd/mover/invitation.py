# SPDX-License-Identifier: Apache-2.0
"""What an inlet's peer needs to write to it, on the wire."""

from __future__ import annotations

from kvpush_client._proto import types_pb2
from kvpushd.mover.transport.base import Invitation, Landing


def to_wire(transport: str, invitation: Invitation) -> types_pb2.Inlet:
    """The message of an inlet of a transport."""
    inlet = types_pb2.Inlet(transport=transport, agent=invitation.agent, metadata=invitation.metadata)
    landing = invitation.landing
    if landing is not None:
        inlet.landing.address = landing.address
        inlet.landing.slots = landing.slots
        inlet.landing.slot_bytes = landing.slot_bytes
    return inlet


def from_wire(inlet: types_pb2.Inlet) -> Invitation:
    """What a message says, whoever wrote it."""
    landing = None
    if inlet.HasField("landing"):
        landing = Landing(inlet.landing.address, inlet.landing.slots, inlet.landing.slot_bytes)
    return Invitation(inlet.agent, inlet.metadata, landing)
