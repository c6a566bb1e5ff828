# SPDX-License-Identifier: Apache-2.0
"""Which blocks a step writes, and so which part of a prefix hit is final before it runs.

vLLM registers a block for prefix hits when the step that will fill it is *scheduled*. A request scheduled
later in the same step may hit it: it is right for vLLM, whose forward writes all before it reads any, but
such a block is not final before that forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Writing:
    """A request of the step: it computes positions [start, end)."""

    request_id: str
    start: int
    end: int


@dataclass(slots=True)
class Writers:
    """The writes of a step. `requests` yields all of its requests; it is asked once, at the first hit.

    Without `synchronous`, a former step may still run, and nothing that was hit counts as final.
    """

    requests: Callable[[], Iterable[Writing]] = tuple
    block_ids: Callable[[str], Sequence[Sequence[int]]] = lambda _: ()
    group_ids: Sequence[int] = ()
    group_sizes: Sequence[int] = ()
    synchronous: bool = False
    _written: set[int] | None = field(default=None, init=False)

    def final_below(self, tables: Sequence[Sequence[int]], computed: int) -> int:
        """One past the last position that is final before the step, for a request that hit `computed` ones.

        `tables` are its block ids per group of vLLM's. Whole blocks only: the rest of a partial hit is copied
        by the step itself.
        """
        if not computed or not self.synchronous:
            return 0
        written = self._blocks_written()
        final = computed
        for group, size in zip(self.group_ids, self.group_sizes, strict=True):
            whole = computed // size
            unwritten = next((i for i, b in enumerate(tables[group][:whole]) if b in written), whole)
            final = min(final, unwritten * size)
        return final

    def _blocks_written(self) -> set[int]:
        if self._written is None:
            self._written = set()
            for writing in self.requests():
                tables = self.block_ids(writing.request_id)
                for group, size in zip(self.group_ids, self.group_sizes, strict=True):
                    self._written.update(tables[group][writing.start // size : -(-writing.end // size)])
        return self._written
