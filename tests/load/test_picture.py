"""The picture of latency and goodput against the load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.benchmarks.machine import ROOT
from tests.load import picture

SVG = "{http://www.w3.org/2000/svg}"


def curve(label: str, capacity: float) -> dict[str, Any]:
    points = [
        {
            "load": load,
            "offered": load * capacity,
            "goodput": min(load, 1.0) * capacity,
            "p99_ms": 20 + 60 * load,
            "refused": max(0.0, load - 1.0),
        }
        for load in (0.5, 1.0, 1.5)
    ]
    return {"server": label, "label": label, "capacity": capacity, "points": points}


def test_picture_has_a_line_for_each_server_and_figure() -> None:
    root = ET.fromstring(picture.draw([curve("<ours>", 1300.0), curve("peer", 90.0)]))
    lines = [path for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]
    assert len(lines) == 4
    marks = [path for path in root.iter(f"{SVG}path") if path.find(f"{SVG}title") is not None]
    assert len(marks) == 2 * 2 * 3 + 2  # and the legend
    text = "".join(root.itertext())
    assert "<ours>: 1300/s" in text
    assert "<ours> at 150 % of its capacity: 1950 requests/s, p99 110.0 ms, goodput 1300/s, refused 50%" in text


def test_places_grow_with_the_values_and_stay_in_the_panels() -> None:
    text = picture.draw([curve("ours", 1300.0)])
    latency, goodput = (
        [tuple(map(float, pair.split())) for pair in match.split("L")]
        for match in re.findall(r'<path d="M([^"]*)" fill="none"', text)
    )
    for places, (left, right) in zip((latency, goodput), picture.PANELS, strict=True):
        assert [x for x, _ in places] == sorted(x for x, _ in places)
        assert all(left < x < right and picture.TOP < y < picture.BOTTOM for x, y in places)
    assert [y for _, y in latency] == sorted((y for _, y in latency), reverse=True)
    assert goodput[1][1] == goodput[2][1] < goodput[0][1]


def test_load_without_a_result_is_left_out_of_the_line() -> None:
    gone = curve("ours", 1300.0)
    gone["points"][2].update(p99_ms=None, goodput=0.0)
    lines = re.findall(r'<path d="M([^"]*)" fill="none"', picture.draw([gone]))
    assert [line.count("L") for line in lines] == [1, 1]


def test_picture_follows_the_page_into_the_dark() -> None:
    text = picture.draw([curve("ours", 1300.0)])
    assert "prefers-color-scheme:dark" in text
    assert 'class="page"' in text


@pytest.mark.parametrize("count", [0, 7])
def test_too_few_or_too_many_servers_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="1 to 6 servers"):
        picture.draw([curve(f"server {number}", 10.0) for number in range(count)])


def test_ticks_lie_between_the_ends_of_the_axis() -> None:
    logarithmic = picture.Axis(8.0, 260.0, 0.0, 100.0, is_logarithmic=True)
    assert logarithmic.ticks() == pytest.approx([10, 20, 50, 100, 200])
    linear = picture.Axis(45.0, 155.0, 0.0, 110.0)
    assert linear.ticks() == pytest.approx([60, 80, 100, 120, 140])
    for axis in (logarithmic, linear):
        ends = [axis.at(value) for value in (axis.low, axis.high, 1000.0, 0.1)]
        assert ends == [axis.first, axis.last, axis.last, axis.first]


def test_picture_of_the_documentation_is_drawn_from_its_report() -> None:
    report = ROOT / "docs" / "benchmarks" / "host-serving.json"
    drawn = ROOT / "docs" / "pictures" / "latency-against-load.svg"
    assert report.exists() == drawn.exists()
    if report.exists():
        curves = json.loads(report.read_text("utf-8"))["curves"]
        assert picture.draw(curves) == drawn.read_text("utf-8"), "run make pictures"


def test_program_writes_the_picture(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"curves": [curve("ours", 5.0)]}))
    picture.main([str(tmp_path / "report.json"), str(tmp_path / "new" / "picture.svg")])
    assert (tmp_path / "new" / "picture.svg").read_text("utf-8").startswith("<svg")
