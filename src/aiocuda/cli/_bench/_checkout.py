"""`checkout`: the commit of a package that runs from a checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

__all__ = ["Checkout", "checkout"]


class Checkout(NamedTuple):
    """The commit, and whether files differ from it. None if the package does not run from a checkout of git."""

    commit: str | None
    dirty: bool | None


def checkout(package: Path) -> Checkout:
    """Return the commit of a package's folder. **May block**, to run git."""
    try:
        # An installed package may be below the folder of another repository, and is no part of it.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        return Checkout(_git(package, "rev-parse", "HEAD").strip(), bool(_git(package, "status", "--porcelain", ".")))
    except (OSError, subprocess.SubprocessError):
        return Checkout(None, None)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
