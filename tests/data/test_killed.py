"""A program that is killed at any moment goes on exactly where it was, also with another world size."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.killed_program import EPOCHS, SAMPLES
from tests.data.test_processes import runs
from tests.helpers import PATIENCE
from tests.project.tree import ROOT


def run(file: Path, world: int, executor: str, steps: int | None, pause: float = 0.0) -> bool:
    """Run the program; kill it a moment after so many steps. Return whether it has ended by itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.data.killed_program", str(file), str(world), executor],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        pids = [int(pid) for pid in process.stdout.readline().split()[1:]]
        if steps is not None:
            for _ in range(steps):
                process.stdout.readline()
            time.sleep(pause)  # noqa: TID251 - a random moment of the next step
            process.kill()
        process.stdout.read()
    until = time.monotonic() + PATIENCE
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < until, "a worker process outlives the program"
        time.sleep(0.001)  # noqa: TID251 - no event tells of the end of another program's child
    return process.returncode == 0


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    file = tmp_path_factory.mktemp("whole") / "progress.json"
    assert run(file, 1, "thread", None)
    indices: list[list[int]] = json.loads(file.read_text())["indices"]
    assert [sorted(each) for each in indices] == [list(range(SAMPLES))] * EPOCHS
    assert indices[0] != indices[1] != indices[2]
    return indices


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "seed"),
    [pytest.param(12, 1, marks=pytest.mark.heavy), pytest.param(200, 2, marks=pytest.mark.soak)],
)
def test_a_killed_program_resumes_exactly(expected: list[list[int]], tmp_path: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    killed = runs_to_the_end = 0
    while killed < kills:
        file = tmp_path / f"progress-{runs_to_the_end}.json"
        ended = False
        while not ended and killed < kills:
            executor = chance.choice(["thread", "thread", "process"])
            ended = run(file, chance.randint(1, 4), executor, chance.randint(0, 8), chance.random() * 0.003)
            killed += not ended
        while not ended:
            ended = run(file, chance.randint(1, 4), "thread", None)
        assert json.loads(file.read_text())["indices"] == expected
        runs_to_the_end += 1
