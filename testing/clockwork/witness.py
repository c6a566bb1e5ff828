# SPDX-License-Identifier: Apache-2.0
"""Keeps what the clockwork model saw: checks cells, records what is wrong, flips bytes on demand.

One per rank. It knows cells and hashes, not vLLM.
"""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from testing.clockwork import chain
from testing.clockwork.cells import Cells, Loops
from testing.clockwork.chain import Words
from testing.clockwork.clock import Verify

MAX_MISMATCHES = 1000
"""Records kept; what comes later is only counted."""

_MAX_SEEN = 4096


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Cells of one layer that one step found wrong for one request.

    Head (a global KV head), position, block and byte (in the cell: key, then value) are those of the first.
    `context` is how many positions the request had computed before the step.
    """

    request_id: str
    rank: int
    step: int
    layer: int
    head: int
    position: int
    block: int
    byte: int
    found: int
    expected: int
    bad_cells: int
    context: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What a witness did so far. A cell counts each time that it is written or checked."""

    steps: int = 0
    cells_written: int = 0
    cells_checked: int = 0
    bad_cells: int = 0
    flips: int = 0


@dataclass(frozen=True, slots=True)
class Flip:
    """A byte to invert, once, before the next step that reads it. The head is a global KV head."""

    layer: int
    head: int
    position: int
    byte: int


@dataclass(slots=True)
class Span:
    """One request's part of a step: positions `context` to `length` are computed, those before are read."""

    request_id: str
    context: int
    length: int
    tags: Words
    hashes: Words
    digest: int = 0

    @property
    def computed(self) -> int:
        """How many tokens the step computes."""
        return self.length - self.context


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a span's cells are in one KV cache group, from which position on they can be read, and which
    ranges of positions are checked."""

    blocks: NDArray[np.int32]
    slots: NDArray[np.int64]
    first: int
    checks: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Witness:
    """The witness of one rank, which has `heads` of the model's `kv_heads`, from `first_head` on."""

    rank: int
    layers: int
    kv_heads: int
    first_head: int
    heads: int
    loops: Loops
    verify: Verify = "full"
    counts: Counts = field(default_factory=Counts)
    mismatches: list[Mismatch] = field(default_factory=list)
    _flips: list[Flip] = field(default_factory=list)
    _basis: dict[tuple[int, int], Words] = field(default_factory=dict)
    _seen: OrderedDict[tuple[str, int], tuple[int, NDArray[np.int32]]] = field(default_factory=OrderedDict)

    def arm(self, flip: Flip) -> None:
        """Flip a byte before the next step that reads it. Ranks without the head ignore it.

        Raises ValueError if the model has no such layer or head.
        """
        if not (0 <= flip.layer < self.layers and 0 <= flip.head < self.kv_heads):
            raise ValueError(f"no {flip}: there are {self.layers} layers with {self.kv_heads} KV heads")
        if self.first_head <= flip.head < self.first_head + self.heads:
            self._flips.append(flip)

    def rows(
        self,
        span: Span,
        blocks: NDArray[np.int32],
        slots: NDArray[np.int64],
        group: int,
        block_size: int,
        window: int | None,
    ) -> Rows:
        """What this step reads and checks of a span in one KV cache group."""
        # The first computed token sees itself and window - 1 before it; vLLM may have freed what is older.
        first = 0 if window is None else max(0, span.context - window + 1)
        if self.verify == "full":
            return Rows(blocks, slots, first, ((first, span.length),))
        if self.verify == "off":
            return Rows(blocks, slots, first, ())
        key = (span.request_id, group)
        until, known = self._seen.pop(key, (0, blocks[:0]))
        oldest, whole = -(-first // block_size), until // block_size
        # A preempted request starts over; one that got other blocks reads other cells.
        if until > span.context or not np.array_equal(known[oldest:whole], blocks[oldest:whole]):
            until, whole = 0, 0
        self._seen[key] = (span.length, blocks)
        while len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        checks = [(max(until, first), span.length)]
        if whole > oldest:
            again = oldest + chain.mix_one(self.counts.steps) % (whole - oldest)
            checks.append((again * block_size, (again + 1) * block_size))
        return Rows(blocks, slots, first, tuple(checks))

    def flip(self, layer: int, cells: Cells, spans: Sequence[Span], rows: Sequence[Rows]) -> None:
        """Carry out the armed flips that this layer's step reads."""
        for flip in [flip for flip in self._flips if flip.layer == layer]:
            for span, row in zip(spans, rows, strict=True):
                if row.first <= flip.position < span.context:
                    block = int(row.blocks[flip.position // cells.block_size])
                    slot = flip.position % cells.block_size
                    cells.flip(block, flip.head - self.first_head, slot, flip.byte)
                    self._flips.remove(flip)
                    self.counts = replace(self.counts, flips=self.counts.flips + 1)
                    break

    def write(self, layer: int, cells: Cells, spans: Sequence[Span], rows: Sequence[Rows]) -> None:
        """Write the cells that this step computes."""
        basis, written = self._basis_of(layer, cells), 0
        for span, row in zip(spans, rows, strict=True):
            new = slice(span.context, span.length)
            self.loops.fill(cells, row.slots, span.hashes[new], span.tags[new], basis)
            written += span.computed * cells.heads
        self.counts = replace(self.counts, cells_written=self.counts.cells_written + written)

    def check(self, layer: int, cells: Cells, spans: Sequence[Span], rows: Sequence[Rows]) -> None:
        """Check the cells that this step reads; what is wrong is recorded and turns the span's digest."""
        basis, checked = self._basis_of(layer, cells), 0
        for span, row in zip(spans, rows, strict=True):
            for first, last in row.checks:
                checked += (last - first) * cells.heads
                finding = self.loops.check(cells, row.blocks, first, last, span.hashes, span.tags, basis)
                if finding is None:
                    continue
                span.digest ^= chain.mix_one(finding.digest ^ layer) | 1
                self._record(
                    Mismatch(
                        request_id=span.request_id,
                        rank=self.rank,
                        step=self.counts.steps,
                        layer=layer,
                        head=self.first_head + finding.head,
                        position=finding.position,
                        block=int(row.blocks[finding.position // cells.block_size]),
                        byte=finding.byte,
                        found=finding.found,
                        expected=finding.expected,
                        bad_cells=finding.bad_cells,
                        context=span.context,
                    )
                )
        self.counts = replace(self.counts, cells_checked=self.counts.cells_checked + checked)

    def stepped(self) -> None:
        """A step is over."""
        self.counts = replace(self.counts, steps=self.counts.steps + 1)

    def _basis_of(self, layer: int, cells: Cells) -> Words:
        key = (layer, cells.words)
        if key not in self._basis:
            heads = range(self.first_head, self.first_head + cells.heads)
            self._basis[key] = chain.basis([layer], heads, cells.words)[0]
        return self._basis[key]

    def _record(self, mismatch: Mismatch) -> None:
        self.counts = replace(self.counts, bad_cells=self.counts.bad_cells + mismatch.bad_cells)
        if len(self.mismatches) < MAX_MISMATCHES:
            self.mismatches.append(mismatch)
            print(f"clockwork: {mismatch}", file=sys.stderr, flush=True)
