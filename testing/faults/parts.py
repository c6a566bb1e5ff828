# SPDX-License-Identifier: Apache-2.0
"""What the messages between processes comprise, and their names.

Imports no gRPC: a mover that is to be up within a second has no time for it.
"""

from __future__ import annotations

from typing import Any

Part = tuple[str, Any]
"""A message's name, and a message of the stream that holds it alone."""


def parts(message: Any) -> list[Part]:
    """What a message of a stream comprises, one by one and in order."""
    found: list[Part] = []
    for field, value in message.ListFields():
        if field.is_repeated:
            for number, one in enumerate(value):
                whole = type(message)()
                getattr(whole, field.name).append(one)
                if "first" in message.DESCRIPTOR.fields_by_name:
                    whole.first = message.first + number
                found.append((name_of(one), whole))
        elif field.message_type is not None:
            whole = type(message)()
            getattr(whole, field.name).CopyFrom(value)
            found.append((name_of(value), whole))
    return found or [(message.DESCRIPTOR.name, message)]


def name_of(message: Any) -> str:
    """Of a message, or of the one that its oneof holds."""
    oneofs = message.DESCRIPTOR.oneofs
    kind = message.WhichOneof(oneofs[0].name) if len(oneofs) == 1 else None
    return str((message if kind is None else getattr(message, kind)).DESCRIPTOR.name)


def same(message: Any) -> Any:
    """A message is its own copy: nobody changes one that was sent."""
    return message
