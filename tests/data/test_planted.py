"""Each planted bug of the data loader is found by its test, and the unchanged loader passes."""

from __future__ import annotations

from tests.data.planted import BUGS
from tests.planting import planted_tests

test_planted_bug_is_found, test_random_programs_break_no_rule = planted_tests(
    BUGS, package="data", simulation="tests.data.simulation", seeds=250, programs=20, soak=10_000
)
