"""Random programs that use a cluster, in virtual time.

``python -m tests.cluster.simulation [--seeds N] [--first S]``: exit 1 and a line ``seed S: C2 …`` at the first
violation.

====  ==========================================================================================================
C1    each call has one outcome, and it is its own: the result of its token, or the error that belongs to it
C2    a call runs at most once in an epoch, without retry once in all, only where it was sent; an answer is from there
C3    a call that was cancelled before it arrived does not run; one that runs is cancelled there; deadlines are on time
C4    restarts: limit, back-off, one process of a replica at a time
C5    a lost replica serves again, with all objects; a loss ends its calls; calls wait only for a replica that restarts
C6    `healthy` and the statistics
C7    a call goes to a running replica, and to one without calls if there is one
C8    a silent process is lost after 2 to 2.5 s, a live one never
C9    after `aclose` nothing is left; a replica forgets calls that are settled
====  ==========================================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import random
import sys
import warnings
from collections import Counter
from typing import Any, Self

from aiocuda.cluster import Cluster, DeadlineError, ReplicaHandle, ReplicaLostError, current_replica
from aiocuda.cluster._messages import Packet, Request, Run
from aiocuda.cluster._replicas import Replicas
from aiocuda.errors import CleanupWarning, ClosedError
from tests.cluster.simulated_engine import LATE_SECONDS, MESSAGE_SECONDS, InlineLoop, SimulatedEngine, SimulatedProcess
from tests.random_programs import Violation, check, command, run_in_virtual_time

__all__ = ["run"]

#: Some turns of the simulated loop.
EPSILON = 1e-3

#: The turns between a loss and the end of its replica's process.
TURNS = 2e-5

#: In this time of rest, the longest silence is noticed, and the longest back-off has passed.
REST_SECONDS = 60


class Failed(Exception):  # noqa: N818 - raised on purpose
    pass


@dataclasses.dataclass(eq=False)
class Call:
    """One call, and what the program knows about it."""

    token: int
    retry: bool
    deadline: float | None
    seconds: float
    fails: bool
    called: float = 0.0
    ended: float | None = None
    outcome: Any = None
    cancelled: float | None = None
    none_left: bool = False  #: all replicas had stopped
    closing: bool = False
    sends: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  #: replica, epoch, id


@dataclasses.dataclass(eq=False)
class MethodRun:
    """One run of the method of a call."""

    token: int
    process: SimulatedProcess
    ended: float | None = None


#: The program in whose replicas the objects are.
PROGRAM: contextvars.ContextVar[Program] = contextvars.ContextVar("program")


class Service:
    """An object of the replicas."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.program = PROGRAM.get()
        self.process = self.program.process_here()
        self.program.may_fail(self.process)

    async def __aenter__(self) -> Self:
        try:
            await asyncio.sleep(self.program.chance.random() * 0.1)
            self.program.may_fail(self.process)
        except BaseException:
            self.process.objects[self.number] = "failed"
            raise
        self.process.objects[self.number] = "created"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.objects[self.number] = "left"

    async def work(self, token: int, seconds: float, fails: bool) -> tuple[int, int, int]:
        where = self.process.replica, self.process.epoch
        run = self.program.begin(token, self.process)
        check("C5", self.process.objects[self.number] == "created", "a method runs on an object that is not there")
        try:
            await asyncio.sleep(seconds)
        finally:
            run.ended = self.program.now()
        if fails:
            raise Failed(token, *where)
        return token, *where


class Program:
    """One random program."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(f"aiocuda cluster {seed}")
        self.replicas = chance.choice([1, 2, 2, 3, 5])
        self.limit = chance.choice([0, 1, 3, 3, 10, 100])
        self.count = chance.choice([1, 10, 40])
        self.spread = chance.choice([0.01, 1.0, 10.0, 100.0])  # seconds of the calls
        self.seconds = chance.choice([1e-3, 0.1, 2.0])  # of a method
        self.classes = chance.choice([1, 1, 2, 3])
        self.bad = chance.choice([0.0, 0.0, 0.05, 0.3])  # constructors that raise
        self.patience = chance.choice([0.0, 0.4])  # calls that are cancelled
        self.hurried = chance.choice([0.0, 0.3])  # calls with a deadline
        self.early = chance.random() < 0.3  # closed while calls run
        self.crowded = chance.random() < 0.04  # more calls than are woken in one turn, and a fault among the replies
        if self.crowded:
            self.replicas, self.count, self.spread, self.seconds, self.early = 1, 800, 1e-3, 2e-3, False
            self.patience = self.hurried = 0.0
        self.calls: list[Call] = []
        self.runs: list[MethodRun] = []
        self.found: list[BaseException] = []
        self.handles: list[ReplicaHandle] = []
        self.spawned: list[bool] = []
        self.closing = False
        self.closed_at: dict[tuple[int, int], float] = {}  # losses, by replica and epoch
        self.epochs: dict[int, int] = {}
        self.restarts: dict[int, list[float]] = {}  # their times, by replica
        self.late_replies: set[tuple[int, int, int]] = set()  # replica, epoch, id: of replies after the loss
        self.due: dict[int, float | None] = {}  # the next start of a replica
        self.excused: set[tuple[int, int]] = set()  # losses that do not count towards the limit
        self.there: set[int] = set()  # numbers of objects whose spawn has returned
        self.blamed: dict[int, set[int]] = {}  # by replica: numbers of objects at whose creation it was lost

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # -- in the replicas -----------------------------------------------------------------------------------------

    def process_here(self) -> SimulatedProcess:
        info = current_replica()
        assert info is not None
        return self.engine.processes[info.index, info.epoch]

    def may_fail(self, process: SimulatedProcess) -> None:
        if process.epoch > 1 and not self.engine.quiet and self.chance.random() < self.bad:
            raise Failed("not created")

    def begin(self, token: int, process: SimulatedProcess) -> MethodRun:
        """A method begins."""
        run = MethodRun(token, process)
        if process.died is not None:
            return run  # it has no effect
        self.runs.append(run)
        with self.noting():
            call = self.calls[token]
            here = [sent[2] for sent in call.sends if sent[:2] == (process.replica, process.epoch)]
            check("C2", bool(here), f"call {token} runs in epoch {process.epoch}, and was sent to {call.sends}")
            check("C3", here[0] not in process.cancelled, f"call {token} runs, and was cancelled before it arrived")
        return run

    @contextlib.contextmanager
    def noting(self) -> Any:
        """Keep a violation that the cluster would treat as an exception of a replica or of an engine."""
        try:
            yield
        except Violation as violation:
            self.found.append(violation)

    # -- in the engine -------------------------------------------------------------------------------------------

    def on_call(self, replica: int, request: Request, packet: Packet) -> None:
        body = request.body
        if not isinstance(body, Run):
            return
        token = packet.load(body.arguments)[0]
        self.calls[token].sends.append((replica, request.epoch, body.id))
        with self.noting():
            found = self.cluster.statistics().replicas
            check("C7", found[replica].state == "running", f"call {token} is sent to a {found[replica].state} replica")
            idle = [each.index for each in found if each.state == "running" and not each.in_flight]
            check(
                "C7", found[replica].in_flight == 1 or not idle, f"call {token} is sent to a busy one, and {idle} idle"
            )

    def on_reply(self, replica: int, epoch: int, identity: int) -> None:
        found = self.cluster.statistics().replicas[replica]
        if found.epoch != epoch or found.state != "running":
            self.late_replies.add((replica, epoch, identity))

    def on_spawn(self, replica: int, epoch: int) -> None:
        with self.noting():
            check("C4", replica not in self.engine.current, f"replica {replica} has two processes")
            check("C4", epoch == self.epochs.get(replica, 0) + 1, f"replica {replica} has epoch {epoch}")
            self.epochs[replica] = epoch
            if epoch > 1:
                due, now = self.due[replica], self.now()
                check("C4", due is not None, f"replica {replica} is started after the limit of {self.limit}")
                assert due is not None
                check("C4", abs(now - due) < EPSILON, f"replica {replica} is started at {now:g}, not at {due:g}")
                if (replica, epoch - 1) not in self.excused:
                    self.restarts.setdefault(replica, []).append(now)

    def on_close(self, replica: int, process: SimulatedProcess | None) -> None:
        now = self.now()
        self.closed_at[replica, self.epochs[replica]] = now
        before = [time for time in self.restarts.get(replica, ()) if now - time < 60.0]
        self.due[replica] = now + min(0.1 * 2.0 ** len(before), 5.0) if len(before) < self.limit else None
        creations = {} if process is None else process.creations
        new = {number for number, end in creations.items() if end >= now - TURNS} - self.there
        blamed = self.blamed.setdefault(replica, set())
        if not new <= blamed:
            self.due[replica] = now + 0.1
            self.excused.add((replica, self.epochs[replica]))
        blamed |= new
        if process is None or self.closing:
            return
        with self.noting():
            harmed = process.died if process.silent is None else process.silent
            reason = self.cluster.statistics().replicas[replica].last_loss
            if harmed is None:
                excused = process.faulted is not None or process.creating_failed
                check("C8", excused, f"replica {replica} is lost, and lives: {reason}")
                return
            waited = now - harmed
            slack = 2 * MESSAGE_SECONDS + EPSILON
            most = 2.5 if not process.creating else 30.5
            check("C8", waited <= most + slack, f"replica {replica} is lost {waited:g} s after its end")
            if process.died is None and process.faulted is None and not process.creating_failed:
                check("C8", waited >= 2.0 - slack, f"replica {replica} is lost after {waited:g} s of silence")

    # -- the calls -----------------------------------------------------------------------------------------------

    def new_call(self, plain: bool = False) -> Call:
        chance = self.chance
        deadline = chance.choice([0.0, 1e-3, 0.1, 3.0]) if chance.random() < self.hurried and not plain else None
        call = Call(
            len(self.calls), plain or chance.random() < 0.4, deadline, self.seconds * chance.random() + 1e-6,
            not plain and chance.random() < 0.2,
        )  # fmt: skip
        self.calls.append(call)
        return call

    async def call(self, handle: ReplicaHandle, call: Call) -> None:
        call.called = self.now()
        call.none_left = all(each.state == "stopped" for each in self.cluster.statistics().replicas)
        call.closing = self.closing
        try:
            call.outcome = await handle.call(
                "work", call.token, call.seconds, call.fails, deadline_s=call.deadline, retry=call.retry
            )
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - checked by `check_outcome`
            call.outcome = error
        call.ended = self.now()
        with self.noting():
            if isinstance(call.outcome, ReplicaLostError) and call.outcome.replica is None:
                stopped = all(each.state == "stopped" for each in self.cluster.statistics().replicas)
                check("C5", stopped, f"call {call.token} has found no replica, and one is left")
            check("C6", self.cluster.healthy is self.is_healthy(), f"healthy is {self.cluster.healthy}")

    def is_healthy(self) -> bool:
        return not self.closing and all(each.state != "stopped" for each in self.cluster.statistics().replicas)

    async def one(self) -> None:
        """Make one call after some time, and perhaps cancel it."""
        chance = self.chance
        await asyncio.sleep(chance.random() * self.spread)
        call = self.new_call()
        task = asyncio.create_task(self.call(chance.choice(self.handles), call))
        if chance.random() < self.patience:
            await asyncio.sleep(chance.choice([0.0, chance.random() * self.seconds, chance.random() * 0.1]))
            if not task.done():
                call.cancelled = self.now()
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # cancelled before it began
            await task

    async def spawn(self) -> None:
        number = len(self.spawned) + 1
        self.spawned.append(True)
        try:
            self.handles.append(await self.cluster.spawn(Service, number))
            self.there.add(number)
        except (Failed, ReplicaLostError, ClosedError, asyncio.CancelledError) as error:
            self.spawned[number - 1] = False
            with self.noting():
                check("C1", not isinstance(error, ClosedError) or self.closing, f"spawn has raised {error!r}")

    def check_outcome(self, call: Call) -> None:
        """The outcome of a call is its own."""
        outcome, where = call.outcome, f"call {call.token}, sent to {call.sends}, ended with {call.outcome!r}"
        assert call.ended is not None
        last = call.sends[-1][:2] if call.sends else None
        if isinstance(outcome, tuple):
            check("C1", outcome[0] == call.token and not call.fails, where)
            check("C2", outcome[1:] == last, where)
            check("C2", call.sends[-1] not in self.late_replies, f"{where}, by a reply after the loss")
            lost = self.closed_at.get(last) if last else None
            check("C2", lost is None or call.ended <= lost + EPSILON, f"{where}, of a lost epoch")
        elif isinstance(outcome, Failed):
            check("C1", outcome.args[0] == call.token and call.fails and outcome.args[1:] == last, where)
        elif isinstance(outcome, DeadlineError):
            assert call.deadline is not None
            late = call.ended - call.called - call.deadline
            check("C3", -EPSILON <= late <= EPSILON, f"{where} {late:g} s after its deadline")
        elif isinstance(outcome, ReplicaLostError):
            if outcome.replica is not None and not self.closing:
                lost_at = self.closed_at.get((outcome.replica, outcome.epoch or 0))
                check("C1", (outcome.replica, outcome.epoch) == last and lost_at is not None, where)
                check("C5", call.ended <= (lost_at or 0.0) + EPSILON, f"{where} after the loss")
                check("C5", not call.retry or len(call.sends) == 3, where)
        elif isinstance(outcome, asyncio.CancelledError):
            check("C1", call.cancelled is not None, where)
        else:
            check("C1", isinstance(outcome, ClosedError) and self.closing, where)
        if call.none_left and not call.closing:
            check("C5", isinstance(outcome, ReplicaLostError | DeadlineError | asyncio.CancelledError), where)
            check("C5", call.ended <= call.called + EPSILON, f"{where}, and waited while no replica was left")

    def check_runs(self) -> None:
        """Each call runs where it was sent, once, and not longer than its caller waits."""
        ran = Counter((run.token, run.process.replica, run.process.epoch) for run in self.runs)
        for (token, *where), times in ran.items():
            check("C2", times == 1, f"call {token} runs {times} times in {where}")
        for call in self.calls:
            most = 3 if call.retry else 1
            check("C2", len(call.sends) <= most, f"call {call.token} was sent {len(call.sends)} times")
            check("C2", len({sent[:2] for sent in call.sends}) == len(call.sends), f"{call.token} went there twice")
        bound = MESSAGE_SECONDS + EPSILON
        for run in self.runs:
            call, process = self.calls[run.token], run.process
            if call.ended is None or not isinstance(call.outcome, asyncio.CancelledError | DeadlineError):
                continue
            ends = (run.ended, process.died, process.silent, self.closed_at.get((process.replica, process.epoch)))
            gone_on = min(time for time in (*ends, self.now()) if time is not None) - call.ended
            check("C3", gone_on <= bound, f"call {run.token} runs {gone_on:g} s after it was cancelled")

    # -- the whole program ---------------------------------------------------------------------------------------

    async def main(self) -> None:
        reports: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reports.append(context))
        PROGRAM.set(self)
        self.engine = SimulatedEngine(self.chance, self.on_call, self.on_spawn, self.on_close, self.on_reply)
        if self.crowded:
            self.engine.speed, self.engine.life = 1e-4, None
        self.started = Replicas(self.engine, self.replicas, self.limit)
        self.cluster = Cluster(self.started, self.engine.dumps, lambda _: None)
        before = asyncio.all_tasks()
        try:
            await self.serve()
        except ReplicaLostError:
            pass  # a process was lost before it had started
        finally:
            self.closing = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CleanupWarning)
                await self.cluster.aclose(self.chance.choice([0.0, 1.0, 30.0]))
        closed = self.now()
        await asyncio.sleep(EPSILON)
        self.check_end(closed)
        await asyncio.sleep(LATE_SECONDS)
        for _ in range(3):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - before
        check("C9", not left, f"tasks are left: {left}")
        check("C1", not reports, f"the loop's exception handler got {reports[:1]}")
        if self.found:
            raise self.found[0]

    async def serve(self) -> None:
        chance = self.chance
        await self.started.start()
        await self.spawn()
        if not self.handles:
            return
        more = [asyncio.create_task(self.later_spawn()) for _ in range(self.classes - 1)]
        tasks = [asyncio.create_task(self.one()) for _ in range(self.count)]
        if self.crowded:
            await asyncio.sleep(self.spread * (0.5 + chance.random()))
            for process in self.engine.current.values():
                self.engine.fault(process)
        if self.early:
            await asyncio.sleep(chance.random() * self.spread)
            self.closing = True
            closing = asyncio.create_task(self.cluster.aclose(chance.choice([0.0, 0.1, 30.0])))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CleanupWarning)
                await closing
            await asyncio.wait([*tasks, *more])
            return
        await asyncio.sleep(self.spread)
        self.engine.quiet = True
        _, hang = await asyncio.wait([*tasks, *more], timeout=2 * REST_SECONDS)
        if self.found:
            raise self.found[0]
        check("C5", not hang, f"{len(hang)} calls wait forever")
        await self.rest()

    async def later_spawn(self) -> None:
        await asyncio.sleep(self.chance.random() * self.spread)
        spawning = asyncio.create_task(self.spawn())
        if self.chance.random() < self.patience:
            await asyncio.sleep(self.chance.random() * self.chance.choice([0.1, 1.0]))
            spawning.cancel()
        await asyncio.wait({spawning})
        if not spawning.cancelled():
            spawning.result()

    async def rest(self) -> None:
        """All replicas that are not stopped serve again, with all objects, and forget the calls."""
        for _ in range(REST_SECONDS):
            states = [each.state for each in self.cluster.statistics().replicas]
            running = [self.engine.current.get(index) for index, state in enumerate(states) if state == "running"]
            sound = all(each is not None and each.lives and each.faulted is None for each in running)
            if sound and all(state in ("running", "stopped") for state in states):
                break
            await asyncio.sleep(1.0)
        else:
            check("C5", False, f"after a minute of rest the replicas are {states}")
        for index, state in enumerate(states):
            if state == "stopped":
                check("C4", self.due[index] is None, f"replica {index} has stopped before the limit of {self.limit}")
        if not running:
            return
        for handle in self.handles:
            call = self.new_call(plain=True)
            await self.call(handle, call)
            check("C5", isinstance(call.outcome, tuple), f"a call at rest ended with {call.outcome!r}")
        await asyncio.sleep(2 * LATE_SECONDS + 3.0)
        for process in self.engine.current.values():
            for number, spawned in enumerate(self.spawned, 1):
                there = process.objects.get(number) == "created"
                check("C5", there or not spawned, f"object {number} is not there again")
                check("C5", spawned or not there, f"object {number} is there, and its spawn has failed")
            kept = len(process.server._runs)  # nothing public depends on it but the memory
            check("C9", not kept, f"replica {process.replica} remembers {kept} calls that are settled")

    def check_end(self, closed: float) -> None:
        for call in self.calls:
            if call.ended is not None:
                self.check_outcome(call)
                late = not call.closing and call.ended > closed + EPSILON
                check("C9", not late, f"call {call.token} ended after the cluster")
            else:
                check("C1", call.cancelled is not None, f"call {call.token} has no outcome")
        self.check_runs()
        found = self.cluster.statistics()
        check("C6", found.waiting == 0, f"statistics().waiting is {found.waiting}")
        retries = sum(max(0, len(call.sends) - 1) for call in self.calls)
        check("C6", found.retries >= retries, f"{retries} calls were sent again, and {found.retries} are counted")
        unseen = sum(isinstance(call.outcome, asyncio.CancelledError | DeadlineError) for call in self.calls)
        sent = Counter(sent[0] for call in self.calls for sent in call.sends)
        cancelled = 0
        for each in found.replicas:
            check("C6", each.state == "stopped" and not each.in_flight, f"after the end: {each}")
            check("C6", each.calls == sent[each.index], f"{sent[each.index]} calls were sent: {each}")
            cancelled += each.calls - each.answered - each.failed - each.lost
        check("C6", 0 <= cancelled <= unseen, f"{cancelled} calls have no count, and {unseen} were cancelled")
        answered = sum(isinstance(call.outcome, tuple) for call in self.calls)
        counted = sum(each.answered for each in found.replicas)
        check("C6", answered <= counted <= answered + unseen, f"{answered} answers, and {counted} are counted")
        for process in self.engine.processes.values():
            left = all(state != "created" for state in process.objects.values())
            check("C9", left, f"objects of replica {process.replica} are not left: {process.objects}")


def run(seed: int) -> None:
    """Run a program. `Violation` if it breaks a rule."""
    run_in_virtual_time(Program(seed).main(), "C0", InlineLoop)


if __name__ == "__main__":
    sys.exit(command(run, "tests.cluster.simulation", __doc__))
