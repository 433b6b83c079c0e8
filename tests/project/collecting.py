"""`collect` runs pytest with this module as a plugin, and returns the tests that it collects.

As a command, ``python -m tests.project.collecting`` checks that the tests which docs/reference and the table of bad
input name exist, and that those of a promise run. ``make check`` runs it: a collection takes several seconds.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.project.features import read
from tests.project.tree import ROOT

_PLUGIN = "tests.project.collecting"
_RESULT_FILE = "AIOCUDA_COLLECTED"
_found: dict[str, bool] = {}


def collect(files: Iterable[str]) -> dict[str, bool]:
    """Return the ids of all tests in these files, without parameters; True for each test that runs somewhere.

    A test runs if it is neither skipped nor expected to fail, with some of its parameters. Tests that need a GPU, and
    tests of the soak, run, too.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "collected.json")
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "-p", _PLUGIN, *files],
            cwd=ROOT,
            env={**os.environ, "AIOCUDA_CORE": "python", _RESULT_FILE: str(result)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        found: dict[str, bool] = json.loads(result.read_text(encoding="utf-8"))
        return found


def _runs(item: Any) -> bool:
    """True if no mark and no call in its source skips the test or expects it to fail."""
    if any(True for _ in item.iter_markers("skip")) or any(True for _ in item.iter_markers("xfail")):
        return False
    if any(mark.args and mark.args[0] for mark in item.iter_markers("skipif")):
        return False
    source = inspect.getsource(item.function)
    return not any(call in source for call in ("pytest.skip(", "pytest.xfail(", "pytest.importorskip("))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note a test. pytest calls this before it deselects tests."""
    name = item.nodeid.partition("[")[0]
    _found[name] = _found.get(name, False) or _runs(item)


def pytest_collection_finish() -> None:
    """Write the result for `collect`."""
    Path(os.environ[_RESULT_FILE]).write_text(json.dumps(_found), encoding="utf-8")


def named(page: str) -> set[str]:
    """Return the tests in the table of a page of the reference."""
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    return {test for row in read(text) for test in row.tests}


def problems(tests: set[str], proofs: set[str]) -> list[str]:
    """Return what is wrong: files and tests that do not exist, and tests in ``proofs`` that never run."""
    files = sorted({test.partition("::")[0] for test in tests})
    missing = [file for file in files if not (ROOT / file).is_file()]
    found = collect(file for file in files if file not in missing)
    wrong = [f"{file} does not exist" for file in missing]
    wrong += [f"{test} does not exist" for test in sorted(tests - found.keys())]
    return wrong + [f"{test} never runs" for test in sorted(proofs) if found.get(test) is False]


def main() -> int:
    """Print what is wrong. Return 1 if anything is."""
    from tests.bad_input.elsewhere import ELSEWHERE

    proofs = named("promises.md") | {test for tests in ELSEWHERE.values() for test in tests}
    wrong = problems(proofs | named("features.md"), proofs)
    print("\n".join(wrong) or f"The reference names {len(proofs)} tests of promises; all of them run.")  # noqa: T201
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
