from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from array import array
from collections.abc import Iterator

import pytest

from aiocuda.driver._port import Port, native_port, open_port
from aiocuda.errors import InvalidTypeError

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() here")


def nothing() -> None:
    """A wake that nobody waits for."""


@pytest.fixture
def port() -> Iterator[Port]:
    port = open_port(nothing, watchable=True)
    yield port
    port.close()


def is_readable(port: Port) -> bool:
    descriptor = port.fileno()
    assert descriptor is not None
    return bool(select.select([descriptor], [], [], 0)[0])


def test_tags_come_in_order_and_once(port: Port) -> None:
    tags = [5, 0, 2**63 - 1, 5]
    for tag in tags:
        port.put(tag)
    assert port.drain() == tags
    assert port.drain() == []


def test_descriptor_is_readable_while_there_is_a_tag(port: Port) -> None:
    assert not is_readable(port)
    port.put(1)
    assert is_readable(port)
    port.drain()
    assert not is_readable(port)
    port.put(2)
    assert is_readable(port)


def test_burst_writes_to_the_pipe_once(port: Port) -> None:
    for tag in range(1000):
        port.put(tag)
    descriptor = port.fileno()
    assert descriptor is not None
    assert len(os.read(descriptor, 4096)) == 8
    assert port.drain() == list(range(1000))


def test_native_tags_are_words_in_the_pipe(port: Port) -> None:
    assert port.write_fd is not None
    os.write(port.write_fd, array("Q", [7, 2**63 - 1]).tobytes())
    assert is_readable(port)
    port.put(8)
    assert sorted(port.drain()) == [7, 8, 2**63 - 1]


def test_more_native_tags_than_one_read_takes_stay_readable(port: Port) -> None:
    assert port.write_fd is not None
    for tag in range(1500):
        os.write(port.write_fd, tag.to_bytes(8, sys.byteorder))
    tags: list[int] = []
    while is_readable(port):
        tags += port.drain()
    assert tags == list(range(1500))


def test_full_pipe_loses_no_tag(port: Port) -> None:
    assert port.write_fd is not None
    written = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            written += os.write(port.write_fd, array("Q", [9]).tobytes())
    for tag in range(10):
        port.put(tag)
    tags: list[int] = []
    while is_readable(port):
        tags += port.drain()
    assert tags.count(9) == written // 8 + 1
    assert [tag for tag in tags if tag != 9] == list(range(9))


def test_tags_of_many_threads_all_come_and_none_is_left_unannounced() -> None:
    port = open_port(nothing, watchable=True)
    descriptor = port.fileno()
    assert descriptor is not None
    count, threads = 2000, 4

    def put(base: int) -> None:
        for index in range(count):
            port.put(base + index)

    putters = [threading.Thread(target=put, args=(number * count,)) for number in range(threads)]
    for thread in putters:
        thread.start()
    tags: list[int] = []
    while len(tags) < count * threads:
        assert select.select([descriptor], [], [], 10)[0], f"nothing announced after {len(tags)} tags"
        tags += port.drain()
    for thread in putters:
        thread.join()
    assert sorted(tags) == list(range(count * threads))
    for number in range(threads):
        own = [tag for tag in tags if tag // count == number]
        assert own == sorted(own)
    port.close()


def test_tag_put_while_the_loop_looks_does_not_silence_the_next(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read = os.read

    def read(descriptor: int, size: int) -> bytes:
        port.put(1)
        return real_read(descriptor, size)

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read)
        assert port.drain() == [1]
    assert not is_readable(port)
    port.put(2)
    assert is_readable(port)


def test_without_descriptors_the_loop_is_woken_once_until_it_looks() -> None:
    woken: list[int] = []
    port = open_port(lambda: woken.append(1), watchable=False)
    assert port.fileno() is None
    assert port.write_fd is None
    port.put(1)
    port.put(2)
    assert woken == [1]
    assert port.drain() == [1, 2]
    port.put(3)
    assert woken == [1, 1]
    assert port.drain() == [3]
    port.close()
    port.put(4)
    assert woken == [1, 1]


@pytest.mark.parametrize("watchable", [True, False])
def test_closed_port_swallows_and_serves_the_next_loop(watchable: bool) -> None:
    port = open_port(nothing, watchable=watchable)
    descriptors = (port.fileno(), port.write_fd)
    port.put(1)
    if port.write_fd is not None:
        os.write(port.write_fd, array("Q", [2] * 2000).tobytes())
    port.close()
    port.close()
    port.put(3)
    assert port.drain() == []
    others = []
    while (again := open_port(nothing, watchable=watchable)) is not port:
        others.append(again)
        assert len(others) < 1000, "a closed port is not used again"
    assert (again.fileno(), again.write_fd) == descriptors
    assert again.drain() == []
    again.put(4)
    assert again.drain() == [4]
    for each in [again, *others]:
        each.close()


def test_port_closed_twice_is_given_out_once() -> None:
    port = open_port(nothing, watchable=False)
    port.close()
    port.close()
    opened = [open_port(nothing, watchable=False) for _ in range(5)]
    assert len({id(each) for each in opened}) == 5
    for each in opened:
        each.close()


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_keeps_off_its_parents_pipe() -> None:
    port = open_port(nothing, watchable=True)
    spare = open_port(nothing, watchable=True)
    spare.close()
    port.put(1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            tags = port.drain()
            port.put(2)
            port.close()
            own = open_port(nothing, watchable=True)
            own.put(3)
            fresh = own is not port and own is not spare and own.fileno() not in (port.fileno(), spare.fileno())
            code = 0 if fresh and tags == [] and own.drain() == [3] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert port.drain() == [1]
    port.close()


def test_anything_else_is_no_port() -> None:
    with pytest.raises(InvalidTypeError, match="'mailbox' is no port"):
        native_port("mailbox")
