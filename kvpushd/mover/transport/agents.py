# SPDX-License-Identifier: Apache-2.0
"""NIXL's agents as this process makes them, and the bell that their connections ring.

The packages nixl_cu12 and nixl_cu13 are imported by name, whichever is installed, and not through `nixl`:
that one looks for CUDA by importing torch, which takes 2 s and 190 MB.
"""

from __future__ import annotations

import importlib
import importlib.util
import select
import weakref
from typing import Any, Protocol

from kvpushd.errors import ConfigError
from kvpushd.mover.transport import descriptors, notices
from kvpushd.mover.transport.notices import Notice

PACKAGES = ("nixl_cu13", "nixl_cu12")
DRAM = "DRAM"


class Owner(Protocol):
    """Whose agent it is."""

    def progress(self) -> None:
        """Takes in what has come."""
        ...


class Agents:
    """Makes agents, none of which has a thread of its own, and knows which of them rang."""

    def __init__(self) -> None:
        """Raises ConfigError where NIXL is not installed."""
        self._nixl = _package()
        self._bell = select.epoll()
        self._rings: dict[int, weakref.ref[Owner]] = {}
        """By descriptor, whose agent rings it."""
        self._mute: list[weakref.ref[Owner]] = []
        """Whose agents have nothing that could ring."""
        self._bindings = importlib.import_module(f"{self._nixl.__name__}._bindings")
        # NIXL's exceptions have no base but Exception.
        self.errors: tuple[type[Exception], ...] = tuple(
            value
            for name, value in vars(self._bindings).items()
            if name.startswith("nixl") and name.endswith("Error")
        )

    def make(self, name: str, owner: Owner | None = None) -> Any:
        """An agent of a name that no other has, ever. Raises what is in `errors`.

        Without an owner nothing is expected to come to it.
        """
        before = set(descriptors.names())
        agent = self._nixl.nixl_agent(name, self._nixl.nixl_agent_config(enable_prog_thread=False))
        if owner is not None:
            rings = descriptors.epolls(set(descriptors.names()) - before)
            if not rings:
                self._mute.append(weakref.ref(owner, self._mute.remove))
            for descriptor in rings:
                # It leaves the bell by itself when the agent closes it.
                self._bell.register(descriptor, select.EPOLLIN)
                self._rings[descriptor] = weakref.ref(owner)
        return agent

    def connection_of(self, agent: Any) -> bytes:
        """Metadata that says how an agent is reached, and nothing of its memory. Raises NIXL's errors."""
        nothing = self._bindings.nixlRegDList(self._bindings.DRAM_SEG)
        found: bytes = agent.get_partial_agent_metadata(nothing, inc_conn_info=True)
        return found

    def tell(self, agent: Any, name: str, notice: Notice) -> None:
        """Tells the agent of that name something, who may not hear it. Raises NIXL's errors."""
        agent.send_notif(name, bytes(notice))

    def heard(self, agent: Any) -> list[tuple[str, Notice]]:
        """What an agent was told since it was last asked, and by whom. To ask makes progress, too.

        Whoever reaches the agent's port can tell it something, and call itself what the bindings can't read.
        """
        try:
            found: dict[str, list[bytes]] = agent.get_new_notifs()
        except UnicodeDecodeError:
            return []
        read = ((name, notices.read(message)) for name, messages in found.items() for message in messages)
        return [(name, notice) for name, notice in read if notice is not None]

    @property
    def bell(self) -> int | None:
        """Readable while a TCP connection of an agent's is; None where one has nothing that could ring.

        NIXL has no call that waits. But an agent's UCX watches its connections by an epoll descriptor, level
        triggered, and such a descriptor can itself be waited for. Other fabrics than TCP don't ring it.
        """
        return None if self._mute else self._bell.fileno()

    def rung(self) -> list[Owner]:
        """Those whose agents ring, and those whose agents never could."""
        # One rings by several descriptors: one for each network device.
        owners = [self._rings[descriptor] for descriptor, _ in self._bell.poll(0)]
        rung = dict.fromkeys(owner() for owner in (*self._mute, *owners))
        return [owner for owner in rung if owner is not None]

    def close(self) -> None:
        """Ends the bell; agents end with the last that refers to them."""
        self._bell.close()


def register(agent: Any, address: int, nbytes: int) -> Any:
    """Registers host memory with an agent; what is returned undoes it. Raises NIXL's errors."""
    return agent.register_memory([(address, nbytes, 0, "")], DRAM)


def name_of(loaded: bytes | str) -> str:
    """The name of an agent whose metadata was loaded."""
    return loaded.decode(errors="replace") if isinstance(loaded, bytes) else loaded


def _package() -> Any:
    for name in PACKAGES:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ConfigError(f"NIXL is not installed, expected one of {', '.join(PACKAGES)}: pip install nixl")
