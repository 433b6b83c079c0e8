"""The methods of streams, and the kinds of operations that they make: one table with a row for each method.

The table is data. Queues, hooks, graphs, pools and pictures read it, so it is in the lowest of their packages.
`aiocuda.device.streams` has the methods themselves.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

__all__ = ["KINDS", "METHODS", "Access", "Kind", "Method", "Refusal"]

#: What an operation does with an argument of its method: it reads or writes the buffer; it reads and writes each buffer
#: of the tuple or dict; it does with the tuple what the kernel, which is the first argument, declares; or the argument
#: is the list of accesses itself.
Access: TypeAlias = Literal["reads", "writes", "each", "declared", "listed"]


class Kind(NamedTuple):
    """One kind of operation.

    Attributes
    ----------
    name
        As in `Operation.kind`.
    workload
        What `aiocuda.pool.classify` returns for the name. If this is None, it refuses the name.
    colour
        In pictures. None if the operation does no work and only orders others: then it is a thin line.
    size
        What the device does with the bytes of `Operation.nbytes`; None if the operation has no size. An operation with
        a size keeps a buffer of that size, or a tuple that begins with one.
    needed
        True if the host needs the result before it goes on: a task that awaits each such operation makes no mistake.
    """

    name: str
    workload: Literal["compute", "memory", "coordination"] | None
    colour: str | None = None
    size: Literal["moved", "set"] | None = None
    needed: bool = False


class Refusal(NamedTuple):
    """Why no graph can contain the work of a method."""

    work: str  #: what the work is
    cure: str  #: what the program can do instead


class Method(NamedTuple):
    """One method of streams that runs the stream's hook (`aiocuda.device.streams._hook`).

    Attributes
    ----------
    name
        As in the call of the hook.
    kind
        Of the operations that the method makes; None if it makes none.
    also
        Other kinds of operations that it makes.
    submits
        True if it submits work, for which a stream of a group first waits for its prerequisites.
    accesses
        The arguments with buffers, by position, and what the operation does with them.
    writes_result
        True if the operation writes the buffer that is its result.
    host
        The arguments that may be host memory, in the form of ``accesses``.
    graph
        What a captured stream does: it records a ``"node"``, or only an ``"order"`` of nodes; or it refuses the work.
        With None the method works only after the capture.
    """

    name: str
    kind: Kind | None = None
    also: tuple[str, ...] = ()
    submits: bool = True
    accesses: tuple[tuple[int, Access], ...] = ()
    writes_result: bool = False
    host: tuple[tuple[int, Access], ...] = ()
    graph: Literal["node", "order"] | Refusal | None = None


#: All methods by name. Legends of pictures have the same order.
METHODS: Final = {
    method.name: method
    for method in (
        Method(
            "empty",
            submits=False,
            graph=Refusal("an allocation", "make the buffer before the `with` block"),
        ),
        Method(
            "upload",
            Kind("upload", "memory", "#2f6fb0", size="moved"),
            writes_result=True,
            host=((0, "reads"),),
            graph=Refusal("a new buffer", "make it before the `with` block, then `stream.copy(buffer, pinned_array)`"),
        ),
        Method(
            "launch",
            Kind("launch", "compute", "#e08a1e"),
            accesses=((3, "declared"),),
            host=((3, "declared"),),
            graph="node",
        ),
        Method(
            "download",
            Kind("download", "memory", "#3a9a5b", size="moved", needed=True),
            accesses=((0, "reads"),),
            host=((1, "writes"),),
            graph="node",
        ),
        Method(
            "copy",
            Kind("copy", "memory", "#7a5aa8", size="moved"),
            also=("upload", "download"),
            accesses=((1, "reads"), (0, "writes")),
            host=((1, "reads"), (0, "writes")),
            graph="node",
        ),
        Method(
            "fill",
            Kind("fill", "memory", "#b0508a", size="set"),
            accesses=((0, "writes"),),
            graph="node",
        ),
        Method(
            "prefetch",
            Kind("prefetch", "memory", "#4aa3a2", size="moved"),
            graph=Refusal("a prefetch", "prefetch before or after its launch"),
        ),
        # Not a method of `Stream`: a graph is launched on it.
        Method(
            "launch_graph",
            Kind("graph", None, "#8a6d3b"),
            accesses=((1, "listed"),),
            graph=Refusal("another graph", "launch it before or after that one"),
        ),
        Method(
            "submit",
            Kind("submit", "compute", "#5a62c8", needed=True),
            accesses=((1, "each"), (2, "each")),
            host=((1, "each"),),
            graph=Refusal("a function of the program", "capture its work by the library that enqueues it"),
        ),
        Method(
            "wait",
            Kind("wait", "coordination"),
            submits=False,
            graph="order",
        ),
        Method(
            "record",
            Kind("record", "coordination"),
            graph=Refusal("an event", "let other streams wait for what a method returns, or for this stream"),
        ),
        Method(
            "synchronize",
            Kind("synchronize", "coordination"),
            graph="order",
        ),
        Method(
            "add_callback",
            Kind("callback", "coordination"),
            graph=Refusal("a callback", "add it to what graph.launch(stream) returns"),
        ),
        # Not a method of `Stream`: when another stream waits for all work of this one.
        Method("end", submits=False, graph="order"),
        Method("capture", submits=False),
        Method("lend", submits=False),
        Method("__cuda_stream__", submits=False),
        Method("aclose", submits=False),
    )
}

#: All kinds by name: those of the methods, and that of a barrier of several streams.
KINDS: Final = {
    kind.name: kind
    for kind in (*(method.kind for method in METHODS.values()), Kind("barrier", "coordination"))
    if kind is not None
}
