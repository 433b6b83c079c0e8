"""`open_cluster`, and the checks of its arguments."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

from .._base._checks import as_count
from .._base._mistakes import keywords
from .._base._types import SourceLine
from .._processes._main_guard import check_main_guard
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError, NoEventLoopError
from ._cluster import Cluster
from ._engine import Engine
from ._replicas import Replicas

if TYPE_CHECKING:
    import distributed

__all__ = ["open_cluster"]

#: The most replicas of a cluster: each has a process and a task.
MOST_REPLICAS = 1024

EngineName: TypeAlias = Literal["local", "dask"]

_CURE = "use `async with open_cluster(…) as cluster`"


class _Opening:
    """What `open_cluster` returns: enter it by ``async with``."""

    def __init__(self, engine: EngineName, replicas: int, restarts: int, client: distributed.Client | None) -> None:
        self._engine = engine
        self._replicas = replicas
        self._restarts = restarts
        self._client = client
        self._line = SourceLine.of_caller()
        self._cluster: Cluster | None = None
        self._begun = False

    async def __aenter__(self) -> Cluster:
        if self._cluster is not None and self._cluster._scope.closing:
            raise self._cluster._scope.closed_error()
        if self._begun:
            raise BusyError("a cluster is opened once: call open_cluster again")
        self._begun = True
        if asyncio._get_running_loop() is None:  # as in a task of trio
            raise NoEventLoopError("a cluster is opened in asyncio's running event loop: under asyncio.run(main())")
        engine = self._make_engine()
        replicas = Replicas(engine, self._replicas, self._restarts)
        cluster = Cluster(replicas, engine.dumps, self._check_class)
        try:
            await replicas.start()
        except BaseException:
            await cluster.aclose(0.0)
            raise
        self._cluster = cluster
        return cluster

    def _make_engine(self) -> Engine:
        if self._engine == "local":
            from ._local_engine import LocalEngine

            check_main_guard({}, "engine='local'")
            return LocalEngine()
        from ._dask import DaskEngine

        assert self._client is not None
        return DaskEngine(self._client)

    def _check_class(self, cls: type) -> None:
        if self._engine == "local":
            check_main_guard({"cls": cls}, "engine='local'")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._cluster is not None
        if kind is None:
            await self._cluster.aclose()
        else:
            await self._cluster._scope.leave(self._cluster)

    def __del__(self) -> None:
        if not getattr(self, "_begun", True):
            self._line.warn(f"open_cluster() was never entered: {_CURE}", RuntimeWarning)

    def __repr__(self) -> str:
        return f"<open_cluster() at {self._line}>"

    if not TYPE_CHECKING:  # a type checker reports these by itself

        def __await__(self) -> NoReturn:
            self._begun = True  # one error is enough: no warning when it is collected
            raise InvalidTypeError(f"a cluster is opened by `async with`, not `await`: {_CURE}")

        def __enter__(self) -> NoReturn:
            self._begun = True
            raise InvalidTypeError(f"a cluster is opened by `async with`, not `with`: {_CURE}")

        def __exit__(self, *exc: object) -> None: ...

        def __getattr__(self, name: str) -> NoReturn:
            cure = ""
            if not name.startswith("_") and hasattr(Cluster, name):
                cure = f": {_CURE}"
                self._begun = True
            raise AttributeError(f"the result of open_cluster() is no cluster yet and has no {name!r}{cure}", name=name)


@keywords(
    "help(aiocuda.cluster.open_cluster) lists its parameters",
    "open_cluster('local', replicas=2), or open_cluster('dask', replicas=2, client=client)",
    **dict.fromkeys(("workers", "num_workers", "num_replicas", "n", "processes"), "use replicas="),
    **dict.fromkeys(
        ("devices", "gpus", "device"), "replica i gets GPU i of its machine, the i-th entry of CUDA_VISIBLE_DEVICES"
    ),
    **dict.fromkeys(("max_restarts", "retries"), "use restarts="),
)
def open_cluster(
    engine: EngineName, *, replicas: int, restarts: int = 3, client: distributed.Client | None = None
) -> _Opening:
    """Open a cluster: replicas of the program's classes, each in a process of its own.

    ::

        class Model:
            async def __aenter__(self):
                self._device = await aiocuda.open_device()    # the GPU of this replica
                ...
            async def __aexit__(self, *exc):
                await self._device.aclose()
            async def predict(self, rows):
                ...

        async with open_cluster("local", replicas=2) as cluster:
            model = await cluster.spawn(Model)
            result = await model.call("predict", rows, deadline_s=0.5, retry=True)

    Replica i gets GPU i of its machine: the i-th entry of ``CUDA_VISIBLE_DEVICES``, if it is set. To share a GPU, name
    it twice: ``CUDA_VISIBLE_DEVICES=0,0``. Without a GPU, replicas use the host driver.

    A replica is lost when its process ends, when one of its devices faults, or when it answers no probe for 2 s: the
    probe asks its event loop and its devices. A lost replica is killed, and its calls raise `ReplicaLostError`, or go
    to another replica with ``retry=True``. A new process is started after 0.1 s; the time doubles with each restart
    within 60 s, up to 5 s. A replica that was restarted ``restarts`` times in 60 s stays stopped.

    The end of the block refuses new calls, waits up to 30 s for the accepted ones (5 s after an exception), leaves the
    objects, and ends the processes.

    Parameters
    ----------
    engine
        ``"local"`` starts processes on this machine, which are connected by socket pairs that they inherit: no port is
        opened. ``"dask"`` uses one worker of a Dask cluster for each replica, and needs the extra ``cluster``.
    replicas
        The number of replicas.
    restarts
        The most restarts of a replica in 60 s.
    client
        An asynchronous ``distributed.Client``, for ``"dask"``. Its workers need a nanny, which is the default. Its
        scheduler must have an address of TLS or of this machine: everything that a scheduler sends is trusted.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        An argument cannot be used; the program's main module would start the cluster again in each process; there are
        fewer GPUs or workers than replicas; another cluster uses the workers.
    ReplicaLostError
        A process has ended before it was ready.
    """
    return _Opening(*_checked(engine, replicas, restarts, client), client)


def _checked(engine: Any, replicas: Any, restarts: Any, client: Any) -> tuple[EngineName, int, int]:
    """Check the arguments of `open_cluster`, and return the first three."""
    if not isinstance(engine, str):
        raise InvalidTypeError(f"engine is 'local' or 'dask', not {engine!r}")
    if engine not in get_args(EngineName):
        raise InvalidArgumentError(f"no engine is called {engine!r}; there are 'local' and 'dask'", engine=engine)
    if engine == "local" and client is not None:
        raise InvalidArgumentError("client= is for the engine 'dask'; the engine 'local' starts processes by itself")
    if engine == "dask" and client is None:
        raise InvalidArgumentError(
            "the engine 'dask' needs client=: `async with distributed.Client(address, asynchronous=True) as client`"
        )
    count = as_count(replicas, "replicas")
    if count > MOST_REPLICAS:
        raise InvalidArgumentError(f"replicas is at most {MOST_REPLICAS}, not {count}", argument="replicas")
    return ("local" if engine == "local" else "dask"), count, as_count(restarts, "restarts", 0)
