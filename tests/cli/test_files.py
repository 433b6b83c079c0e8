from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiocuda.cli._files import File, Skipped, find_files, open_file, pieces, standard_library

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links, FIFOs and users as POSIX has them")


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's leave to read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that all users can enter; pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def found(root: Path, without: frozenset[str] = frozenset()) -> tuple[list[str], dict[str, str]]:
    """(files, what is skipped and why), relative to the root."""
    files, skipped = find_files(str(root), without)
    return (
        [os.path.relpath(file.path, root) for file in files],
        {os.path.relpath(each.path, root): each.reason for each in skipped},
    )


def test_files_come_sorted_with_sizes_and_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a", "d/y", "d/x", "c"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    assert found(tmp_path) == (["a", "b", "c", "d/x", "d/y"], {})
    monkeypatch.chdir(tmp_path)
    files, _ = find_files("d")
    assert [(file.path, file.size, file.pieces) for file in files] == [
        (str(tmp_path / "d" / "x"), 3, ((0, 3),)),
        (str(tmp_path / "d" / "y"), 3, ((0, 3),)),
    ]


def test_one_file_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "only").write_bytes(b"abc")
    assert [file.size for file in find_files(str(tmp_path / "only"))[0]] == [3]
    (tmp_path / "empty").mkdir()
    assert find_files(str(tmp_path / "empty")) == ([], [])
    assert find_files(str(tmp_path / "gone")) == ([], [Skipped(str(tmp_path / "gone"), "vanished")])


def test_a_search_that_is_given_up_returns_its_files(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    asked = iter([False, True])
    assert [file.path for file in find_files(str(tmp_path), given_up=lambda: next(asked))[0]] == [str(tmp_path / "a")]


def test_folders_that_are_left_out(tmp_path: Path) -> None:
    for name in ("site-packages/a", "x/__pycache__/b", "x/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    assert found(tmp_path, frozenset({"site-packages", "__pycache__"})) == (["x/c"], {})


def test_special_files_are_skipped_with_a_reason(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(tmp_path / "socket"))
        (tmp_path / "null").symlink_to("/dev/null")
        assert found(tmp_path) == ([], {"fifo": "a FIFO", "null": "a character device", "socket": "a socket"})


def test_links_to_files_are_followed_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"abc")
    (tmp_path / "folder" / "up").symlink_to("..")
    (tmp_path / "link").symlink_to("folder/file")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "ping").symlink_to("pong")
    (tmp_path / "pong").symlink_to("ping")
    (tmp_path / "nowhere").symlink_to("gone")
    assert found(tmp_path) == (
        ["link", "folder/file"],
        {
            "folder/up": "a link to a folder, which is not followed",
            "nowhere": "a link that leads nowhere",
            "ping": "a loop of links",
            "pong": "a loop of links",
            "self": "a loop of links",
        },
    )
    (tmp_path / "root").symlink_to("folder")
    assert found(tmp_path / "root")[0] == ["file"]


def test_a_folder_that_cannot_be_read(open_to_all: Path) -> None:
    (open_to_all / "closed").mkdir()
    (open_to_all / "closed" / "x").write_bytes(b"1")
    (open_to_all / "open").write_bytes(b"1")
    (open_to_all / "closed").chmod(0)
    with as_nobody():
        assert found(open_to_all) == (["open"], {"closed": "not readable: permission denied"})


def test_names_of_any_bytes(tmp_path: Path) -> None:
    names = [b"\xff\xfe", b"new\nline", b"\x1b[31m", "ünï".encode(), b"[bold]"]
    for name in names:
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(b"1")
    files, skipped = find_files(str(tmp_path))
    assert sorted(os.fsencode(os.path.basename(file.path)) for file in files) == sorted(names)
    assert skipped == []


def sparse(path: Path, size: int, **data: bytes) -> Path:
    """A file of holes, with data at ``at_<offset>``."""
    with path.open("wb") as file:
        file.truncate(size)
        for where, content in data.items():
            file.seek(int(where.removeprefix("at_")))
            file.write(content)
    return path


def test_holes_are_not_pieces(tmp_path: Path) -> None:
    path = sparse(tmp_path / "sparse", 5 << 30, at_3221225472=b"x" * 100)
    if path.stat().st_blocks * 512 > 1 << 20:
        pytest.skip("this file system has no holes")
    sparse(tmp_path / "hole", 1 << 40)
    hole, file = find_files(str(tmp_path))[0]
    assert (hole.size, hole.pieces, hole.streamed) == (1 << 40, (), 0)
    assert file.size == 5 << 30
    ((start, length),) = file.pieces
    assert start <= 3 << 30 < (3 << 30) + 100 <= start + length
    assert file.streamed < 1 << 20


def test_a_file_of_too_many_pieces_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sparse(tmp_path / "sparse", 1 << 20, at_0=b"a", at_262144=b"b", at_524288=b"c")
    descriptor = open_file(str(path))
    try:
        told = pieces(descriptor, 1 << 20)
        if len(told) != 3:
            pytest.skip("this file system has no holes")
        assert sum(length for _, length in told) < 1 << 20
        monkeypatch.setattr("aiocuda.cli._files.MOST_PIECES", 2)
        assert pieces(descriptor, 1 << 20) == ((0, 1 << 20),)
    finally:
        os.close(descriptor)


def test_the_standard_library_has_no_folders_of_others() -> None:
    root, without = standard_library()
    files, _ = find_files(root, without)
    assert len(files) > 500
    assert os.__file__ in {file.path for file in files}
    assert not [file.path for file in files if {"site-packages", "__pycache__"} & set(Path(file.path).parts)]


def test_a_file_is_as_it_was_when_it_was_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    (file,) = find_files(str(tmp_path))[0]
    assert file == File(str(path), 3, path.stat().st_mtime_ns, ((0, 3),))
