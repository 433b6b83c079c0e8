"""``python -m tests.load.servers NAME --port PORT --core CORE``"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os

from ..setting import SCALE, Setting
from . import SERVERS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.load.servers", description=__doc__)
    parser.add_argument("name", nargs="?", choices=SERVERS)
    parser.add_argument("--port", type=int)
    parser.add_argument("--core", type=int, help="run on this core only, with all processes that the server starts")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all times")
    parser.add_argument("--describe", action="store_true", help="print versions and missing packages as JSON, and end")
    given = parser.parse_args()
    if given.describe:
        print(json.dumps({"versions": _versions(), "missing": _missing()}))
        return
    if given.name is None or given.port is None:
        parser.error("NAME and --port are required")
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    os.environ[SCALE] = str(given.scale)  # further processes read it, too
    importlib.import_module(f"{__package__}.{given.name}").serve(given.port, Setting.of_environment())


def _missing() -> dict[str, str]:
    return {name: why for name, server in SERVERS.items() if (why := server.missing()) is not None}


def _versions() -> dict[str, str]:
    """Return the versions of the packages that the servers of this environment use."""
    found = {}
    for package in ("starlette", "uvicorn", "fastapi", "litserve", "mosec", "batched", "httptools", "uvloop"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
