"""The picture of the overlap in a terminal, and the notes that explain why stages overlap little."""

from __future__ import annotations

import io

import pytest

from aiocuda.cli._report import STAGES, DemoReport, Overlap
from aiocuda.observe import TimelineSpan

pytest.importorskip("rich")

from aiocuda.cli._screen import OutputConsole, show_report


def span(stream: str, start_ms: float, end_ms: float, kind: str = "upload") -> TimelineSpan:
    return TimelineSpan(stream, kind, start_ms * 1e3, end_ms * 1e3, 0)


def test_text_has_both_runs_with_one_scale() -> None:
    overlap = Overlap.of(
        [
            *(span("read", 0, 1), span("upload", 1, 3), span("compute", 3, 5), span("download", 5, 5.1)),
            *(span("read", 6, 7), span("upload", 7, 9), span("compute", 9, 10)),
        ],
        [
            *(span("read", 20, 21), span("upload", 21, 23), span("compute", 23, 25)),
            *(span("read", 21, 22), span("upload", 23, 25), span("compute", 25, 26)),
        ],
    )
    assert list(overlap.text(20, "ab")) == [
        ("", "one stage after the other: 10 ms"),
        ("read", "aa          bb"),
        ("upload", "  aaaa        bbbb"),
        ("compute", "      aaaa        bb"),
        ("download", "          a"),
        ("", "the stages overlap: 6 ms"),
        ("read", "aabb"),
        ("upload", "  aaaabbbb"),
        ("compute", "      aaaabb"),
        ("download", ""),
    ]


def test_waits_and_other_streams_are_not_drawn() -> None:
    spans = [span("upload", 0, 9, "wait"), span("upload", 9, 10), span("another", 0, 30)]
    assert Overlap.of(spans, []).serial == [span("upload", 9, 10)]


def test_marks_are_in_order_and_none_is_lost() -> None:
    spans = [span("read", *ends) for ends in ((0, 0.1), (0.1, 0.2), (0.2, 0.3), (9, 10))]
    assert list(Overlap(spans).text(10, "ab"))[1] == ("read", "aba      b")


def test_runs_that_are_too_short_are_not_drawn() -> None:
    of = report([0.001] * 4, [0.001] * 4, 0.002)
    of.overlap = Overlap([span("read", 0, 1)], [span("read", 2, 3)])
    assert "batches in turn" not in shown(of)


def test_nothing_to_draw() -> None:
    assert list(Overlap().text(20, "ab")) == []
    assert "<rect" not in Overlap().to_svg("nothing")


def report(alone: list[float], together: list[float], seconds: float, batches: int = 32) -> DemoReport:
    """Return a report with these times of the stages."""
    return DemoReport(
        "host", "host 0", "0", files=1, bytes=1000, streamed=1000, batches=batches, batch_bytes=1 << 20,
        seconds=seconds, sequential_seconds=sum(alone), speedup=sum(alone) / seconds,
        speedup_bound=sum(alone) / max(alone), stage_seconds=dict(zip(STAGES, alone, strict=True)),
        overlapped_stage_seconds=dict(zip(STAGES, together, strict=True)),
    )  # fmt: skip


def shown(of: DemoReport, encoding: str = "utf-8") -> str:
    console = OutputConsole()
    console.file = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace")
    show_report(of, console)
    console.file.seek(0)
    return console.file.read()


def test_stages_that_overlap_need_no_note() -> None:
    assert "note:" not in shown(report([1, 2, 2, 0.1], [1, 2, 2, 0.1], 2.2))


@pytest.mark.parametrize(
    ("of", "note"),
    [
        (
            report([1, 2, 2, 0.1], [1, 2, 2, 0.1], 4, batches=2),
            "2 batches of at most 1.0 MB cannot keep all stages at work; a folder with more data overlaps better",
        ),
        (
            report([8, 1, 1, 0.1], [8, 1, 1, 0.1], 8.2),
            "the stage read takes 79% of the time of all stages; overlap can only hide the others, because many small "
            "files are slow to read",
        ),
        (
            report([1, 2, 2, 0.1], [1.1, 2.1, 3.5, 0.1], 3.6),
            "beside the others, the stage compute took 3.500 s instead of 2.000 s, because all of them share the "
            "processors and the GIL",
        ),
    ],
)
def test_a_note_explains_little_overlap(of: DemoReport, note: str) -> None:
    assert [line for line in shown(of).splitlines() if line.startswith("note:")] == [f"note: {note}"]


def test_a_terminal_without_block_characters_gets_others() -> None:
    of = report([1, 2, 2, 0.1], [1, 2, 2, 0.1], 2.2)
    of.overlap = Overlap([span("read", 0, 50), span("read", 50, 100)], [span("read", 200, 250)])
    assert "#=" in shown(of, "ascii")
    assert "█▓" in shown(of)
