# SPDX-License-Identifier: Apache-2.0
"""Writes and checks KV cells in place: a C library built at first use, and a twin of it in numpy.

Both follow the same contract and give the same findings; the twin is what a test compares with.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from testing.clockwork.chain import Words

_SOURCE = Path(__file__).with_name("cells.c")
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-std=c11", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True, slots=True)
class Cells:
    """Where one layer's cells lie: cell (block, head, slot) is at `base + block * block_stride + ...`.

    Strides in bytes, multiples of 8; a cell is `words` 64-bit words, at least two, without gaps.
    """

    base: int
    block_stride: int
    head_stride: int
    token_stride: int
    block_size: int
    heads: int
    words: int

    def address(self, block: int, head: int, slot: int) -> int:
        """Address of a cell's first byte."""
        return self.base + block * self.block_stride + head * self.head_stride + slot * self.token_stride

    def flip(self, block: int, head: int, slot: int, byte: int) -> None:
        """Invert one byte of a cell."""
        if not 0 <= byte < self.words * 8:
            raise ValueError(f"byte {byte} is outside of a cell of {self.words * 8} bytes")
        cell = ctypes.c_uint8.from_address(self.address(block, head, slot) + byte)
        cell.value ^= 0xFF


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found wrong. Position, head (local) and byte are those of the first bad cell."""

    bad_cells: int
    position: int
    head: int
    byte: int
    found: int
    expected: int
    digest: int


class Loops(Protocol):
    """The two loops. `basis` has shape (heads, words).

    `fill` writes the cells of `slots` (block * block_size + offset); `hashes` and `tags` are one per slot.
    `check` reads the cells of positions `first` to `last`, `blocks` being the request's block table from
    position 0 on, `hashes` and `tags` likewise; None means that all are right.
    """

    def fill(self, cells: Cells, slots: NDArray[np.int64], hashes: Words, tags: Words, basis: Words) -> None:
        """Write cells."""
        ...

    def check(
        self,
        cells: Cells,
        blocks: NDArray[np.int32],
        first: int,
        last: int,
        hashes: Words,
        tags: Words,
        basis: Words,
    ) -> Finding | None:
        """Check cells."""
        ...


class _CCells(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p)] + [
        (name, ctypes.c_int64)
        for name in ("block_stride", "head_stride", "token_stride", "block_size", "heads", "words")
    ]


class _CFinding(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("position", "head", "byte")] + [
        (name, ctypes.c_uint64) for name in ("found", "expected", "digest")
    ]


def _pointer(array: NDArray[Any], dtype: type[np.generic]) -> ctypes.c_void_p:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"need a contiguous array of {dtype.__name__}, got {array.dtype}")
    return ctypes.c_void_p(array.ctypes.data)


def build(cache: Path | None = None) -> Path:
    """The compiled library, built if the cache lacks it. Safe with several processes at once.

    Raises RuntimeError with the compiler's words if there is no `cc` or it fails.
    """
    source = _SOURCE.read_bytes()
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpushd-clockwork"
    # -march=native: a home shared by machines must not share the binary.
    key = hashlib.sha256(source + " ".join((*_FLAGS, platform.node())).encode()).hexdigest()[:16]
    library = cache / f"cells-{key}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    handle, fresh = tempfile.mkstemp(dir=cache, suffix=".so")
    os.close(handle)
    try:
        subprocess.run(["cc", *_FLAGS, str(_SOURCE), "-o", fresh], check=True, capture_output=True, text=True)
        Path(fresh).replace(library)
    except FileNotFoundError:
        raise RuntimeError("the clockwork model needs a C compiler called cc; install gcc or clang") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"cc failed on {_SOURCE}:\n{error.stderr}") from None
    finally:
        Path(fresh).unlink(missing_ok=True)
    return library


class CLoops:
    """The loops in C. They run without the GIL."""

    def __init__(self, library: Path | None = None) -> None:
        self._library = ctypes.CDLL(str(library or build()))
        self._library.clockwork_fill.restype = None
        self._library.clockwork_check.restype = ctypes.c_int64

    def fill(self, cells: Cells, slots: NDArray[np.int64], hashes: Words, tags: Words, basis: Words) -> None:
        """Write cells."""
        self._library.clockwork_fill(
            ctypes.byref(_c_cells(cells)),
            _pointer(slots, np.int64),
            ctypes.c_int64(len(slots)),
            _pointer(hashes, np.uint64),
            _pointer(tags, np.uint64),
            _pointer(basis, np.uint64),
        )

    def check(
        self,
        cells: Cells,
        blocks: NDArray[np.int32],
        first: int,
        last: int,
        hashes: Words,
        tags: Words,
        basis: Words,
    ) -> Finding | None:
        """Check cells."""
        out = _CFinding()
        bad = self._library.clockwork_check(
            ctypes.byref(_c_cells(cells)),
            _pointer(blocks, np.int32),
            ctypes.c_int64(first),
            ctypes.c_int64(last),
            _pointer(hashes, np.uint64),
            _pointer(tags, np.uint64),
            _pointer(basis, np.uint64),
            ctypes.byref(out),
        )
        if not bad:
            return None
        return Finding(bad, out.position, out.head, out.byte, out.found, out.expected, out.digest)


def _c_cells(cells: Cells) -> _CCells:
    return _CCells(
        cells.base,
        cells.block_stride,
        cells.head_stride,
        cells.token_stride,
        cells.block_size,
        cells.heads,
        cells.words,
    )


class NumpyLoops:
    """The loops in numpy: slower, and plain."""

    def fill(self, cells: Cells, slots: NDArray[np.int64], hashes: Words, tags: Words, basis: Words) -> None:
        """Write cells."""
        for slot, value, tag in zip(slots.tolist(), hashes, tags, strict=True):
            for head in range(cells.heads):
                row = self._row(cells, slot // cells.block_size, head, slot % cells.block_size)
                row[:] = value ^ basis[head]
                row[1] = tag ^ basis[head, 1]

    def check(
        self,
        cells: Cells,
        blocks: NDArray[np.int32],
        first: int,
        last: int,
        hashes: Words,
        tags: Words,
        basis: Words,
    ) -> Finding | None:
        """Check cells."""
        bad, digest = 0, 0
        place: tuple[int, int, int, int, int] | None = None
        for head in range(cells.heads):
            for position in range(first, last):
                block, slot = int(blocks[position // cells.block_size]), position % cells.block_size
                row = self._row(cells, block, head, slot)
                expected = hashes[position] ^ basis[head]
                expected[1] = tags[position] ^ basis[head, 1]
                wrong = row != expected
                if not wrong.any():
                    continue
                bad += 1
                if place is None:
                    word = int(wrong.argmax())
                    found, wanted = int(row[word]), int(expected[word])
                    difference = found ^ wanted
                    byte = word * 8 + ((difference & -difference).bit_length() - 1) // 8
                    place = (position, head, byte, found, wanted)
                for value in row.tolist():
                    digest = ((digest ^ value) * 0x9E3779B97F4A7C15 + 1) & ((1 << 64) - 1)
        if place is None:
            return None
        return Finding(bad, *place, digest)

    @staticmethod
    def _row(cells: Cells, block: int, head: int, slot: int) -> Words:
        buffer = (ctypes.c_uint64 * cells.words).from_address(cells.address(block, head, slot))
        return np.ctypeslib.as_array(buffer)
