"""The stages of the demo, one after the other and overlapped: a run of ``aiocuda demo``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["draw"]

DESCRIPTION = (
    "Above, four stages work one after the other, and each waits for the others. "
    "Below, the stages work on different batches at the same time, so the run is shorter."
)


def draw() -> str:
    """Return the picture of a run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overlap.svg"
        command = [sys.executable, "-m", "aiocuda", "demo", "--driver", "host", "--timeline", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        text = path.read_text("utf-8")
    if "<desc>" in text:
        return text
    return text.replace("</title>\n", f"</title>\n<desc>{DESCRIPTION}</desc>\n", 1)
