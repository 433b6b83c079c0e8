"""Repair in an order: score the vertices, visit the first ones, and repeat."""

from __future__ import annotations

import numpy as np

from .kernels import THREADS, blocks, boltzmann, rank, repair, shuffle
from .search import Search

__all__ = ["Repair"]

#: Number of rounds of a sweep. Each round scores the vertices again and makes a part of the visits.
ROUNDS = 4

#: Lowest and highest temperature of the replicas, in conflicts.
TEMPERATURES = 0.1, 0.35


class Repair(Search):
    """A sweep is as many visits as there are vertices, or up to three fewer, for any order.

    A workload's `score` determines the order of the vertices. With the order ``"random"``, each sweep visits every
    vertex once, in a new random order.
    """

    def __init__(self, graph, colours, seed, replicas, order="", temperatures=TEMPERATURES):
        super().__init__(graph, colours, seed, replicas)
        self.temperatures = temperatures
        self.random = order == "random"
        self.rounds = 1 if self.random else min(ROUNDS, self.n)
        self.visits = self.n // self.rounds

    def score(self, stream, sweep, round):
        """Enqueue the kernels that compute ``keys (replicas, n)``: the highest are visited first."""
        raise NotImplementedError

    def learn(self, stream):
        """Enqueue the use of ``gained (replicas, visits)``: the conflicts that each visit of ``order`` has removed."""

    def tables(self):
        rows = [boltzmann(temperature) for temperature in np.linspace(*self.temperatures, self.replicas)]
        weights = np.zeros((self.replicas, max(map(len, rows))), np.uint32)
        for weight, row in zip(weights, rows, strict=True):
            weight[: len(row)] = row
        self.depth = weights.shape[1]
        return {"weights": weights}

    def memory(self):
        return {
            **super().memory(),
            "keys": ((self.replicas, self.n), np.uint64),
            "order": ((self.replicas, self.visits), np.int32),
            "gained": ((self.replicas, self.visits), np.int32),
        }

    def sweep(self, slot, sweep, row):
        state, stream, grid, n = self.state, slot.stream, blocks(self.n, self.replicas), self.n
        for round in range(self.rounds):
            if self.random:
                stream.launch(shuffle, grid, THREADS, state["keys"], n, self.seed, sweep)
            else:
                self.score(stream, sweep, round)
            stream.launch(rank, grid, THREADS, state["keys"], state["order"], n, self.visits)
            tables = state["adjacency"], state["order"], state["weights"], state["record"]
            held = state["counts"], state["colours"], state["conflicts"], state["gained"]
            stream.launch(
                repair, self.replicas, THREADS, *tables, *held, n, self.k, self.depth, self.visits,
                self.seed, sweep, round,
            )  # fmt: skip
            if not self.random:
                self.learn(stream)
