"""`Client`: sends requests to a server on this machine, at given times or as fast as they are answered."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from .connection import Connection, Response
from .outcomes import Outcome

__all__ = ["MOST_CONNECTIONS", "Client"]

#: Default limit of open connections.
MOST_CONNECTIONS = 512

#: Seconds. The client comes back at least this often, since a retry may be due before the next arrival.
_LONGEST_SLEEP = 0.05


class Client:
    """A client with keep-alive connections to a port of 127.0.0.1. One run at a time.

    Parameters
    ----------
    port
        The server's port.
    request
        Returns the bytes of the request with a number.
    is_right
        True if this is the body of the right response to the request with that number.
    most_connections
        The most open connections. A request for which none is free waits in the client; its latency still counts from
        the scheduled time.
    """

    def __init__(
        self,
        port: int,
        request: Callable[[int], bytes],
        is_right: Callable[[int, bytes], bool],
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        if most_connections < 1:
            raise ValueError(f"most_connections is at least 1, not {most_connections}")
        self._port = port
        self._request = request
        self._is_right = is_right
        self._most_connections = most_connections
        self._loop = asyncio.get_running_loop()
        self._idle: list[Connection] = []  # last in, first out: few connections are used at a low load
        self._under_way: dict[Connection, Outcome] = {}
        self._open: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: deque[Outcome] = deque()
        self._unfinished = 0
        self._all_finished = asyncio.Event()
        self._finished: Callable[[Outcome], None] = _ignore
        self._start = 0.0
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        self._closed = True
        for task in self._opening:
            task.cancel()
        for connection in self._open:
            connection.abort()
        while self._open or self._opening:
            await asyncio.sleep(0)

    async def open_loop(
        self,
        arrivals: Sequence[float],
        *,
        drain_s: float,
        retry: Callable[[Outcome], float | None] | None = None,
        spin_s: float = 0.0,
    ) -> list[Outcome]:
        """Send a request at each of these times, whether or not earlier ones are answered.

        Parameters
        ----------
        arrivals
            Seconds since the begin of the run, in order.
        drain_s
            The most seconds to wait for responses after the last arrival. Later responses are not counted.
        retry
            Called with each outcome; returns the time at which the request is sent again, or None. Retries after the
            last arrival are left out.
        spin_s
            Busy waiting instead of sleep that long before an arrival. A selector sleeps for whole milliseconds, so
            without it requests are sent up to 1 ms late. It needs a core for the client alone.

        Returns
        -------
        list of Outcome
            One for each request and retry, in the order of their numbers.
        """
        outcomes: list[Outcome] = []
        due = [(at, 0) for at in arrivals]  # sorted, thus a heap
        last = due[-1][0] if due else 0.0
        self._begin()

        def finished(outcome: Outcome) -> None:
            again = None if retry is None else retry(outcome)
            if again is not None and again <= last:
                heapq.heappush(due, (again, outcome.attempt + 1))

        self._finished = finished
        while due:
            if await self._is_due(due, spin_s):
                at, attempt = heapq.heappop(due)
                outcome = Outcome(len(outcomes), at, attempt)
                outcomes.append(outcome)
                self._send(outcome)
        await self._drain(drain_s)
        return outcomes

    async def closed_loop(self, connections: int, seconds: float, *, drain_s: float = 10.0) -> list[Outcome]:
        """Let each of these connections send its next request as soon as the previous one is answered."""
        outcomes: list[Outcome] = []
        self._begin()

        def send_next(_: Outcome | None = None) -> None:
            now = self._now()
            if now < seconds:
                outcome = Outcome(len(outcomes), now)
                outcomes.append(outcome)
                self._send(outcome)

        self._finished = send_next
        for _ in range(connections):
            send_next()
        await asyncio.sleep(seconds)
        await self._drain(drain_s)
        return outcomes

    def _begin(self) -> None:
        if self._closed or self._unfinished:
            raise RuntimeError("the client is closed, or another run is under way: make a client for each run")
        self._start = self._loop.time()

    def _now(self) -> float:
        return self._loop.time() - self._start

    async def _is_due(self, due: Sequence[tuple[float, int]], spin_s: float) -> bool:
        """Wait until the first request is due, or for a moment; True if it is due."""
        left = due[0][0] - self._now()
        if left > 0:
            await asyncio.sleep(0 if left <= spin_s else min(left - spin_s, _LONGEST_SLEEP))
        return due[0][0] <= self._now()

    async def _drain(self, seconds: float) -> None:
        """Wait for the responses; then count the requests that have none, and close their connections."""
        self._all_finished.clear()
        if self._unfinished:
            try:
                async with asyncio.timeout(seconds):
                    await self._all_finished.wait()
            except TimeoutError:
                pass  # the outcomes show it
        self._finished = _ignore
        for outcome in [*self._under_way.values(), *self._waiting]:
            outcome.problem = "no response until the end of the run"
        self._waiting.clear()
        for connection in [*self._under_way]:
            del self._under_way[connection]
            connection.abort()
        self._unfinished = 0

    # Connections

    def _send(self, outcome: Outcome) -> None:
        outcome.reached = self._now()
        self._unfinished += 1
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                self._hand_over(connection, outcome, outcome.reached)
                return
        self._waiting.append(outcome)
        self._open_another()

    def _hand_over(self, connection: Connection, outcome: Outcome, now: float) -> None:
        outcome.sent = now
        self._under_way[connection] = outcome
        connection.request(self._request(outcome.number))

    def _open_another(self) -> None:
        """Open a connection for a waiting request, if that is allowed."""
        if len(self._open) + len(self._opening) < self._most_connections and len(self._opening) < len(self._waiting):
            self._opening.add(self._loop.create_task(self._connect()))

    async def _connect(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._received, self._lost), "127.0.0.1", self._port
            )
        except OSError as error:
            self._opening.discard(task)
            if self._waiting:
                self._finish(self._waiting.popleft(), Response(0, problem=f"no connection: {error.strerror}"))
            self._open_another()
        else:
            self._open.add(connection)
            self._free(connection)
        finally:
            self._opening.discard(task)

    def _received(self, connection: Connection, response: Response) -> None:
        outcome = self._under_way.pop(connection, None)
        if outcome is not None:  # None: of a run that has ended
            self._finish(outcome, response)
        self._free(connection)

    def _free(self, connection: Connection) -> None:
        """Give the connection to the first waiting request."""
        if not connection.is_usable:
            return
        if self._waiting:
            self._hand_over(connection, self._waiting.popleft(), self._now())
        else:
            self._idle.append(connection)

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._waiting and not self._closed:
            self._open_another()

    def _finish(self, outcome: Outcome, response: Response) -> None:
        outcome.status, outcome.retry_after, outcome.problem = response.status, response.retry_after, response.problem
        if response.status:
            outcome.answered = self._now()
            if response.status == 200 and not self._is_right(outcome.number, response.body):
                outcome.problem = "wrong result"
        self._unfinished -= 1
        self._finished(outcome)
        if not self._unfinished:
            self._all_finished.set()


def _ignore(outcome: Outcome) -> None:
    """Do nothing: between two runs."""
