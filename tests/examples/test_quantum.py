"""J7, the quantum workload: its FFT, its order, its norm, and both modes."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt
import pytest

from aiocuda import DriverNotAvailableError, Kernel, ManagedContext
from aiocuda.driver.cuda._compiler import compile_cuda
from tests.driver.cuda.test_compiler import needs_nvrtc
from tests.examples.test_examples import output
from tests.examples.workloads import load

quantum = load("quantum")
Array = npt.NDArray[Any]

DRIVERS = ["host", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)]


def found(*arguments: object) -> dict[str, Any]:
    """What the program finds."""
    report: dict[str, Any] = asyncio.run(quantum.main(quantum.parse([*map(str, arguments)])))
    return report


def stepped(psi: Array, well: Any, dt: float) -> Array:
    """One step, by NumPy's FFT."""
    potential, kinetic = (
        np.sum(np.meshgrid(*[line**2 / 2] * well.dimensions), axis=0).reshape(psi.shape)
        for line in (well.axis, well.momenta)
    )
    half = np.exp(-0.5j * dt * potential)
    moved: Array = half * np.fft.ifft2(np.exp(-1j * dt * kinetic) * np.fft.fft2(half * psi))
    return moved


@pytest.mark.parametrize("points", [2, 4, 64, 512])
def test_transform_is_the_discrete_fourier_transform(points: int) -> None:
    random = np.random.default_rng(points)
    lines = random.normal(size=(3, points)) + 1j * random.normal(size=(3, points))
    roots = np.exp(-2j * math.pi * np.arange(points) / points)
    np.testing.assert_allclose(quantum.transform(lines, roots), np.fft.fft(lines), rtol=0, atol=1e-13 * points)
    back = quantum.transform(quantum.transform(lines, roots), roots.conj()) / points
    np.testing.assert_allclose(back, lines, rtol=0, atol=1e-13)


@pytest.mark.asyncio
@pytest.mark.parametrize(("points", "dimensions"), [(64, 1), (1024, 1), (4096, 1), (64, 2)])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_kernels_do_what_numpy_does(driver: Any, points: int, dimensions: int) -> None:
    """A packet of no symmetry, so that no two points may be taken for each other."""
    well = quantum.Well(points, dimensions, seed=7)
    random = np.random.default_rng(points)
    shape = (well.rows, points)
    start = random.normal(size=shape) + 1j * random.normal(size=shape)
    well.start = lambda: start
    async with ManagedContext(driver=driver) as context:
        evolution = quantum.Evolution(well, 0.1, context)
        (sample,) = [sample async for sample in evolution.run([range(1, 3)])]
        state = await evolution.state()
    expected = stepped(stepped(start, well, 0.1), well, 0.1)
    np.testing.assert_allclose(state, expected, rtol=0, atol=1e-11)

    density, cell = np.abs(expected) ** 2, well.spacing**dimensions
    x, y = well.exact(3 * 0.1)
    mean = [(density * well.axis).sum() / density.sum(), (density * well.axis[: well.rows, None]).sum() / density.sum()]
    assert sample.step == 3
    assert sample.norm == pytest.approx(math.sqrt(cell * density.sum()), rel=1e-12)
    assert sample.error == pytest.approx(
        math.sqrt(cell * (np.abs(expected - y[: well.rows, None] * x) ** 2).sum()), rel=1e-12
    )
    assert sample.position == pytest.approx(mean[:dimensions], rel=1e-9)


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("driver", DRIVERS)
def test_half_the_step_is_a_quarter_of_the_error_and_the_norm_is_kept(driver: str, dimensions: int) -> None:
    same = ("--driver", driver, "--points", 64, "--dimensions", dimensions, "--every", 8)
    coarse = found(*same, "--dt", 0.1, "--steps", 12)
    fine = found(*same, "--dt", 0.05, "--steps", 24)
    assert 3.9 < coarse["error"] / fine["error"] < 4.1
    assert 1e-5 < fine["error"] < 1e-2
    for report in (coarse, fine):
        assert report["norm_drift"] < 1e-12
        last = report["history"][-1]
        assert last["time"] == pytest.approx(1.2)
        assert last["position"] == pytest.approx(last["exact_position"], abs=report["error"] * 3)


def test_exact_solution_is_the_packet_that_swings() -> None:
    """Its phase, too: Schrödinger's equation holds for it at each point, by differences in time and FFT in space."""
    well = quantum.Well(128, 1, seed=5)
    time, apart = 0.7, 1e-4
    before, here, after = (well.exact(time + shift)[0] for shift in (-apart, 0.0, apart))
    kinetic = np.fft.ifft(well.momenta**2 / 2 * np.fft.fft(here))
    np.testing.assert_allclose(
        1j * (after - before) / (2 * apart), kinetic + well.axis**2 / 2 * here, rtol=0, atol=1e-6
    )
    assert well.spacing * (np.abs(here) ** 2).sum() == pytest.approx(1.0, abs=1e-12)


def test_seed_determines_the_initial_state() -> None:
    first, again, other = (quantum.Well(64, 2, seed).start() for seed in (1, 1, 2))
    assert (first == again).all()
    assert not np.allclose(first, other)


@pytest.mark.parametrize("driver", DRIVERS)
def test_both_modes_come_to_the_same_bits(driver: str) -> None:
    same = ("--driver", driver, "--points", 64, "--steps", 23, "--every", 5, "--dt", 0.05)
    reports = [found(*same, "--mode", mode) for mode in ("sync", "async")]
    assert [report.pop("mode") for report in reports] == ["sync", "async"]
    made = [report.pop("streams_created") for report in reports]
    assert made[0] == 0
    assert made[1] > 0 or driver == "cuda"  # whose kept streams, from earlier tests of this process, are used again
    assert all(report.pop("seconds") > 0 for report in reports)
    assert reports[0] == reports[1]
    assert [sample["step"] for sample in reports[0]["history"]] == [5, 10, 15, 20, 23]


def test_picture_shows_what_was_measured() -> None:
    report = found("--driver", "host", "--points", 64, "--dimensions", 2, "--steps", 40, "--dt", 0.1)
    root = ET.fromstring(quantum.picture(report))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"mean position", "error", "norm - 1", "⟨x⟩", "y exactly"} <= set(texts)
    lines = [
        element.get("d", "") for element in root.iter("{http://www.w3.org/2000/svg}path") if "fill" in element.attrib
    ]
    assert [line.count("L") for line in lines] == [3] * 6  # four samples each


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--points", "100"], "--points is 100: it takes a power of two, 64 to 4096"),
        (["--points", "8192"], "--points is 8192: it takes"),
        (["--dt", "nan"], "--dt is nan: it takes more than 0 and at most 1"),
        (["--steps", "0"], "--steps and --every take 1 or more"),
        (["--json", f"{__file__}/x.json"], "Not a directory: "),
    ],
)
def test_what_it_cannot_do_is_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quantum.parse(arguments)
    assert complaint in capsys.readouterr().err


def test_missing_driver_is_reported_in_one_line() -> None:
    async def main() -> None:
        raise DriverNotAvailableError("CUDA is not available: no NVIDIA driver")

    with pytest.raises(SystemExit, match=r"^CUDA is not available: no NVIDIA driver$"):
        load("program").run(main())


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [quantum.split_step, quantum.measure], ids=lambda kernel: kernel.name)
def test_source_compiles(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_CACHE_DIR", str(tmp_path))
    image, symbol, *_ = compile_cuda(kernel.source, "sm_90")
    assert image
    assert symbol == kernel.name


@pytest.mark.slow
def test_program_writes_report_and_picture(tmp_path: Path) -> None:
    report, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    printed = output(
        "examples/workloads/quantum.py", "--driver", "host", "--steps", "20", "--json", str(report), "--plot", str(plot)
    )
    assert printed.startswith("20 steps of 0.02: norm kept to ")
    assert json.loads(report.read_text(encoding="utf-8"))["steps"] == 20
    assert plot.read_text(encoding="utf-8").startswith("<svg ")
