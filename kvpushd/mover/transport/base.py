# SPDX-License-Identifier: Apache-2.0
"""What a mover asks of whatever carries bytes.

Threads. All of an object's methods are called from one thread, the mover's; none starts another that touches
a pool. None blocks for longer than it takes to copy a few megabytes, so that the mover goes round.

Completions. Each write that was posted ends in exactly one completion, in any order, given out by `poll`.
One without a fault says that every byte is in the target pool. One with a fault says only that nothing reads
the source any more: bytes that were on their way may still land while the inlet at the far end lives. Who
wants those blocks back closes that inlet. Either kind of completion says nothing of other writes, and
nothing is ordered between two writes that are both in flight.

There is no cancel. NIXL has none: releasing a handle, deregistering the memory and forgetting the remote
agent all return while bytes go on landing. So a write ends when it ends, and `close_outlet` with writes in
flight takes effect only after the last of them. Where nothing is heard of one for too long, `cut_outlet` ends
all that go the same way: with a fault, hence as above.

Fences. `close_inlet` is the fence of the receiving side: when it returns, nothing that came through that
inlet lands any more, even where the sender is stopped, partitioned or hostile, and the inlet's pools may be
unmapped once no other inlet holds them. Writes of others that were on their way through it end with a fault,
over there. `deregister` fences nothing, and must not be called while an inlet or a write holds the pool.

Progress. Bytes come in by software on some fabrics: an inlet receives only while `progress` is called, and
the first write to an inlet hangs until it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpush_client.events import Fault
from kvpushd.core.runs import Runs

LOCAL_OUTLET = 0
INSPECTED_RUNS = 512
INSPECTED_BYTES = 8 << 20
"""Of one inspection: so that what is said of it is short, and it takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Region:
    """A pool's place in an address space: its own, or that of the process behind an outlet. Bytes."""

    pool_id: bytes
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Write:
    """Byte runs to carry from a registered pool to one behind an outlet, as offsets into the two pools.

    The caller has checked that they lie inside both. At least one run.
    """

    write_id: int
    outlet_id: int
    source_pool: bytes
    target_pool: bytes
    runs: Runs


@dataclass(frozen=True, slots=True)
class Completion:
    """A write is terminal. `fault` absent = all of it landed."""

    write_id: int
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Handles:
    """What a transport holds of its fabric: ways out, transfers under way, registrations of pools."""

    outlets: int
    transfers: int
    registrations: int


class Carrier(Protocol):
    """Carries bytes from a registered pool to where an outlet leads."""

    @property
    def name(self) -> str:
        """As the wire names it, e.g. "nixl-ucx"."""
        ...

    def register(self, region: Region) -> None:
        """Makes a pool of this process a possible source. Raises TransportFailed."""
        ...

    def deregister(self, pool_id: bytes) -> None:
        """Undoes `register`. No write may be reading it."""
        ...

    def post(self, write: Write) -> None:
        """Begins a write. Never raises for what is wrong with the way: that ends the write, by `poll`.

        Raises Invalid, and takes nothing, where the outlet or a pool was never named here.
        """
        ...

    def inspect(self, write: Write) -> None:
        """Begins to compare what a write has landed with what it carried, as checksums or byte by byte.

        It ends as a write does, by a completion with the write's id, whose fault says CORRUPTED where they
        differ. At most INSPECTED_RUNS runs and INSPECTED_BYTES bytes. Raises Invalid as `post` does.
        """
        ...

    def poll(self) -> list[Completion]:
        """Makes progress with the writes and says which are terminal since the last call."""
        ...

    @property
    def in_flight(self) -> int:
        """Writes posted whose completion `poll` has not given out."""
        ...

    def close(self) -> None:
        """Lets go of everything, and fences every inlet. Completions that are due are lost."""
        ...


class Transport(Carrier, Protocol):
    """A carrier that leads to other processes, and lets them in."""

    def open_inlet(self, inlet_id: int, agent: str, pools: Sequence[Region]) -> bytes:
        """Lets one peer write to some pools; returns what its `open_outlet` needs.

        `agent` names the inlet among all that the two sides will ever make. Raises Invalid where the id is
        taken, TransportFailed where the fabric refuses.
        """
        ...

    def close_inlet(self, inlet_id: int) -> None:
        """The fence, see above. An unknown id is closed already."""
        ...

    def open_outlet(self, outlet_id: int, agent: str, metadata: bytes, pools: Sequence[Region]) -> None:
        """Makes another process's inlet a place to write to. Says nothing of whether it is still there.

        Raises Invalid where the id is taken or the metadata is not that agent's, TransportFailed where the
        fabric refuses.
        """
        ...

    def close_outlet(self, outlet_id: int) -> None:
        """Forgets it, once its last write is terminal; until then new writes to it are refused."""
        ...

    def cut_outlet(self, outlet_id: int) -> None:
        """Forgets it now: its writes end with a fault, and when this returns nothing reads their sources."""
        ...

    def progress(self) -> None:
        """Takes in what comes through the inlets."""
        ...

    def handles(self) -> Handles:
        """Counts what is held: for now and then, not for each round."""
        ...

    @property
    def bell(self) -> int | None:
        """A descriptor that is readable while something has come that `progress` or `poll` would take in.

        None where the fabric has no such thing. It may ring for nothing, and need not ring for everything.
        """
        ...
