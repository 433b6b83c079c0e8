"""Bugs that were planted on purpose: the simulator finds each one, and names the invariant that it breaks.

`python -m tests.mutants` finds the seeds anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants.mutant import MUTANTS, Mutant, StalePatchError, Verdict, simulate
from tests.mutants.table import PAGE, table
from tests.testing.simulation.test_simulate import PROGRAMS

pytestmark = pytest.mark.slow


def judge(mutant: Mutant, tree: Path) -> Verdict:
    mutant.plant(tree)
    return simulate(tree, mutant.first, mutant.seeds)


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Verdict]]]:
    """Of the mutants that were asked for, as many processes at a time as there are processors."""
    wanted = {item.name for item in request.session.items}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield {
            mutant.name: threads.submit(judge, mutant, tmp_path_factory.mktemp(mutant.name))
            for mutant in MUTANTS
            if f"test_planted_bug_is_found[{mutant.name}]" in wanted
        }
        threads.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_planted_bug_is_found(mutant: Mutant, verdicts: dict[str, Future[Verdict]]) -> None:
    verdict = verdicts[mutant.name].result()  # or StalePatchError, which says what to do
    assert verdict.code == 1, (
        f"nothing was found from seed {mutant.first} on. If the library has changed, other seeds find it: "
        f"`python -m tests.mutants {mutant.name}` looks for the first one\n{verdict.output}"
    )
    assert verdict.violated in mutant.expected, verdict.output


def test_tree_without_them_passes_the_same_seeds() -> None:
    """`test_thousands_of_programs_break_no_invariant` begins with seed 0, and goes on beyond those of all mutants."""
    assert max(mutant.first + mutant.seeds for mutant in MUTANTS) <= PROGRAMS


def test_patch_that_no_longer_applies_says_so(tmp_path: Path) -> None:
    patch = tmp_path / "old.patch"
    patch.write_text(
        "# Nothing.\n# V1 by seed 0\n\n"
        "--- a/src/aiocuda/event.py\n+++ b/src/aiocuda/event.py\n@@ -1,1 +1,1 @@\n-never was\n+is\n",
        encoding="utf-8",
    )
    with pytest.raises(StalePatchError, match=r"(?s)old\.patch.*0 times in aiocuda/event\.py.*never was.*git diff src"):
        Mutant.read(patch).plant(tmp_path / "tree")


def test_enough_are_planted() -> None:
    assert len(MUTANTS) >= 20


def test_page_lists_them() -> None:
    assert table(MUTANTS) in PAGE.read_text(encoding="utf-8"), (
        f"{PAGE.name} has another table: `python -m tests.mutants` writes both"
    )
