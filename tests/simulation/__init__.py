"""Random programs in virtual time, with invariants that are checked after each step. See README.md."""

from __future__ import annotations
