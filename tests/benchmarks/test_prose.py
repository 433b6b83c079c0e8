"""Figures in the sentences and tables of the pages are those of ``docs/benchmarks/*.json``, in as many digits."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from .machine import ROOT

DOCS = ROOT / "docs"


@cache
def rows(file: str) -> dict[str, dict[str, Any]]:
    report = json.loads((DOCS / "benchmarks" / f"{file}.json").read_text(encoding="utf-8"))
    return {row["name"]: row for row in report["rows"]}


def of(file: str, row: str, *keys: str) -> float:
    """Return a figure of a row: its p50, that of its baseline or of a peer, or another figure."""
    found = rows(file)[row]
    for key in keys:
        found = found[key]
    return float(found["p50"] if isinstance(found, dict) else found)


EMPTY, UP, STALL = ("h200", "await_empty_kernel"), ("h200", "pageable_up"), ("h200-peers", "latency_5ms")
REDUCE, REPLAY = ("h200-x2-collectives", "all_reduce_devices"), ("h200", "pipeline_100us_replay")
PINNED = of(*UP) / of(*UP, "figures", "pinned_ratio")

#: A text of a page with {} for each figure, and the figures.
SENTENCES = [
    (
        "how-to/coming-from.md",
        "has the lowest latency: {} µs for an empty kernel in [Figures](../benchmarks.md), compared with {} µs for "
        "`await` and {} µs for `to_thread`",
        [of(*EMPTY, "baseline"), of(*EMPTY), of(*EMPTY, "peers", "torch_to_thread")],
    ),
    (
        "how-to/launch-host-func.md",
        "`await asyncio.to_thread(event.synchronize)` | {} µs |",
        [of(*STALL, "peers", "torch_to_thread")],
    ),
    (
        "how-to/launch-host-func.md",
        "with `call_soon_threadsafe` | {} µs |",
        [of(*STALL, "peers", "cupy_host_function")],
    ),
    ("how-to/launch-host-func.md", "of an operation of aiocuda is {} µs late there", [of(*STALL)]),
    (
        "how-to/launch-host-func.md",
        "for an event of PyTorch it was {} µs later than a host callback in C",
        [of("h200-wait", "wait_for_torch", "figures", "beyond_raw_us")],
    ),
    ("explanation/calls-that-wait.md", "it stood still for {} ms on two H200", [of("h200-x2-stalls", "stalls_peers")]),
    (
        "how-to/troubleshooting.md",
        "memory reach {} to {} GB/s with four threads, and copies of pinned memory {} GB/s",
        [of("h200", "pageable_down"), of(*UP), PINNED],
    ),
    (
        "tutorial/3-memory.md",
        "copied by the driver | {} | | ordinary array, copied by aiocuda | {} | | pinned array | {} |",
        [of(*UP, "baseline"), of(*UP), PINNED],
    ),
    ("how-to/cluster.md", "lost serves again after {} s", [of("h200-x2-cluster", "cluster_losses")]),
    (
        "how-to/coordination.md",
        "took {} ms for 256 MB, and NCCL {} ms; for 1 MB it took {} ms, and NCCL {} ms",
        [
            of(*REDUCE),
            of(*REDUCE, "peers", "nccl4py"),
            of(*REDUCE, "figures", "small_us") / 1000,
            of(*REDUCE, "peers", "nccl4py", "figures", "small_us") / 1000,
        ],
    ),
    (
        "explanation/pipelines.md",
        "wait for the slot reach {} of those that do not, and a pipeline with replay reaches {} of the former",
        [of(*REPLAY, "figures", "of_by_hand_0.1_0.1_0.1"), of(*REPLAY, "figures", "of_paced_0.1_0.1_0.1")],
    ),
]


def services() -> list[tuple[str, str, list[float]]]:
    """Return the rows of the table of PyTorch services."""
    found = []
    for name, prefix in (
        ("`integrations.torch.submit`", ""),
        ("PyTorch on the loop, `synchronize()`", "on_loop_"),
        ("`asyncio.to_thread`", "to_thread_"),
        ("an event polled after `sleep(0)`", "sleep_0_"),
    ):
        figures = []
        for size in ("64", "8192"):
            row = ("h200-services", f"torch_service_{size}")
            figures += [of(*row, "figures", f"{prefix}per_s") if prefix else of(*row)]
            figures += [of(*row, "figures", f"{prefix}longest_turn_ms")]
        found.append(("how-to/pytorch-service.md", f"| {name} | {{}}/s | {{}} ms | {{}}/s | {{}} ms |", figures))
    return found


def waits() -> list[tuple[str, str, list[float]]]:
    """Return the rows of the table of waits."""
    durations = {
        "10 ms": "constant",
        "1 and 10 ms in turn": "in_turn",
        "2 to 20 ms, uniform": "uniform",
        "10 ms, a tenth of them 25 ms": "longer",
        "20 ms, a tenth of them 3 ms": "shorter",
        "about 5 ms, lognormal": "lognormal",
    }
    found = []
    for streams in (1, 16):
        for name, key in durations.items():
            figures = [
                of("h200-waits", f"lateness_{streams}", "figures", f"{policy}_{key}_{figure}")
                for policy in ("balanced", "latency", "efficient", "raw")
                for figure in ("p50_us", "p99_us", "max_us", "cores")
            ]
            cells = " | ".join(["{}, {}, {}; {}"] * 4)
            found.append(("explanation/waiting.md", f"| {streams}: {name} | {cells} |", figures))
    return found


@pytest.mark.parametrize(("page", "text", "figures"), [*SENTENCES, *services(), *waits()])
def test_figures_of_a_page_are_those_of_the_file(page: str, text: str, figures: list[float]) -> None:
    pattern = r"\**(\d[\d .]*\d|\d)\**".join(map(re.escape, text.split("{}")))
    found = re.findall(pattern, " ".join((DOCS / page).read_text(encoding="utf-8").split()))
    assert len(found) == 1, f"{page} has this text {len(found)} times: {text}"
    shown = found[0] if isinstance(found[0], tuple) else (found[0],)
    assert len(shown) == len(figures)
    for each, figure in zip(shown, figures, strict=True):
        assert rounds_to(figure, each), f"{page}: {each} is {figure:g} in the file. {text}"


def rounds_to(figure: float, shown: str) -> bool:
    """Return whether a figure is the shown one in its number of digits: 5 680 has three, 12.8 too."""
    digits = shown.replace(" ", "")
    whole, _, decimals = digits.partition(".")
    zeros = min(len(whole) - len(whole.rstrip("0") or whole), max(len(whole) - 2, 0))  # two digits count at least
    unit = 10.0 ** (-len(decimals) if decimals else zeros)
    return abs(float(digits) - figure) <= unit * 0.501


@pytest.mark.parametrize(
    ("figure", "shown", "is_right"),
    [
        *((5682.2, "5 680", True), (5682.2, "5 690", False), (12.775, "13", True), (12.775, "12", False)),
        *(
            (12.775, "12.8", True),
            (99.8, "100", True),
            (75.5, "100", False),
            (0.0535, "0.05", True),
            (0.0535, "0.06", False),
        ),
    ],
)
def test_digits_of_a_figure(figure: float, shown: str, is_right: bool) -> None:
    assert rounds_to(figure, shown) is is_right
