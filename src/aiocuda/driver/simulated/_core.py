"""The machine moved by a clock: no threads, no sleep, and no time but what the clock says.

Who lets the time pass
    Every verb costs its caller a little, a query always 1 µs, so that polling moves time. A simulated event loop that
    has nothing else to do leaps to what is due next. On another loop the port asks to be drained in every turn, and
    each time one thing happens.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from ...errors import DeviceFault, DeviceOutOfMemory
from .._clock import Clock, running_clock
from .._codes import error_class, translate
from .._workers import Workers
from ..software import Core, Model
from ..software._work import KernelCall, TwinError, Work, touched
from ..software.rules import Command, IllegalAddressError, Kind, Stream
from ._chance import QUERY_NS, WORK_NS, Chance
from ._order import Order
from ._upset import Upset, Upsets

__all__ = ["Job", "SimulatedCore", "local"]

#: A stream with more than this in it would block its caller on a GPU (measured: the 1 021st entry does).
MOST_ENTRIES = 1_021

#: Verbs that ask and change nothing.
QUERIES = frozenset({"event_query", "stream_query"})

#: Which driver a worker thread is at work for, as ``serves``. One for all drivers, since each would take 1 KB.
local: Final = threading.local()

#: Commands that take no place in a hardware queue.
_FREE: frozenset[Kind] = frozenset({"record", "wait", "call", "allocate", "free"})


class SimulatedCore(Core):
    """State of one simulated driver."""

    __slots__ = (  # a dictionary of more than thirty names, with those of `Core`, takes 1.6 KB
        *("_ahead", "_in_callback", "_job", "_lengths_of", "_naps", "_next_step", "_ports", "_waiting", "_workers"),
        *("chance", "clock", "order", "refused", "seed", "trace", "upsets", "violations"),
    )

    name = "simulated"
    _ms_per_tick = 1e-6

    def __init__(self, model: Model, seed: int | None, upsets: Iterable[Upset] | None) -> None:
        self.chance = Chance(seed)
        super().__init__(model, self.chance.choose)
        self.seed = seed
        self.clock = running_clock() or Clock()
        self._ahead = 0  # of the clock's time, in nanoseconds: ours goes on where another clock takes over
        self.upsets = Upsets.drawn(self.chance) if upsets is None else Upsets(upsets)
        #: Everything that happened, a line each, if it is a list.
        self.trace: list[str] | None = None
        #: What no program may do: rules of CUDA that were broken, with the verb that broke them.
        self.violations: list[str] = []
        #: Verbs that were called after the fault, in order.
        self.refused: list[str] = []
        self.order = Order()
        self._next_step: int | None = None
        self._naps: dict[Command, Iterator[float]] = {}  # kernels whose twins run bit by bit
        self._waiting: list[Callable[[], object]] = []  # for streams to be idle, or for a fault
        self._lengths_of = 0  # the stream whose command is being submitted
        self._job: Job | None = None  # the one that runs just now, on the virtual time
        self._in_callback = 0  # the thread that one runs in just now; others may call meanwhile
        self._workers = Workers()
        self._ports: list[Any] = []

    # Time

    @property
    def attached(self) -> bool:
        """Does a simulated loop let the time pass?"""
        return running_clock() is self.clock

    @property
    def now_ns(self) -> int:
        """The driver's time. It never goes back, whatever clock is gone by."""
        return self.clock.now_ns + self._ahead

    def adopt(self) -> None:
        """Go by the clock of the simulated loop that runs now, if one does, and whenever that runs again."""
        clock = running_clock()
        if clock is None:
            return
        clock.invite(self)
        if clock is not self.clock:
            with self._lock:
                now = self.now_ns
                clock.take_over(self, self.clock)
                self.clock = clock
                self._ahead = now - clock.now_ns

    @property
    def fault(self) -> DeviceFault | None:
        """The latch. Who waits for what another loop has left reads it again and again, and calls no verb."""
        if running_clock() is not self.clock:
            self.adopt()
        return self._latch.fault

    def let_pass(self, seconds: float) -> None:
        """Nobody does anything for a while; what is due happens."""
        with self._lock:
            self.clock.spend(round(seconds * 1e9))

    def happen(self) -> bool:
        """Let the next thing happen; False if there is none."""
        with self._lock:
            due = self.clock.next_ns()
            if due is not None:
                self.clock.advance(due)
            return due is not None

    def _at(self, delay_ns: int, action: Callable[[], object]) -> None:
        self.clock.at(self.clock.now_ns + delay_ns, self, action)
        self._progress()

    def _progress(self) -> None:
        """Something is due: where no simulated loop runs, somebody must come and let it happen."""

    def _note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_ns} {text}")

    # Entering a verb

    def _enter(self) -> None:
        self._begin(_verb())

    def _begin(self, verb: str) -> None:
        """Enter the verb of this name."""
        if self._in_callback and self._in_callback == threading.get_ident():
            self.violations.append(f"V8: {verb} was called by a driver's own callback")
        if running_clock() is not self.clock:
            self.adopt()  # a loop that took over what another one left has opened no port
        with self._lock:
            self.clock.spend(QUERY_NS if verb in QUERIES else self.chance.verb())
            if self._refusal is not None:
                if self._farewell is None and self._job is None:  # what a thread is told, the loop does not know yet
                    self.refused.append(verb)
                raise self._refusal.again()
            self._calls += 1
            upset = self.upsets.due("refuse", verb)
            if upset is not None:
                self._refuse(verb, upset.code)

    def _enter_release(self) -> None:
        super()._enter_release()
        if not self.attached:
            self.adopt()
        with self._lock:
            self.clock.spend(self.chance.verb())

    def _refuse(self, verb: str, code: int) -> None:
        self._note(f"refuse {verb} {code}")
        kind = error_class(code)
        if kind is DeviceFault:
            raise self._fail(code, 0, f"{verb} answered a fault").again()
        if kind is DeviceOutOfMemory:
            free, _ = self._memory.info(0)
            raise DeviceOutOfMemory(f"{verb}: out of memory", code=code, call=verb, requested=0, free=free)
        raise translate(code, verb, "refused", "the simulated driver was told to refuse it")

    # Progress

    def _seconds(self, kind: Kind, work: Work) -> float | None:
        """In nanoseconds: the machine only compares and adds."""
        if isinstance(work, KernelCall) and work.function.naps:
            return None
        modelled = round(work.seconds * 1e9) or WORK_NS
        length = self.chance.length(self._lengths_of, modelled)
        upset = self.upsets.due("slow")
        if upset is not None:
            length += round(upset.seconds * 1e9)
        return length

    def _submit(self, stream: Stream, kind: Kind, action: Any) -> None:
        wrong = None
        if kind == "allocate":
            self.order.allocate(action.address, action.nbytes, stream.handle)
        elif kind == "free":
            wrong = self.order.free(action[0].address, stream.handle)
        else:
            self.order.submit(stream.handle)
        if wrong is not None:
            self.violations.append(f"V11: {wrong}")
        self._note(f"submit {kind} in {stream.handle}")
        super()._submit(stream, kind, action)

    def _submit_work(self, stream: Stream, kind: Kind, work: Work, engine: Any) -> None:
        number = self.order.submit(stream.handle)
        for address in touched(work):
            wrong = self.order.use(address, stream.handle, number)
            if wrong is not None:
                self.violations.append(f"V11: {wrong}")
        self._note(f"submit {kind} in {stream.handle}")
        self._lengths_of = stream.handle
        super()._submit_work(stream, kind, work, engine)
        entries = sum(command.kind not in _FREE for command in stream.queue)
        if entries > MOST_ENTRIES:
            self.violations.append(
                f"V12: stream {stream.handle} was given {entries} operations: the caller would block"
            )

    def _advance(self) -> None:
        if self._refusal is None and not self._machine.is_settled:
            self._step_at(self.now_ns + self.chance.doorbell())

    def _step_at(self, when: int) -> None:
        if self._next_step is None or when < self._next_step:
            self._next_step = when
            self.clock.at(when - self._ahead, self, lambda: self._move(when))
            self._progress()

    def _move(self, when: int) -> None:
        """The machine goes on, as far as the clock has come."""
        if self._next_step == when:
            self._next_step = None
        with self._lock:
            if self._refusal is not None:
                return
            step = self._step(self.now_ns)
            for command in step.starts:
                self._note(f"start {self._name(command)}")
                if command.seconds is None:
                    self._naps[command] = command.action.naps(self._device_of(command), self._look, self._seconds_now)
                    self._at(0, lambda command=command: self._resume(command))  # type: ignore[misc]
            if step.next is not None:
                self._step_at(int(step.next))

    def _perform(self, command: Command) -> None:
        if not self._end(command):
            super()._perform(command)
            command.action = None

    def _carry_out(self, command: Command) -> None:
        self._note(f"reach {command.kind} in {command.stream.handle}")
        super()._carry_out(command)

    def _resume(self, command: Command) -> None:
        """A twin that runs bit by bit goes on until its next nap."""
        with self._lock:
            if self._refusal is not None:
                return
            try:
                nap = next(self._naps[command], None)
            except IllegalAddressError as error:
                self._fail(700, self._device_of(command), f"illegal address in a {command.kind}: {error}")
                return
            except TwinError as error:
                self._fail(719, self._device_of(command), str(error), error.__cause__)
                return
            if nap is not None:
                self._at(max(1, round(nap * 1e9)), lambda: self._resume(command))
                return
            upset = self.upsets.due("slow")
            if upset is not None:
                self._at(round(upset.seconds * 1e9), lambda: self._finish(command))
                return
            self._finish(command)

    def _finish(self, command: Command) -> None:
        """A twin that ran bit by bit has come to its end."""
        with self._lock:
            if self._refusal is not None:
                return
            del self._naps[command]
            if not self._end(command):
                self._machine.finish(command, self.now_ns)
                self._advance()

    def _end(self, command: Command) -> bool:
        """What an engine did is over. Is it to be a fault?"""
        self._note(f"end {self._name(command)}")
        upset = self.upsets.due("fault")
        if upset is not None:
            self._fail(upset.code, self._device_of(command), f"a {command.kind} faulted")
        return upset is not None

    def _device_of(self, command: Command) -> int:
        assert command.engine is not None
        return command.engine.device

    def _name(self, command: Command) -> str:
        return f"{command.kind} in {command.stream.handle}"

    def _seconds_now(self) -> float:
        return self.now_ns / 1e9

    def _reached(self, function: Callable[[], object]) -> None:
        self._in_callback = threading.get_ident()
        try:
            function()
        finally:
            self._in_callback = 0

    def _faulted(self) -> None:
        if self._latch.fault is not None:
            self._note(f"fault {self._latch.fault.code}")
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done()

    # Waiting

    def _synchronize(self, streams: list[Stream], then: Callable[[], object]) -> None:
        """In a job the rest of it comes later; on a thread of ours it waits; anybody else lets the time pass."""
        with self._lock:
            busy = [] if self._refusal is not None else [stream for stream in streams if not stream.is_idle]
            if not busy:
                then()
                return
            left = len(busy)
            reached = threading.Event()
            job = self._job
            if job is not None:
                job.left += 1

            def one_reached() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    passed()

            def passed() -> None:
                if not reached.is_set():
                    reached.set()
                    self._waiting = [done for done in self._waiting if done is not passed]
                    then()
                    if job is not None:
                        job.part_done()

            self._waiting.append(passed)
            for stream in busy:
                self._submit(stream, "call", one_reached)
        if job is not None:
            return
        if getattr(local, "serves", None) is self:
            reached.wait()
            return
        while not reached.is_set():
            if not self.happen():
                raise RuntimeError("this call would block for ever: nothing is left to happen")

    def _threads(self) -> int:
        return self._workers.alive

    def _dismiss(self) -> None:
        self._workers.close()
        self._faulted()


class Job:
    """Blocking work on the virtual time. It is over when the work is, and all that it waits for."""

    __slots__ = ("_over", "left")

    def __init__(self, over: Callable[[], object]) -> None:
        self._over = over
        self.left = 1

    def part_done(self) -> None:
        """One thing less to wait for."""
        self.left -= 1
        if self.left == 0:
            self._over()


def _verb() -> str:
    """The verb that has been entered, by the name of its function."""
    frame = sys._getframe(2)
    while frame.f_code.co_name.startswith("_") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name
