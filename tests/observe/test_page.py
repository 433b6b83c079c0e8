"""R6: the page of a timeline, as text and in a browser."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import time
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiocuda
from aiocuda import Device, InvalidTypeError, Stream
from aiocuda.observe import Recording, Timeline, TimelineSpan, draw, page_of, shown
from aiocuda.observe._recording import LABEL_KEPT, LABEL_SHOWN, Batch, LoopRecord, Request, Resume
from tests.helpers import block_until
from tests.observe.browser import CHROMIUM, Browser
from tests.observe.test_trace import HOSTILE


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes, and the text in each."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open, data))

    def texts_of(self, tag: str) -> list[str]:
        return [text for open_tag, text in self.texts if open_tag == tag and text.strip()]

    @property
    def data(self) -> dict[str, Any]:
        (found,) = (json.loads(text) for text in self.texts_of("script") if text.startswith("{"))
        assert isinstance(found, dict)
        return found


def recording(labels: list[str], device: str = "GPU") -> Recording:
    """A fill for each label; the second and later ones wait for the one before, and each resumes an await."""
    spans = [
        TimelineSpan(f"s{at % 3}", "fill", 10.0 * at, 10.0 * at + 8, at + 1, None, label, 64, (at,) if at else ())
        for at, label in enumerate(labels)
    ]
    resumes = [Resume(1e-5 * at + 9e-6, at, at + 1, "fill", label) for at, label in enumerate(labels)]
    iterations = [(1e-5 * at + 8.5e-6, 1e-5 * at + 9.5e-6) for at in range(len(labels))]
    return Recording(device, spans, [LoopRecord(iterations, [], resumes)])


@pytest.mark.asyncio
async def test_the_page_has_every_operation_with_its_label_and_bytes(device: Device, stream: Stream) -> None:
    async with Timeline(device) as timeline:
        with aiocuda.label("request 17"):
            await stream.fill(stream.empty(1024), 1)
    page = Page(timeline.to_html())
    data = page.data
    assert data["title"] == f"Timeline of {device.name} ({device.driver.name} driver)"
    assert data["title"] in page.texts_of("title")
    texts = data["texts"]
    (fill,) = (each for each in data["slices"] if texts[each[0]] == "fill")
    assert (texts[fill[1]], texts[fill[2]], fill[5], fill[6]) == (
        "fill",
        "request 17",
        timeline.spans[0].operation,
        4096,
    )
    rows = {texts[row[0]]: data["slices"][row[3] : row[4]] for row in data["rows"]}
    assert fill in rows["left"]
    assert {"event loop", "awaits"} <= set(rows)
    for kind, source, target in data["arrows"]:
        assert kind in (0, 1)
        assert {source, target} <= set(range(len(data["slices"])))
    assert "Streams" in Page(timeline.to_html("Streams & <b>more</b>")).data["title"]


def test_the_page_needs_nothing_from_outside() -> None:
    text = page_of([recording(HOSTILE)], "a title")
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "href", "action", "data"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    template = text.replace(json.dumps(page.data), "")
    for address in re.findall("[a-z]+://[^\"'\\s]*", template):
        assert address.startswith("http://www.w3.org/")
    assert not re.search("@import|url\\(|fetch\\(|XMLHttpRequest|innerHTML|document\\.write|eval\\(", text)
    policy = next(each["content"] for tag, each in page.elements if "http-equiv" in each)
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    script = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_labels_names_and_titles_of_every_kind_stay_text(text: str) -> None:
    """In the page and in the picture, in every place."""
    span = TimelineSpan(text, "launch", 0, 1, 1, text, text, 8)
    plain = Page(page_of([Recording("GPU", [span._replace(stream="s", kernel="k", label="l")])], "t"))
    output = page_of([Recording(text, [span])], text)
    output.encode("utf-8")
    page = Page(output)
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    cleaned = shown(text, LABEL_KEPT)
    assert cleaned in page.data["texts"]
    assert page.data["devices"] == [cleaned]
    block = output[output.index('id="data">') + len('id="data">') :]
    block = block[: block.index("</script>")]
    assert not set(block) & set("<>&\u2028\u2029")
    assert len(output) < 60_000 + 8 * 4 * LABEL_KEPT

    picture = draw([span], text)
    picture.encode("utf-8")
    root = ET.fromstring(picture)
    (rect,) = root.iter("{http://www.w3.org/2000/svg}rect")
    assert len(rect.attrib["data-label"]) == len(cleaned) <= LABEL_KEPT
    (tooltip,) = rect
    label = (tooltip.text or "").partition("label ")[2]
    assert len(label) <= LABEL_SHOWN + len("\n8 bytes")
    assert {each.tag.rpartition("}")[2] for each in root.iter()} <= {"svg", "title", "style", "path", "text", "rect"}


@pytest.mark.asyncio
async def test_the_picture_has_labels_and_bytes(device: Device, stream: Stream) -> None:
    async with Timeline(device) as timeline:
        with aiocuda.label("seventeen"):
            stream.fill(stream.empty(1024), 1)
        stream.synchronize()
    rects = list(ET.fromstring(timeline.to_svg()).iter("{http://www.w3.org/2000/svg}rect"))
    by_kind = {rect.attrib["data-kind"]: rect for rect in rects}
    assert by_kind["fill"].attrib["data-label"] == "seventeen"
    assert "data-label" not in by_kind["synchronize"].attrib
    assert (by_kind["fill"][0].text or "").endswith("ms\nlabel seventeen\n4,096 bytes")


def test_the_page_and_the_picture_have_one_legend() -> None:
    kinds = ("graph", "record", "launch", "wait", "read", "launch")
    spans = [TimelineSpan("s", kind, 10.0 * at, 10.0 * at + 8, at + 1) for at, kind in enumerate(kinds)]
    legend = Page(page_of([Recording("GPU", spans)], "t")).data["legend"]
    assert [name for name, _ in legend] == ["read", "launch", "graph", "record, wait"]
    drawn = re.findall(r'h-14z" fill="(#\w+)"/>\n<text [^>]*>([^<]*)<', draw(spans, "t"))
    assert [[name, colour] for colour, name in drawn] == legend
    of_requests = Page(page_of([requests(4, 4)], "t")).data["legend"]
    assert [name for name, _ in of_requests] == ["fill", "batch", "queued", "answered", "failed"]


@pytest.mark.asyncio
@pytest.mark.parametrize("title", [7, b"bytes", ["list"]])
async def test_a_title_is_a_string(device: Device, title: Any) -> None:
    for method in (Timeline(device).to_svg, Timeline(device).to_html):
        with pytest.raises(InvalidTypeError, match="a title is a string, not"):
            method(title)


def test_a_page_without_operations() -> None:
    data = Page(page_of([Recording("GPU", [])], "empty")).data
    assert (data["rows"], data["slices"], data["arrows"]) == ([], [], [])
    assert Page(page_of([], "empty")).data["devices"] == []


@pytest.mark.slow
def test_cost_of_a_page_is_linear() -> None:
    def seconds(count: int) -> float:
        made = recording(["label"] * count)
        began = time.process_time()
        page_of([made], "t")
        return time.process_time() - began

    assert min(seconds(20_000) for _ in range(2)) < 15 * max(min(seconds(4_000) for _ in range(3)), 1e-3)


# -- in a browser ------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with Browser(tmp_path / "profile") as opened:
        opened.resize(1200, 700)
        yield opened


def text_of(browser: Browser, name: str) -> str:
    found = browser.evaluate(f"document.getElementById('{name}').innerText")
    assert isinstance(found, str)
    return found


@pytest.mark.heavy
def test_the_page_searches_zooms_and_shows_details(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of([recording(["one", "two", *HOSTILE, "two"])], "a <title>"), encoding="utf-8")
    browser.open(path.as_uri())
    assert text_of(browser, "title") == "a <title>"
    browser.key("/")
    for character in "two":
        browser.key(character, character)
    # Each of the two operations is found, and the await that it resumed.
    assert text_of(browser, "found") == "4 found"
    browser.key("Enter")
    assert text_of(browser, "found") == "1 of 4"
    details = text_of(browser, "details")
    assert all(word in details for word in ("fill", "s1", "two", "64", "Waited for", "Awaited by"))
    browser.evaluate("document.querySelector('#details button').click()")
    assert "one" in text_of(browser, "details")

    browser.evaluate("document.getElementById('rows').focus()")
    axis = "document.getElementById('axis').toDataURL()"
    drawn = [browser.evaluate(axis)]
    for act in (
        lambda: browser.key("+", "+"),
        lambda: browser.key("ArrowRight"),
        lambda: browser.mouse("mouseWheel", 700, 200, deltaX=0, deltaY=-300),
        lambda: browser.evaluate("document.getElementById('fit').click()"),
    ):
        act()
        browser.drawn()
        drawn.append(browser.evaluate(axis))
        assert drawn[-1] != drawn[-2]
    browser.key("Escape")
    assert text_of(browser, "details") == ""

    # Hovering over the first bar shows it.
    browser.mouse("mouseMoved", 200, 175)
    browser.drawn()
    tip = text_of(browser, "tip")
    assert "one" in tip
    assert "8.0 µs" in tip
    assert browser.errors == []


@pytest.mark.heavy
def test_hostile_texts_run_no_script_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE):
        span = TimelineSpan(text, text, 0, 1, 1, text, text, 8)
        path = tmp_path / f"{number}.html"
        path.write_text(page_of([Recording(text, [span])], text), encoding="utf-8")
        browser.open(f"{path.as_uri()}#search={urllib.parse.quote(text[:4])}")
        assert browser.evaluate("document.querySelectorAll('script, img').length") == 2
        assert browser.evaluate("document.getElementById('details').childElementCount") == 1
        assert browser.errors == []


@pytest.mark.heavy
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_the_page_is_readable_in_both_schemes_and_widths(
    browser: Browser, tmp_path: Path, scheme: str, width: int
) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of([recording(["one", "two", "three"])], "title"), encoding="utf-8")
    browser.scheme(scheme)
    browser.resize(width, 700)
    browser.open(path.as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page, ink = browser.evaluate(
        "['background-color', 'color'].map((name) => getComputedStyle(document.body).getPropertyValue(name))"
    )
    dark, light = sorted((page, ink), key=lambda colour: sum(map(int, re.findall("\\d+", colour)[:3])))
    assert page == (dark if scheme == "dark" else light)
    # The canvas has bars, and text of the row names.
    read = (
        "(() => { const c = document.getElementById('rows'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const s = new Set();"
        " for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) s.add([d[i], d[i + 1], d[i + 2]].join());"
        " return [...s]; })()"
    )
    block_until(lambda: "176,80,138" in browser.evaluate(read), "the drawing of the fills")  # in the next frame
    assert len(browser.evaluate(read)) > 10
    assert browser.errors == []


def requests(count: int, at_once: int) -> Recording:
    """So many requests, of which so many are in the batcher at a time, in batches of 20, and a fill for each batch."""
    step, all_of_them, batches = 1e-3, [], []
    for number in range(count):
        batch = number // 20
        began = batch * 20 * step
        submitted = max(0.0, began - (at_once - 20) * step)
        outcome = ("failed", "answered", "answered", "answered")[number % 4]
        label = f"request {number}"
        end = began + 20 * step
        all_of_them.append(Request(1, "infer", number, submitted, began, end, outcome, batch, label))
        if number % 20 == 0:
            batches.append(Batch(1, "infer", batch, began, end, 20, 5))
    spans = [
        TimelineSpan("s", "fill", 1e6 * each.start, 1e6 * each.end, each.number + 1, None, None, 64) for each in batches
    ]
    return Recording("GPU", spans, batches=batches, requests=all_of_them)


@pytest.mark.heavy
@pytest.mark.parametrize("at_once", [60, 1000])
@pytest.mark.parametrize("width", [1200, 360])
def test_a_thousand_requests_are_readable(browser: Browser, tmp_path: Path, width: int, at_once: int) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of([requests(1000, at_once)], "title"), encoding="utf-8")
    browser.resize(width, 900)
    browser.open(path.as_uri())
    assert all(kind in text_of(browser, "legend") for kind in ("batch", "queued", "answered", "failed"))
    colours = (
        "(() => { const c = document.getElementById('rows'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const s = {}; for (let i = 0; i < d.length; i += 4) {"
        " const k = [d[i], d[i + 1], d[i + 2]].join(); s[k] = (s[k] || 0) + 1; } return s; })()"
    )
    queued, answered, fill = "217,187,78", "74,158,142", "176,80,138"
    block_until(lambda: queued in browser.evaluate(colours), "the drawing of the requests")  # in the next frame
    drawn = browser.evaluate(colours)
    assert drawn[fill] > 20 * width / 4, "the streams are not pushed off the page"
    assert drawn[queued] > width
    # Each request has two pixels and a gap: more of them than fit are reached by scrolling.
    tall = browser.evaluate("document.getElementById('view').scrollHeight")
    assert tall > 3 * at_once
    assert tall < 3 * at_once + 900
    if at_once == 60:
        assert drawn[answered] > width

    browser.evaluate(
        "(() => { const s = document.getElementById('search'); s.value = 'request 977';"
        " s.dispatchEvent(new Event('input')); document.getElementById('after').click(); })()"
    )
    assert text_of(browser, "found") == "1 of 2"
    details = text_of(browser, "details")
    assert all(word in details for word in ("queued", "requests of infer", "request 977", "977", "48", "batch 48"))
    browser.evaluate("document.querySelector('#details button').click()")
    details = text_of(browser, "details")
    assert all(word in details for word in ("batches of infer", "infer", "Its requests", "request 960"))
    assert browser.errors == []


@pytest.mark.heavy
def test_twenty_thousand_spans_are_drawn_in_ten_times_the_time_of_twenty_at_most(
    browser: Browser, tmp_path: Path
) -> None:
    def seconds(count: int) -> float:
        path = tmp_path / "page.html"
        path.write_text(page_of([recording([f"label {each}" for each in range(count)])], "title"), encoding="utf-8")
        browser.open(path.as_uri())
        found = browser.evaluate(
            "(async () => { const one = () => new Promise((done) => requestAnimationFrame(done)); const began ="
            " performance.now(); for (let i = 0; i < 20; i++) { document.getElementById(i % 2 ? 'in' : 'out').click();"
            " await one(); } return (performance.now() - began) / 20e3; })()"
        )
        assert isinstance(found, float)
        return found

    few = seconds(20)
    assert seconds(20_000) < 10 * few
    browser.key("/")
    for character in "label 19999":
        browser.key(character, character)
    assert text_of(browser, "found") == "2 found"
    assert browser.errors == []
