"""``python -m tests.simulation``: its output, its exit codes, and a long run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.budget import part_of
from tests.project.tree import ROOT, SOURCE
from tests.seeds import seed_of_source
from tests.simulation import __main__ as command
from tests.simulation.run import Outcome, simulate, sweep

KEYS = {
    "seeds",
    "seconds",
    "violations",
    "operations_median",
    "streams_median",
    "faults",
    "transitions_unseen",
}


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start the command in a new process."""
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# The command


def test_seeds_without_violations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert command.main(["--first", "0", "--seeds", "5", "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report.keys() >= KEYS
    assert (report["first"], report["seeds"], report["violations"]) == (0, 5, [])
    assert report["seconds"] > 0
    assert all(isinstance(count, int) and count > 0 for count in report["faults"].values())
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "first seed 0"
    assert printed[-1].startswith("5 seeds in ")
    assert ", 0 violations; median " in printed[-1]


def test_random_first_seed_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    firsts = set()
    for _ in range(2):
        assert command.main(["--seeds", "1"]) == 0
        firsts.add(capsys.readouterr().out.splitlines()[0])
    assert len(firsts) == 2
    assert all(first.startswith("first seed ") for first in firsts)


def broken(seed: int, *, trace: bool = False, asynchronous: bool = True) -> Outcome:
    outcome = simulate(seed, trace=trace, asynchronous=asynchronous)
    if seed == 2:
        outcome.violations.append("V6 planted")
        outcome.traceback = "Traceback: here"
    return outcome


def test_first_violation_ends_it_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulation.run.simulate", broken)
    file = tmp_path / "figures.json"
    assert command.main(["--first", "0", "--seeds", "9", "--json", str(file)]) == 1
    captured = capsys.readouterr()
    assert "seed 2: V6 planted" in captured.out.splitlines()
    assert captured.err == "Traceback: here\n"
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["seeds"], report["violations"]) == (3, ["seed 2: V6 planted"])


def test_trace_of_the_first_seed_is_written(tmp_path: Path) -> None:
    traces = []
    for turn in range(2):
        file = tmp_path / f"{turn}.trace"
        assert command.main(["--first", "4", "--seeds", "1", "--trace", str(file)]) == 0
        traces.append(file.read_bytes())
    assert traces[0] == traces[1]
    lines = traces[0].decode().splitlines()
    assert len(lines) > 50
    assert all(line.split(" ", 1)[0].isdecimal() for line in lines)
    assert lines == simulate(4, trace=True).trace


def test_synchronous_programs_use_default_streams_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """J2: no stream is created, no notifier rings, and no invariant is violated."""
    file = tmp_path / "of seed 4"
    arguments = ["--first", "4", "--seeds", "8", "--synchronous", "--trace", str(file)]
    assert command.main(arguments) == 0
    lines = file.read_text(encoding="utf-8").splitlines()
    assert {line.rsplit(" in ", 1)[1] for line in lines if " in " in line} == {"0"}
    assert lines == simulate(4, trace=True, asynchronous=False).trace != simulate(4, trace=True).trace


def test_seconds_limit_the_run() -> None:
    assert sweep(0, None, 0.2).seeds >= 1


def test_every_20th_seed_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[int, bool]] = []

    def counted(seed: int, *, trace: bool = False, asynchronous: bool = True) -> Outcome:
        runs.append((seed, trace))
        return simulate(seed, trace=trace, asynchronous=asynchronous)

    monkeypatch.setattr("tests.simulation.run.simulate", counted)
    sweep(100, 22, None)
    assert [seed for seed, traced in runs if traced] == [100, 100, 120, 120]
    assert len(runs) == 24


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["simulate"], "unrecognized arguments: simulate"),
        (["--seeds", "0"], "--seeds 0: at least 1"),
        (["--seeds", "many"], "invalid int value: 'many'"),
        (["--seconds", "0"], "--seconds 0.0: more than 0"),
        (["--seconds", "nan"], "--seconds nan: more than 0"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


# The long run

#: Programs of each of the two ranges in `make slow`, and in the soak.
PROGRAMS, MANY_PROGRAMS = 900, 2_000

#: Programs of each range in `make test`.
FEW_PROGRAMS = part_of(250)


def _finished(process: subprocess.Popen[str], file: Path) -> dict[str, Any]:
    out, err = process.communicate(timeout=1_800)
    print(out)  # noqa: T201 - the first seed, to repeat a failure
    assert process.returncode == 0, out + err
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert report["violations"] == []
    return report


def _run_in_parallel(tmp_path: Path, firsts: list[int], *limit: str) -> list[dict[str, Any]]:
    """Run several ranges in parallel, each in its own process."""
    files = [tmp_path / f"{first}.json" for first in firsts]
    processes = [
        start("--first", str(first), *limit, "--json", str(file)) for first, file in zip(firsts, files, strict=True)
    ]
    try:
        return [_finished(process, file) for process, file in zip(processes, files, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_programs_break_no_invariant(tmp_path: Path) -> None:
    """Run the range from seed 0 and a new range for this source in parallel. `make slow` runs thousands."""
    for report in _run_in_parallel(tmp_path, [0, seed_of_source()], "--seeds", str(FEW_PROGRAMS)):
        assert report["seeds"] == FEW_PROGRAMS
        assert report["operations_median"] >= 40
        assert report["streams_median"] >= 3


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    "programs", [pytest.param(PROGRAMS, marks=pytest.mark.heavy), pytest.param(MANY_PROGRAMS, marks=pytest.mark.soak)]
)
def test_thousands_of_programs_break_no_invariant(programs: int, tmp_path: Path) -> None:
    """Run the range from seed 0 and a new range for this source in parallel."""
    for report in _run_in_parallel(tmp_path, [0, seed_of_source()], "--seeds", str(programs)):
        assert report["seeds"] == programs
        assert report["operations_median"] >= 40
        assert report["streams_median"] >= 3
        assert report["transitions_unseen"] == []
        assert report["faults"].keys() >= {
            "refuse 2",
            "fault 700",
            "slow",
            "lose",
            "delay",
            "repeat",
            "cancel",
            "abandon",
        }
