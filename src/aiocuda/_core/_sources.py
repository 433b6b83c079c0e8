"""The files of the core that are compiled, and their hash. It imports nothing of aiocuda: the build runs it alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["FOLDER", "MODULES", "hash_of_sources"]

FOLDER = Path(__file__).parent

#: The modules that the extension has, each after those that it uses. `_state` is of both forms.
MODULES = (
    "_hot", "_estimate", "_blocks", "_native", "_operation", "_stream_operation", "_ring", "_bound_call",
    "_enqueuing_stream", "_gather",
)  # fmt: skip

#: The other files from which the extension is built.
_OTHERS = ("_state.py", "_compiled.pxd", "_calls.h", "build.py")


def hash_of_sources(folder: Path = FOLDER) -> str | None:
    """Return a hash of the files from which the extension is built; None if one of them is missing."""
    try:
        files = [(folder / name).read_bytes() for name in (*(f"{module}.py" for module in MODULES), *_OTHERS)]
    except OSError:
        return None
    return hashlib.sha256(b"\0".join(files)).hexdigest()[:16]
