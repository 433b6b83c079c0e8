"""P34 with the libraries themselves, on a GPU. Each case is a process of its own, for what it tests is a crash."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.project.forked import LIBRARIES, ForkingProcess
from tests.stream.beside_child import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROGRAM = """\
import warnings
from tests.stream.beside_child import main
warnings.simplefilter("default")
main({case!r})
"""


@pytest.fixture(scope="module")
def process_with() -> Iterator[Callable[[str], ForkingProcess]]:
    """Return the process that has imported a library, which takes seconds, and forks for each case."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def started(library: str) -> ForkingProcess:
            return stack.enter_context(contextlib.closing(ForkingProcess([*LIBRARIES, library])))

        yield started


@pytest.mark.parametrize(
    ("library", "case"),
    [(library, case) for library, cases in CASES.items() if importlib.util.find_spec(library) for case in cases],
)
def test_other_library_goes_on_with_a_closed_stream(
    library: str, case: str, process_with: Callable[[str], ForkingProcess], tmp_path: Path
) -> None:
    tmp_path.joinpath("case.py").write_text(PROGRAM.format(case=case), encoding="utf-8")
    finished = process_with(library).run(["case.py"], tmp_path, {})
    assert finished.status == 0, f"{finished.status}\n{finished.output[-2000:]}{finished.errors[-6000:]}"
    told = json.loads(finished.output.strip().splitlines()[-1])
    assert told
    assert {what: true for what, true in told.items() if not true} == {}
