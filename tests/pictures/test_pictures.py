"""The committed pictures: their form, their use on the pages, and whether those of figures are up to date."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.pictures import which_one
from tests.pictures.__main__ import main
from tests.pictures.svg import COLOURS, DARK, LIGHT, Axis, Page
from tests.pictures.table import FOLDER, PICTURES
from tests.project.tree import ROOT

SVG = "{http://www.w3.org/2000/svg}"
COMMITTED = sorted(FOLDER.glob("*.svg"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: An image in Markdown: the alternative text, and the path.
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+\.svg)\)")

#: Runs of less than a second. `overlap` and `cluster-loss` start processes.
SHORT = ("operation", "triple-buffer", "fault", "memory", "cancellation", "batching", "coordination")


def texts(root: ET.Element) -> list[ET.Element]:
    return list(root.iter(f"{SVG}text"))


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, as WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_each_picture_of_the_table_is_committed() -> None:
    assert {path.stem for path in COMMITTED} == set(PICTURES)
    assert len(COMMITTED) >= 12


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_picture_is_small_complete_and_readable_in_both_modes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert len(text.encode()) <= 60_000
    for tag in ("title", "desc"):
        found = root.find(f"{SVG}{tag}")
        assert found is not None
        assert found.text
    assert not set(re.findall(r"\w+://[^\s\"'<>]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not list(root.iter(f"{SVG}script"))
    assert not list(root.iter(f"{SVG}image"))
    light, _, dark = text.partition("@media(prefers-color-scheme:dark)")
    for name in ("page", "ink", "note"):
        one, other = (re.search(rf"\.{name}{{fill:(#\w+)}}", half) for half in (light, dark))
        assert one is not None
        assert other is not None
        assert one[1] != other[1]
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    background = next(part for part in root.iter(f"{SVG}path") if part.get("class") == "page")
    assert background.get("d") == f"M0 0h{width:g}v{height:g}h-{width:g}z"
    for part in texts(root):
        assert float(part.get("font-size", root.attrib["font-size"])) * 960 / width >= 12, part.text


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_picture_is_on_a_page_with_an_alternative_text_and_a_caption(path: Path) -> None:
    uses = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in IMAGE.finditer(text):
            if (page.parent / match[2]).resolve() == path:
                uses += 1
                assert len(match[1]) >= 20, page
                after = text[match.end() :].lstrip("\n")
                assert page.name == "README.md" or re.match(r"\*[^*]{20,}\.\*\n", after), f"{page}: no caption"
    assert uses


def test_each_image_on_a_page_exists() -> None:
    for page in PAGES:
        for _, target in IMAGE.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("name", [name for name, picture in PICTURES.items() if picture.is_fixed])
def test_picture_of_figures_is_up_to_date(name: str) -> None:
    assert PICTURES[name].draw() == (FOLDER / f"{name}.svg").read_text(encoding="utf-8"), "run make pictures"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_picture_of_a_run_is_drawn_again(name: str) -> None:
    drawn, committed = (ET.fromstring(text) for text in (PICTURES[name].draw(), (FOLDER / f"{name}.svg").read_text()))
    assert drawn.findtext(f"{SVG}desc") == committed.findtext(f"{SVG}desc")
    assert len(texts(drawn)) >= 8


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted({name for name, one in PICTURES.items() if not one.is_fixed} - set(SHORT)))
def test_picture_of_processes_is_drawn_again(name: str) -> None:
    assert texts(ET.fromstring(PICTURES[name].draw()))


def test_objects_of_the_decision_are_on_the_page() -> None:
    page = (ROOT / "docs" / "how-to" / "which-one.md").read_text(encoding="utf-8")
    for _, name, _, _ in which_one.QUESTIONS:
        assert re.search(rf"`{name}`|^## .*\b{name}\b", page, re.MULTILINE), name


def test_the_decision_is_readable_on_a_phone() -> None:
    """390 pixels wide, of which the margins of the page take 32."""
    root = ET.fromstring(which_one.draw())
    width = float(root.attrib["width"])
    assert (
        min(float(part.get("font-size", root.attrib["font-size"])) for part in texts(root)) * (390 - 32) / width >= 12
    )


def test_colours_have_enough_contrast_in_both_modes() -> None:
    for mode, first in ((LIGHT, 0), (DARK, 2)):
        for name, colours in COLOURS.items():
            solid, soft = colours[first : first + 2]
            assert contrast(mode["on"], solid) >= 4.5, name
            assert contrast(mode["ink"], soft) >= 4.5, name
            assert contrast(solid, mode["page"]) >= 3, name
            assert contrast(mode["note"], soft) >= 4.5, name
        assert contrast(mode["note"], mode["page"]) >= 4.5


def test_text_that_would_be_cut_off_is_refused() -> None:
    page = Page("Title", "Description.", 100)
    for x, y in ((700, 50), (20, 99), (20, 5)):
        with pytest.raises(ValueError, match="does not fit into the picture 'Title'"):
            page.text(x, y, "a long text")
    with pytest.raises(ValueError, match="does not fit"):
        page.text(30, 50, "a long text", anchor="middle")


def test_label_is_left_out_of_a_bar_that_is_too_narrow() -> None:
    page = Page("Title", "Description.", 100)
    page.bar(20, 40, 20, 30, "blue", label="a long label", tooltip="<tip>")
    page.bar(20, 40, 200, 30, "blue", label="short")
    drawn = texts(ET.fromstring(page.svg()))
    assert [part.text for part in drawn] == ["Title", "short"]


def test_any_text_gives_xml() -> None:
    page = Page("<a> & \x00\ud800", "]]> \x1b", 100)
    root = ET.fromstring(page.svg())
    assert root.findtext(f"{SVG}title") == "<a> & \ufffd\ufffd"
    assert root.findtext(f"{SVG}desc") == "]]> \ufffd"


def test_axis_places_values_between_its_ends() -> None:
    axis = Axis(0, 50, 100, 600)
    assert [axis.at(value) for value in (-1, 0, 25, 50, 99)] == [100, 100, 350, 600, 600]
    assert axis.ticks() == pytest.approx([0, 10, 20, 30, 40, 50])
    logarithmic = Axis(1, 1000, 0, 300, logarithmic=True)
    assert [logarithmic.at(value) for value in (1, 10, 1000)] == pytest.approx([0, 100, 300])
    assert logarithmic.ticks() == [1, 10, 100, 1000]


def test_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["memory", "elephant"])
    assert "there is no picture 'elephant'; the names are" in capsys.readouterr().err
