"""The report of the benchmark of loaders."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.loader_cases import Case
from tests.benchmarks.loader_report import LoaderReport


def test_ours_is_held_beside_the_faster_form_of_spdl(tmp_path: Path) -> None:
    case, file = Case("memcpy", 1 << 20, 1.0), tmp_path / "report.json"
    report = LoaderReport(file, "command", small=False, driver="host")
    report.add_case(case, {"step": 999.0, "link": 5000.0, "decode_thread": 4000.0, "decode_process": 3000.0})
    for loader, rate in (("aiocuda-thread", 900.0), ("spdl", 300.0), ("spdl-subprocess", 450.0), ("torch", 90.0)):
        line = {"loader": loader, "case": case.name, "rates": [rate], "first_ms": 1.0, "cores": 1.0, "note": ""}
        report.add({**line, "longest_turn_ms": None})
    (row,) = json.loads(file.read_text("utf-8"))["rows"]
    assert {name: peer["times"] for name, peer in row["peers"].items()} == {
        "spdl": 3,
        "spdl-subprocess": 2,
        "torch": 10,
    }
    assert (row["figures"]["times_spdl"], row["figures"]["times_torch"]) == (2, 10)
    assert next(check["value"] for check in row["checks"] if check["figure"] == "times_spdl") == 2


def test_ours_is_held_beside_the_same_executor_of_another_checkout(tmp_path: Path) -> None:
    case, file = Case("memcpy", 1 << 20, 1.0), tmp_path / "report.json"
    report = LoaderReport(file, "command", small=False, driver="host", before="a3ca03f1")
    report.add_case(case, {"step": 999.0, "link": 5000.0, "decode_thread": 4000.0, "decode_process": 3000.0})
    for loader, rate in (("before-thread", 1000.0), ("aiocuda-thread", 900.0), ("before-process", 500.0)):
        line = {"loader": loader, "case": case.name, "rates": [rate], "first_ms": 1.0, "cores": 1.0, "note": ""}
        report.add({**line, "longest_turn_ms": None})
    (row,) = json.loads(file.read_text("utf-8"))["rows"]
    found = {name: (peer["label"], peer["times"]) for name, peer in row["peers"].items()}
    assert found == {"before": ("a3ca03f1", 0.9)}
    check = next(check for check in row["checks"] if check["figure"] == "times_before")
    assert (check["value"], check["at_least"], check["met"]) == (0.9, 0.95, False)
