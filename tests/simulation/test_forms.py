"""The compiled core does the same as the core in Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from aiocuda._core import build
from tests.project.tree import ROOT, SOURCE

#: The number of seeds in `make slow`, and in the soak.
SEEDS, MANY_SEEDS = 100, 1_000

_PROGRAM = """
import hashlib, json, sys
from aiocuda._core._form import form
from tests.simulation.run import simulate

def trace(seed):
    result = simulate(seed, trace=True)
    assert not result.traceback, result.traceback
    return hashlib.sha256("\\n".join(result.trace).encode()).hexdigest()

print(json.dumps([form().name, [trace(seed) for seed in range(int(sys.argv[1]))]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [pytest.param(SEEDS, marks=pytest.mark.heavy), pytest.param(MANY_SEEDS, marks=pytest.mark.soak)]
)
@pytest.mark.skipif(build.why_not_compiled() is not None, reason=str(build.why_not_compiled()))
def test_one_seed_gives_the_same_trace_in_both_forms(seeds: int) -> None:
    build.build()
    path = os.pathsep.join((str(SOURCE), str(ROOT)))
    running = {
        form: subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(seeds)],
            env={**os.environ, "PYTHONPATH": path, "AIOCUDA_CORE": form},
            stdout=subprocess.PIPE,
            text=True,
        )
        for form in ("python", "compiled")
    }
    traces = {}
    for form, process in running.items():
        name, traces[form] = json.loads(process.communicate()[0])
        assert name == form
    assert [seed for seed in range(seeds) if traces["python"][seed] != traces["compiled"][seed]] == []
