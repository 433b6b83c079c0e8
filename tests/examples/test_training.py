"""The program of the page on training: killed at random steps, it has the weights of a run that nothing has killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.libraries import requires
from tests.project.tree import ROOT, SOURCE


@pytest.mark.heavy
@pytest.mark.timeout(600)
@requires("torch")
@pytest.mark.parametrize(
    ("ranks", "thread", "process", "gpus"),
    [
        pytest.param(1, 10, 10, "", id="one-rank"),
        pytest.param(2, 3, 1, "", id="two-ranks"),
        pytest.param(3, 3, 1, "", id="three-ranks"),
        pytest.param(1, 3, 1, None, id="one-rank-on-a-gpu", marks=pytest.mark.gpu),
    ],
)
def test_killed_training_has_the_weights_of_an_uninterrupted_one(
    ranks: int, thread: int, process: int, gpus: str | None, tmp_path: Path
) -> None:
    """To the bit, also where processes decode instead of threads, and with the optimiser and the loader's state."""
    variables = {"PYTHONPATH": os.pathsep.join((str(SOURCE), str(ROOT))), "OMP_NUM_THREADS": "1"}
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpus
    command = [sys.executable, "-m", "tests.examples.killed_training", tmp_path, ranks, thread, process, 1]
    ended = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_page_shows_the_program() -> None:
    page = (ROOT / "docs" / "how-to" / "training.md").read_text(encoding="utf-8")
    program = (ROOT / "examples" / "training.py").read_text(encoding="utf-8")
    assert f"```python\n{program}```\n" in page
