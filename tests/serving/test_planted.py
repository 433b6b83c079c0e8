"""Each planted bug of the batcher is found by its test, and the unchanged batcher passes."""

from __future__ import annotations

from tests.planting import planted_tests
from tests.serving.planted import BUGS

test_planted_bug_is_found, test_random_programs_break_no_rule = planted_tests(
    BUGS, package="serving", simulation="tests.serving.simulation", seeds=1000, programs=1000, soak=100_000
)
