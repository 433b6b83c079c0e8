"""Byte histograms: the kernel, its host implementation, an independent count to check them, and entropy."""

from __future__ import annotations

import threading
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..kernels import Kernel

__all__ = ["HEADER_BYTES", "MOST_SEGMENTS", "THREADS", "Counter", "entropies", "histograms"]

Array: TypeAlias = npt.NDArray[Any]

#: Segments in one slot, and so rows of its result, at most; these rows have 1 MiB.
MOST_SEGMENTS: Final = 1024

#: A slot begins with a table: the offset and the length of each segment, as two 64-bit integers.
HEADER_BYTES: Final = 16 * MOST_SEGMENTS

#: Threads of a block. Each block counts one segment.
THREADS: Final = 256

# There is one table for each of the 8 warps: half of a text is spaces and e's, and threads that add to one counter wait
# for each other. Segments start at a multiple of 16 bytes, so that each load reads 16.
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

# The host implementation runs beside the threads that read files. Each call that releases the GIL has to acquire it
# again, which takes longer than counting a small file. So it makes few calls: adjacent segments are counted together,
# with 256 counters for each. `np.bincount` would hold the GIL all the time; `np.copyto` and `np.add.at` release it.
_TOGETHER = 1 << 18  # bytes: 2 MiB of indices stay in the cache
_MOST_TOGETHER = 255  # segments that 16-bit indices can count, with one more table for the gaps


class _Scratch(threading.local):
    """Memory of each thread for wide indices."""

    def __init__(self) -> None:
        self._wide = np.empty(0, np.intp)

    def wide(self, size: int) -> Array:
        """Return memory for so many indices. The next call of the thread may return the same memory."""
        if self._wide.size < size:
            self._wide = np.empty(max(_TOGETHER, size), np.intp)
        return self._wide[:size]


_scratch = _Scratch()


def _count_on_host(slot: Array, segments: int, rows: Array) -> None:
    table = slot[:HEADER_BYTES].view(np.int64).reshape(-1, 2)[:segments]
    ends = (table[:, 0] + table[:, 1]).tolist()
    first = 0
    while first < segments:
        start, last = int(table[first, 0]), first + 1
        while last < segments and ends[last] - start <= _TOGETHER and last - first < _MOST_TOGETHER:
            last += 1
        rows[first:last] = _count(slot[start : ends[last - 1]], table[first:last])
        first = last


def _count(data: Array, table: Array) -> Array:
    """Return a row of counts for each segment of the table; ``data`` has the segments and the gaps between them."""
    count = len(table)
    runs = np.zeros((count, 2), np.int64)  # length of each segment, and of the gap after it
    runs[:, 0] = table[:, 1]
    runs[:-1, 1] = table[1:, 0] - table[:-1, 0] - table[:-1, 1]
    bases = np.full((count, 2), 256 * count, np.uint16)
    bases[:, 0] = np.arange(0, 256 * count, 256)
    narrow = np.repeat(bases.ravel(), runs.ravel())
    narrow += data
    indices = _scratch.wide(data.size)
    np.copyto(indices, narrow)
    counts = np.zeros(256 * (count + 1), np.int64)
    np.add.at(counts, indices, 1)
    return counts[: 256 * count].reshape(count, 256)


#: ``byte_histograms(slot, segments, rows)``: one row of 256 counts for each segment of a slot.
histograms = Kernel("byte_histograms", source=_SOURCE, host=_count_on_host)


class Counter:
    """Counts bytes by another method than the kernel: it counts pairs of bytes, and adds up their counts at the end."""

    def __init__(self) -> None:
        self.counts = np.zeros(256, np.int64)
        self._pairs = np.zeros(1 << 16, np.int64)

    def add(self, data: Array) -> None:
        """Count more bytes."""
        if not data.any():  # usual in a sparse file
            self.counts[0] += data.size
            return
        if data.size < 1 << 14:  # for fewer bytes, 64 Ki counters cost more than they save
            self.counts += np.bincount(data, minlength=256)
            return
        even = data.size & ~1
        self._pairs += np.bincount(data[:even].view(np.uint16), minlength=1 << 16)
        self.counts[data[even:]] += 1

    def total(self) -> npt.NDArray[np.int64]:
        """Return the counts of all bytes so far."""
        pairs = self._pairs.reshape(256, 256)
        total: npt.NDArray[np.int64] = self.counts + pairs.sum(axis=0) + pairs.sum(axis=1)
        return total


def entropies(counts: Array) -> npt.NDArray[np.float64]:
    """Return Shannon's entropy of each row, in bits per byte: 0 to 8; 0 for no bytes."""
    totals = np.maximum(counts.sum(axis=-1), 1)
    # -Σ p log p with p = c / n is log n - Σ c log c / n, which takes one logarithm and no mask.
    weighted = np.einsum("...i,...i->...", counts, np.log2(np.maximum(counts, 1)))
    found: npt.NDArray[np.float64] = np.maximum(np.log2(totals) - weighted / totals, 0.0)
    return found
