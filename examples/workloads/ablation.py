"""Does the order of repair matter? Multi-scale and reservoir order against random order, with the same number of
visits.

These are fixed in advance and the same for all three: the graph, the initial colours, the temperatures, the rule by
which a visited vertex gets its colour, and the number of visited vertices. The temperatures are low ones, at which
random order performs best. A search with a colouring without conflicts is better than one without. Of two with, the one
after fewer sweeps is better; of two without, the one with fewer conflicts left after the last sweep, on average over
its replicas.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from colouring.dimacs import GraphError, gnp, read
from colouring.search import solve
from conflict_repair import ConflictRepair
from program import check_outputs, run
from reservoir import Reservoir

ORDERS = {"random": ConflictRepair, "multiscale": ConflictRepair, "reservoir": Reservoir}

#: The coldest and the warmest replica's.
TEMPERATURES = 0.06, 0.15

#: Of 10 comparisons with random order, the number that an order must win.
WANTED = 8


def left(found):
    """Return the measure of a search: less is better."""
    solved = found.conflicts == 0
    return (0, len(found.history)) if solved else (1, found.mean[-1])


def told(result):
    unsolved, amount = result
    return f"{amount:.2f} left" if unsolved else f"{amount} sweeps"


async def compare(graph, colours, seeds, sweeps, replicas, driver):
    """Return the measure of each order, for each seed."""
    rows = []
    print(f"{graph.name}, {colours} colours, {sweeps} sweeps, {replicas} replicas")
    print("seed", *(f"{order:>12}" for order in ORDERS))
    for seed in seeds:
        row = {}
        for order, make in ORDERS.items():
            search = make(graph, colours, seed, replicas, order, TEMPERATURES)
            row[order] = left(await solve(search, sweeps, driver=driver))
        rows.append({"seed": seed, **row})
        print(f"{seed:4}", *(f"{told(result):>12}" for result in row.values()), flush=True)
    return rows


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="multi-scale and reservoir order of repair against random order")
    parser.add_argument("graph", metavar="GRAPH.col", nargs="?", help="if none is given, a random one, G(150, 0.5)")
    parser.add_argument("--colours", type=int, default=20, metavar="K")
    parser.add_argument("--seeds", type=int, default=10, metavar="COUNT")
    parser.add_argument("--sweeps", type=int, default=50, metavar="N")
    parser.add_argument("--replicas", type=int, default=16, metavar="R")
    parser.add_argument("--driver", choices=("auto", "host", "simulated", "cuda"), default="auto")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    if min(options.colours, options.seeds, options.sweeps, options.replicas) < 1:
        parser.error("--colours, --seeds, --sweeps and --replicas take 1 or more")
    try:
        options.graph = read(options.graph) if options.graph else gnp(150, 0.5, 7)
    except (GraphError, OSError) as error:
        parser.error(str(error))
    check_outputs(parser, options.json)
    return options


def main():
    options = parse()
    seeds = range(1, options.seeds + 1)
    rows = run(compare(options.graph, options.colours, seeds, options.sweeps, options.replicas, options.driver))
    wins = {order: sum(row[order] < row["random"] for row in rows) for order in ("multiscale", "reservoir")}
    for order, count in wins.items():
        print(f"{order} order beats random order with {count} of {len(rows)} seeds")
    if options.json:
        Path(options.json).write_text(json.dumps({"wins": wins, "seeds": rows}), encoding="utf-8")
    return 0 if min(wins.values()) * 10 >= WANTED * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
