"""The number of threads that decode: all, or one where it is as fast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiocuda._base._checks import has_gil
from aiocuda.data import _thread_limit
from aiocuda.data._thread_limit import FIRST, MOST_PAUSE, WINDOW, ThreadLimit

pytestmark = pytest.mark.skipif(not has_gil(), reason="without the GIL all threads decode")

THREADS = 8
RUN = 1e-3  # seconds between the ends of two runs


class Rates:
    """Threads that decode so many samples per second, all together and one alone, in virtual time."""

    def __init__(self, limit: ThreadLimit, of_all: float, of_one: float, cpu: float = 20e-6) -> None:
        self.limit = limit
        self.slower = 1.0  #: times as long for a sample, but as many samples: the consumer needs no more
        self.of_all, self.of_one = of_all, of_one
        self.cpu = cpu
        self.time = 0.0

    def run(self, seconds: float, *, is_idle: bool = False) -> Iterator[tuple[float, bool]]:
        """Decode for so long. Yield the time of each change, and whether one thread decodes from then on."""
        end = self.time + seconds
        while self.time < end:
            self.time += RUN
            before = self.limit.is_one
            threads, rate = (1, self.of_one) if before else (THREADS, self.of_all)
            rows = rate * RUN
            if is_idle:
                self.limit.idle()
            more = self.limit.note(threads, threads * RUN * self.slower, self.cpu * rows, rows, self.time)  # type: ignore[arg-type]
            assert more == (before and not self.limit.is_one)
            if before != self.limit.is_one:
                yield self.time, self.limit.is_one


def test_one_thread_goes_on_alone_if_it_decodes_as_many() -> None:
    rates = Rates(ThreadLimit(THREADS), of_all=20_000, of_one=40_000)
    ((time, is_one),) = rates.run(1.0, is_idle=True)
    assert FIRST <= time <= FIRST + 2 * WINDOW
    assert is_one


def test_trials_in_vain_take_one_window_after_longer_and_longer_pauses() -> None:
    rates = Rates(ThreadLimit(THREADS), of_all=40_000, of_one=20_000)
    changes = list(rates.run(60.0))
    begins, ends = [time for time, _ in changes[::2]], [time for time, _ in changes[1::2]]
    assert [is_one for _, is_one in changes] == [True, False] * len(ends)
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    assert max(lengths) <= WINDOW + 3 * RUN
    pauses = [after - before for before, after in zip(ends, begins[1:], strict=False)]
    wanted = [min(FIRST * 4**number, MOST_PAUSE) for number in range(1, len(pauses) + 1)]
    assert pauses == pytest.approx(wanted, abs=2 * WINDOW)
    assert len(pauses) >= 6


def test_one_thread_that_is_never_idle_is_compared_again() -> None:
    rates = Rates(ThreadLimit(THREADS), of_all=20_000, of_one=40_000)
    assert [is_one for _, is_one in rates.run(1.0)] == [True, False, True]  # all are not faster
    rates.of_all = 80_000  # the samples wait for files now, and do not need the GIL so much
    assert [is_one for _, is_one in rates.run(20.0)][:1] == [False]
    assert not rates.limit.is_one


def test_one_thread_that_has_pauses_is_not_compared_again() -> None:
    rates = Rates(ThreadLimit(THREADS), of_all=20_000, of_one=20_000)  # the rate of the consumer
    assert [is_one for _, is_one in rates.run(60.0, is_idle=True)] == [True]


@pytest.mark.parametrize(
    ("of_all", "cpu"),
    [
        (1000, 20e-6),  # a sample takes 8 ms, as from a disk
        (4000, 0.3e-3),  # it is not quick
        (40_000, 50e-6),  # two processors are in use
    ],
)
def test_no_trial_where_several_threads_help(of_all: float, cpu: float) -> None:
    assert list(Rates(ThreadLimit(THREADS), of_all, of_all, cpu).run(30.0)) == []


def test_window_in_which_the_consumer_took_nothing_does_not_count() -> None:
    rates = Rates(ThreadLimit(THREADS), of_all=20_000, of_one=20_000)
    assert [is_one for _, is_one in rates.run(FIRST + WINDOW + 10 * RUN)] == [True]
    rates.time += 10.0  # in the trial
    assert list(rates.run(5.0, is_idle=True)) == []
    assert rates.limit.is_one


def test_all_threads_decode_samples_that_have_become_slow() -> None:
    """Also if the thread has pauses: the consumer may take more batches at any time."""
    rates = Rates(ThreadLimit(THREADS), of_all=1_000, of_one=1_000)
    rates.slower = 0.1
    assert [is_one for _, is_one in rates.run(1.0, is_idle=True)] == [True]
    rates.slower = 0.35  # 0.35 ms: they are quick still
    assert list(rates.run(1.0, is_idle=True)) == []
    rates.slower = 0.6
    assert [is_one for _, is_one in rates.run(2 * WINDOW, is_idle=True)] == [False]


def test_one_thread_that_does_not_return_ends_the_trials_for_long() -> None:
    rates = Rates(ThreadLimit(THREADS), of_all=20_000, of_one=40_000)
    list(rates.run(1.0, is_idle=True))
    rates.limit.end()
    ((time, is_one),) = rates.run(MOST_PAUSE + 1.0)
    assert is_one
    assert time >= 1.0 + MOST_PAUSE


def test_one_worker_has_no_trial_and_neither_have_threads_without_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(Rates(ThreadLimit(1), 20_000, 40_000).run(10.0)) == []
    monkeypatch.setattr(_thread_limit, "has_gil", lambda: False)
    assert list(Rates(ThreadLimit(THREADS), 20_000, 40_000).run(10.0)) == []
