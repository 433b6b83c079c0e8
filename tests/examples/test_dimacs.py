"""J7, graphs in DIMACS' form: what is read, what is refused, and graphs drawn at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.test_examples import output
from tests.examples.workloads import PLACE, load

dimacs = load("colouring.dimacs")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"bad\.col: there is no problem line `p edge VERTICES EDGES`"),
        ("c nothing\n", r"bad\.col: there is no problem line"),
        ("e 1 2\n", r"bad\.col:1: an edge before the problem line"),
        ("p edge 3 1\np edge 3 1\n", r"bad\.col:2: a second problem line, 'p edge 3 1'"),
        ("p edge 3\n", r"bad\.col:1: a graph's problem line is `p edge VERTICES EDGES`, not 'p edge 3'"),
        ("p sat 3 1\n", r"bad\.col:1: .* not 'p sat 3 1'"),
        ("p edge x 1\n", r"bad\.col:1: the number of vertices is a number, not 'x'"),
        ("p edge 0 0\n", r"bad\.col:1: the number of vertices is from 1 to 20000, not 0"),
        ("p edge 999999999999 0\n", r"bad\.col:1: the number of vertices is from 1 to 20000"),
        ("p edge 3 -1\n", r"bad\.col:1: the number of edges is a number, not '-1'"),
        ("p edge 3 1\ne 1\n", r"bad\.col:2: an edge is `e VERTEX VERTEX`, not 'e 1'"),
        ("p edge 3 1\ne 1 2 3\n", r"bad\.col:2: an edge is `e VERTEX VERTEX`"),
        ("p edge 3 1\ne 1 4\n", r"bad\.col:2: a vertex is from 1 to 3, not 4"),
        ("p edge 3 1\ne 0 1\n", r"bad\.col:2: a vertex is from 1 to 3, not 0"),
        ("p edge 3 1\ne 1 2.5\n", r"bad\.col:2: a vertex is a number, not '2\.5'"),
        ("p edge 3 1\ne 1 " + "9" * 5000 + "\n", r"bad\.col:2: a vertex is a number, not '9{60}\\u2026'"),
        ("p edge 3 1\ne 2 2\n", r"bad\.col:2: vertex 2 is joined to itself"),
        ("p edge 3 1\nhello\n", r"bad\.col:2: 'hello' is none of DIMACS' lines"),
        ("p edge 3 4\ne 1 2\n", r"bad\.col: the problem line says 4 edges, and there are 1: is the file whole\?"),
        ("\udcff\udcfe\x00", r"bad\.col:1: .* is none of DIMACS' lines"),
    ],
)
def test_what_is_no_graph_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.col"
    file.write_bytes(text.encode("ascii", "surrogateescape"))
    with pytest.raises(dimacs.GraphError, match=complaint):
        dimacs.read(file)


def test_files_that_differ_in_form_are_read(tmp_path: Path) -> None:
    """Both directions of each edge, comments in any encoding, blank lines, colours of vertices, other line ends."""
    file = tmp_path / "odd.col"
    file.write_bytes(b"c Universit\xe9\r\np col 3 4\r\n\r\nn 1 2\r\ne 1 2\r\ne 2 1\r\ne 3 2\r\ne 2 3\r\n")
    graph = dimacs.read(file)
    assert graph.adjacency.tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert (graph.name, graph.vertices, graph.edges) == ("odd", 3, 2)
    assert [graph.conflicts(colours) for colours in ([0, 1, 0], [0, 0, 1], [2, 2, 2])] == [0, 1, 2]


def test_random_graphs_are_as_dense_as_asked_and_the_same_each_time(tmp_path: Path) -> None:
    graph = dimacs.gnp(200, 0.3, 1)
    assert graph.edges == pytest.approx(0.3 * 199 * 100, rel=0.03)
    assert (graph.adjacency == graph.adjacency.T).all()
    assert not graph.adjacency.diagonal().any()
    assert (dimacs.gnp(200, 0.3, 2).adjacency != graph.adjacency).mean() == pytest.approx(2 * 0.3 * 0.7, abs=0.02)
    assert dimacs.gnp(20, 1.0, 1).edges == 190
    assert dimacs.gnp(20, 0.0, 1).edges == 0
    dimacs.write(graph, tmp_path / "written.col", "one\ntwo")
    assert (dimacs.read(tmp_path / "written.col").adjacency == graph.adjacency).all()
    for vertices, probability, wrong in ((0, 0.5, "0"), (20_001, 0.5, "20001"), (5, -0.1, "-0.1"), (5, 1.1, "1.1")):
        with pytest.raises(dimacs.GraphError, match=f"not {wrong}$"):
            dimacs.gnp(vertices, probability, 1)


def test_the_instance_that_comes_along_is_the_generators() -> None:
    assert (dimacs.read(PLACE / "gnp60.col").adjacency == dimacs.gnp(60, 0.2, 1).adjacency).all()


@pytest.mark.slow
def test_generator_writes_what_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "made.col"
    assert output("examples/workloads/gnp.py", "30", "0.5", str(file), "--seed", "4") == "30 vertices, 211 edges\n"
    assert (dimacs.read(file).adjacency == dimacs.gnp(30, 0.5, 4).adjacency).all()
