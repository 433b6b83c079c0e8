"""A random graph G(n, p) as a DIMACS `.col` file: ``python gnp.py 60 0.2 gnp60.col --seed 1``."""

from __future__ import annotations

import argparse

from colouring.dimacs import GraphError, gnp, write

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write a random graph G(n, p) in DIMACS' form")
    parser.add_argument("vertices", type=int)
    parser.add_argument("probability", type=float, help="of each edge, 0 to 1")
    parser.add_argument("file", metavar="FILE.col")
    parser.add_argument("--seed", type=int, default=1, help="0 or more; the same one gives the same graph")
    options = parser.parse_args()
    if not 0 <= options.seed < 2**64:
        parser.error(f"--seed is {options.seed}: it takes 0 to {2**64 - 1}")
    try:
        graph = gnp(options.vertices, options.probability, options.seed)
        told = f"random graph G({options.vertices}, {options.probability:g}), seed {options.seed}, by gnp.py"
        write(graph, options.file, told)
    except (GraphError, OSError) as error:
        parser.error(str(error))
    print(f"{graph.vertices} vertices, {graph.edges} edges")
