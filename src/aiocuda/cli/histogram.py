"""Byte histograms: the kernel, its NumPy twin, an independent count to check them by, and entropy."""

from __future__ import annotations

import threading
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..kernel import Kernel

__all__ = ["HEADER_BYTES", "MOST_SEGMENTS", "THREADS", "Counter", "entropies", "histograms"]

Array: TypeAlias = npt.NDArray[Any]

#: Segments that one slot holds, and so rows of its result: 1 MiB of them.
MOST_SEGMENTS: Final = 1024

#: A slot begins with its table: where each segment starts, and how long it is, as two 64-bit integers.
HEADER_BYTES: Final = 16 * MOST_SEGMENTS

#: Threads of a block. Each block counts one segment.
THREADS: Final = 256

# A table for each of the 8 warps: text is half spaces and e's, and the fewer threads add to one counter, the fewer of
# them wait. Segments start at a multiple of 16 bytes, so that each load takes 16.
_SOURCE = """
extern "C" __global__ void byte_histograms(const unsigned char *slot, int segments, unsigned int *rows)
{
    __shared__ unsigned int bins[8][256];
    const long long *table = (const long long *)slot;
    unsigned int *mine = bins[threadIdx.x / 32 % 8];
    for (int segment = blockIdx.x; segment < segments; segment += gridDim.x) {
        const unsigned char *bytes = slot + table[2 * segment];
        const long long length = table[2 * segment + 1];
        for (int i = threadIdx.x; i < 8 * 256; i += blockDim.x) bins[0][i] = 0;
        __syncthreads();
        const uint4 *quads = (const uint4 *)bytes;
        for (long long i = threadIdx.x; i < length / 16; i += blockDim.x) {
            const uint4 quad = quads[i];
            const unsigned int words[4] = {quad.x, quad.y, quad.z, quad.w};
            for (int w = 0; w < 4; w++)
                for (int shift = 0; shift < 32; shift += 8) atomicAdd(&mine[words[w] >> shift & 255], 1u);
        }
        for (long long i = length / 16 * 16 + threadIdx.x; i < length; i += blockDim.x) atomicAdd(&mine[bytes[i]], 1u);
        __syncthreads();
        for (int bin = threadIdx.x; bin < 256; bin += blockDim.x) {
            unsigned int sum = 0;
            for (int warp = 0; warp < 8; warp++) sum += bins[warp][bin];
            rows[256 * segment + bin] = sum;
        }
        __syncthreads();
    }
}
"""

# `np.bincount` widens its argument to 64 bits, and that with the GIL held, which would stop the reading of files.
# Widened by `np.copyto`, 64 KiB at a time into memory that stays in the cache, nothing holds the GIL: 600 to 850 MB/s.
_PIECE = 1 << 16
_local = threading.local()


def _twin(slot: Array, segments: int, rows: Array) -> None:
    table = slot[:HEADER_BYTES].view(np.int64).reshape(-1, 2)[:segments]
    for row, (start, length) in zip(rows, table.tolist(), strict=False):
        row[:] = _count(slot[start : start + length])


def _count(data: Array) -> Array:
    wide = getattr(_local, "wide", None)
    if wide is None:
        wide = _local.wide = np.empty(_PIECE, np.intp)
    counts = np.zeros(256, np.intp)
    for start in range(0, data.size, _PIECE):
        piece = data[start : start + _PIECE]
        indices = wide[: piece.size]
        np.copyto(indices, piece)
        counts += np.bincount(indices, minlength=256)
    return counts


#: ``byte_histograms(slot, segments, rows)``: one row of 256 counts for each segment of a slot.
histograms = Kernel("byte_histograms", source=_SOURCE, host=_twin)


class Counter:
    """Counts a file's bytes by another way than the kernel and its twin: two bytes at a time, then both halves."""

    def __init__(self) -> None:
        self.counts = np.zeros(256, np.int64)
        self._pairs = np.zeros(1 << 16, np.int64)

    def add(self, data: Array) -> None:
        """Count these bytes too."""
        if not data.any():  # what a sparse file is full of
            self.counts[0] += data.size
            return
        if data.size < 1 << 14:  # below it, the 64 Ki counters cost more than they save
            self.counts += np.bincount(data, minlength=256)
            return
        even = data.size & ~1
        self._pairs += np.bincount(data[:even].view(np.uint16), minlength=1 << 16)
        self.counts[data[even:]] += 1

    def total(self) -> npt.NDArray[np.int64]:
        """All counts so far."""
        pairs = self._pairs.reshape(256, 256)
        total: npt.NDArray[np.int64] = self.counts + pairs.sum(axis=0) + pairs.sum(axis=1)
        return total


def entropies(counts: Array) -> npt.NDArray[np.float64]:
    """Shannon's entropy of each row, in bits per byte: 0 for nothing, or for one byte over and over; 8 at most."""
    totals = counts.sum(axis=-1, dtype=np.float64)
    shares = counts / np.maximum(totals, 1.0)[..., np.newaxis]
    logs = np.log2(shares, out=np.zeros_like(shares), where=counts > 0)
    found: npt.NDArray[np.float64] = np.abs((shares * logs).sum(axis=-1))  # of no bytes it is -0.0
    return found
