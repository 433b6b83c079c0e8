"""J7: colours enough within the time, and orders of repair that are worth their while."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples.workloads import load
from tests.project.tree import ROOT

ablation, annealing, conflict_repair, reservoir = map(load, ("ablation", "annealing", "conflict_repair", "reservoir"))
dimacs, search = load("colouring.dimacs"), load("colouring.search")

each_workload = pytest.mark.parametrize(
    "make", [annealing.Annealing, conflict_repair.ConflictRepair, reservoir.Reservoir], ids=lambda made: made.name
)


def instance(name: str, vertices: int, probability: float, seed: int) -> Any:
    """DIMACS' graph where it lies beside the project, and else one of the same distribution."""
    for place in (ROOT / "shared", ROOT.parent / "shared"):
        file: Path = place / "data" / f"{name}.col"
        if file.exists():
            return dimacs.read(file)
    return dimacs.gnp(vertices, probability, seed)


def coloured(make: Any, graph: Any, colours: int, driver: str, seconds: float) -> int:
    """With how many of five seeds there is a colouring without conflicts within so many seconds each."""
    good = 0
    for seed in range(1, 6):
        began = time.monotonic()
        found = asyncio.run(search.solve(make(graph, colours, seed, 32), 5000, driver=driver))
        assert graph.conflicts(found.colouring) == found.conflicts
        good += found.conflicts == 0 and time.monotonic() - began <= seconds
    return good


@pytest.mark.soak
@each_workload
def test_five_colours_for_125_vertices_on_the_host_in_two_minutes(make: Any) -> None:
    assert coloured(make, instance("DSJC125.1", 125, 0.1, 3), 5, "host", 120) >= 4


@pytest.mark.gpu
@pytest.mark.soak
@each_workload
def test_56_colours_for_500_vertices_on_a_gpu_in_five_minutes(make: Any) -> None:
    assert coloured(make, instance("DSJC500.5", 500, 0.5, 1), 56, "cuda", 300) >= 4


@pytest.mark.soak
def test_each_order_beats_random_order_with_eight_of_ten_seeds() -> None:
    options: argparse.Namespace = ablation.parse([])
    rows = asyncio.run(
        ablation.compare(options.graph, options.colours, range(1, 11), options.sweeps, options.replicas, "host")
    )
    for order in ("multiscale", "reservoir"):
        assert sum(row[order] < row["random"] for row in rows) >= ablation.WANTED
