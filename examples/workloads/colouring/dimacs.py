"""Graphs: read from DIMACS `.col` files, written to them, and drawn at random."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .philox import GRAPH, draw

__all__ = ["Graph", "GraphError", "gnp", "read", "write"]

#: Vertices of the largest graph. The adjacency matrix has a byte for each pair: 400 MB.
MOST_VERTICES = 20_000


class GraphError(ValueError):
    """A file that is not a DIMACS graph. The message names the line."""


class Graph(NamedTuple):
    """A graph without loops; an edge that is given twice counts once."""

    name: str
    adjacency: npt.NDArray[np.uint8]  #: (n, n), symmetric, 1 where there is an edge

    @property
    def vertices(self) -> int:
        return len(self.adjacency)

    @property
    def edges(self) -> int:
        return int(np.count_nonzero(self.adjacency)) // 2

    def conflicts(self, colouring: npt.ArrayLike) -> int:
        """Return the number of edges with both ends of one colour."""
        colours = np.asarray(colouring)
        ends = np.argwhere(np.triu(self.adjacency))
        return int(np.count_nonzero(colours[ends[:, 0]] == colours[ends[:, 1]]))


def read(path: str | os.PathLike[str]) -> Graph:
    """Read a graph from a DIMACS `.col` file.

    Raises
    ------
    GraphError
        The file is not a valid graph. The message has the name of the file and the number of the line.
    OSError
        It cannot be read.
    """
    path = Path(path)
    adjacency: npt.NDArray[np.uint8] | None = None
    said = edges = 0
    # Comments of old files may have any encoding.
    with path.open(encoding="ascii", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            words = line.split()
            where = f"{path}:{number}"
            if not words or words[0] == "c":
                continue
            if words[0] == "p":
                if adjacency is not None:
                    raise GraphError(f"{where}: a second problem line, {_shown(line)}; a file holds one graph")
                adjacency, said = _problem(words, line, where)
            elif words[0] == "e":
                if adjacency is None:
                    raise GraphError(f"{where}: an edge before the problem line `p edge VERTICES EDGES`")
                if len(words) != 3:
                    raise GraphError(f"{where}: an edge is `e VERTEX VERTEX`, not {_shown(line)}")
                edges += 1
                one, other = (_integer(word, where, 1, len(adjacency), "a vertex") - 1 for word in words[1:])
                if one == other:
                    raise GraphError(f"{where}: vertex {one + 1} is joined to itself, and no colouring suits that")
                adjacency[one, other] = adjacency[other, one] = 1
            elif words[0] not in ("n", "d", "v", "x"):  # colours, dimensions, coordinates and parameters of a generator
                raise GraphError(f"{where}: {_shown(line)} is none of DIMACS' lines (c, p, e, n)")
    if adjacency is None:
        raise GraphError(f"{path}: there is no problem line `p edge VERTICES EDGES`")
    if 2 * edges < said:  # some files give twice the number of edges, one for each direction
        raise GraphError(f"{path}: the problem line says {said} edges, and there are {edges}: is the file whole?")
    return Graph(path.stem, adjacency)


def write(graph: Graph, path: str | os.PathLike[str], comment: str = "") -> None:
    """Write a graph as a DIMACS `.col` file."""
    out = [f"c {line}" for line in comment.splitlines()]
    out.append(f"p edge {graph.vertices} {graph.edges}")
    out += [f"e {one + 1} {other + 1}" for one, other in np.argwhere(np.triu(graph.adjacency))]
    Path(path).write_text("\n".join(out) + "\n", encoding="ascii")


def gnp(vertices: int, probability: float, seed: int) -> Graph:
    """A random graph G(n, p): each pair of vertices is joined with a probability, by itself."""
    if not 1 <= vertices <= MOST_VERTICES:
        raise GraphError(f"a graph has 1 to {MOST_VERTICES} vertices, not {vertices}")
    if not 0 <= probability <= 1:
        raise GraphError(f"a probability is from 0 to 1, not {probability}")
    ones, others = np.triu_indices(vertices, 1)
    joined = draw(seed, GRAPH, 0, ones, others)[0] < int(probability * 2**32)
    adjacency = np.zeros((vertices, vertices), np.uint8)
    adjacency[ones[joined], others[joined]] = 1
    return Graph(f"gnp{vertices}", adjacency | adjacency.T)


def _problem(words: list[str], line: str, where: str) -> tuple[npt.NDArray[np.uint8], int]:
    if len(words) != 4 or words[1] not in ("edge", "edges", "col"):
        raise GraphError(f"{where}: a graph's problem line is `p edge VERTICES EDGES`, not {_shown(line)}")
    vertices = _integer(words[2], where, 1, MOST_VERTICES, "the number of vertices")
    edges = _integer(words[3], where, 0, MOST_VERTICES**2, "the number of edges")
    return np.zeros((vertices, vertices), np.uint8), edges


def _integer(word: str, where: str, least: int, most: int, what: str) -> int:
    # `int` would also accept signs, underscores, digits of other scripts, and a million digits.
    if not (word.isascii() and word.isdigit() and len(word) <= 20):
        raise GraphError(f"{where}: {what} is a number, not {_shown(word)}")
    if not least <= int(word) <= most:
        raise GraphError(f"{where}: {what} is from {least} to {most}, not {word}")
    return int(word)


def _shown(text: str) -> str:
    text = text.rstrip("\r\n")
    return ascii(text if len(text) <= 60 else f"{text[:60]}…")
