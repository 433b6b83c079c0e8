"""``aiocuda bench``: rows, output, exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from rich.console import Console

import aiocuda as package
from aiocuda import Device
from aiocuda.cli._bench import ROWS, BenchReport, BenchRow, Row, bench, checkout, published_figures
from aiocuda.cli._screen import BenchTable
from aiocuda.driver.host import HostDriver
from tests.benchmarks.readme import PUBLISHED, PUBLISHED_ROWS, published
from tests.cli.programs import STRICT, environment, program, started
from tests.helpers import PATIENCE, git
from tests.project.tree import ROOT

pytest.importorskip("typer")

KEYS = ["name", "title", "p50", "p99", "n", "unit", "published", "ratio", "error"]


@pytest.mark.heavy
@pytest.mark.slow
def test_json_has_standard_output_to_itself() -> None:
    finished = started("bench", "--json", "--driver", "host")
    assert (finished.returncode, finished.stderr) == (0, "")
    told = json.loads(finished.stdout)
    assert list(told) == [
        "schema", "command", "driver", "comparable", "machine", "versions", "commit", "dirty", "published", "rows",
    ]  # fmt: skip
    assert (told["driver"], told["comparable"], told["machine"]["gpu"]) == ("host", False, None)
    assert told["command"] == "aiocuda bench --json --driver host"
    assert told["versions"]["aiocuda"] == package.__version__
    assert "H200" in told["published"]["gpu"]
    assert [row["name"] for row in told["rows"]] == [row.name for row in ROWS]
    for row in told["rows"]:
        assert list(row) == KEYS
        assert row["p50"] > 0
        assert row["n"] > 0
        if row["unit"] == "µs":
            assert row["p99"] >= row["p50"]
        else:
            assert row["p99"] <= row["p50"]
        assert (row["published"] is None) is (row["name"] not in PUBLISHED_ROWS)
        if row["published"] is not None:
            assert row["ratio"] == pytest.approx(row["p50"] / row["published"])


def test_published_figures_are_those_of_the_project() -> None:
    assert (ROOT / PUBLISHED).read_text("utf-8") == published(ROOT / "docs" / "benchmarks")
    assert published_figures()["rows"].keys() == PUBLISHED_ROWS.keys()
    units = {row.name: row.unit for row in ROWS}
    assert all(units[name] == (unit if unit != "ms" else "ops/s") for name, (_, unit, _) in PUBLISHED_ROWS.items())


def test_commit_is_that_of_the_checkout_in_which_the_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    assert checkout(folder) == (None, None)
    git(tmp_path, "init")
    (tmp_path / "program.py").write_text("")
    git(tmp_path, "add", "program.py")
    git(tmp_path, "commit", "-m", "a repository around an installed package")
    assert checkout(folder) == (None, None)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "the package")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert checkout(folder) == (head, False)
    (folder / "__init__.py").write_text("changed = True")
    assert checkout(folder) == (head, True)


@pytest.mark.parametrize(
    ("commit", "dirty", "said"),
    [
        (None, None, f"aiocuda {package.__version__}: host driver"),
        ("0123456789abcdef", False, f"aiocuda {package.__version__} (0123456789ab): host driver"),
        (
            "0123456789abcdef",
            True,
            f"aiocuda {package.__version__} (0123456789ab with uncommitted changes): host driver",
        ),
    ],
)
def test_table_has_the_commits_of_both_figures(
    commit: str | None, dirty: bool | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = asyncio.run(report_of(monkeypatch))
    report.commit, report.dirty = commit, dirty
    report.published = {**report.published, "aiocuda": "0.9", "commit": "fedcba9876543210", "dirty": True}
    console = Console(file=io.StringIO(), width=200)
    BenchTable(console).begin(report)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.startswith(said)
    assert "aiocuda 0.9 (fedcba987654 with uncommitted changes)\n" in printed


async def report_of(monkeypatch: pytest.MonkeyPatch, *rows: Row) -> tuple[BenchReport, list[BenchRow]]:
    """Run some rows on the host driver. Return the report, and the rows that were shown."""
    monkeypatch.setattr("aiocuda.cli._bench.ROWS", rows)
    shown: list[BenchRow] = []
    async with package.open_device(driver=HostDriver()) as device:
        report = await bench(device, None, lambda report: None, shown.append)
        assert device.statistics().in_flight == 0
    return report, shown


def counting(values: list[float], closed: list[bool]) -> Any:
    async def measure(device: Device) -> Any:
        try:
            for value in values:
                await asyncio.sleep(0)
                yield value
        finally:
            closed.append(True)

    return measure


def test_p99_is_on_the_bad_side_and_the_first_samples_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    values = [1e9, *(float(number) for number in range(100)), 1e9]
    low = Row("await_empty_kernel", "", "µs", counting(values, closed), most=100)
    high = Row("pinned_4k", "", "GB/s", counting(values, closed), most=100)
    report, shown = asyncio.run(report_of(monkeypatch, low, high))
    assert report.rows == shown
    assert [(row.p50, row.p99, row.n) for row in shown] == [(49.5, 99.0, 100), (49.5, 0.0, 100)]
    figures = json.loads((ROOT / PUBLISHED).read_text("utf-8"))
    assert shown[0].ratio == pytest.approx(49.5 / figures["rows"]["await_empty_kernel"]["p50"])
    assert (shown[1].published, shown[1].ratio) == (None, None)
    assert closed == [True, True]


def test_a_row_without_enough_memory_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hungry(device: Device) -> Any:
        async with device.stream() as stream:
            yield 1.0
            await stream.fill(stream.empty(1 << 50), 0)
            yield 1.0

    last = Row("last", "", "µs", counting([1.0] * 10, []))
    _, (first, second) = asyncio.run(report_of(monkeypatch, Row("hungry", "", "µs", hungry), last))
    assert (first.p50, first.n) == (None, 0)
    assert first.error is not None
    assert (second.n, second.error) == (9, None)


@pytest.mark.heavy
@pytest.mark.slow
def test_table_without_a_gpu_is_not_compared_and_a_row_without_memory_is_1() -> None:
    """A device with too little memory for the large copies."""
    little = """
        import aiocuda.cli._app as app
        from aiocuda.driver.host import HostDriver

        open_device = app.open_device
        app.open_device = lambda driver: open_device(driver=HostDriver(memory=2 << 20))
    """
    finished = program(little, "bench", "--driver", "host")
    assert (finished.returncode, finished.stderr) == (1, "")
    for words in ("NOT COMPARABLE: ", "published: NVIDIA H200, CUDA 13.0"):
        assert words in finished.stdout
    for row in ROWS:
        assert f"\n{row.title} " in finished.stdout
    lines = finished.stdout.splitlines()
    failed = ("pinned memory", "NumPy array", "triple buffer")
    assert all(any(words in line for words in failed) for line in lines if "error: " in line)
    assert sum("error: " in line for line in lines) == 5
    assert sum("not comparable" in line for line in lines) == len(PUBLISHED_ROWS) - 5
    assert "slower" not in finished.stdout


@pytest.mark.heavy
@pytest.mark.slow
def test_a_fault_is_4() -> None:
    """A driver that copies to where there is no memory."""
    wrong = """
        from aiocuda.driver.host import HostDriver

        upload = HostDriver.upload
        HostDriver.upload = lambda self, stream, target, source, nbytes: upload(self, stream, 4096, source, nbytes)
    """
    finished = program(wrong, "bench", "--driver", "host")
    assert finished.returncode == 4
    assert "aiocuda: device 0 has faulted" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals as POSIX has them")
@pytest.mark.parametrize("title", ["await an empty kernel", "allocate and"])
def test_ctrl_c_is_130_before_the_last_row(title: str) -> None:
    """During the row after this one."""
    process = subprocess.Popen(
        [sys.executable, *STRICT, "-m", "aiocuda", "bench", "--driver", "host"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(title in line for line in process.stdout)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr.read() == "aiocuda: interrupted\n"
        assert ROWS[-1].title not in process.stdout.read()
