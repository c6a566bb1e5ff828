# SPDX-License-Identifier: Apache-2.0
"""What it costs to verify what has landed: CPU per GB and time, for each of the settings of `verify`.

    python -m benchmarks.verify --rounds 5

Two movers, NIXL over the loopback's TCP, 128 MiB a write in runs of 64 KiB. The settings take turns; one JSON
object each on stdout, with medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time

import numpy as np

from benchmarks.idle import BLOCK_BYTES, POOL_BYTES, cpu_ns, layout
from kvpush_client.pool import Pool
from kvpushd.core.events import WriteEnded
from kvpushd.core.layout import Blocks, Window
from kvpushd.core.words import WriteId
from kvpushd.mover.attention import Attention
from kvpushd.mover.child import MoverSettings
from kvpushd.mover.handle import MoverHandle, OutletPool
from kvpushd.mover.process import SAMPLED, VERIFY

WRITES = SAMPLED
"""A round's: in a sample, one of them is inspected."""


class Way:
    """Two movers, a pool each, and the way from one to the other."""

    def __init__(self, verify: str) -> None:
        self._verify = verify
        self._number = 0

    async def open(self) -> None:
        """Starts the movers."""
        name = f"verify-{os.getpid()}-{self._verify}"
        self._sender = await MoverHandle.spawn(MoverSettings(name, verify=self._verify))
        self._receiver = await MoverHandle.spawn(MoverSettings(f"{name}-in"))
        self._pools = [Pool.create(POOL_BYTES, "verify") for _ in range(2)]
        for mover, pool in zip((self._sender, self._receiver), self._pools, strict=True):
            pool.prefault()
            await mover.map_pool(b"pool", pool.fd, layout())
        inlet, (base,) = await self._receiver.open_inlet(1, [b"pool"], f"{name}-inlet")
        await self._sender.open_outlet(1, inlet, [OutletPool(b"pool", base, layout())])
        self._receiver.attend(Attention.FILLING)

    async def round(self) -> tuple[float, float]:
        """CPU seconds per GB of both movers, and GB per second."""
        before, begun = self._cpu(), time.perf_counter()
        for _ in range(WRITES):
            await self._write()
        size = WRITES * POOL_BYTES / 2 / 1e9
        return (self._cpu() - before) / 1e9 / size, size / (time.perf_counter() - begun)

    def _cpu(self) -> int:
        return cpu_ns(self._sender.pid) + cpu_ns(self._receiver.pid)

    async def _write(self) -> None:
        ended: asyncio.Future[WriteEnded] = asyncio.get_running_loop().create_future()
        self._number += 1
        every_other = [Blocks(0, 0, np.arange(0, POOL_BYTES // BLOCK_BYTES, 2))]
        self._sender.post(
            WriteId(self._number),
            source_pool=b"pool",
            source_blocks=every_other,
            outlet_id=1,
            target_pool=b"pool",
            target_blocks=every_other,
            window=Window(0, 16 * len(every_other[0].ids), 0, 1),
            ended=ended.set_result,
        )
        assert (await ended).fault is None

    async def close(self) -> None:
        """Ends the movers."""
        await self._sender.stop()
        await self._receiver.stop()
        for pool in self._pools:
            pool.close()


async def measure(rounds: int) -> None:
    """Lets the settings take turns, and prints what each costs."""
    ways = {verify: Way(verify) for verify in VERIFY}
    found: dict[str, list[tuple[float, float]]] = {verify: [] for verify in VERIFY}
    for number in range(rounds):
        for verify, way in ways.items():
            await way.open()
            if not number:
                await way.round()  # the first writes to a pool are slower
            found[verify].append(await way.round())
            await way.close()
    for verify, samples in found.items():
        cpu, rate = (statistics.median(column) for column in zip(*samples, strict=True))
        print(json.dumps({"verify": verify, "cpu_s_per_gb": round(cpu, 2), "gb_per_s": round(rate, 2)}))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
