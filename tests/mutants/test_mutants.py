"""Planted bugs: the simulator finds each one, and reports an invariant that the bug violates.

`python -m tests.mutants` searches for the seeds again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants.mutant import MUTANTS, Mutant, Verdict, simulate
from tests.mutants.table import PAGE, table
from tests.planting import StaleBugError
from tests.simulation.run import simulate as run_unchanged

pytestmark = pytest.mark.slow


def run(mutant: Mutant, tree: Path) -> Verdict:
    mutant.plant(tree)
    return simulate(tree, mutant.first, mutant.seeds)


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Verdict]]]:
    """Run the selected mutants, in as many processes as there are processors."""
    wanted = {item.name for item in request.session.items}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield {
            mutant.name: threads.submit(run, mutant, tmp_path_factory.mktemp(mutant.name))
            for mutant in MUTANTS
            if f"test_planted_bug_is_found[{mutant.name}]" in wanted
        }
        threads.shutdown(cancel_futures=True)


@pytest.mark.heavy
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_planted_bug_is_found(mutant: Mutant, verdicts: dict[str, Future[Verdict]]) -> None:
    verdict = verdicts[mutant.name].result()  # raises StaleBugError if the patch does not apply
    assert verdict.code == 1, (
        f"no seed from {mutant.first} on finds it. After a change of the library other seeds may find it: "
        f"`python -m tests.mutants {mutant.name}` searches for the first one\n{verdict.output}"
    )
    assert verdict.violated in mutant.expected, verdict.output
    assert verdict.seed is not None
    unchanged = run_unchanged(verdict.seed)
    assert (unchanged.violations, unchanged.traceback) == ([], ""), f"seed {verdict.seed} of the unchanged package"


def test_patch_that_does_not_apply_is_reported(tmp_path: Path) -> None:
    patch = tmp_path / "old.patch"
    patch.write_text(
        "# Nothing.\n# V1 by seed 0\n\n"
        "--- a/src/aiocuda/event.py\n+++ b/src/aiocuda/event.py\n@@ -1,1 +1,1 @@\n-never was\n+is\n",
        encoding="utf-8",
    )
    with pytest.raises(StaleBugError, match=r"(?s)old\.patch.*aiocuda/event\.py has 0 times.*never was.*git diff src"):
        Mutant.read(patch).plant(tmp_path / "tree")


def test_there_are_at_least_20_mutants() -> None:
    assert len(MUTANTS) >= 20


def test_documentation_lists_the_mutants() -> None:
    assert table(MUTANTS) in PAGE.read_text(encoding="utf-8"), (
        f"the table in {PAGE.name} differs: `python -m tests.mutants` writes it"
    )
