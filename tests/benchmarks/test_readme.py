"""The tables of README and of the pages of figures agree with the files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks import readme, report
from tests.benchmarks.machine import ROOT
from tests.benchmarks.rows import ROWS
from tests.benchmarks.test_report import measured

FIGURES, LOADERS = readme.FIGURES, readme.LOADERS


def pages_of(root: Path) -> list[Path]:
    pages = (Path("README.md"), Path("docs", "benchmarks.md"), readme.LIMITS, readme.CONCURRENCY, *LOADERS)
    return [root / page for page in pages]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(readme, "FIGURES", {"await_empty_kernel": "await one"})
    monkeypatch.setattr(readme, "LOADERS", {page: {"png_1_MB": "a megabyte"} for page in LOADERS})
    folder = tmp_path / "docs" / "benchmarks"
    rows = [
        report.row_report(
            ROWS["await_empty_kernel"], measured(12.0, baseline=(10.0,)), {"torch_to_thread": measured(1234.5)}
        ),
        report.row_report(ROWS["latency_5ms"], measured(95.0, cpu_share=0.2), {}),
        report.row_report(ROWS["chain_500"], {"error": "exit code 1"}, {}),
    ]
    written = {
        "schema": report.SCHEMA,
        "commit": "0123456789abcdef",
        "dirty": False,
        "small": False,
        "command": "python -m tests.benchmarks",
        "machine": {"gpu": "NVIDIA H200", "cuda": "13.0", "driver": "580", "cpus": 16},
        "versions": {"python": "3.12.3", "aiocuda": "1.2.3"},
        "rows": rows,
    }
    report.write(written, folder / "h200.json")
    points = [
        {"load": load, "p50_ms": 10 * load, "p99_ms": 20 * load, "p999_ms": None, "goodput": 1.0, "refused": 0.0}
        for load in readme.LOADS
    ]
    curves = [{"server": name, "label": name, "capacity": 100.0, "points": points} for name in ("ours", "ours_one")]
    host = {**written, "commit": "fedcba9876543210-dirty", "machine": {"gpu": None, "cpus": 2}, "rows": []}
    del host["dirty"]  # an older file
    report.write({**host, "curves": curves}, folder / "host-serving.json")
    loaders = [
        {
            **report.row_report(ROWS["await_empty_kernel"], measured(rate, baseline=(limit,)), {}),
            "name": f"loader_{executor}_png_1_MB",
            "peers": {"by_hand": {"label": "by hand", "p50": 9.0}, "torch": {"label": "PyTorch", "p50": 1234.5}},
        }
        for executor, rate, limit in (("thread", 62.0, 75.0), ("process", 77.0, 100.0))
    ]
    report.write({**written, "rows": loaders}, folder / "h200-loaders.json")
    (folder / "local.json").write_text("not looked at")
    for page in pages_of(tmp_path):
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"above\n{readme.BEGIN}\nold\n{readme.END}\nbelow\n", "utf-8")
    return tmp_path


def test_pages_agree_with_the_files(project: Path) -> None:
    root = ["--root", str(project)]
    assert readme.main(["--check", *root]) == 1
    assert readme.main(root) == 0
    assert readme.main(["--check", *root]) == 0
    for page in pages_of(project):
        text = page.read_text("utf-8")
        assert text.startswith("above\n")
        assert text.endswith("below\n")
        assert "\nold\n" not in text


def test_figures_and_the_limits_of_the_project_have_a_page_each(project: Path) -> None:
    folder = project / "docs" / "benchmarks"
    figures, limits = readme.section(folder), readme.limits(folder)
    assert figures.startswith("## Operations, copies and pipelines\n")
    for text in (figures, limits):
        assert "NVIDIA H200" in text
        assert "`0123456789ab`" in text
    assert "error: exit code 1" in figures
    assert "≤" not in figures
    assert "1.2 × baseline (≤ 1.4)" in limits
    assert "**missed: 95 (≤ 80)**; 0.2 of a core (≤ 0.3)" in limits
    assert "exit code 1" not in limits


def test_each_table_has_version_and_commit_and_says_if_the_code_differed(project: Path) -> None:
    folder = project / "docs" / "benchmarks"
    clean, changed = (
        "aiocuda 1.2.3, commit `0123456789ab`",
        "aiocuda 1.2.3, commit `fedcba987654` with uncommitted changes",
    )
    tables = {
        readme.short_table(folder): [clean],
        readme.section(folder): [clean, clean, changed],
        readme.limits(folder): [clean, clean],
        readme.concurrency_table(folder): [changed],
        readme.loaders_table(folder, {"png_1_MB": "a megabyte"}): [clean],
    }
    for table, said in tables.items():
        assert re.findall(r"aiocuda [\d.]+, commit `\w+`(?: with uncommitted changes)?", table) == said
    file = json.loads((folder / "h200.json").read_text("utf-8"))
    (folder / "h200.json").write_text(json.dumps({**file, "commit": None, "dirty": None}), "utf-8")
    assert "aiocuda 1.2.3, an unknown commit." in readme.short_table(folder)


def test_every_file_of_figures_has_a_title() -> None:
    files = (ROOT / "docs" / "benchmarks").glob("*.json")
    assert {path.stem for path in files if not path.name.startswith("local")} == readme.SECTIONS.keys()


def test_readme_has_a_few_figures_in_plain_words(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project / "docs" / "benchmarks"
    assert readme.short_table(folder).splitlines()[2] == "| await one | 12 µs | 1.23 ms | – | 10 µs |"
    assert len(FIGURES) <= 7
    monkeypatch.setattr(readme, "FIGURES", {"chain_500": "a row that failed"})
    with pytest.raises(readme.ReadmeError, match="has no figures of chain_500"):
        readme.short_table(folder)


def test_readme_marks_the_rows_of_an_older_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project / "docs" / "benchmarks"
    file = json.loads((folder / "h200.json").read_text("utf-8"))
    older = {
        **file,
        "commit": "aaaaaaaaaaaa-dirty",
        "rows": [row for row in file["rows"] if row["name"] == "latency_5ms"],
    }
    del older["dirty"]
    older["rows"][0]["baseline"] = file["rows"][0]["baseline"]
    report.write(older, folder / "h200-peers.json")
    monkeypatch.setattr(readme, "FIGURES", {"await_empty_kernel": "await one", "latency_5ms": "added"})
    table = readme.short_table(folder).splitlines()
    assert table[2].startswith("| await one | 12 µs |")
    assert table[3].startswith("| added * | 95 µs |")
    assert table[5].endswith("; the rows with * with aiocuda 1.2.3, commit `aaaaaaaaaaaa` with uncommitted changes.")


def test_table_of_loaders_has_ours_beside_the_others(project: Path) -> None:
    folder = project / "docs" / "benchmarks"
    lines = readme.loaders_table(folder, {"png_1_MB": "a megabyte"}).splitlines()
    assert lines[0] == "| batches, and the time of a step | PyTorch | threads | processes | limit |"
    assert lines[2] == "| a megabyte | 1 230 | 62 | 77 | 100 |"
    with pytest.raises(readme.ReadmeError, match="has no figures of jpeg"):
        readme.loaders_table(folder, {"jpeg": "no row"})


def test_every_figure_of_readme_is_a_row() -> None:
    files = [ROOT / "docs" / "benchmarks" / name for name in ("h200.json", "h200-peers.json")]
    rows = {row["name"] for path in files for row in json.loads(path.read_text("utf-8"))["rows"]}
    assert rows >= FIGURES.keys()


def test_each_row_of_a_machine_is_in_one_file() -> None:
    folder = ROOT / "docs" / "benchmarks"
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("local")]
    assert all(path.parent == folder and path.suffix == ".json" for path in files)
    reports = [json.loads(path.read_text("utf-8")) for path in files]
    rows = [
        (report["machine"]["gpu"], report["machine"].get("gpus", 1), row["name"])
        for report in reports
        for row in report["rows"]
    ]
    assert len(rows) == len(set(rows))


def test_several_gpus_are_counted(project: Path) -> None:
    folder = project / "docs" / "benchmarks"
    file = json.loads((folder / "h200.json").read_text("utf-8"))
    file["machine"] |= {"gpu": "NVIDIA H200", "gpus": 2, "cuda": "13.0", "driver": "580"}
    (folder / "a.json").write_text(json.dumps(file), "utf-8")
    assert "\n## a\n\n2 × NVIDIA H200, CUDA 13.0, driver 580, " in readme.section(folder)


def test_the_package_has_the_published_figures(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "PUBLISHED_ROWS", {"await": ("await_empty_kernel", "µs", lambda row: row["p50"] / 2)})
    path = project / readme.PUBLISHED
    path.parent.mkdir(parents=True)
    root = ["--root", str(project)]
    assert readme.main(root) == 0
    found = json.loads(path.read_text("utf-8"))
    assert found["rows"] == {"await": {"p50": 6.0, "row": "await_empty_kernel"}}
    measured = found["measured"]
    assert (measured["gpu"], measured["aiocuda"]) == ("NVIDIA H200", "1.2.3")
    assert (measured["commit"], measured["dirty"]) == ("0123456789abcdef", False)
    assert readme.main(["--check", *root]) == 0
    path.write_text(path.read_text("utf-8").replace("6.0", "5.0"))
    assert readme.main(["--check", *root]) == 1
    monkeypatch.setattr(readme, "PUBLISHED_ROWS", {"await": ("await_empty_kernel", "ms", lambda row: row["p50"])})
    assert readme.main(root) == 1


def test_pages_are_compared_and_left_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (project / "README.md").read_bytes()
    assert readme.main(["--check", "--root", str(project)]) == 1
    assert (project / "README.md").read_bytes() == before
    assert "run python -m tests.benchmarks.readme" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", readme.BEGIN, f"{readme.END}{readme.BEGIN}", f"{readme.BEGIN}{readme.END}" * 2])
def test_page_without_its_markers_is_refused(text: str) -> None:
    with pytest.raises(readme.ReadmeError, match="need one"):
        readme.filled(text, "table")


@pytest.mark.parametrize(
    ("text", "says"), [("{", "is not JSON"), ('{"schema": "other/2"}', "has the schema 'other/2'")]
)
def test_a_file_that_no_run_wrote_is_refused(
    project: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "docs" / "benchmarks" / "h200.json").write_text(text)
    assert readme.main(["--root", str(project)]) == 1
    assert says in capsys.readouterr().err
