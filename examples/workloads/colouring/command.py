"""The common command line of the three workloads."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import charts
from program import check_outputs, run

from .dimacs import GraphError, read
from .search import solve

__all__ = ["main", "parse", "picture", "report"]

#: The Boltzmann weights of all colours of a vertex have to fit into 32 bits.
MOST_COLOURS = 4095


def parse(description, arguments=None, orders=()):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("graph", metavar="GRAPH.col", help="in DIMACS' form")
    parser.add_argument("--colours", type=int, required=True, metavar="K")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--sweeps", type=int, default=5000, metavar="N", help="at most; it ends without conflicts")
    parser.add_argument("--replicas", type=int, default=32, metavar="R", help="colourings side by side")
    if orders:
        parser.add_argument("--order", choices=orders, default=orders[0], help="who is repaired, and when")
    parser.add_argument("--driver", choices=("auto", "host", "simulated", "cuda"), default="auto")
    parser.add_argument("--mode", choices=("sync", "async"), default="async")
    parser.add_argument("--json", metavar="FILE", help="- for the standard output")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the conflicts over the sweeps")
    options = parser.parse_args(arguments)
    for name, least, most in (
        ("colours", 1, MOST_COLOURS), ("seed", 0, 2**64 - 1), ("sweeps", 1, 2**31 - 1), ("replicas", 1, 1024),
    ):  # fmt: skip
        if not least <= getattr(options, name) <= most:
            parser.error(f"--{name} is {getattr(options, name)}: it takes {least} to {most}")
    try:
        options.graph = read(options.graph)
    except (GraphError, OSError) as error:
        parser.error(str(error))
    check_outputs(parser, options.json, options.plot)
    return options


def report(options, search, found):
    return {
        "workload": search.name,
        "graph": search.graph.name,
        "vertices": search.n,
        "edges": search.graph.edges,
        "colours": search.k,
        "seed": search.seed,
        "replicas": search.replicas,
        **({"order": options.order} if "order" in options else {}),
        "driver": found.driver,
        "device": found.device,
        "mode": options.mode,
        "initial_colouring": search.initial.tolist(),
        "colouring": found.colouring,
        "conflicts": found.conflicts,
        "sweeps": len(found.history),
        "history": found.history,
        "mean_history": found.mean,
        "seconds": found.seconds,
        "streams_created": found.streams_created,
    }


def picture(found):
    """The conflicts over the sweeps, as SVG."""
    sweeps = list(range(1, found["sweeps"] + 1))
    lines = [
        charts.Line("fewest", sweeps, found["history"]),
        charts.Line(f"mean of {found['replicas']}", sweeps, found["mean_history"], dashed=True),
    ]
    title = f"{found['workload']}: {found['graph']} with {found['colours']} colours, seed {found['seed']}"
    both = [charts.Chart("conflicts", lines), charts.Chart("conflicts", lines, logarithmic=True)]
    return charts.draw(f"{title} ({found['driver']}, {found['mode']})", "sweep", both)


def main(make, description, orders=()):
    options = parse(description, orders=orders)
    order = {"order": options.order} if orders else {}
    search = make(options.graph, options.colours, options.seed, options.replicas, **order)
    solved = run(solve(search, options.sweeps, driver=options.driver, mode=options.mode))
    found = report(options, search, solved)
    if options.json == "-":
        json.dump(found, sys.stdout)
    else:
        what = "1 conflict" if found["conflicts"] == 1 else f"{found['conflicts']} conflicts"
        print(f"{what} after {found['sweeps']} sweeps, {found['seconds']:.1f} s ({found['driver']})")
        if options.json:
            Path(options.json).write_text(json.dumps(found), encoding="utf-8")
    if options.plot:
        Path(options.plot).write_text(picture(found), encoding="utf-8")
