"""Each planted bug of the cluster is found by its test, and the unchanged cluster passes."""

from __future__ import annotations

from tests.cluster.planted import BUGS
from tests.planting import planted_tests

test_planted_bug_is_found, test_random_programs_break_no_rule = planted_tests(
    BUGS, package="cluster", simulation="tests.cluster.simulation", seeds=400, programs=300, soak=10_000
)
