"""Annealing: colour a graph by the Metropolis algorithm, at many temperatures in parallel.

A conflict, an edge with two ends of one colour, is a unit of energy. Each replica is a colouring of the whole graph at
its own temperature, from a ladder. A sweep visits the vertices in random order and proposes to each as many random
colours as there are other colours. After each sweep, neighbours on the ladder may exchange their temperatures, so that
a colouring that is stuck at a low temperature can leave by a high one (replica exchange; Swendsen and Wang 1986, Geyer
1991, Hukushima and Nemoto 1996). Acceptance uses tables of integers that the host computes: every driver finds the same
colours.
"""

from __future__ import annotations

import numpy as np
from colouring import kernels, philox
from colouring.command import main
from colouring.kernels import THREADS, boltzmann
from colouring.philox import EXCHANGE, ORDER, VISIT, draw, scaled
from colouring.search import BATCH, Search

import aiocuda

#: The coldest and the warmest temperature, in conflicts.
LADDER = 0.13, 0.45

#: Number of visits for which a host implementation draws random numbers at a time.
AHEAD = 64

SOURCE = (
    philox.SOURCE
    + f"""
enum {{ VISIT = {VISIT}, EXCHANGE = {EXCHANGE}, SCALE = {kernels.SCALE} }};
"""
    + """
typedef long long Index;

// A word as a number below SCALE.
__device__ inline unsigned fraction(unsigned word) { return (unsigned)scaled(word, SCALE); }

// Visit all vertices in order. Each is offered k - 1 random colours, one after the other: one that costs d conflicts
// more is taken with a probability of factors[d] / SCALE. Block p has the p-th temperature; at[p] is its replica.
extern "C" __global__ void metropolis(const unsigned char* adjacency, const int* order, const unsigned* factors,
                                      const int* at, const int* record, short* counts, int* colours, int* conflicts,
                                      int n, int k, int depth, unsigned long long seed, int sweep, int row) {
    int r = at[blockIdx.x], total = conflicts[r];
    if (record[0] == 0) return;
    order += (Index)row * n;
    factors += (Index)blockIdx.x * depth;
    counts += (Index)r * k * n;
    colours += (Index)r * n;
    for (int i = 0; i < n && total > 0; ++i) {
        int v = order[i], old = colours[v], now = old;
        Words words;
        for (int offer = 0; offer < k - 1; ++offer) {
            // Four words are for two offers.
            if (offer % 2 == 0) words = draw(seed, VISIT, sweep, r, i, offer / 2);
            unsigned which = offer % 2 ? words.c : words.a, chance = offer % 2 ? words.d : words.b;
            int other = now + 1 + scaled(which, k - 1);
            if (other >= k) other -= k;
            int more = counts[(Index)other * n + v] - counts[(Index)now * n + v];
            if (more <= 0 || (more < depth && fraction(chance) < factors[more])) now = other;
        }
        total += counts[(Index)now * n + v] - counts[(Index)old * n + v];
        __syncthreads();  // everybody has read
        if (now != old) {
            for (int u = threadIdx.x; u < n; u += blockDim.x) {
                int joined = adjacency[(Index)v * n + u];
                counts[(Index)old * n + u] -= joined;
                counts[(Index)now * n + u] += joined;
            }
            if (threadIdx.x == 0) colours[v] = now;
        }
        __syncthreads();  // everybody has written
    }
    if (threadIdx.x == 0) conflicts[r] = total;
}

// Every second pair of neighbours on the ladder changes places, always if the warmer one has no more conflicts, and if
// it has d more with a probability of factors[pair][d] / SCALE. A thread for each pair.
extern "C" __global__ void exchange(const unsigned* factors, const int* conflicts, const int* record, int* at,
                                    int replicas, int depth, unsigned long long seed, int sweep) {
    int pair = 2 * (blockIdx.x * blockDim.x + threadIdx.x) + sweep % 2;
    if (record[0] == 0 || pair + 1 >= replicas) return;
    int cold = at[pair], warm = at[pair + 1], more = conflicts[warm] - conflicts[cold];
    unsigned chance = fraction(draw(seed, EXCHANGE, sweep, 0, pair, 0).a);
    if (more <= 0 || (more < depth && chance < factors[(Index)pair * depth + more])) {
        at[pair] = warm;
        at[pair + 1] = cold;
    }
}
"""
)


def metropolis_on_host(
    adjacency, order, factors, at, record, counts, colours, conflicts, n, k, depth, seed, sweep, row
):
    if record[0] == 0:
        return
    replicas = np.arange(len(at))
    mine = np.empty_like(factors)
    mine[at] = factors  # each replica's
    parts, base = np.arange(k // 2)[:, None, None], replicas * k
    around = np.arange(2 * k) % k
    live = conflicts > 0
    for i, v in enumerate(order[row]):
        if i % AHEAD == 0:  # in parts: those of a large graph would fill the memory
            words = draw(int(seed), VISIT, int(sweep), replicas, np.arange(i, i + AHEAD)[:, None], parts)
            steps = [1 + scaled(word, k - 1) for word in words[0::2]]  # each (parts, AHEAD, replicas)
            # As factors decrease, a proposal is accepted if it adds at most this many conflicts.
            limits = [tolerated(scaled(word, kernels.SCALE), mine) for word in words[1::2]]
        held, old, j = counts[:, :, v].ravel(), colours[:, v], i % AHEAD
        now, has = old, held[base + old]
        start = has
        for offer in range(k - 1):
            other = around[now + steps[offer % 2][offer // 2, j]]
            would = held[base + other]
            taken = would - has <= limits[offer % 2][offer // 2, j]
            now, has = np.where(taken, other, now), np.where(taken, would, has)
        moved = np.flatnonzero((now != old) & live)
        if moved.size:
            conflicts[moved] += (has - start)[moved]
            joined, before, after = adjacency[v], old[moved], now[moved]
            counts[moved, before] -= joined
            counts[moved, after] += joined
            colours[moved, v] = after
            if not conflicts.all():
                live = conflicts > 0


def tolerated(chances, factors):
    """Return the number of additional conflicts that a random number accepts; the last axis is that of the replicas."""
    limits = np.zeros(chances.shape, np.int16)
    for factor in factors.T[1:]:
        limits += chances < factor
    return limits


def exchange_on_host(factors, conflicts, record, at, replicas, depth, seed, sweep):
    if record[0] == 0:
        return
    pairs = np.arange(sweep % 2, replicas - 1, 2)
    cold, warm = at[pairs], at[pairs + 1]
    more = conflicts[warm] - conflicts[cold]
    chances = scaled(draw(int(seed), EXCHANGE, int(sweep), 0, pairs)[0], kernels.SCALE)
    taken = (more <= 0) | (chances < factors[pairs, more.clip(0, depth - 1)])
    at[pairs], at[pairs + 1] = np.where(taken, warm, cold), np.where(taken, cold, warm)


metropolis = aiocuda.Kernel("metropolis", source=SOURCE, host=metropolis_on_host)
exchange = aiocuda.Kernel("exchange", source=SOURCE, host=exchange_on_host)


class Annealing(Search):
    """While the device makes the sweeps of one step, the host draws the orders for the next ones."""

    name = "annealing"

    def tables(self):
        coldness = 1 / np.geomspace(*LADDER, self.replicas)
        self.factors = table([boltzmann(1 / cold) for cold in coldness])
        # The exchange of a pair is a Metropolis step at a temperature of its own.
        self.exchanges = table([boltzmann(1 / less) for less in coldness[:-1] - coldness[1:]])
        return {"factors": self.factors, "exchanges": self.exchanges, "at": np.arange(self.replicas, dtype=np.int32)}

    def inputs(self, sweeps):
        order = np.zeros((BATCH, self.n), np.int32)
        for row, sweep in zip(order, sweeps, strict=False):
            row[:] = np.argsort(draw(self.seed, ORDER, sweep, 0, np.arange(self.n))[0], kind="stable")
        return {"order": order}

    def sweep(self, slot, sweep, row):
        state, replicas, depth = self.state, self.replicas, self.factors.shape[1]
        order, record = slot.buffer("order"), state["record"]
        tables = state["adjacency"], order, state["factors"], state["at"], record
        held = state["counts"], state["colours"], state["conflicts"]
        slot.stream.launch(
            metropolis, replicas, THREADS, *tables, *held, self.n, self.k, depth, self.seed, sweep, row
        )  # fmt: skip
        pairs = (replicas // 2 + THREADS - 1) // THREADS
        if pairs:
            tables = state["exchanges"], state["conflicts"], record, state["at"]
            depth = self.exchanges.shape[1]
            slot.stream.launch(exchange, pairs, THREADS, *tables, replicas, depth, self.seed, sweep)


def table(rows):
    """Rows of integers as one array; shorter rows are filled with 0."""
    filled = np.zeros((max(1, len(rows)), max([len(row) for row in rows], default=1)), np.uint32)
    for place, row in zip(filled, rows, strict=False):
        place[: len(row)] = row
    return filled


if __name__ == "__main__":
    main(Annealing, "a graph is coloured by parallel Metropolis with a temperature ladder")
