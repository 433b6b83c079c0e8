"""The first seed of random tests."""

from __future__ import annotations

import functools
import hashlib

from tests.project.tree import PACKAGE

__all__ = ["seed_of_source"]


@functools.cache
def seed_of_source() -> int:
    """Return a seed that follows from the source of the library.

    Each change of the library is tested with new random programs. Runs of the same source have the same ones, so that
    what passes once passes again. `make soak` begins with a random seed.
    """
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.read_bytes())
    return int.from_bytes(found.digest()[:4], "big")
