# SPDX-License-Identifier: Apache-2.0
"""What two nodes agree on before a link carries anything: hellos, and the bounds that each holds to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpush_client._proto import peer_pb2
from kvpushd.errors import Invalid, Unsupported
from kvpushd.rpc.tls import Options

PROTOCOL = 1
# Names end up in logs and tables, and next to the names of certificates.
NODE = r"[A-Za-z0-9._-]{1,253}"
# A link's silence as either side may ask for it, in milliseconds.
SILENCE_MS = (100, 600_000)


@dataclass(frozen=True, slots=True)
class Terms:
    """What this node says of itself on every link, and the bounds that it holds to. Times in seconds."""

    node: str
    boot: bytes
    software: str
    silence: float = 3.0
    connect_timeout: float = 5.0
    message_bytes: int = 16 << 20
    items_per_message: int = 4096
    queued_items: int = 65536
    links_per_node: int = 16

    def hello(self) -> peer_pb2.PeerHello:
        """The first message."""
        return peer_pb2.PeerHello(
            protocol=PROTOCOL,
            node=self.node,
            boot=self.boot,
            software=self.software,
            silence_ms=round(self.silence * 1000),
        )

    def options(self) -> Options:
        """Channel and server options that every link has."""
        return (
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_send_message_length", self.message_bytes),
            # Links are between nodes, never through the proxy that the environment names.
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            # Else channels of one process share connections, and with them the back-off after a failure:
            # a peer that came back at once could not be dialed for a second.
            ("grpc.use_local_subchannel_pool", 1),
        )


def agent_prefix(node: str, boot: bytes) -> str:
    """What the names of a node's transport agents begin with: no other node's do, and no other start's."""
    return f"{node}-{boot.hex()[:12]}-"


def check_hello(message: peer_pb2.LinkRequest | peer_pb2.LinkResponse) -> peer_pb2.PeerHello:
    """The hello that a link must begin with. Raises Invalid or Unsupported."""
    if not message.HasField("hello") or message.items:
        raise Invalid("a link begins with a message that holds a hello and nothing else")
    hello = message.hello
    if hello.protocol != PROTOCOL:
        raise Unsupported(
            f"the peer ({hello.software!r}) speaks protocol {hello.protocol}, this node {PROTOCOL}: "
            "upgrade the older one"
        )
    if not re.fullmatch(NODE, hello.node):
        raise Invalid("hello.node must have 1 to 253 letters, digits, dots, dashes and underscores")
    if len(hello.software) > 200 or not hello.software.isprintable():
        raise Invalid("hello.software must have at most 200 printable characters")
    if len(hello.boot) != 16:
        raise Invalid(f"hello.boot must have 16 bytes, not {len(hello.boot)}")
    least, most = SILENCE_MS
    if not least <= hello.silence_ms <= most:
        raise Invalid(f"hello.silence_ms is {hello.silence_ms}; allowed: {least} to {most}")
    return hello
