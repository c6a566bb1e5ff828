# SPDX-License-Identifier: Apache-2.0
"""What a mover costs while nothing moves: CPU per attention level, memory, descriptors, threads.

    python benchmarks/idle.py --inlets 8 --seconds 10

One JSON object per level on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path

from kvpush_client.layout import Group, Layer, Layout, Plane
from kvpush_client.pool import Pool
from kvpushd.mover.attention import Attention
from kvpushd.mover.child import MoverSettings
from kvpushd.mover.handle import MoverHandle

POOL_BYTES = 256 << 20
BLOCK_BYTES = 64 << 10


def layout() -> Layout:
    """One layer of blocks of 64 KiB."""
    plane = Plane(0, BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES // 16, BLOCK_BYTES // 16)
    return Layout(
        POOL_BYTES, POOL_BYTES // BLOCK_BYTES, (Group(16),), (Layer("layer", 0, 0, 1, 1, (plane,)),)
    )


def cpu_ns(pid: int) -> int:
    """CPU time of all of a process's threads, in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def status(pid: int) -> dict[str, int]:
    """Memory in KiB, and counts."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    found = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "Threads")}
    return found | {"Descriptors": len(os.listdir(f"/proc/{pid}/fd"))}


async def measure(inlets: int, seconds: float) -> None:
    """Starts a mover, and prints what it costs at each level."""
    mover = await MoverHandle.spawn(MoverSettings(f"idle-{os.getpid()}"))
    pool = Pool.create(POOL_BYTES, "idle")
    pool.prefault()
    await mover.map_pool(b"pool", pool.fd, layout())
    for number in range(1, inlets + 1):
        await mover.open_inlet(number, [b"pool"], f"idle-{os.getpid()}-{number}")
    for level in Attention:
        mover.attend(level)
        await asyncio.sleep(2)  # the last level's round, and the page tables
        before, rounds = cpu_ns(mover.pid), mover.beat.rounds
        await asyncio.sleep(seconds)
        percent = (cpu_ns(mover.pid) - before) / seconds / 1e7
        facts = {
            "attention": level.name.lower(),
            "inlets": inlets,
            "cpu_percent_of_a_core": round(percent, 3),
        }
        print(
            json.dumps(
                facts | {"rounds_per_s": round((mover.beat.rounds - rounds) / seconds)} | status(mover.pid)
            )
        )
    await mover.stop()
    pool.close()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inlets", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    asyncio.run(measure(options.inlets, options.seconds))


if __name__ == "__main__":
    main()
