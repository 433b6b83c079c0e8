"""P34 with the libraries themselves, on a GPU. Each case is a process of its own, for what it tests is a crash."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.project.tree import ROOT
from tests.stream.beside_child import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "case",
    [case for library, cases in CASES.items() if importlib.util.find_spec(library) is not None for case in cases],
)
def test_other_library_goes_on_with_a_closed_stream(case: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.stream.beside_child", case],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, f"{finished.returncode}\n{finished.stdout[-2000:]}{finished.stderr[-6000:]}"
    told = json.loads(finished.stdout.strip().splitlines()[-1])
    assert told
    assert {what: true for what, true in told.items() if not true} == {}
