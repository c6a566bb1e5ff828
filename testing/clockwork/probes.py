# SPDX-License-Identifier: Apache-2.0
"""Questions about a running engine, for `Engine.inspect`."""

import os
import resource
from typing import Any


def kv_cache_groups(core: Any) -> list[tuple[list[str], int | None]]:
    """The layers of each KV cache group, and its sliding window in tokens if it has one."""
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    return [
        (list(group.layer_names), getattr(group.kv_cache_spec, "sliding_window", None)) for group in groups
    ]


def process_ids(core: Any) -> list[int]:
    """The engine's process, then one per rank if they are processes of their own."""
    ranks = getattr(core.model_executor, "workers", [])
    return [os.getpid(), *(rank.proc.pid for rank in ranks)]


def ask_connector(core: Any) -> bool:
    """Whether the connector has anything to send; asking makes it look at what it was told meanwhile."""
    return bool(core.scheduler.connector.has_pending_push_work())


def sleeps(core: Any) -> int:
    """How often this process lets go of its core when it waits a hundred times as for its ranks."""
    from vllm.distributed.utils import sched_yield

    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(100):
        sched_yield()
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
