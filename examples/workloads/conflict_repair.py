"""Conflict repair: improve a colouring region by region, on several scales.

The conflict field has the number of conflicts of each vertex. It is coarsened like a Haar wavelet: neighbours in a
hierarchy of pairs, pairs of pairs and so on are summed, so there is one field for each scale. The vertices in
the regions with most conflicts, over all scales, are visited: each gets a random colour with few conflicts, at a low
temperature (a local search in the sense of Galinier and Hertz 2006, with a heat bath in place of a tabu list).
"""

from __future__ import annotations

import numpy as np
from colouring import philox
from colouring.command import main
from colouring.kernels import THREADS
from colouring.philox import ORDER, draw
from colouring.repair import Repair

import aiocuda

#: Weights of the scales, single vertices first, for each round of a sweep, from coarse to fine.
EMPHASIS = (1, 0, 0, 4), (1, 0, 4), (1, 4), (1,)

SOURCE = (
    philox.SOURCE
    + f"""
enum {{ ORDER = {ORDER} }};
"""
    + """
typedef long long Index;

// The conflict field on all scales, and keys that put the vertices of busy regions first. A block for each replica.
// The pyramid is a heap: leaves at [leaves, 2 leaves), of which place[v] is v's, and each node holds the sum of two.
extern "C" __global__ void coarsen(const int* place, const int* emphasis, const short* counts, const int* colours,
                                   const int* record, int* pyramid, unsigned long long* keys,
                                   int n, int k, int levels, unsigned long long seed, int sweep, int round) {
    int r = blockIdx.x, leaves = 1 << levels;
    if (record[0] == 0) return;
    counts += (Index)r * k * n;
    colours += (Index)r * n;
    keys += (Index)r * n;
    emphasis += round * (levels + 1);
    pyramid += (Index)r * 2 * leaves;
    for (int leaf = threadIdx.x; leaf < leaves; leaf += blockDim.x) pyramid[leaves + leaf] = 0;
    __syncthreads();
    for (int v = threadIdx.x; v < n; v += blockDim.x) {
        pyramid[leaves + place[v]] = counts[(Index)colours[v] * n + v];
    }
    __syncthreads();
    for (int width = leaves / 2; width > 0; width /= 2) {
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            pyramid[width + i] = pyramid[2 * (width + i)] + pyramid[2 * (width + i) + 1];
        }
        __syncthreads();
    }
    for (int v = threadIdx.x; v < n; v += blockDim.x) {
        unsigned long long score = 0;  // means of the regions around v, in units of 2^-levels
        for (int level = 0; level <= levels; ++level) {
            unsigned long long sum = pyramid[(leaves + place[v]) >> level];
            score += sum * emphasis[level] << (levels - level);
        }
        keys[v] = score << 24 | draw(seed, ORDER, sweep, r, v, round).a >> 8;
    }
}
"""
)


def coarsen_on_host(place, emphasis, counts, colours, record, pyramid, keys, n, k, levels, seed, sweep, round):
    if record[0] == 0:
        return
    leaves = 1 << levels
    field = pyramid[:, leaves:]
    field[:] = 0
    field[:, place] = np.take_along_axis(counts, colours[:, None], axis=1)[:, 0]
    scores = np.zeros(keys.shape, np.uint64)
    for level in range(levels + 1):
        sums = pyramid[:, leaves >> level : 2 * leaves >> level]
        if level:
            below = pyramid[:, 2 * leaves >> level : 4 * leaves >> level]
            np.add(below[:, 0::2], below[:, 1::2], out=sums)
        weight = np.uint64(emphasis[round, level]) << np.uint64(levels - level)
        scores += sums[:, place >> level].astype(np.uint64) * weight
    words = draw(int(seed), ORDER, int(sweep), np.arange(len(keys))[:, None], np.arange(n), int(round))[0]
    keys[:] = scores << np.uint64(24) | (words >> np.uint32(8)).astype(np.uint64)


coarsen = aiocuda.Kernel("coarsen", source=SOURCE, host=coarsen_on_host)


def hierarchy(adjacency):
    """Return a leaf of 2^levels for each vertex, so that vertices with many edges between them share a region.

    At each level, a region is joined with the free region to which it has most edges.
    """
    nests = [[vertex] for vertex in range(len(adjacency))]
    edges = adjacency.astype(np.int64)
    while len(nests) > 1:
        free = np.ones(len(nests), bool)
        pairs = []
        for one in np.argsort(-edges.sum(axis=1), kind="stable"):
            if free[one]:
                free[one] = False
                other = int(np.where(free, edges[one], -1).argmax())
                pairs.append((one, other if free[other] else -1))  # the last one is joined with nothing
                free[other] = False
        nests.append([None] * len(nests[0]))
        nests = [nests[one] + nests[other] for one, other in pairs]
        left, right = np.array(pairs).T
        edges = np.pad(edges, (0, 1))
        edges = edges[left] + edges[right]
        edges = edges[:, left] + edges[:, right]
        np.fill_diagonal(edges, 0)
    place = np.empty(len(adjacency), np.int32)
    for leaf, vertex in enumerate(nests[0]):
        if vertex is not None:
            place[vertex] = leaf
    return place, len(nests[0]).bit_length() - 1


class ConflictRepair(Repair):
    """With ``order="random"`` each sweep visits all vertices in random order instead."""

    name = "conflict_repair"

    def tables(self):
        place, self.levels = hierarchy(self.graph.adjacency)
        emphasis = np.zeros((len(EMPHASIS), self.levels + 1), np.int32)
        for row, scales in zip(emphasis, EMPHASIS, strict=True):
            row[: len(scales)] = scales[: len(row)]
        return {**super().tables(), "place": place, "emphasis": emphasis}

    def memory(self):
        return {**super().memory(), "pyramid": ((self.replicas, 2 << self.levels), np.int32)}

    def score(self, stream, sweep, round):
        state = self.state
        tables = state["place"], state["emphasis"], state["counts"], state["colours"], state["record"]
        stream.launch(
            coarsen, self.replicas, THREADS, *tables, state["pyramid"], state["keys"], self.n, self.k, self.levels,
            self.seed, sweep, round,
        )  # fmt: skip


if __name__ == "__main__":
    main(ConflictRepair, "a graph's colouring is repaired where a wavelet finds conflicts", ("multiscale", "random"))
