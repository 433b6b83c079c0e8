"""The cache of compiled kernels: what is trusted, and what is not."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.driver.cuda._cache import ProgramCache

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there is no cache where files have no owner")

KEY = "0123456789abcdef" * 4
OTHER = KEY[::-1]
DATA = b"_Z1fv\n\x7fELF" + bytes(range(256)) * 8


@pytest.fixture
def cache(tmp_path: Path) -> ProgramCache:
    made = ProgramCache(tmp_path / "kernels")
    assert made.put(KEY, DATA)
    return made


def entry(cache: ProgramCache, key: str = KEY) -> Path:
    return Path(cache.directory) / key


def files(cache: ProgramCache) -> set[str]:
    return set(os.listdir(cache.directory))


def test_what_was_put_is_got_also_by_another_process(cache: ProgramCache) -> None:
    assert cache.get(KEY) == DATA
    assert ProgramCache(cache.directory).get(KEY) == DATA
    assert cache.get(OTHER) is None


def test_a_cache_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert ProgramCache(tmp_path / "absent").get(KEY) is None
    assert not (tmp_path / "absent").exists()


def test_directory_and_files_are_the_owners_alone(cache: ProgramCache) -> None:
    assert stat.S_IMODE(os.stat(cache.directory).st_mode) == 0o700
    assert stat.S_IMODE(entry(cache).stat().st_mode) == 0o600
    assert files(cache) == {KEY}  # nothing temporary stays


@pytest.mark.parametrize("key", ["../key", "a/b", "/nonexistent/key", "..\\key", "a\0b", "", ".", ".."], ids=ascii)
def test_key_that_is_not_the_name_of_a_file_is_refused(cache: ProgramCache, key: str) -> None:
    before = files(cache)
    for call in (lambda: cache.get(key), lambda: cache.put(key, DATA)):
        with pytest.raises(InvalidArgumentError, match=re.escape(f"{key!r} is not a key of the kernel cache")):
            call()
    assert files(cache) == before
    assert not (Path(cache.directory).parent / "key").exists()


def test_key_that_is_no_string_is_refused(cache: ProgramCache) -> None:
    with pytest.raises(InvalidTypeError, match="a key of the kernel cache is a str"):
        cache.get(3)  # type: ignore[arg-type]


def test_a_second_put_replaces_the_first(cache: ProgramCache) -> None:
    cache.put(KEY, b"new")
    assert cache.get(KEY) == b"new"


@pytest.mark.parametrize("position", [0, 20, 40, 60, len(DATA), -1])
def test_a_flipped_byte_is_noticed_and_can_be_replaced(cache: ProgramCache, position: int) -> None:
    content = bytearray(entry(cache).read_bytes())
    content[position] ^= 1
    entry(cache).write_bytes(content)
    with pytest.warns(
        RuntimeWarning, match=f"{KEY} is ignored, and compiled again: its content is not what was stored"
    ):
        assert cache.get(KEY) is None
    assert cache.put(KEY, DATA)
    assert cache.get(KEY) == DATA


@pytest.mark.parametrize("size", [0, 5, 60])
def test_a_truncated_entry_is_noticed(cache: ProgramCache, size: int) -> None:
    os.truncate(entry(cache), size)
    with pytest.warns(RuntimeWarning, match="not what was stored"):
        assert cache.get(KEY) is None


def test_an_entry_counts_under_its_own_key_only(cache: ProgramCache) -> None:
    entry(cache).rename(entry(cache, OTHER))
    with pytest.warns(RuntimeWarning, match="not what was stored"):
        assert cache.get(OTHER) is None


def test_a_symbolic_link_is_not_followed(cache: ProgramCache, tmp_path: Path) -> None:
    entry(cache).rename(tmp_path / "elsewhere")
    entry(cache).symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match=f"{KEY} is ignored"):
        assert cache.get(KEY) is None
    assert cache.put(KEY, b"new")  # replaces the link, not what it points to
    assert not entry(cache).is_symlink()
    assert (tmp_path / "elsewhere").read_bytes().endswith(DATA)


@pytest.mark.timeout(60)
def test_a_pipe_in_its_place_does_not_hang(cache: ProgramCache) -> None:
    entry(cache).unlink()
    os.mkfifo(entry(cache), 0o600)
    with pytest.warns(RuntimeWarning, match="no regular file"):
        assert cache.get(KEY) is None


def test_a_directory_in_its_place_costs_the_cache_only(cache: ProgramCache) -> None:
    entry(cache).unlink()
    entry(cache).mkdir(mode=0o700)
    with pytest.warns(RuntimeWarning, match=f"{KEY} is ignored.*no regular file"):
        assert cache.get(KEY) is None
    assert not cache.put(KEY, DATA)
    assert files(cache) == {KEY}


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_may_write_is_ignored(cache: ProgramCache, mode: int) -> None:
    entry(cache).chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"others may write it \(mode {mode:04o}\)"):
        assert cache.get(KEY) is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_not_used(cache: ProgramCache, mode: int) -> None:
    os.chmod(cache.directory, mode)
    with pytest.warns(RuntimeWarning, match=r"kernel cache .* is not used: others may write it .*chmod 700"):
        assert cache.get(KEY) is None
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert not cache.put(OTHER, DATA)
    assert files(cache) == {KEY}


def test_what_another_user_owns_is_not_trusted(cache: ProgramCache) -> None:
    if os.geteuid() != 0:  # then the root directory is another user's
        with pytest.warns(RuntimeWarning, match="user 0 owns it"):
            assert ProgramCache("/").get(KEY) is None
        return
    os.chown(entry(cache), 12345, -1)
    with pytest.warns(RuntimeWarning, match=f"{KEY} is ignored.*user 12345 owns it"):
        assert cache.get(KEY) is None
    os.chown(cache.directory, 12345, -1)
    with pytest.warns(RuntimeWarning, match="is not used: user 12345 owns it"):
        assert cache.get(KEY) is None


def test_a_file_in_the_directorys_place(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("")
    cache = ProgramCache(tmp_path / "kernels")
    with pytest.warns(RuntimeWarning, match="it is no directory"):
        assert cache.get(KEY) is None
    assert not cache.put(KEY, DATA)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a place where not even root can write")
def test_where_nothing_can_be_written_nothing_fails() -> None:
    cache = ProgramCache("/proc/self/aiocuda")
    assert not cache.put(KEY, DATA)
    assert cache.get(KEY) is None


FULL_DISK = """
import resource, sys
from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.driver.cuda._cache import ProgramCache
cache = ProgramCache(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
print(cache.put("key", bytes(1000)), cache.get("key"))
"""


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, os.fspath(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.split() == ["False", "None"]
    assert os.listdir(tmp_path) == []


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path, limit=4000)
    for age, name in enumerate("abc"):
        cache.put(name, bytes(1000))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    cache.put("d", bytes(1500))  # four headers and 4 500 bytes
    assert files(cache) == {"a", "b", "d"}
    cache.put("e", bytes(3900))
    assert files(cache) == {"e"}


def test_unfinished_files_of_killed_writers_are_removed(cache: ProgramCache) -> None:
    for name, age in (("old.part", 4000), ("young.part", 100)):
        entry(cache, name).write_bytes(b"half")
        os.utime(entry(cache, name), (time.time() - age,) * 2)
    cache.put(OTHER, DATA)
    assert files(cache) == {KEY, OTHER, "young.part"}


WRITER = """
import sys
from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.driver.cuda._cache import ProgramCache
cache = ProgramCache(sys.argv[1], limit=20_000)
for turn in range(60):
    for key in "abcde":
        data = key.encode() * 5000
        assert cache.get(key) in (None, data)
        assert cache.put(key, data)
"""


@pytest.mark.slow
def test_processes_that_write_and_trim_at_once_see_whole_entries(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", WRITER, os.fspath(tmp_path)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    assert [writer.communicate(timeout=60)[1] for writer in writers] == [b""] * 3
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"AIOCUDA_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/a/b"),
        ({"AIOCUDA_CACHE_DIR": "", "XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/c/aiocuda"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/d"}, "/d/.cache/aiocuda"),
        ({"HOME": "/d"}, "/d/.cache/aiocuda"),
        ({"HOME": "relative"}, None),
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], directory: str | None) -> None:
    for name in ("AIOCUDA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cache = ProgramCache.default()
    assert (cache and cache.directory) == directory


def test_a_relative_choice_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AIOCUDA_CACHE_DIR", "kernels")
    cache = ProgramCache.default()
    assert cache is not None
    assert cache.directory == os.fspath(tmp_path / "kernels")


def test_a_sound_cache_warns_of_nothing(cache: ProgramCache) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.get(KEY)
        cache.get(OTHER)
        cache.put(OTHER, DATA)
    assert caught == []
