"""J7, the workloads that colour graphs: their decisions, their output, and that all drivers find the same colours."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt
import pytest

from aiocuda import Kernel, ManagedContext
from aiocuda.driver.cuda._compiler import compile_cuda
from tests.driver.cuda.test_compiler import needs_nvrtc
from tests.examples.test_examples import output
from tests.examples.workloads import PLACE, load

annealing, conflict_repair, reservoir = map(load, ("annealing", "conflict_repair", "reservoir"))
command, dimacs, kernels, philox, search = (
    load(f"colouring.{name}") for name in ("command", "dimacs", "kernels", "philox", "search")
)
Array = npt.NDArray[Any]

SMALL = PLACE / "gnp60.col"
WORKLOADS: dict[str, Any] = {
    "annealing": annealing.Annealing,
    "conflict_repair": conflict_repair.ConflictRepair,
    "reservoir": reservoir.Reservoir,
}
each_workload = pytest.mark.parametrize("name", WORKLOADS)
DRIVERS = ["host", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)]


def solved(name: str, colours: int, sweeps: int, driver: str, mode: str = "async", **more: Any) -> Any:
    """What a workload finds on the small graph."""
    given = {"seed": 1, "replicas": 4, **more}
    return asyncio.run(
        search.solve(WORKLOADS[name](dimacs.read(SMALL), colours, **given), sweeps, driver=driver, mode=mode)
    )


@functools.cache
def on_the_host(name: str, colours: int) -> Any:
    """The result that all other drivers and modes must find."""
    return solved(name, colours, 11, "host", "sync")


def counted(file: Path, colouring: list[int]) -> int:
    """The conflicts of a colouring, from the file's own lines."""
    edges = [line.split()[1:] for line in file.read_text(encoding="ascii").splitlines() if line.startswith("e")]
    return sum(colouring[int(one) - 1] == colouring[int(other) - 1] for one, other in edges)


# -- what they find ----------------------------------------------------------------------------------------------


@each_workload
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("colours", [5, 6])
def test_all_drivers_and_modes_find_the_same(name: str, driver: str, colours: int) -> None:
    """With 5 colours conflicts are left after the last sweep, with 6 the search ends by itself."""
    expected = on_the_host(name, colours)
    assert (expected.conflicts == 0) == (colours == 6)
    assert expected.conflicts == counted(SMALL, expected.colouring)
    assert len(expected.history) == len(expected.mean) == 11 if colours == 5 else expected.history.count(0) == 1
    assert min(expected.history) == expected.conflicts
    for mode in ("async",) if driver == "host" else ("sync", "async"):
        found = solved(name, colours, 11, driver, mode)
        # CUDA's driver may have kept streams that serve again, from earlier tests of this process.
        assert (found.streams_created > 0) == (mode == "async") or (driver, mode) == ("cuda", "async")
        assert found[:4] == expected[:4]


@each_workload
@pytest.mark.parametrize("driver", ["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_graph_larger_than_a_block_of_threads(name: str, driver: str) -> None:
    graph = dimacs.gnp(300, 0.05, 2)
    expected, found = (
        asyncio.run(search.solve(WORKLOADS[name](graph, 5, 2**63 + 1, 2), 3, driver=each)) for each in ("host", driver)
    )
    assert found[:4] == expected[:4]


@each_workload
def test_seeds_differ_from_the_start_on(name: str) -> None:
    graph = dimacs.read(SMALL)
    one, other = (WORKLOADS[name](graph, 5, seed, 2).initial for seed in (1, 2))
    assert (one != other).sum() > 30
    assert solved(name, 5, 3, "host").mean != solved(name, 5, 3, "host", seed=2).mean


@each_workload
def test_start_is_as_random_colours_are(name: str) -> None:
    """Neither greedy nor stored: as many conflicts as edges times the chance that two colours are the same."""
    graph = dimacs.gnp(300, 0.5, 1)
    conflicts = [graph.conflicts(WORKLOADS[name](graph, 8, seed, 2).initial) for seed in range(40)]
    assert np.mean(conflicts) == pytest.approx(graph.edges / 8, rel=0.01)
    assert np.bincount(WORKLOADS[name](graph, 8, 1, 2).initial, minlength=8).min() > 15


@each_workload
@pytest.mark.asyncio
async def test_device_counters_match_the_colours(name: str) -> None:
    graph, replicas = dimacs.gnp(41, 0.3, 5), 3
    made = WORKLOADS[name](graph, 4, 1, replicas)
    async with ManagedContext(driver="host") as context:
        await made.begin(context)
        await context.triple_buffered_step(made.step(range(6)))
        (telemetry,) = await context.flush()
        stream = context.stream("download")
        names = "colours", "counts", "conflicts", "record", "best"
        colours, counts, conflicts, record, best = [await stream.download(made.state[each]) for each in names]
    rows = telemetry.outputs["telemetry"]
    for replica in range(replicas):
        expected = [(graph.adjacency * (colours[replica] == colour)).sum(axis=1) for colour in range(4)]
        assert (counts[replica] == expected).all()
        assert conflicts[replica] == rows[5, 1 + replica] == graph.conflicts(colours[replica])
    assert record[0] == rows[5, 0] == rows[:6, 1:].min() == graph.conflicts(best)


@each_workload
def test_a_graph_without_edges_and_one_colour(name: str, tmp_path: Path) -> None:
    file = tmp_path / "points.col"
    file.write_text("p edge 3 0\n", encoding="ascii")
    made = WORKLOADS[name](dimacs.read(file), 1, 0, 1)
    found = asyncio.run(search.solve(made, 5, driver="host"))
    assert (found.colouring, found.conflicts, found.history) == ([0, 0, 0], 0, [0])


# -- how they decide ---------------------------------------------------------------------------------------------


def test_philox_is_philox() -> None:
    """The known answers that Random123 comes with."""
    ones = 0xFFFFFFFF
    known = {
        (0, 0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (ones, ones, ones, ones, ones, ones): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): (
            *(0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    }
    for asked, answer in known.items():
        assert tuple(int(word) for word in philox.philox(*asked)) == answer


#: The colourings of four vertices that are all joined, with three colours, by their conflicts; there are never none.
COLOURINGS = {1: 36, 2: 18, 3: 24, 6: 3}


@pytest.mark.parametrize("rule", ["metropolis", "heat bath"])
def test_colours_follow_the_boltzmann_distribution(rule: str) -> None:
    temperature, replicas, sweeps, n, k = 1.3, 1000, 30, 4, 3
    adjacency = np.ones((n, n), np.uint8) - np.eye(n, dtype=np.uint8)
    colours, counts = np.zeros((replicas, n), np.int32), np.zeros((replicas, k, n), np.int16)
    kernels.count_on_host(adjacency, colours, counts, n, k)
    conflicts, record = np.full(replicas, 6, np.int32), np.array([6], np.int32)
    factors = np.tile(np.array(kernels.boltzmann(temperature), np.uint32), (replicas, 1))
    order = np.random.default_rng(1).permuted(np.tile(np.arange(n), (replicas, 1)), axis=1)
    at, gained = np.arange(replicas), np.zeros((replicas, n), np.int32)
    seen: list[int] = []
    for sweep in range(sweeps):
        held, last = (record, counts, colours, conflicts), (n, k, factors.shape[1])
        if rule == "metropolis":
            annealing.metropolis_on_host(adjacency, order, factors, at, *held, *last, 1, sweep, sweep)
        else:
            kernels.repair_on_host(adjacency, order, factors, *held, gained, *last, n, 1, sweep, 0)
        if sweep >= 6:
            seen.extend(conflicts)
    weights = {energy: many * np.exp(-energy / temperature) for energy, many in COLOURINGS.items()}
    for energy, weight in weights.items():
        assert np.mean(np.array(seen) == energy) == pytest.approx(weight / sum(weights.values()), abs=0.012)


def test_exchange_keeps_what_each_temperature_is_to_see() -> None:
    """Two replicas at two temperatures, drawn from the Boltzmann distribution each time, keep it after an exchange."""
    ladders, temperatures = 20_000, np.array([0.7, 1.5])
    random = np.random.default_rng(1)
    often = np.exp(-3 / temperatures) * 2 / (6 * np.exp(-1 / temperatures) + 2 * np.exp(-3 / temperatures))
    many = kernels.boltzmann(1 / (1 / temperatures[0] - 1 / temperatures[1]))
    factors = np.tile(np.array(many, np.uint32), (2 * ladders - 1, 1))
    conflicts = np.where(random.random((ladders, 2)) < often, 3, 1).astype(np.int32)
    at = np.arange(2 * ladders, dtype=np.int32)
    # A long ladder of pairs that are all the same; with an even sweep the first of each pair meets the second.
    annealing.exchange_on_host(factors, conflicts.ravel(), np.array([1]), at, 2 * ladders, len(many), 1, 0)
    seen = (conflicts.ravel()[at].reshape(-1, 2) == 3).mean(axis=0)
    assert (at != np.arange(2 * ladders)).mean() > 0.1
    np.testing.assert_allclose(seen, often, atol=0.01)


def test_hierarchy_puts_what_belongs_together_into_one_region() -> None:
    """Cliques with few edges between them."""
    cliques = np.repeat(np.arange(4), 8)
    shuffled = np.random.default_rng(3).permutation(32)
    adjacency = (cliques[shuffled][:, None] == cliques[shuffled]).astype(np.uint8)
    np.fill_diagonal(adjacency, 0)
    adjacency[0, 1:] |= 1
    adjacency[1:, 0] |= 1
    place, levels = conflict_repair.hierarchy(adjacency)
    assert levels == 5
    assert sorted(place) == list(range(32))
    for clique in range(4):
        assert len({leaf // 8 for leaf in place[cliques[shuffled] == clique]}) == 1


def test_busiest_regions_come_first_on_each_scale() -> None:
    place = np.arange(8, dtype=np.int32)
    field = np.array([[0, 3, 0, 0, 2, 2, 0, 1]])
    colours, counts = np.zeros((1, 8), np.int32), field[:, None].astype(np.int16)
    pyramid, keys = np.zeros((1, 16), np.int32), np.zeros((1, 8), np.uint64)
    order = np.zeros((1, 8), np.int32)

    def first(count: int, *emphasis: int) -> list[int]:
        scales = np.array([emphasis], np.int32)
        conflict_repair.coarsen_on_host(place, scales, counts, colours, np.array([9]), pyramid, keys, 8, 1, 3, 1, 0, 0)
        kernels.rank_on_host(keys, order, 8, 8)
        return sorted(order[0, :count].tolist())

    assert first(1, 1, 0, 0, 0) == [1]
    assert first(2, 0, 1, 0, 0) == [4, 5]
    assert first(4, 0, 0, 1, 0) == [4, 5, 6, 7]
    # A vertex counts as much as the mean of its region: 3 + 3/4 here, 2 + 5/4 there, and 2·5/4 outweigh 1.
    assert first(1, 1, 0, 1, 0) == [1]
    assert first(2, 1, 0, 3, 0) == [4, 5]
    assert pyramid[0, 1:].tolist() == [8, 3, 5, 3, 0, 4, 1, *field[0]]


def test_readout_learns_what_visits_mend() -> None:
    """From nothing: what a visit mends is a multiple of one unit's state, and noise in the others."""
    random, visits, replicas = np.random.default_rng(2), 32, 3
    shape = (replicas, reservoir.UNITS, visits)
    readout = np.zeros((replicas, reservoir.UNITS), np.int64)
    order = np.tile(np.arange(visits, dtype=np.int32), (replicas, 1))
    for _ in range(200):
        states = random.integers(-60, 60, shape).astype(np.int16)
        gained = states[:, 5].astype(np.int32) // 12
        reservoir.learn_on_host(states, order, gained, np.array([1]), readout, visits, visits, visits.bit_length())
    said = np.einsum("ri,riv->rv", readout, states.astype(np.int64)) / 65536 / 256
    assert abs(said - states[:, 5] / 12).mean() < 0.6
    assert np.corrcoef(said.ravel(), gained.ravel())[0, 1] > 0.97


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [annealing.metropolis, conflict_repair.coarsen, reservoir.echo, kernels.repair],  # one of each source
    ids=lambda kernel: kernel.name,
)
def test_source_compiles(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_CACHE_DIR", str(tmp_path))
    image, symbol, *_ = compile_cuda(kernel.source, "sm_90")
    assert image
    assert symbol == kernel.name


# -- the command line --------------------------------------------------------------------------------------------


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    orders = {"annealing": (), "conflict_repair": ("multiscale", "random"), "reservoir": ("reservoir", "random")}
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    command.main(WORKLOADS[name], "", orders[name])


@each_workload
def test_report_and_picture(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    given = ("--colours", 5, "--seed", 3, "--sweeps", 9, "--driver", "host", "--replicas", 4)
    run(name, monkeypatch, SMALL, *given, "--mode", "sync", "--json", "-", "--plot", plot)
    found = json.loads(capsys.readouterr().out)
    assert (found["workload"], found["graph"], found["vertices"], found["edges"]) == (name, "gnp60", 60, 358)
    assert (found["colours"], found["seed"], found["sweeps"]) == (5, 3, 9)
    assert (found["driver"], found["mode"], found["streams_created"]) == ("host", "sync", 0)
    for colouring in (found["initial_colouring"], found["colouring"]):
        assert len(colouring) == 60
        assert set(colouring) <= set(range(5))
    assert counted(SMALL, found["colouring"]) == found["conflicts"] == min(found["history"])
    assert counted(SMALL, found["initial_colouring"]) > 5 * found["conflicts"]
    assert len(found["history"]) == len(found["mean_history"]) == 9

    root = ET.parse(plot).getroot()
    paths = [path.get("d", "") for path in root.iter("{http://www.w3.org/2000/svg}path") if "fill" in path.attrib]
    assert [path.count("L") for path in paths] == [8] * 4  # two lines of nine sweeps, twice


def test_order_of_repair_can_be_random(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = (SMALL, "--colours", 5, "--sweeps", 4, "--driver", "host", "--replicas", 4, "--json", "-")
    found = []
    for name, order in (("conflict_repair", "random"), ("reservoir", "random"), ("conflict_repair", "multiscale")):
        run(name, monkeypatch, *given, "--order", order)
        found.append(json.loads(capsys.readouterr().out))
    assert [report["order"] for report in found] == ["random", "random", "multiscale"]
    assert found[0]["mean_history"] == found[1]["mean_history"] != found[2]["mean_history"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["no.col", "--colours", "5"], "No such file or directory: 'no.col'"),
        ([SMALL], "the following arguments are required: --colours"),
        ([SMALL, "--colours", "0"], "--colours is 0: it takes 1 to 4095"),
        ([SMALL, "--colours", "5", "--seed", "-1"], "--seed is -1: it takes 0 to "),
        ([SMALL, "--colours", "5", "--sweeps", "0"], "--sweeps is 0: it takes 1 to "),
        ([SMALL, "--colours", "5", "--replicas", "1025"], "--replicas is 1025: it takes 1 to 1024"),
        ([__file__, "--colours", "5"], "test_colouring.py:1: "),
        ([SMALL, "--colours", "5", "--json", f"{SMALL}/x.json"], "Not a directory: "),
        ([SMALL, "--colours", "5", "--plot", f"{SMALL}/x.svg"], "Not a directory: "),
    ],
)
def test_what_cannot_be_done_is_refused(
    arguments: list[object], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("annealing", monkeypatch, *arguments)
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
@each_workload
def test_program_runs_by_its_path(name: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    given = ("--colours", "6", "--driver", "host", "--sweeps", "40", "--replicas", "8", "--json", str(report))
    printed = output(f"examples/workloads/{name}.py", str(SMALL), *given)
    assert printed.startswith("0 conflicts after ")
    assert json.loads(report.read_text(encoding="utf-8"))["conflicts"] == 0
