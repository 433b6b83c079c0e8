"""Kernels that several workloads launch, each with a host implementation in NumPy.

One block of threads is one replica, a colouring of the whole graph. All of its threads follow the same decisions, since
all read the same data and random numbers are counter-based, and share the work of a decision. So replicas are
independent, nothing depends on the order of threads, and every sum is of integers: a host implementation that handles
all replicas together finds the same colours.

A replica has ``colours[v]``; ``counts[c][v]``, the number of neighbours of v with colour c; ``conflicts``, the number
of edges with two ends of the same colour. A replica without conflicts does not change any more. Once ``record[0]``, the
fewest conflicts ever, is 0, no replica changes: kernels that were enqueued after a solution have no effect.
"""

from __future__ import annotations

import math

import numpy as np

import aiocuda

from . import philox
from .philox import ORDER, VISIT, draw

__all__ = ["SCALE", "THREADS", "blocks", "boltzmann", "count", "judge", "rank", "repair", "shuffle"]

THREADS = 256  # of a block

#: The integer of a Boltzmann factor of 1. The device adds and compares integers, because `exp` differs between devices.
SCALE = 1 << 20

SOURCE = (
    philox.SOURCE
    + f"""
enum {{ ORDER = {ORDER}, VISIT = {VISIT} }};
"""
    + """
typedef long long Index;  // a graph's square may pass 31 bits

// counts, from colours. A thread for each vertex of each replica.
extern "C" __global__ void count(const unsigned char* adjacency, const int* colours, short* counts, int n, int k) {
    int v = blockIdx.x * blockDim.x + threadIdx.x;
    if (v >= n) return;
    colours += (Index)blockIdx.y * n;
    counts += (Index)blockIdx.y * k * n;
    for (int c = 0; c < k; ++c) counts[(Index)c * n + v] = 0;
    for (int u = 0; u < n; ++u) counts[(Index)colours[u] * n + v] += adjacency[(Index)u * n + v];
}

// Keys that put vertices into a random order, another one in each sweep and replica.
extern "C" __global__ void shuffle(unsigned long long* keys, int n, unsigned long long seed, int sweep) {
    int v = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y;
    if (v < n) keys[(Index)r * n + v] = draw(seed, ORDER, sweep, r, v, 0).a;
}

// The vertices of the m highest keys, highest first; of equal ones the first vertex. It counts who stands before whom.
extern "C" __global__ void rank(const unsigned long long* keys, int* order, int n, int m) {
    int v = blockIdx.x * blockDim.x + threadIdx.x, before = 0;
    if (v >= n) return;
    keys += (Index)blockIdx.y * n;
    unsigned long long key = keys[v];
    for (int u = 0; u < n; ++u) before += keys[u] > key || (keys[u] == key && u < v);
    if (before < m) order[(Index)blockIdx.y * m + before] = v;
}

// Visit vertices in order, and give each a colour by chance: one that costs d conflicts more than the best is taken
// with weights[d], the Boltzmann factor of the replica's temperature. What each visit has mended is told in `gained`.
extern "C" __global__ void repair(const unsigned char* adjacency, const int* order, const unsigned* weights,
                                  const int* record, short* counts, int* colours, int* conflicts, int* gained,
                                  int n, int k, int depth, int m, unsigned long long seed, int sweep, int round) {
    int r = blockIdx.x, total = conflicts[r], i = 0;
    if (record[0] == 0) return;
    order += (Index)r * m;
    weights += (Index)r * depth;
    counts += (Index)r * k * n;
    colours += (Index)r * n;
    gained += (Index)r * m;
    for (; i < m && total > 0; ++i) {
        int v = order[i], old = colours[v], least = counts[v], now = 0;
        for (int c = 1; c < k; ++c) least = min(least, (int)counts[(Index)c * n + v]);
        unsigned sum = 0;
        for (int c = 0; c < k; ++c) sum += weights[min(counts[(Index)c * n + v] - least, depth - 1)];
        unsigned mark = __umulhi(draw(seed, VISIT, sweep, r, i, round).a, sum);
        sum = weights[min(counts[v] - least, depth - 1)];
        while (sum <= mark) sum += weights[min(counts[(Index)(++now) * n + v] - least, depth - 1)];
        int mended = counts[(Index)old * n + v] - counts[(Index)now * n + v];
        total -= mended;
        __syncthreads();  // everybody has read
        if (now != old) {
            for (int u = threadIdx.x; u < n; u += blockDim.x) {
                int joined = adjacency[(Index)v * n + u];
                counts[(Index)old * n + u] -= joined;
                counts[(Index)now * n + u] += joined;
            }
        }
        if (threadIdx.x == 0) {
            colours[v] = now;
            gained[i] = mended;
        }
        __syncthreads();  // everybody has written
    }
    if (threadIdx.x == 0) {
        for (; i < m; ++i) gained[i] = 0;
        conflicts[r] = total;
    }
}

// Keep the best colouring, of equal ones the first replica's, and report: the fewest conflicts ever, then each
// replica's. One block.
extern "C" __global__ void judge(const int* colours, const int* conflicts, int* record, int* best, int* telemetry,
                                 int n, int replicas, int row) {
    int leader = 0, fewest = record[0];
    telemetry += (Index)row * (replicas + 1);
    for (int r = 1; r < replicas; ++r) {
        if (conflicts[r] < conflicts[leader]) leader = r;
    }
    __syncthreads();  // everybody has read
    if (conflicts[leader] < fewest) {
        fewest = conflicts[leader];
        for (int v = threadIdx.x; v < n; v += blockDim.x) best[v] = colours[(Index)leader * n + v];
    }
    for (int r = threadIdx.x; r < replicas; r += blockDim.x) telemetry[1 + r] = conflicts[r];
    if (threadIdx.x == 0) record[0] = telemetry[0] = fewest;
}
"""
)


def blocks(n: int, replicas: int) -> tuple[int, int]:
    """Return the grid with a thread for each vertex of each replica."""
    return (n + THREADS - 1) // THREADS, replicas


def boltzmann(temperature: float) -> list[int]:
    """Boltzmann's factors of 0, 1, 2 … more conflicts, of which 0 has `SCALE`; the last one is 0."""
    last = math.ceil(temperature * math.log(SCALE)) + 1
    return [int(SCALE * math.exp(-more / temperature)) for more in range(last)] + [0]


def count_on_host(adjacency, colours, counts, n, k):
    joined = adjacency.astype(np.float32)  # the sums are below 2²⁴: exact, in any order
    for c in range(k):
        counts[:, c] = (colours == c).astype(np.float32) @ joined


def shuffle_on_host(keys, n, seed, sweep):
    keys[:] = draw(int(seed), ORDER, int(sweep), np.arange(len(keys))[:, None], np.arange(n))[0]


def rank_on_host(keys, order, n, m):
    order[:] = np.argsort(~keys, axis=1, kind="stable")[:, :m]


def repair_on_host(
    adjacency, order, weights, record, counts, colours, conflicts, gained, n, k, depth, m, seed, sweep, round
):
    if record[0] == 0:
        return
    replicas = np.arange(len(colours))
    words = draw(int(seed), VISIT, int(sweep), replicas[:, None], np.arange(m), int(round))[0].astype(np.uint64)
    weight, base = weights.ravel(), (replicas * depth)[:, None]
    live = conflicts > 0
    gained[:] = 0
    for i in range(m):
        v = order[:, i]
        held = counts[replicas, :, v]
        more = held - held.min(axis=1, keepdims=True)
        sums = weight[np.minimum(more, depth - 1) + base].cumsum(axis=1, dtype=np.uint64)
        mark = words[:, i] * sums[:, -1] >> np.uint64(32)
        now = (sums <= mark[:, None]).sum(axis=1)
        old = colours[replicas, v]
        moved = np.flatnonzero((now != old) & live)
        if moved.size:
            v, now, old = v[moved], now[moved], old[moved]
            mended = held[moved, old] - held[moved, now]
            joined = adjacency[v]
            counts[moved, old] -= joined
            counts[moved, now] += joined
            colours[moved, v] = now
            gained[moved, i] = mended
            conflicts[moved] -= mended
            if not conflicts.all():
                live = conflicts > 0


def judge_on_host(colours, conflicts, record, best, telemetry, n, replicas, row):
    leader = int(conflicts.argmin())
    if conflicts[leader] < record[0]:
        record[0] = conflicts[leader]
        best[:] = colours[leader]
    telemetry[row, 0] = record[0]
    telemetry[row, 1:] = conflicts


count = aiocuda.Kernel("count", source=SOURCE, host=count_on_host)
shuffle = aiocuda.Kernel("shuffle", source=SOURCE, host=shuffle_on_host)
rank = aiocuda.Kernel("rank", source=SOURCE, host=rank_on_host)
repair = aiocuda.Kernel("repair", source=SOURCE, host=repair_on_host)
judge = aiocuda.Kernel("judge", source=SOURCE, host=judge_on_host)
