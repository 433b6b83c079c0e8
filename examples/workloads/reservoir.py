"""A dendritic reservoir learns during a search which vertices are worth repairing, and visits them first.

Each vertex has a few neurons, the same for all of them and fixed at random: an echo state network over the graph
(Jaeger 2001; Gallicchio and Micheli 2010). The inputs of a neuron are the conflicts of its own vertex and, through
dendrites, the states of the neighbours: each neighbour ends at one branch, and each branch saturates before the soma
adds them up. Only the readout learns, by the delta rule: a score predicts how many conflicts a visit removes. The
highest scores are visited first, as in `conflict_repair`. All of it is fixed-point arithmetic, the same on every
driver.
"""

from __future__ import annotations

import numpy as np
from colouring import philox
from colouring.command import main
from colouring.kernels import THREADS, blocks
from colouring.philox import ORDER, WEIGHTS, draw, scaled
from colouring.repair import Repair

import aiocuda

INPUTS = 4  # a constant; the conflicts of the vertex; how many a visit can remove; the number of equally good colours
UNITS = 12  # the inputs and the neurons after them
BRANCHES = 4  # of a dendrite
LIMIT = 127  # of a state
SATURATION = 48  # of a branch

SOURCE = (
    philox.SOURCE
    + f"""
enum {{
    ORDER = {ORDER}, INPUTS = {INPUTS}, UNITS = {UNITS}, BRANCHES = {BRANCHES}, LIMIT = {LIMIT},
    SATURATION = {SATURATION},
}};
"""
    + """
typedef long long Index;

__device__ inline int within(long long value, int limit) {
    return value < -limit ? -limit : value > limit ? limit : (int)value;
}

// The next state of each vertex's neurons, from the states of its neighbours, and the readout's score as a key: the
// highest are visited first. A thread for each vertex of each replica.
extern "C" __global__ void echo(const unsigned char* adjacency, const int* share, const int* branch, const int* source,
                                const int* dendrite, const int* input, const short* counts, const int* colours,
                                const int* record, const short* states, short* next, const long long* readout,
                                unsigned long long* keys, int n, int k, unsigned long long seed, int sweep, int round) {
    int v = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y;
    if (v >= n || record[0] == 0) return;
    counts += (Index)r * k * n + v;
    states += (Index)r * UNITS * n;
    next += (Index)r * UNITS * n + v;
    int field = counts[(Index)colours[(Index)r * n + v] * n], least = field, choice = 0;
    for (int c = 0; c < k; ++c) least = min(least, (int)counts[(Index)c * n]);
    for (int c = 0; c < k; ++c) choice += counts[(Index)c * n] == least;
    int heard[INPUTS] = {4, min(field, 7), min(field - least, 7), min(choice, 7)};

    int sums[BRANCHES][UNITS] = {};
    for (int u = 0; u < n; ++u) {
        if (!adjacency[(Index)v * n + u]) continue;
        for (int i = 0; i < UNITS; ++i) sums[branch[u]][i] += states[(Index)i * n + u];
    }
    long long score = 0;
    for (int i = 0; i < UNITS; ++i) {
        int state;
        if (i < INPUTS) {
            state = 16 * heard[i];
        } else {
            int drive = 0;
            for (int j = 0; j < INPUTS; ++j) drive += input[i * INPUTS + j] * heard[j];
            for (int b = 0; b < BRANCHES; ++b) {
                int mean = sums[b][source[b * UNITS + i]] * share[v] >> 16;  // below LIMIT * BRANCHES * 65536
                drive += within(mean * dendrite[b * UNITS + i] >> 3, SATURATION);
            }
            state = (states[(Index)i * n + v] + within(drive, LIMIT)) >> 1;  // a leaky neuron
        }
        next[(Index)i * n] = state;
        score += readout[(Index)r * UNITS + i] * state;
    }
    Words words = draw(seed, ORDER, sweep, r, v, round);
    // In units of 1/256 conflict, and up to 1/4 by chance, so that others have their turn.
    unsigned place = within(score >> 16, 1 << 20) + (1 << 20) + (words.a >> 26);
    keys[(Index)r * n + v] = (unsigned long long)place << 32 | words.b;
}

// The delta rule: what the readout said of each vertex that was visited, and what the visit has mended. A block for
// each replica, a thread for each unit.
extern "C" __global__ void learn(const short* states, const int* order, const int* gained, const int* record,
                                 long long* readout, int n, int m, int rate) {
    int r = blockIdx.x, unit = threadIdx.x;
    if (record[0] == 0) return;
    states += (Index)r * UNITS * n;
    order += (Index)r * m;
    gained += (Index)r * m;
    readout += (Index)r * UNITS;
    long long change = 0;
    for (int i = 0; i < m; ++i) {
        long long said = 0;
        for (int j = 0; j < UNITS; ++j) said += readout[j] * states[(Index)j * n + order[i]];
        change += (long long)within(256 * gained[i] - (said >> 16), 2048) * states[(Index)unit * n + order[i]];
    }
    __syncthreads();  // everybody has read
    readout[unit] += change >> rate;
}
"""
)


def echo_on_host(
    adjacency, share, branch, source, dendrite, input, counts, colours, record, states, next, readout, keys,
    n, k, seed, sweep, round,
):  # fmt: skip
    if record[0] == 0:
        return
    field = np.take_along_axis(counts, colours[:, None], axis=1)[:, 0]
    least = counts.min(axis=1)
    choice = (counts == least[:, None]).sum(axis=1)
    heard = np.stack([np.full_like(field, 4), field.clip(max=7), (field - least).clip(max=7), choice.clip(max=7)], 1)
    neurons = slice(INPUTS, UNITS)
    drive = (input[neurons].astype(np.float32) @ heard.astype(np.float32)).astype(np.int32)  # below 2²⁴: exact
    for b in range(BRANCHES):
        ending = np.flatnonzero(branch == b)
        said = states[:, source[b, neurons, None], ending].astype(np.float32)
        scheduler = (said @ adjacency[ending].astype(np.float32)).astype(np.int32)
        scheduler *= share
        scheduler >>= 16
        scheduler *= dendrite[b, neurons, None]
        scheduler >>= 3
        drive += np.minimum(np.maximum(scheduler, -SATURATION, out=scheduler), SATURATION, out=scheduler)
    next[:, :INPUTS] = 16 * heard
    next[:, neurons] = states[:, neurons] + drive.clip(-LIMIT, LIMIT) >> 1
    scores = np.einsum("ri,riv->rv", readout, next.astype(np.int64)) >> 16
    words = draw(int(seed), ORDER, int(sweep), np.arange(len(keys))[:, None], np.arange(n), int(round))
    places = scores.clip(-(1 << 20), 1 << 20) + (1 << 20) + (words[0] >> np.uint32(26))
    keys[:] = places.astype(np.uint64) << np.uint64(32) | words[1]


def learn_on_host(states, order, gained, record, readout, n, m, rate):
    if record[0] == 0:
        return
    seen = np.take_along_axis(states, order[:, None], axis=2).astype(np.int64)  # (replicas, units, visits)
    said = np.einsum("ri,riv->rv", readout, seen) >> 16
    errors = (256 * gained.astype(np.int64) - said).clip(-2048, 2048)
    readout += np.einsum("rv,riv->ri", errors, seen) >> rate


echo = aiocuda.Kernel("echo", source=SOURCE, host=echo_on_host)
learn = aiocuda.Kernel("learn", source=SOURCE, host=learn_on_host)


class Reservoir(Repair):
    """With ``order="random"`` each sweep visits all vertices in random order instead."""

    name = "reservoir"

    def tables(self):
        def weights(part, shape, most):
            return scaled(draw(self.seed, WEIGHTS, 0, 0, np.arange(np.prod(shape)), part)[0], most).reshape(shape)

        units = BRANCHES, UNITS
        degrees = self.graph.adjacency.sum(axis=1, dtype=np.int64)
        tables = {
            "share": BRANCHES * 65536 // np.maximum(degrees, 1),  # of a neighbour in its branch's mean
            "branch": weights(0, self.n, BRANCHES),  # where a vertex ends, at its neighbours' dendrites
            "source": weights(1, units, UNITS),  # the neighbours' neurons that are inputs of a branch
            "dendrite": weights(2, units, 17) - 8,
            "input": weights(3, (UNITS, INPUTS), 17) - 8,
        }
        tables = {name: np.ascontiguousarray(table, np.int32) for name, table in tables.items()}
        states = np.zeros((self.replicas, UNITS, self.n), np.int16)
        self.turn = 0
        self.rate = self.visits.bit_length()  # the mean of the visits: above twice that the readout swings
        return {
            **super().tables(),
            **tables,
            "states": states,
            "next": states,
            "readout": np.zeros((self.replicas, UNITS), np.int64),
        }

    def score(self, stream, sweep, round):
        state = self.state
        tables = [state[name] for name in ("adjacency", "share", "branch", "source", "dendrite", "input")]
        state["states"], state["next"] = state["next"], state["states"]
        seen = state["counts"], state["colours"], state["record"], state["next"], state["states"]
        stream.launch(
            echo, blocks(self.n, self.replicas), THREADS, *tables, *seen, state["readout"], state["keys"],
            self.n, self.k, self.seed, sweep, round,
        )  # fmt: skip

    def learn(self, stream):
        state = self.state
        seen = state["states"], state["order"], state["gained"], state["record"]
        stream.launch(learn, self.replicas, UNITS, *seen, state["readout"], self.n, self.visits, self.rate)


if __name__ == "__main__":
    main(Reservoir, "a dendritic reservoir orders a colouring's repair", ("reservoir", "random"))
