"""The process of one row or one peer, or the one that describes the machine.

It writes its measurements before it closes anything, so that a process which then fails or hangs loses nothing. On
SIGUSR1 it prints the stack of the main thread, on SIGUSR2 those of all threads; this works even if a thread waits
forever for the GIL. (Inspecting running threads can crash. Hence two signals: the important thread is first.)
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import faulthandler
import gc
import importlib
import json
import signal
from pathlib import Path
from typing import Any

from . import peers
from .figures import Measured
from .rows import ROWS, Row, size
from .turns import TurnMeter, metered_loop


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.child")
    parser.add_argument("verb", choices=("machine", "row", "peer"))
    parser.add_argument("name", nargs="?", help="the row")
    parser.add_argument("--peer", choices=sorted(peers.PEERS))
    parser.add_argument("--driver", choices=("cuda", "host"), default="host")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--size", action="append", type=size, default=[])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    if arguments.verb == "machine":
        from .machine import describe

        _hand_back(arguments.out, describe())
        return
    row = ROWS[arguments.name]
    sizes = row.size(arguments.small, dict(arguments.size))
    info = peers.PEERS[arguments.peer] if arguments.verb == "peer" else None
    reason = peers.missing(info, gpu=arguments.driver == "cuda") if info is not None else None
    if reason is not None:
        _hand_back(arguments.out, {"skipped": reason})
        return
    loop, turns = _loop(info)
    if info is None or info.ours:
        work = _measure_row(row, arguments.driver, sizes, turns, arguments.out)
    else:
        work = _measure_peer(row, info, sizes, turns, arguments.out)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(work)
    except Exception as error:
        _hand_back(arguments.out, {"error": f"{type(error).__name__}: {error}"})
        raise


def _loop(info: peers.PeerInfo | None) -> tuple[asyncio.AbstractEventLoop, TurnMeter]:
    """asyncio's own, or the one of another package, which has no turns to measure."""
    if info is None or not info.ours:
        return metered_loop()
    return importlib.import_module(info.requires).new_event_loop(), TurnMeter()


async def _measure_row(row: Row, driver: str, sizes: dict[str, float], turns: TurnMeter, out: Path) -> None:
    from .setting import open_setting

    function = getattr(importlib.import_module(f".{row.module}", __package__), row.function or row.name)
    async with open_setting(driver, sizes, turns) as setting:
        _freeze()
        measured = await function(setting)
        statistics: Any = setting.device.statistics()
        _hand_back(out, {**_plain(measured), "statistics": _fields(statistics)})


async def _measure_peer(row: Row, info: peers.PeerInfo, sizes: dict[str, float], turns: TurnMeter, out: Path) -> None:
    from .peers import rows

    function = getattr(rows, row.function or row.name)
    peer = peers.make(info)
    _freeze()
    _hand_back(out, _plain(await function(peer, sizes, turns)))


def _freeze() -> None:
    """Exclude the objects of the start-up from garbage collection, as services do.

    Traversing the objects of NumPy and the CUDA packages took 23 ms in the middle of a burst: a pause of the
    interpreter that is unrelated to the measured code. Later objects are collected as usual.
    """
    gc.collect()
    gc.freeze()


def _plain(measured: Measured) -> dict[str, Any]:
    return dataclasses.asdict(measured)


def _fields(statistics: Any) -> dict[str, Any]:
    """Counters of the device: the numbers of polls, sleeps and parks explain a figure."""
    return dict(statistics) if isinstance(statistics, dict) else dataclasses.asdict(statistics)


def _hand_back(out: Path, result: dict[str, Any]) -> None:
    """Add to what was handed back before."""
    before = json.loads(out.read_text("utf-8")) if out.exists() else {}
    out.write_text(json.dumps({**before, **result}), encoding="utf-8")


if __name__ == "__main__":
    main()
