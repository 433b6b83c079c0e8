"""The folders of the project."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "aiocuda"


def python_path(*folders: Path) -> str:
    """Return PYTHONPATH for a child: these folders, and those of this process, which may have the requirements."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
