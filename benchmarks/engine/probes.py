# SPDX-License-Identifier: Apache-2.0
"""What is asked of, or set in, a running engine between two steps. For `Engine.inspect`."""

import random
from typing import Any


def set_budget(core: Any, tokens: int) -> None:
    """The most tokens that a step computes: the size of a chunk."""
    core.scheduler.max_num_scheduled_tokens = tokens


def shuffle(core: Any, seed: int) -> None:
    """Puts the free blocks in random order, as after long use. Cached prefixes are forgotten."""
    pool = core.scheduler.kv_cache_manager.block_pool
    pool.reset_prefix_cache()
    blocks = pool.free_block_queue.popleft_n(pool.free_block_queue.num_free_blocks)
    random.Random(seed).shuffle(blocks)
    pool.free_block_queue.append_n(blocks)


def forwards(core: Any) -> dict[str, tuple[float, float]]:
    """Since the last call, by the caller's request id: begin of its first forward, end of its prefill."""
    found = core.collective_rpc("clockwork_forwards")[0]
    # vLLM's front end has added a dash and eight hexadecimal digits to the caller's id.
    return {request_id[:-9]: times for request_id, times in found.items()}
